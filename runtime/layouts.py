"""The layouts of parameters, and what moves when one takes the place of another.

The *optimizer layout* spreads every parameter over all ranks along dim 0 (ZeRO-1, arXiv 1910.02054); it never changes.
The *compute layout* of a strategy is the union of what its replicas and stages use, duplicated; gradients are the
union of what they leave, summed.

Parameters are copied: a strategy's replicas and stages hold duplicates. They travel in the order of their first use:
stage by stage, then as the graph uses them. Gradients are summed: what replicas and stages leave are terms, which the
owners get summed, and the next strategy, in the middle of a step, gets as terms of its own (HotSPa's use; Hydraulis,
arXiv 2412.07894, has bridges between the optimizer and the compute layouts). They go in the reverse order, that of the
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from hgraph.annotation import Annotation, Subgroup, sharded
from hgraph.bundles import TensorReshard
from hgraph.capture import Captured
from hgraph.graph import info
from hgraph.shard_map import Box, duplicate, shard_map, summed
from hgraph.strategy import Strategy
from passes.pipelines import CompiledScheme

__all__ = ["SwitchedKind", "first_use", "optimizer_annotation", "owned_box", "parameter_of", "switch_reshards"]

SwitchedKind: TypeAlias = Literal["parameters", "gradients"]


def optimizer_annotation(shape: Sequence[int], num_ranks: int) -> Annotation:
    """Returns the optimizer layout of a parameter: dim 0 over all ranks; a scalar lies on rank 0."""
    if not shape:
        return Annotation((Subgroup((0,)),))
    return sharded(range(num_ranks), 0)


def owned_box(shape: Sequence[int], num_ranks: int, rank: int) -> Box | None:
    """Returns the box of a parameter that `rank` owns, None where it owns nothing."""
    annotation = optimizer_annotation(shape, num_ranks)
    return shard_map(annotation, shape).piece(rank).box if rank in annotation.ranks else None


def first_use(captured: Captured) -> dict[str, int]:
    """Returns, for each name that a parameter is used by, where in the graph it is used first."""
    position = {node: number for number, node in enumerate(captured.graph.nodes)}
    return {
        info(node).name: min((position[user] for user in node.users), default=len(position))
        for node in captured.graph.nodes
        if node.op == "placeholder" and info(node).role == "parameter"
    }


def switch_reshards(
    start: Strategy | None,
    end: Strategy | None,
    kind: SwitchedKind,
    compiled: Mapping[str, CompiledScheme],
    captured: Captured,
    num_ranks: int,
) -> list[TensorReshard]:
    """Returns every tensor that moves from the layout of `start` to that of `end`; None is the optimizer layout.

    `compiled` has the schemes of both strategies by text. Parameters come in the order in which `end` uses them first
    (`start`, where `end` is the optimizer layout), gradients in the reverse of the order in which `start` does.

    A tensor is named as its parameter, with `..k` behind where its layout is not one union (no parameter's name has two
    dots in a row): then every part of a target gets its copy from the first part that holds it, and each part of a sum
    goes to the first part of the target. What a layout does not hold (a parameter without gradient) does not move.
    """
    found = []
    shapes = {name: facts.shape for facts in captured.parameters for name in facts.names}
    user = (end or start) if kind == "parameters" else (start or end)
    names = sorted(shapes, key=_use(user, compiled, captured))
    for name in names if kind == "parameters" else names[::-1]:
        home = [optimizer_annotation(shapes[name], num_ranks)]
        sources = home if start is None else _parts(start, compiled, name, kind)
        targets = home if end is None else _parts(end, compiled, name, kind)
        pairs = [(source, target) for source in sources for target in targets]
        chosen = pairs[: len(targets)] if kind == "parameters" else pairs[:: max(len(targets), 1)]
        parts = [
            TensorReshard(name if number == 0 else f"{name}..{number}", source, target, shapes[name])
            for number, (source, target) in enumerate(chosen)
        ]
        found += parts if kind == "parameters" else parts[::-1]
    return found


def parameter_of(tensor_name: str) -> str:
    """Returns the name of the parameter of a tensor that `switch_reshards` has named."""
    return tensor_name.partition("..")[0]


def _use(
    strategy: Strategy | None, compiled: Mapping[str, CompiledScheme], captured: Captured
) -> Callable[[str], tuple[int, int]]:
    """Returns a key that sorts names by the last stage of any replica that uses them, then as the graph uses them."""
    uses = first_use(captured)
    stages: dict[str, int] = {}
    for replica in strategy.replicas if strategy is not None else ():
        for name, stage in compiled[str(replica.scheme)].parameters:
            stages[name] = max(stages.get(name, 0), stage)
    last = len(captured.graph.nodes)
    return lambda name: (stages.get(name, 0), uses.get(name, last))


def _parts(
    strategy: Strategy, compiled: Mapping[str, CompiledScheme], name: str, kind: SwitchedKind
) -> list[Annotation]:
    """Returns how the replicas and stages of a strategy hold `name`: one union, and what cannot be part of it."""
    held: list[Annotation] = []
    for replica in strategy.replicas:
        own: Mapping[tuple[str, int], Annotation] = getattr(compiled[str(replica.scheme)], kind)
        held += [annotation.relabel(replica.ranks) for (other, _), annotation in own.items() if other == name]
    single = [annotation for annotation in held if annotation.hsize == 1]
    union = summed if kind == "gradients" else duplicate
    together = [union(single)] if single else []
    return together + [annotation for annotation in held if annotation.hsize > 1]
