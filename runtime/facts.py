"""Facts of a captured model that other parts ask for, and the check that all processes compiled the same thing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import nn

from hgraph.capture import Captured
from hgraph.errors import InvalidInput, NotSupported
from hgraph.graph import annotated_text, info
from hgraph.model_facts import ModelFacts
from hgraph.strategy import Pool
from hgraph.strategy_file import write_pool
from runtime.cluster import Cluster
from runtime.optimizer import AdamW

__all__ = ["check_same_everywhere", "compute_dtype", "leaf_template", "model_facts", "trained_names"]

_ATTENTION = torch.ops.hydraulis.packed_attention.default


def model_facts(captured: Captured) -> ModelFacts | None:
    """Returns what a strategy file is checked against; None for a model without layers or attention."""
    heads = [int(info(node.args[0]).shape[1]) for node in captured.graph.nodes if node.target == _ATTENTION]
    if not heads or not captured.num_layers:
        return None
    shapes = {name: facts.shape for facts in captured.parameters for name in facts.names}
    return ModelFacts(captured.num_layers, min(heads), tuple(shapes), captured.module_names, shapes)


def compute_dtype(captured: Captured) -> torch.dtype:
    """Returns the dtype of all parameters; raises `NotSupported` for several, and for those not trained in yet."""
    dtypes = {facts.dtype for facts in captured.parameters}
    if len(dtypes) > 1:
        raise NotSupported(f"parameters of several dtypes: {sorted(map(str, dtypes))}; convert the model to one")
    (dtype,) = dtypes
    if dtype not in (torch.float32, torch.float64):
        raise NotSupported(f"training in {dtype} is not there yet; convert the model to float32")
    return dtype


def trained_names(captured: Captured) -> set[str]:
    """Returns the first names of the parameters that get a gradient; no strategy changes which."""
    reached = set(captured.outputs)
    return {facts.name for facts in captured.parameters if facts.requires_grad and not reached.isdisjoint(facts.names)}


def leaf_template(pool: Pool, model: nn.Module) -> str | Sequence[tuple[str, str]]:
    """The pool's template; `hf` is what the model says of itself (`_tp_plan` of Hugging Face models)."""
    if pool.template != "hf":
        return pool.template
    plan = getattr(model, "_tp_plan", None) or getattr(model, "tp_plan", None)
    if not plan:
        raise InvalidInput(f"template hf: {type(model).__name__} has no _tp_plan; use template: megatron")
    roles = {"colwise": "column", "rowwise": "row"}
    split = [
        (f"{pattern}.weight", roles[style.split("_")[0]])
        for pattern, style in plan.items()
        if style.split("_")[0] in roles
    ]
    return [*split, ("*", "replicate")]


def check_same_everywhere(
    cluster: Cluster, captured: Captured, pool: Pool, optimizer: AdamW, model: nn.Module, seed: int, bridges: str = ""
) -> None:
    """Raises `InvalidInput` where processes differ in program, pool, settings, version or weights. Collective."""
    own = {
        "graph": _digest(annotated_text(captured.graph)),
        "pool": _digest(write_pool(pool)),
        "optimizer": str(optimizer),
        "seed": str(seed),
        "topology or size of buckets": bridges,
        "torch version": torch.__version__,
        "weights": _weights_digest(model),
    }
    everyone = cluster.gather(own)
    for what in own:
        values = [other[what] for other in everyone]
        for rank, value in enumerate(values):
            if value != values[0]:
                hint = (
                    "; seed the generator before the model is built, or load the same file" if what == "weights" else ""
                )
                raise InvalidInput(f"start-up: rank 0 and rank {rank} differ in {what}{hint}")


def _weights_digest(model: nn.Module) -> str:
    sums = [
        f"{name} {parameter.detach().double().sum().item():.17g}"
        for name, parameter in model.named_parameters()
        if parameter.device.type != "meta"
    ]
    return _digest("\n".join(sums))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
