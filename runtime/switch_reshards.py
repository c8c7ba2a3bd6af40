"""What moves when the layout changes: the tensors of a switch from one layout to another.

A layout is the *optimizer layout* (None here) or the compute layout of a strategy. Parameters are copied: a strategy's
replicas and stages hold duplicates. Gradients are summed: what replicas and stages leave are terms, which the
optimizer layout's owners get summed, and the next strategy, in the middle of a step, gets as terms of its own (HotSPa's
use; Hydraulis, arXiv 2412.07894, has bridges between the optimizer and the compute layouts).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from hgraph.annotation import Annotation
from hgraph.bundles import TensorReshard
from hgraph.capture import Captured
from hgraph.shard_map import duplicate, summed
from hgraph.strategy import Strategy
from passes.pipelines import CompiledScheme
from runtime.layouts import first_use, optimizer_annotation

__all__ = ["SwitchedKind", "switch_reshards"]

SwitchedKind: TypeAlias = Literal["parameters", "gradients"]


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
    (`start`, where `end` is the optimizer layout), gradients in the reverse of the order in which `start` does; between
    the optimizer layout and a strategy these are the tensors of `runtime.layouts.bridge_plans`.

    A tensor is named as its parameter, with `#k` behind where its layout is not one union: then every part of a target
    gets its copy from the first part that holds it, and each part of a sum goes to the first part of the target. What a
    layout does not hold (a parameter without gradient) does not move.
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
            TensorReshard(name if number == 0 else f"{name}#{number}", source, target, shapes[name])
            for number, (source, target) in enumerate(chosen)
        ]
        found += parts if kind == "parameters" else parts[::-1]
    return found


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
