"""The parameters of a Llama-like model known by its sizes alone: what bridges move where no model is at hand.

Shapes and splits are Megatron's (arXiv 1909.08053): q, k, v, gate, up by rows, o and down by columns, embedding and
head by vocabulary, norms whole. Layouts are those of the runtime: the optimizer layout spreads dim 0 over all ranks,
the compute layout is the union of the replicas'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from hgraph.annotation import Annotation, Subgroup, sharded
from hgraph.bundles import TensorReshard
from hgraph.memory_model import ModelSizes
from hgraph.placements import Replicate, Shard
from hgraph.shard_map import duplicate, summed
from hgraph.strategy import Strategy

__all__ = ["BridgeKind", "ParameterTensor", "bridge_reshards", "num_parameters", "parameter_tensors"]

BridgeKind: TypeAlias = Literal["parameters", "gradients"]


@dataclass(frozen=True, slots=True)
class ParameterTensor:
    """A parameter: `split_dim` is the dim that tensor parallelism cuts, None where every rank has it whole."""

    name: str
    shape: tuple[int, ...]
    split_dim: int | None
    layer: int

    @property
    def num_elements(self) -> int:
        elements = 1
        for size in self.shape:
            elements *= size
        return elements


def parameter_tensors(model: ModelSizes) -> tuple[ParameterTensor, ...]:
    """Returns every parameter of a model without tied weights, in order of first use."""
    hidden, ffn, last = model.hidden, model.ffn_hidden, model.layers - 1
    kv_rows = hidden * (model.kv_heads or model.heads) // model.heads
    found = [ParameterTensor("embedding", (model.vocab, hidden), 0, 0)]
    for layer in range(model.layers):
        own: list[tuple[str, tuple[int, ...], int | None]] = [
            ("attention_norm", (hidden,), None),
            ("q", (hidden, hidden), 0),
            ("k", (kv_rows, hidden), 0),
            ("v", (kv_rows, hidden), 0),
            ("o", (hidden, hidden), 1),
            ("mlp_norm", (hidden,), None),
            *((name, (ffn, hidden), 0) for name in (("gate", "up") if model.gated else ("up",))),
            ("down", (hidden, ffn), 1),
        ]
        found += [ParameterTensor(f"layers.{layer}.{name}", shape, dim, layer) for name, shape, dim in own]
    return (
        *found,
        ParameterTensor("norm", (hidden,), None, last),
        ParameterTensor("head", (model.vocab, hidden), 0, last),
    )


def num_parameters(model: ModelSizes) -> int:
    """Returns how many numbers the parameters have together."""
    return sum(tensor.num_elements for tensor in parameter_tensors(model))


def bridge_reshards(model: ModelSizes, strategy: Strategy, kind: BridgeKind, num_ranks: int) -> list[TensorReshard]:
    """Returns what moves from the optimizer layout to a strategy (parameters), or back (gradients), by first use."""
    computes = _Layouts(strategy, model)
    reshards = []
    for tensor in parameter_tensors(model):
        home, compute = sharded(range(num_ranks), 0), computes.of(tensor, kind)
        source, target = (home, compute) if kind == "parameters" else (compute, home)
        reshards.append(TensorReshard(tensor.name, source, target, tensor.shape))
    return reshards if kind == "parameters" else reshards[::-1]


class _Layouts:
    """The compute layouts of a strategy, one annotation for all tensors alike."""

    def __init__(self, strategy: Strategy, model: ModelSizes) -> None:
        self.strategy = strategy
        self.stage_of_layer = [
            [stage for stage, count in enumerate(replica.scheme.layer_split(model.layers)) for _ in range(count)]
            for replica in strategy.replicas
        ]
        self.known: dict[tuple[object, ...], Annotation] = {}

    def of(self, tensor: ParameterTensor, kind: BridgeKind) -> Annotation:
        """Returns a subgroup per replica, on the ranks of the tensor's stage: duplicates, or terms of gradients."""
        stages = tuple(stages[tensor.layer] for stages in self.stage_of_layer)
        key = (tensor.split_dim, kind, stages)
        if key not in self.known:
            placement = Replicate() if tensor.split_dim is None else Shard(tensor.split_dim)
            parts = []
            for replica, stage in zip(self.strategy.replicas, stages, strict=True):
                ranks = replica.stage_ranks(stage)
                cp = replica.scheme.stages[stage].cp
                if cp > 1:  # copies along context parallelism, tensor parallelism running fastest
                    own = Subgroup(ranks, (cp, len(ranks) // cp), (Replicate(), placement))
                else:
                    own = Subgroup(ranks, (len(ranks),), (placement,))
                parts.append(Annotation((own,)))
            self.known[key] = duplicate(parts) if kind == "parameters" else summed(parts)
        return self.known[key]
