"""The two layouts of parameters, and the bridges between them.

The *optimizer layout* spreads every parameter over all ranks along dim 0 (ZeRO-1, arXiv 1910.02054); it never changes.
The *compute layout* of a strategy is the union of what its replicas and stages use, duplicated; gradients are the
union of what they leave, summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from hgraph.annotation import Annotation, Subgroup, sharded
from hgraph.capture import ParameterFacts
from hgraph.reshard import plan_reshard
from hgraph.reshard_plan import ReshardPlan
from hgraph.shard_map import Box, duplicate, shard_map, summed
from hgraph.strategy import Strategy
from passes.pipelines import CompiledScheme
from runtime.bridge import Bridge

__all__ = ["StrategyBridges", "bridge_plans", "optimizer_annotation", "owned_box"]


def optimizer_annotation(shape: Sequence[int], num_ranks: int) -> Annotation:
    """Returns the optimizer layout of a parameter: dim 0 over all ranks; a scalar lies on rank 0."""
    if not shape:
        return Annotation((Subgroup((0,)),))
    return sharded(range(num_ranks), 0)


def owned_box(shape: Sequence[int], num_ranks: int, rank: int) -> Box | None:
    """Returns the box of a parameter that `rank` owns, None where it owns nothing."""
    annotation = optimizer_annotation(shape, num_ranks)
    return shard_map(annotation, shape).piece(rank).box if rank in annotation.ranks else None


class StrategyBridges:
    """Both bridges of one strategy on one rank.

    Plans are keyed `name` or `name#k`: k counts the parts of a layout that is not one union of single subgroups.
    """

    def __init__(
        self,
        plans: tuple[Mapping[str, ReshardPlan], Mapping[str, ReshardPlan]],
        rank: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
    ) -> None:
        self.parameters = Bridge(plans[0], rank, dtypes[0], device)
        self.gradients = Bridge(plans[1], rank, dtypes[1], device)

    @property
    def total_bytes(self) -> int:
        """Bytes that both bridges move between all ranks in one step."""
        return self.parameters.total_bytes + self.gradients.total_bytes


def bridge_plans(
    strategy: Strategy,
    compiled: Mapping[str, CompiledScheme],
    parameters: Iterable[ParameterFacts],
    num_ranks: int,
) -> tuple[dict[str, ReshardPlan], dict[str, ReshardPlan]]:
    """Returns the plans of the parameter bridge and of the gradient bridge, by plan key."""
    inward: dict[str, ReshardPlan] = {}
    outward: dict[str, ReshardPlan] = {}
    for facts in parameters:
        home = optimizer_annotation(facts.shape, num_ranks)
        for name in facts.names:
            used = _annotations(strategy, compiled, name, "parameters")
            for key, target in _unions(name, used, partial=False):
                inward[key] = plan_reshard(home, target, facts.shape, collectives=False)
            left = _annotations(strategy, compiled, name, "gradients")
            for key, source in _unions(name, left, partial=True):
                outward[key] = plan_reshard(source, home, facts.shape, collectives=False)
    return inward, outward


def _annotations(strategy: Strategy, compiled: Mapping[str, CompiledScheme], name: str, kind: str) -> list[Annotation]:
    """The annotations, on global ranks, under which replicas and stages hold `name` (parameter or gradient)."""
    result = []
    for replica in strategy.replicas:
        held = getattr(compiled[str(replica.scheme)], kind)
        result += [own.relabel(replica.ranks) for (other, _), own in held.items() if other == name]
    return result


def _unions(name: str, annotations: Sequence[Annotation], *, partial: bool) -> list[tuple[str, Annotation]]:
    """One union of all annotations of a single subgroup, and each other annotation by itself."""
    single = [annotation for annotation in annotations if annotation.hsize == 1]
    parts = [summed(single) if partial else duplicate(single)] if single else []
    parts += [annotation for annotation in annotations if annotation.hsize > 1]
    return [(name if number == 0 else f"{name}#{number}", part) for number, part in enumerate(parts)]
