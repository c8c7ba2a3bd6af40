"""Bridge plans: many tensors from one layout to another in one plan, with relays and balanced loads.

`plan_bridge` gathers what all tensors need into bundles (`hgraph/bundles.py`), routes these (`hgraph/routes.py`) and cuts
the tensors, in the order given, into buckets. One message per pair of ranks and bucket carries all that a level moves.

Invariants
----------
- Every tensor's own part (`reshard_plan`) is a plan that `check_reshard` accepts.
- Buckets hold every tensor once, in the order given: that of first use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy

from hgraph.errors import InvalidInput
from hgraph.bundles import Bundle, Pattern, Tensor, TensorReshard, gather_bundles, scale_box
from hgraph.reshard_plan import Combine, Destination, Move, Origin, ReshardPlan
from hgraph.reshard_needs import is_in_place
from hgraph.routes import NUM_LEVELS, SCRATCH, SOURCE, TARGET, Routes, find_routes
from hgraph.shard_map import shard_map
from hgraph.topology import Topology, single_node

__all__ = ["BridgePlan", "plan_bridge"]

_ORIGINS: dict[int, Origin] = {SOURCE: "source", TARGET: "target", SCRATCH: "scratch"}


class _Step(NamedTuple):
    """One move of everything in a need of a pattern."""

    need: int
    level: int
    sender: int
    receiver: int
    combine: Combine
    origin: Origin
    destination: Destination


@dataclass(frozen=True)
class BridgePlan:
    """How the ranks of `topology` reshard `tensors`; `buckets` are positions in `tensors`, bucket by bucket."""

    tensors: tuple[Tensor, ...]
    patterns: tuple[Pattern, ...]
    bundles: tuple[Bundle, ...]
    routes: Routes
    topology: Topology
    buckets: tuple[tuple[int, ...], ...]
    _known: dict[tuple[int, int | None], Sequence[_Step]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def positions(self) -> dict[str, int]:
        """The position of each tensor by name."""
        return {tensor.reshard.name: position for position, tensor in enumerate(self.tensors)}

    def reshard_plan(self, name: str) -> ReshardPlan:
        """Returns what the bridge does to one tensor, as a plan by itself."""
        tensor = self.tensors[self.positions[name]]
        reshard = tensor.reshard
        phases = tuple(phase for phase in self.moves(tensor) if phase)
        return ReshardPlan(reshard.source, reshard.target, reshard.shape, phases)

    def moves(self, tensor: Tensor, rank: int | None = None) -> tuple[tuple[Move, ...], ...]:
        """Returns the phases of one tensor, all moves or those that `rank` takes part in, by level (0 to 3).

        Moves that combine into one element take effect in the order in which they are listed. A phase may be empty.
        """
        pattern = self.patterns[tensor.pattern]
        phases: list[list[Move]] = [[] for _ in range(NUM_LEVELS)]
        if self._is_in_place[tensor.pattern]:
            return tuple(map(tuple, phases))
        for step in self._steps(tensor.pattern, rank):
            phases[step.level].extend(
                Move(step.sender, step.receiver, scale_box(box, tensor.scale), step.combine, step.origin, step.destination)
                for box in pattern.needs[step.need].boxes
            )
        return tuple(map(tuple, phases))

    def _steps(self, number: int, rank: int | None) -> Sequence[_Step]:
        if (number, rank) not in self._known:
            self._known[number, rank] = [*self._own_steps(number, rank), *self._transfer_steps(number, rank)]
        return self._known[number, rank]

    def _own_steps(self, number: int, rank: int | None) -> Iterator[_Step]:
        """What ranks copy from their own source buffer: values they need, and the first of the terms they sum."""
        pattern = self.patterns[number]
        for at, (need, bundle) in enumerate(zip(pattern.needs, pattern.bundles, strict=True)):
            if need.is_copy:
                targets: set[int] = set(need.receivers).intersection(need.terms[0])
                summing: set[int] = set()
            else:
                root = int(self.routes.roots[bundle])
                targets = {root} if any(root in term for term in need.terms) else set()
                summing = self._summing[bundle]
            for own in sorted(targets):
                if rank in (None, own):
                    yield _Step(at, 0, own, own, "copy", "source", "target")
            for own in sorted(summing):
                if rank in (None, own):
                    yield _Step(at, 0, own, own, "copy", "source", "scratch")

    def _transfer_steps(self, number: int, rank: int | None) -> Iterator[_Step]:
        pattern, routes = self.patterns[number], self.routes
        combine: Combine = "max" if pattern.source.reduce == "max" else "sum"
        need_of = {bundle: at for at, bundle in enumerate(pattern.bundles)}
        chosen = numpy.isin(routes.bundle, pattern.bundles)
        if rank is not None:
            chosen &= (routes.sender == rank) | (routes.receiver == rank)
        for at in numpy.flatnonzero(chosen):
            bundle, sender, receiver = int(routes.bundle[at]), int(routes.sender[at]), int(routes.receiver[at])
            level, origin = int(routes.level[at]), _ORIGINS[int(routes.origin[at])]
            scratch = level == 0 and receiver != routes.roots[bundle]
            how: Combine = combine if self._combines[at] else "copy"
            yield _Step(need_of[bundle], level, sender, receiver, how, origin, "scratch" if scratch else "target")

    @cached_property
    def _combines(self) -> numpy.ndarray:
        """Per transfer, whether it adds to what is there: sums, but for the first to a root that holds no term."""
        routes = self.routes
        combines = routes.level < 2
        holds = [
            root < 0 or any(root in term for term in bundle.terms)
            for root, bundle in zip(routes.roots.tolist(), self.bundles, strict=True)
        ]
        first = combines & (routes.receiver == routes.roots[routes.bundle]) & ~numpy.array(holds, dtype=bool)[routes.bundle]
        candidates = numpy.flatnonzero(first)
        _, at = numpy.unique(routes.bundle[candidates], return_index=True)
        combines[candidates[at]] = False
        return combines

    @cached_property
    def _summing(self) -> list[set[int]]:
        """Per bundle, the ranks that sum terms in their scratch buffer."""
        routes = self.routes
        result: list[set[int]] = [set() for _ in self.bundles]
        sums = (routes.level == 0) & (routes.receiver != routes.roots[routes.bundle])
        for bundle, receiver in zip(routes.bundle[sums].tolist(), routes.receiver[sums].tolist(), strict=True):
            result[bundle].add(receiver)
        return result

    def buffer_elements(self, bucket: Sequence[int] | None = None) -> numpy.ndarray:
        """Returns the elements of each rank's messages (sent and received) and sums for `bucket` (all tensors)."""
        routes, count = self.routes, self.elements(bucket)
        moved = count[routes.bundle].astype(float)
        sums = (routes.level == 0) & (routes.receiver != routes.roots[routes.bundle])
        summing = numpy.unique(numpy.stack([routes.bundle[sums], routes.receiver[sums]]), axis=1)
        size = self.topology.num_ranks
        return sum(
            numpy.bincount(ranks, weights, minlength=size)
            for ranks, weights in (
                (routes.sender, moved), (routes.receiver, moved), (summing[1], count[summing[0]].astype(float))
            )
        )

    @cached_property
    def _is_in_place(self) -> list[bool]:
        """Per pattern, whether every rank's source buffer already is a right target buffer."""
        found = []
        for pattern in self.patterns:
            source, target = shard_map(pattern.source, pattern.shape), shard_map(pattern.target, pattern.shape)
            found.append(is_in_place(source, target, pattern.needs))
        return found

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
) -> BridgePlan:
    """Returns the plan that reshards all tensors, given in the order of their first use.

    `bucket_elements` cuts them into buckets: a new one begins where some rank would otherwise send, receive and sum
    more elements than that in one bucket (a tensor that has more makes a bucket by itself). Without it, all are one.

    Raises `InvalidInput` where an annotation does not fit its tensor's shape or names a rank the topology has not.
    """
    highest = max((max(*r.source.ranks, *r.target.ranks) for r in reshards), default=0)
    topology = topology or single_node(highest + 1)
    if highest >= topology.num_ranks:
        raise InvalidInput(
            f"bridge: expected ranks below {topology.num_ranks}, those of topology {topology.name}; got rank {highest}"
        )
    tensors, patterns, bundles = gather_bundles(reshards)
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
