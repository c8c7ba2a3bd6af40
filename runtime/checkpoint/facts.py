"""What a checkpoint says beside its tensors, and whether model and data are those that it was saved from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hgraph.data.batches import GlobalBatches
from hgraph.data.dataset import Dataset, sequence_labels
from hgraph.errors import InvalidInput
from hgraph.graph import annotated_text
from runtime.checkpoint.folder import VERSION
from runtime.facts import trained_names

if TYPE_CHECKING:
    from runtime.program import Program

__all__ = ["changed_settings", "check_data", "check_model", "check_version", "facts_of"]

_SAMPLED_SEQUENCES = 32


def facts_of(program: Program, batches: GlobalBatches | None) -> dict[str, Any]:
    """Returns the content of `checkpoint.json` (`docs/checkpoints.md`) but for the sizes of the files."""
    state = next(iter(program.ranks.values()))
    return {
        "version": VERSION,
        "step_count": program.step_count,
        "optimizer_steps": state.optimizer.step_count,
        "seed": program.seed,
        "next_batch": asdict(program.next_batch),
        "saved_by": {"ranks": program.pool.num_ranks, "torch": torch.__version__},
        "optimizer": _optimizer(program),
        "model": _model(program),
        "data": None if batches is None else _data(batches),
    }


def check_version(facts: Mapping[str, Any], checkpoint: Path) -> None:
    """Raises `InvalidInput` for a format of another version."""
    if facts.get("version") != VERSION:
        raise InvalidInput(f"{checkpoint}: expected format version {VERSION}, got {facts.get('version')!r}")


def check_model(facts: Mapping[str, Any], program: Program, checkpoint: Path) -> None:
    """Raises `InvalidInput` with every parameter that is not as it was saved: names, ties, shapes, what is trained."""
    saved, own = facts["model"], _model(program)
    faults = list(_model_faults(saved["parameters"], own["parameters"]))
    if saved["dtype"] != own["dtype"]:
        faults.append(f"master weights: {saved['dtype']} in the checkpoint, {own['dtype']} now")
    if faults:
        raise InvalidInput("\n  ".join([f"{checkpoint} is of another model:", *faults]))


def check_data(facts: Mapping[str, Any], batches: GlobalBatches, checkpoint: Path) -> None:
    """Raises `InvalidInput` with every field of the data by which the remaining order would differ."""
    own, saved = _data(batches), facts["data"]
    if saved is None:
        raise InvalidInput(
            f"{checkpoint} was saved without `batches`, so that nothing tells whether the data are the same; load "
            "without `batches` to go on anyhow"
        )
    faults = [
        f"{what}: {saved.get(what)} in the checkpoint, {value} now"
        for what, value in own.items()
        if saved.get(what) != value
    ]
    if faults:
        raise InvalidInput("\n  ".join([f"{checkpoint} was trained on other data:", *faults]))


def changed_settings(facts: Mapping[str, Any], program: Program) -> list[str]:
    """Returns what differs and may: settings of the optimizer, and what the model computes from the same parameters."""
    own = _optimizer(program)
    texts = [
        f"optimizer {name}: {facts['optimizer'].get(name)} in the checkpoint, {value} now"
        for name, value in own.items()
        if facts["optimizer"].get(name) != value
    ]
    if facts["model"].get("graph") != _graph_digest(program):
        texts.append("the model or the loss computes something else than when the checkpoint was saved")
    return texts


def _optimizer(program: Program) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(program.optimizer)))


def _model(program: Program) -> dict[str, Any]:
    trained = trained_names(program.captured)
    parameters = {
        facts.name: {"names": list(facts.names), "shape": list(facts.shape), "trained": facts.name in trained}
        for facts in program.captured.parameters
    }
    return {"dtype": str(program.master_dtype), "graph": _graph_digest(program), "parameters": parameters}


def _graph_digest(program: Program) -> str:
    buffers = [f"{name} {value.double().sum().item():.12g}" for name, value in program.captured.buffers.items()]
    return _digest("\n".join([annotated_text(program.captured.graph), *buffers]).encode())


def _model_faults(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    old = {name: facts for facts in saved.values() for name in facts["names"]}
    new = {name: facts for facts in own.values() for name in facts["names"]}
    told: set[tuple[str, ...]] = set()
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in new:
            yield f"{name}: {old[name]['shape']} in the checkpoint, the model has no such parameter"
        elif name not in old:
            yield f"{name}: {new[name]['shape']} in the model, the checkpoint has no such parameter"
        elif set(old[name]["names"]) & new.keys() != set(new[name]["names"]) & old.keys():
            names = tuple(sorted({*old[name]["names"], *new[name]["names"]}))
            if names not in told:
                yield _tie_text(names, tied_before=len(old[name]["names"]) > len(new[name]["names"]))
            told.add(names)
        else:
            yield from _field_faults(name, old[name], new[name])


def _field_faults(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    if name not in (old["names"][0], new["names"][0]):
        return
    if old["shape"] != new["shape"]:
        yield f"{name}: shape {old['shape']} in the checkpoint, {new['shape']} in the model"
    if old["trained"] != new["trained"]:
        kinds = {True: "trained", False: "frozen"}
        yield f"{name}: {kinds[old['trained']]} in the checkpoint, {kinds[new['trained']]} in the model"


def _tie_text(names: tuple[str, ...], *, tied_before: bool) -> str:
    both = " and ".join(names)
    if tied_before:
        return (
            f"{both}: one parameter (tied) in the checkpoint, several in the model; tie them in the model too "
            "(assign one to the other), or start anew from weights that `export_weights` wrote from the tied model"
        )
    return (
        f"{both}: several parameters in the checkpoint, one (tied) in the model; leave them apart in the model too, "
        "or start anew from exported weights after choosing which of them to keep"
    )


def _data(batches: GlobalBatches) -> dict[str, Any]:
    """What the remaining order depends on. Sizes of batches may change: a position counts sequences."""
    lengths = np.asarray(batches.dataset.lengths, dtype=np.int64)
    return {
        "sequences": len(lengths),
        "tokens": int(lengths.sum()),
        "lengths": _digest(lengths.tobytes()),
        "contents": _contents_digest(batches.dataset, lengths),
        "seed": batches.seed,
        "shuffle": batches.shuffle,
    }


def _contents_digest(dataset: Dataset, lengths: np.ndarray) -> str:
    """Digest of up to 32 sequences, spread over the data set: reading all of it could take long."""
    present = np.flatnonzero(lengths)
    chosen = present[np.unique(np.linspace(0, len(present) - 1, _SAMPLED_SEQUENCES).round().astype(np.int64))]
    parts = []
    for index in chosen.tolist():
        labels = sequence_labels(dataset, index)
        parts.append(dataset.tokens(index).numpy().astype(np.int64).tobytes())
        parts.append(b"" if labels is None else labels.numpy().astype(np.int64).tobytes())
    return _digest(b"|".join(parts))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
