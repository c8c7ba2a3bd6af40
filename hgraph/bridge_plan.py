"""Bridge plans: many tensors from one layout to another in one plan, with relays and balanced loads.

`plan_bridge` gathers what all tensors need into bundles (`hgraph/bundles.py`), routes these (`hgraph/routes.py`) and
cuts the tensors, in the order given, into buckets. One message per pair of ranks and bucket carries all that a level
moves.

Invariants
----------
- Every tensor's own part (`reshard_plan`) is a plan that `check_reshard` accepts.
- Buckets hold every tensor once, in the order given: that of first use. None is empty.
- Names of tensors are distinct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy

from hgraph.bundle_cuts import cut_bundles
from hgraph.bundles import Bundle, Pattern, Tensor, TensorReshard, gather_bundles, scale_box
from hgraph.errors import InvalidInput
from hgraph.reshard_plan import Move, ReshardPlan
from hgraph.route_moves import route_moves
from hgraph.route_plan import NUM_LEVELS, Routes
from hgraph.routes import check_ranks, find_routes
from hgraph.topology import Topology, single_node

__all__ = ["BridgePlan", "plan_bridge"]


@dataclass(frozen=True)
class BridgePlan:
    """How the ranks of `topology` reshard `tensors`; `buckets` are positions in `tensors`, bucket by bucket."""

    tensors: tuple[Tensor, ...]
    patterns: tuple[Pattern, ...]
    bundles: tuple[Bundle, ...]
    routes: Routes
    topology: Topology
    buckets: tuple[tuple[int, ...], ...]
    _known: dict[tuple[int, int | None], tuple[tuple[Move, ...], ...]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        held = [position for bucket in self.buckets for position in bucket]
        if held != list(range(len(self.tensors))) or not all(self.buckets):
            raise InvalidInput(
                f"bridge: expected buckets that hold the tensors 0 to {len(self.tensors) - 1} in this order, each "
                f"once, and no empty bucket; got {self.buckets}"
            )
        if len(self.positions) != len(self.tensors):
            names = [tensor.reshard.name for tensor in self.tensors]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise InvalidInput(f"bridge: expected tensors of distinct names, got {twice} more than once")

    @cached_property
    def positions(self) -> dict[str, int]:
        """The position of each tensor by name."""
        return {tensor.reshard.name: position for position, tensor in enumerate(self.tensors)}

    def reshard_plan(self, name: str) -> ReshardPlan:
        """Returns what the bridge does to one tensor, as a plan by itself."""
        tensor = self.tensors[self.positions[name]]
        reshard = tensor.reshard
        phases = tuple(phase for phase in self.moves(tensor) if phase)
        if not phases and not self.patterns[tensor.pattern].is_in_place:
            phases = ((),)  # no element moves, but the local shapes change
        return ReshardPlan(reshard.source, reshard.target, reshard.shape, phases)

    def moves(self, tensor: Tensor, rank: int | None = None) -> tuple[tuple[Move, ...], ...]:
        """Returns the phases of one tensor, all moves or those that `rank` takes part in, by level (0 to 3).

        Moves that combine into one element take effect in the order in which they are listed. A phase may be empty.
        """
        key = (tensor.pattern, rank)
        if key not in self._known:
            self._known[key] = self._pattern_moves(self.patterns[tensor.pattern], rank)
        return tuple(
            tuple(replace(move, box=scale_box(move.box, tensor.scale)) for move in level) for level in self._known[key]
        )

    def _pattern_moves(self, pattern: Pattern, rank: int | None) -> tuple[tuple[Move, ...], ...]:
        if pattern.is_in_place:
            return ((),) * NUM_LEVELS
        reduce = pattern.source.reduce
        return route_moves(pattern.needs, pattern.bundles, self.bundles, self.routes, reduce, rank)

    def buffer_elements(self, bucket: Sequence[int] | None = None) -> numpy.ndarray:
        """Returns the elements of each rank's messages (sent and received) and sums for `bucket` (all tensors)."""
        routes, count = self.routes, self.elements(bucket)
        moved = count[routes.bundle].astype(float)
        scratch = routes.into_scratch
        num_ranks = self.topology.num_ranks
        summing = divmod(numpy.unique(routes.bundle[scratch] * num_ranks + routes.receiver[scratch]), num_ranks)
        result = numpy.zeros(self.topology.num_ranks)
        for ranks, elements in ((routes.sender, moved), (routes.receiver, moved), (summing[1], count[summing[0]])):
            result += numpy.bincount(ranks, elements, minlength=len(result))
        return result

    def elements(self, bucket: Sequence[int] | None = None) -> numpy.ndarray:
        """Returns the elements of each bundle that the tensors of `bucket` (all tensors) have."""
        count = numpy.zeros(len(self.bundles), dtype=numpy.int64)
        per_pattern: dict[int, int] = {}
        for position in range(len(self.tensors)) if bucket is None else bucket:
            tensor = self.tensors[position]
            per_pattern[tensor.pattern] = per_pattern.get(tensor.pattern, 0) + tensor.elements_per_unit
        for number, elements in per_pattern.items():
            pattern = self.patterns[number]
            numpy.add.at(count, list(pattern.bundles), elements * numpy.array([need.numel for need in pattern.needs]))
        return count


def plan_bridge(
    reshards: Sequence[TensorReshard],
    topology: Topology | None = None,
    *,
    bucket_elements: int | None = None,
    smallest_part: int = 1 << 16,
) -> BridgePlan:
    """Returns the plan that reshards all tensors, given in the order of their first use.

    `bucket_elements` cuts them into buckets: a new one begins where some rank would otherwise send, receive and sum
    more elements than that in one bucket (a tensor that has more makes a bucket by itself). Without it, all are one.

    Where several ranks could send, sum or take in a bundle, it is cut into parts of at least about `smallest_part`
    elements, so that they share the load (`hgraph/bundle_cuts.py`).

    Raises `InvalidInput` where an annotation does not fit its tensor's shape or names a rank the topology has not, and
    where `bucket_elements` is not an integer of 1 or more.
    """
    is_count = isinstance(bucket_elements, (int, numpy.integer)) and not isinstance(bucket_elements, bool)
    if bucket_elements is not None and not (is_count and bucket_elements >= 1):
        raise InvalidInput(
            f"bridge: expected bucket_elements of 1 or more, an integer, got {bucket_elements!r}; leave it out for one "
            "bucket"
        )
    annotations = {id(annotation): annotation for r in reshards for annotation in (r.source, r.target)}
    ranks = {rank for annotation in annotations.values() for rank in annotation.ranks}
    topology = topology or single_node(max(ranks, default=0) + 1)
    check_ranks("bridge", tuple(ranks), topology)
    tensors, patterns, bundles = cut_bundles(*gather_bundles(reshards, topology), topology, smallest_part)
    routes = find_routes(bundles, topology)
    whole = (tuple(range(len(tensors))),) if tensors else ()
    plan = BridgePlan(tuple(tensors), tuple(patterns), tuple(bundles), routes, topology, whole)
    return plan if bucket_elements is None else replace(plan, buckets=_buckets(plan, bucket_elements))


def _buckets(plan: BridgePlan, limit: int) -> tuple[tuple[int, ...], ...]:
    per_pattern: dict[int, numpy.ndarray] = {}
    for position, tensor in enumerate(plan.tensors):
        if tensor.pattern not in per_pattern:
            per_pattern[tensor.pattern] = plan.buffer_elements((position,)) / tensor.elements_per_unit
    buckets: list[list[int]] = []
    filled = numpy.zeros(0)
    for position, tensor in enumerate(plan.tensors):
        elements = per_pattern[tensor.pattern] * tensor.elements_per_unit
        if not buckets or (filled + elements).max() > limit:
            buckets.append([])
            filled = numpy.zeros_like(elements)
        buckets[-1].append(position)
        filled = filled + elements
    return tuple(map(tuple, buckets))
