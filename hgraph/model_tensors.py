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
from hgraph.errors import InvalidInput
from hgraph.placements import Replicate, Shard
from hgraph.shard_map import duplicate, summed
from hgraph.strategy import Strategy

__all__ = ["BridgeKind", "ModelSizes", "ParameterTensor", "bridge_reshards", "switch_reshards"]

BridgeKind: TypeAlias = Literal["parameters", "gradients"]


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a Llama-like model, without grouped heads or tied weights."""

    layers: int
    hidden: int
    ffn_hidden: int
    vocab: int

    def __post_init__(self) -> None:
        if min(self.layers, self.hidden, self.ffn_hidden, self.vocab) < 1:
            raise InvalidInput(f"model sizes: expected 1 or more each, got {self}")

    def tensors(self) -> tuple[ParameterTensor, ...]:
        """Returns every parameter in order of first use."""
        hidden, ffn, last = self.hidden, self.ffn_hidden, self.layers - 1
        found = [ParameterTensor("embedding", (self.vocab, hidden), 0, 0)]
        for layer in range(self.layers):
            own = [
                ("attention_norm", (hidden,), None),
                *((name, (hidden, hidden), 0) for name in ("q", "k", "v")),
                ("o", (hidden, hidden), 1),
                ("mlp_norm", (hidden,), None),
                *((name, (ffn, hidden), 0) for name in ("gate", "up")),
                ("down", (hidden, ffn), 1),
            ]
            found += [ParameterTensor(f"layers.{layer}.{name}", shape, dim, layer) for name, shape, dim in own]
        return (
            *found,
            ParameterTensor("norm", (hidden,), None, last),
            ParameterTensor("head", (self.vocab, hidden), 0, last),
        )

    @property
    def num_parameters(self) -> int:
        return sum(tensor.num_elements for tensor in self.tensors())


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


def bridge_reshards(model: ModelSizes, strategy: Strategy, kind: BridgeKind, num_ranks: int) -> list[TensorReshard]:
    """Returns what moves from the optimizer layout to a strategy (parameters), or back (gradients), by first use."""
    computes = _Layouts(strategy, model)
    reshards = []
    for tensor in model.tensors():
        home, compute = sharded(range(num_ranks), 0), computes.of(tensor, kind)
        source, target = (home, compute) if kind == "parameters" else (compute, home)
        reshards.append(TensorReshard(tensor.name, source, target, tensor.shape))
    return reshards if kind == "parameters" else reshards[::-1]


def switch_reshards(model: ModelSizes, start: Strategy, end: Strategy, kind: BridgeKind) -> list[TensorReshard]:
    """Returns what moves from one strategy to another in the middle of a step.

    Gradients gathered so far are summed over the replicas and go to one replica of `end`, whose others begin at zero.
    """
    sources, targets = _Layouts(start, model), _Layouts(end, model)
    reshards = []
    for tensor in model.tensors():
        source, target = sources.of(tensor, kind), targets.of(tensor, kind)
        if kind == "gradients":
            target = Annotation((target.subgroups[0],))
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
                parts.append(Annotation((Subgroup(ranks, (len(ranks),), (placement,)),)))
            self.known[key] = duplicate(parts) if kind == "parameters" else summed(parts)
        return self.known[key]
