"""Saving, loading and exporting the state of a program. Everything here is collective."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hgraph.data.batches import BatchState, GlobalBatches
from hgraph.errors import HydraulisError, InvalidInput, RankFailed
from runtime.checkpoint.boxes import HeldBox, read_boxes, write_boxes
from runtime.checkpoint.facts import changed_settings, check_data, check_model, check_version, facts_of
from runtime.checkpoint.folder import (
    FACTS_FILE,
    begin,
    complete,
    find_checkpoint,
    keep_last,
    publish,
    read_facts,
    temporary,
)
from runtime.cluster import Cluster, ProcessCluster, SimulatedCluster
from runtime.layouts import owned_box
from runtime.meeting import meet
from runtime.rank_step import RankState

if TYPE_CHECKING:
    from runtime.program import Program

__all__ = ["export_weights", "load", "save", "wait_for_save"]

_MOMENTS = ("exp_avg", "exp_avg_sq")
Result = TypeVar("Result")


def save(
    program: Program, folder: Path, batches: GlobalBatches | None, keep: int | None, *, background: bool = False
) -> Path:
    """Writes the checkpoint of the program's present step into `folder` and returns its path; see `Program.save`."""
    if keep is not None and keep < 1:
        raise InvalidInput(f"save: expected keep of 1 or more, got {keep}")
    cluster, target = program.cluster, complete(folder, program.step_count)
    meet(cluster, f"save to {target}")
    _settle(program)
    facts: dict[str, Any] = {}

    def prepare() -> None:
        facts.update(facts_of(program, batches))
        begin(target)

    _on_rank_0(cluster, prepare)
    unseen = [rank for rank, seen in enumerate(cluster.gather(temporary(target).is_dir())) if not seen]
    if unseen:
        raise InvalidInput(
            f"{temporary(target)}: made by rank 0, not seen by ranks {unseen}; all nodes share the folder"
        )
    boxes = list(_boxes(program, {rank: state.optimizer.state_dict() for rank, state in program.ranks.items()}))
    if not background:
        _write(cluster, target, boxes, facts, keep)
        return target
    copies = [replace(held, values=held.values.detach().to("cpu", copy=True)) for held in boxes]
    program.background.start(target, lambda: _write(cluster, target, copies, facts, keep))
    return target


def wait_for_save(program: Program) -> None:
    """Returns once a save in the background has ended; see `Program.wait_for_save`."""
    meet(program.cluster, "wait_for_save")
    _settle(program)


def load(program: Program, folder: Path, batches: GlobalBatches | None) -> Path:
    """Reads a checkpoint into the program and returns its path; see `Program.load`."""
    cluster = program.cluster
    meet(cluster, f"load from {folder}")
    _settle(program)

    checkpoint, facts, next_batch = _on_rank_0(cluster, lambda: _read_checked(program, folder, batches))
    states = {rank: _empty_state(state, facts["optimizer_steps"]) for rank, state in program.ranks.items()}
    frozen = {rank: _like(state.frozen) for rank, state in program.ranks.items()}
    # Read beside the state that is there: a checkpoint that cannot be read leaves the program as it was.
    read_boxes(checkpoint, _boxes(program, states, frozen), alone=isinstance(cluster, SimulatedCluster))
    for rank, state in program.ranks.items():
        state.optimizer.load_state_dict(states[rank])
        state.frozen.update(frozen[rank])
    program.step_count, program.seed = facts["step_count"], facts["seed"]
    program.next_batch = next_batch
    if program.is_main and (changed := changed_settings(facts, program)):
        warnings.warn("\n  ".join([f"{checkpoint}: what holds now differs:", *changed]), stacklevel=3)
    return checkpoint


def _read_checked(
    program: Program, folder: Path, batches: GlobalBatches | None
) -> tuple[Path, dict[str, Any], BatchState]:
    """Returns which checkpoint is meant and what it says beside its tensors, after all checks of that."""
    checkpoint = find_checkpoint(folder)
    facts = read_facts(checkpoint)
    check_version(facts, checkpoint)
    try:
        check_model(facts, program, checkpoint)
        next_batch = BatchState(**facts["next_batch"])
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"{checkpoint / FACTS_FILE}: expected what `save` writes, got something else ({type(error).__name__}: "
            f"{error}); load another checkpoint"
        ) from error
    if batches is not None:
        check_data(facts, batches, checkpoint)
    return checkpoint, facts, next_batch


def export_weights(program: Program, path: Path) -> None:
    """Writes all weights, whole, as safetensors; see `Program.export_weights`."""
    meet(program.cluster, f"export_weights to {path}")
    own = {name: value.dtype for name, value in program.model.named_parameters(remove_duplicate=False)}
    weights = program.state_dict()
    kept = {name for name in program.model.state_dict() if name not in weights}
    tensors = {name: value.to(own[name]).cpu() for name, value in weights.items()}
    tensors |= {name: value for name, value in program.captured.buffers.items() if name in kept}

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".tmp")
        # Copies: safetensors refuses tensors that share memory, as tied ones do.
        copies = {name: value.detach().clone().contiguous() for name, value in tensors.items()}
        try:
            save_file(copies, unfinished)
        except SafetensorError as error:
            raise InvalidInput(f"export_weights: {path} cannot be written: {error}") from error
        os.replace(unfinished, path)

    _on_rank_0(program.cluster, write)


def _write(cluster: Cluster, target: Path, boxes: list[HeldBox], facts: Mapping[str, Any], keep: int | None) -> None:
    """Writes and completes `target`. Uses no process group but the one aside: it may run beside training."""
    group = cluster.aside if isinstance(cluster, ProcessCluster) else None
    write_boxes(temporary(target), boxes, alone=isinstance(cluster, SimulatedCluster), group=group)

    def finish() -> None:
        publish(target, facts)
        if keep is not None:
            keep_last(target.parent, keep)

    _on_rank_0(cluster, finish, aside=True)


def _settle(program: Program) -> None:
    """Waits for the write in the background; raises `RankFailed` on all ranks where it failed on one. Collective."""
    if not program.background.is_pending:
        return
    faults = [fault for fault in program.cluster.gather(program.background.finish()) if fault]
    if faults:
        raise RankFailed(faults[0])


def _boxes(
    program: Program,
    states: Mapping[int, Mapping[str, Any]],
    frozen: Mapping[int, Mapping[str, Tensor]] | None = None,
) -> Iterator[HeldBox]:
    """The boxes of all local ranks in the optimizer layout: weights, frozen ones too, and both moments."""
    shapes = {facts.name: facts.shape for facts in program.captured.parameters}
    for rank, state in states.items():
        still = program.ranks[rank].frozen if frozen is None else frozen[rank]
        tensors = {"weights": {**state["master"], **still}, **{kind: state[kind] for kind in _MOMENTS}}
        for kind, shards in tensors.items():
            for name, values in shards.items():
                box = owned_box(shapes[name], program.pool.num_ranks, rank)
                assert box is not None, f"{name} lies on rank {rank}, which owns nothing of it"
                yield HeldBox(f"{kind}.{name}", shapes[name], box, values)


def _empty_state(state: RankState, step: int) -> dict[str, Any]:
    present = state.optimizer.state_dict()
    return {"step": step, **{kind: _like(present[kind]) for kind in ("master", *_MOMENTS)}}


def _like(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty_like(tensor) for name, tensor in tensors.items()}


def _on_rank_0(cluster: Cluster, action: Callable[[], Result], *, aside: bool = False) -> Result:
    """Returns on every rank what `action` returned on rank 0, or raises on every rank what it raised there.

    What is no error of this package is raised as `InvalidInput` where files are at fault, else as `RankFailed`: the
    others wait for an answer whatever it is.
    """
    outcome: Any = None
    cause: Exception | None = None
    if 0 in cluster.local_ranks:
        try:
            outcome = action()
        except HydraulisError as error:
            outcome = error
        except OSError as error:
            cause, outcome = error, InvalidInput(f"checkpoint: {error}")
        except Exception as error:
            cause, outcome = error, RankFailed(f"checkpoint: rank 0: {type(error).__name__}: {error}")
    outcome = cluster.broadcast(outcome, aside=aside)
    if isinstance(outcome, HydraulisError):
        raise outcome from (cause or outcome.__cause__)
    return outcome
