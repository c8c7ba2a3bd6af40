"""The two layouts of parameters, and the bridges between them.

The *optimizer layout* spreads every parameter over all ranks along dim 0 (ZeRO-1, arXiv 1910.02054); it never changes.
The *compute layout* of a strategy is the union of what its replicas and stages use, duplicated; gradients are the
union of what they leave, summed.

Parameters travel in the order of their first use: stage by stage, then as the graph uses them. Gradients go home in the
reverse order, which is that of the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hgraph.annotation import Annotation, Subgroup, sharded
from hgraph.bridge_plan import BridgePlan, plan_bridge
from hgraph.bundles import TensorReshard
from hgraph.capture import Captured
from hgraph.errors import InvalidInput
from hgraph.graph import info
from hgraph.shard_map import Box, duplicate, shard_map, summed
from hgraph.strategy import Strategy
from hgraph.topology import Topology, single_node
from passes.pipelines import CompiledScheme
from runtime.bridge import Bridge
from runtime.buffer_pool import BufferPool

__all__ = [
    "StrategyBridges",
    "bridge_plans",
    "bucket_elements",
    "first_use",
    "optimizer_annotation",
    "owned_box",
]


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

    Plans are of tensors named `name` or `name#k`: k counts the parts of a layout that is not one union of single
    subgroups. `dtypes` are those that parameters and gradients travel in; both bridges take their buffers from `pool`.
    """

    def __init__(
        self,
        plans: tuple[BridgePlan, BridgePlan],
        rank: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
        pool: BufferPool | None = None,
    ) -> None:
        pool = pool or BufferPool(device)
        self.parameters = Bridge(plans[0], rank, dtypes[0], device, pool=pool)
        self.gradients = Bridge(plans[1], rank, dtypes[1], device, pool=pool, lane=1)

    @property
    def total_bytes(self) -> int:
        """Bytes that both bridges move between all ranks in one step."""
        return self.parameters.total_bytes + self.gradients.total_bytes


def bridge_plans(
    strategy: Strategy,
    compiled: Mapping[str, CompiledScheme],
    captured: Captured,
    num_ranks: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    bucket_mb: float,
    topology: Topology | None = None,
) -> tuple[BridgePlan, BridgePlan]:
    """Returns the plan of the parameter bridge and of the gradient bridge; the same on every rank.

    `dtypes` are those that parameters and gradients travel in. A bucket takes up to `bucket_mb` megabytes (10^6 bytes)
    on the rank that has most to send, receive and sum in it. Without `topology` all links are taken to be equal.

    Raises `InvalidInput` for a size that is not above 0, or a topology of another number of ranks.
    """
    topology = topology or single_node(num_ranks)
    if topology.num_ranks != num_ranks:
        raise InvalidInput(
            f"topology {topology.name}: expected the {num_ranks} ranks of the pool, got {topology.num_ranks}"
        )
    inward: list[TensorReshard] = []
    outward: list[TensorReshard] = []
    shapes = {name: facts.shape for facts in captured.parameters for name in facts.names}
    for name in _in_order_of_use(strategy, compiled, captured, shapes):
        home = optimizer_annotation(shapes[name], num_ranks)
        used = _annotations(strategy, compiled, name, "parameters")
        inward += [TensorReshard(key, home, part, shapes[name]) for key, part in _unions(name, used, partial=False)]
        left = _annotations(strategy, compiled, name, "gradients")
        outward += [TensorReshard(key, part, home, shapes[name]) for key, part in _unions(name, left, partial=True)]
    sizes = [bucket_elements(bucket_mb, dtype) for dtype in dtypes]
    return (
        plan_bridge(inward, topology, bucket_elements=sizes[0]),
        plan_bridge(outward[::-1], topology, bucket_elements=sizes[1]),
    )


def bucket_elements(bucket_mb: float, dtype: torch.dtype) -> int:
    """Returns how many elements of `dtype` a bucket of `bucket_mb` megabytes holds, at least one."""
    if not bucket_mb > 0:
        raise InvalidInput(f"bucket_mb: expected a size above 0 MB, got {bucket_mb}")
    return max(1, int(bucket_mb * 1e6) // dtype.itemsize)


def first_use(captured: Captured) -> dict[str, int]:
    """Returns, for each name that a parameter is used by, where in the graph it is used first."""
    position = {node: number for number, node in enumerate(captured.graph.nodes)}
    return {
        info(node).name: min((position[user] for user in node.users), default=len(position))
        for node in captured.graph.nodes
        if node.op == "placeholder" and info(node).role == "parameter"
    }


def _in_order_of_use(
    strategy: Strategy, compiled: Mapping[str, CompiledScheme], captured: Captured, names: Mapping[str, object]
) -> list[str]:
    """Names by the last stage of any replica that uses them, then as the graph uses them."""
    uses = first_use(captured)
    stages = dict.fromkeys(names, 0)
    for replica in strategy.replicas:
        for name, stage in compiled[str(replica.scheme)].parameters:
            stages[name] = max(stages[name], stage)
    return sorted(names, key=lambda name: (stages[name], uses.get(name, len(captured.graph.nodes))))


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
