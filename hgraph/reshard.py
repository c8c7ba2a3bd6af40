"""Plans resharding: operations that turn one annotation of a tensor into another (HSPMD, arXiv 2504.20490, section 4).

Every pair of valid annotations of one shape has a plan. What ranks need is cut to the finest common slices
(`hgraph/reshard_needs.py`); collectives are recognised from the boxes (`hgraph/reshard_collectives.py`); everything
else is batched moves, with relays where a topology says which links are slow (`hgraph/routes.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hgraph.annotation import Annotation
from hgraph.bundles import Bundle
from hgraph.errors import InvalidInput
from hgraph.placements import Shard, balanced_sizes
from hgraph.reshard_collectives import recognise_copies
from hgraph.reshard_moves import MoveList
from hgraph.reshard_needs import Family, Need, families_by_cell, find_needs, is_in_place
from hgraph.reshard_plan import Collective, Combine, Move, Operation, ReshardPlan
from hgraph.reshard_reductions import Spread, recognise_reductions
from hgraph.route_moves import route_moves
from hgraph.routes import check_ranks, find_routes
from hgraph.shard_map import box_numel, intersect, shard_map
from hgraph.topology import Topology

__all__ = ["lower_bound_elements", "plan_reshard", "reshard_bytes"]


def plan_reshard(
    source: Annotation,
    target: Annotation,
    shape: Sequence[int],
    *,
    collectives: bool = True,
    topology: Topology | None = None,
    free_dims: Sequence[int] = (),
) -> ReshardPlan:
    """Returns the plan that turns `source` into `target` for a tensor of global shape `shape`.

    Without `collectives` the plan is a single phase of moves that read the source: partial terms are combined at the
    receiver. With them, a partial value that no collective completes everywhere is combined at one receiver and copied
    from there in a second phase. `free_dims` are dims whose length is symbolic for the caller: no annotation may cut
    them, and the plan holds for every length of them (`ReshardPlan.at`).

    With a `topology`, what no collective does is routed (`find_routes`): a value crosses the network once into each
    node and is shared there, terms are summed inside a node before they cross. Routes depend on how sizes compare, so
    those of one length of the free dims are right for every other.

    - The target buffer starts neutral: 0 or -inf, by the target's reduction, or the source's where the target is plain.
    - Operations that combine into the same elements take effect in the order in which they are listed, which is
      ascending in the rank that sends them (where several ranks hold one term, in the lowest of them; with a topology,
      from near to far), so results are deterministic, and the same on every receiver of one family.
    - Where source and target reduce differently, the first of these is a "copy", which replaces the neutral element.
    - Senders: own copy first, with a topology the nearer link, then the sender with the least to send so far, then the
      lowest rank.
    - A partial target gets each source term in one of its terms; the other terms stay neutral.

    Raises `InvalidInput` where an annotation does not fit the shape, cuts a free dim or names a rank that the topology
    has not.
    """
    lengths = tuple(int(length) for length in shape)
    free = tuple(sorted(set(free_dims)))
    _check_free_dims(source, target, lengths, free)
    if topology is not None:
        check_ranks("plan_reshard", (*source.ranks, *target.ranks), topology)
    planned = tuple(max(length, 1) if dim in free else length for dim, length in enumerate(lengths))
    source_map, target_map = shard_map(source, planned), shard_map(target, planned)
    needs = find_needs(source_map, target_map, None if topology is None else topology.node_of)
    if is_in_place(source_map, target_map, needs):
        return ReshardPlan(source, target, lengths, (), free)
    first_combines = not target.is_partial or source.reduce == target.reduce
    draft = _Draft(source.reduce, first_combines, free)
    if topology is not None:
        phases = draft.routed(needs, topology, collectives)
    else:
        phases = draft.with_collectives(needs) if collectives else draft.moves_only(needs)
    return ReshardPlan(source, target, planned, phases, free).at(lengths)


def _check_free_dims(source: Annotation, target: Annotation, shape: Sequence[int], free: Sequence[int]) -> None:
    for dim in free:
        if not 0 <= dim < len(shape):
            raise InvalidInput(f"plan_reshard: free dim {dim} on a tensor of {len(shape)} dims; count from the front")
        for annotation in (source, target):
            placements = [annotation.hetero, *(p for group in annotation.subgroups for p in group.placements)]
            if any(isinstance(placement, Shard) and placement.dim == dim for placement in placements):
                raise InvalidInput(
                    f"plan_reshard: expected free dim {dim} to be whole, got it cut by {annotation}; "
                    f"plan for its actual length instead"
                )


class _Draft:
    """Turns needs into phases. `first_combines`: whether the first term may be combined into the neutral element."""

    def __init__(self, reduce: str | None, first_combines: bool, free_dims: Sequence[int]) -> None:
        self._reduce: Combine = "max" if reduce == "max" else "sum"
        self._first_combines = first_combines
        self._free_dims = free_dims
        self._moves = MoveList()

    def moves_only(self, needs: Sequence[Need]) -> tuple[tuple[Operation, ...], ...]:
        """Returns one phase of moves from the source."""
        for need in needs:
            for receiver in need.receivers:
                self._receive(need, receiver)
        return (self._moves.take(),)

    def with_collectives(self, needs: Sequence[Need]) -> tuple[tuple[Operation, ...], ...]:
        """Returns a phase of collectives and moves and, where needed, a second one of moves from the target."""
        recognised, copies, reductions, spreads = self._recognise(needs)
        for need in copies:
            for receiver in need.receivers:
                self._receive(need, receiver)
        for need in reductions:
            spreads.extend(self._reduce_at_one(need))
        phases: list[tuple[Operation, ...]] = [(*recognised, *self._moves.take())]
        for spread in spreads:
            for receiver in spread.receivers:
                self._moves.add(spread.holders, receiver, spread.boxes, origin="target")
        if second := self._moves.take():
            phases.append(second)
        return tuple(phases)

    def _recognise(
        self, needs: Sequence[Need], node_of: Sequence[int] | None = None
    ) -> tuple[list[Collective], list[Need], list[Need], list[Spread]]:
        """Returns collectives, the copies and reductions that they leave, and what some receivers have after them."""
        gathered, copies = recognise_copies([need for need in needs if need.is_copy], self._free_dims)
        sums = [need for need in needs if not need.is_copy]
        reduced, reductions, spreads = recognise_reductions(sums, self._reduce, self._free_dims, node_of)
        return [*gathered, *reduced], copies, reductions, spreads

    def routed(self, needs: Sequence[Need], topology: Topology, collectives: bool) -> tuple[tuple[Operation, ...], ...]:
        """Returns a phase of collectives and moves, and phases of moves by level of their routes."""
        recognised: list[Collective] = []
        left, spreads = list(needs), list[Spread]()
        if collectives:
            recognised, copies, reductions, spreads = self._recognise(needs, topology.node_of)
            left = [*copies, *reductions]
        bundles = [Bundle(need.terms, need.receivers, need.numel, need.direct) for need in left]
        for spread in spreads:
            need = Need((spread.holders,), spread.receivers, spread.boxes)
            left.append(need)
            bundles.append(Bundle(need.terms, need.receivers, need.numel, in_target=True))
        routes = find_routes(bundles, topology)
        first, *others = route_moves(left, range(len(left)), bundles, routes, self._reduce)
        phases: list[tuple[Operation, ...]] = [(*recognised, *first), *others]
        return tuple(phase for phase in phases if phase) or ((),)

    def _receive(self, need: Need, receiver: int) -> None:
        for position, holders in enumerate(need.terms):
            copies = need.is_copy or (position == 0 and not self._first_combines)
            combine: Combine = "copy" if copies else self._reduce
            self._moves.add(holders, receiver, need.boxes, position=position, combine=combine)

    def _reduce_at_one(self, need: Need) -> list[Spread]:
        """Combines at one receiver per box, one that holds a term where there is one; returns what is left to copy."""
        spreads = []
        for box in need.boxes:
            part = Need(need.terms, need.receivers, (box,))
            candidates = [rank for rank in need.receivers if any(rank in term for term in need.terms)]
            root = self._moves.least_loaded_receiver(candidates or need.receivers)
            self._receive(part, root)
            others = tuple(rank for rank in need.receivers if rank != root)
            spreads.append(Spread((root,), others, (box,)))
        return spreads


def reshard_bytes(plan: ReshardPlan, element_bytes: int) -> dict[tuple[int, int], int]:
    """Returns the bytes that cross from rank to rank, by (sender, receiver); what stays on a rank does not count.

    A collective counts as its members' direct exchange: an all-reduce as a reduce-scatter of balanced parts and an
    all-gather of them. The sum of the values is the total.
    """
    counts: Counter[tuple[int, int]] = Counter()
    for phase in plan.phases:
        for operation in phase:
            if isinstance(operation, Move):
                counts[operation.sender, operation.receiver] += box_numel(operation.box)
            else:
                _count_collective(operation, counts)
    return {pair: count * element_bytes for pair, count in sorted(counts.items()) if pair[0] != pair[1] and count}


def _count_collective(operation: Collective, counts: Counter[tuple[int, int]]) -> None:
    parts = balanced_sizes(box_numel(operation.received[0]), len(operation.ranks))
    for i, sender in enumerate(operation.ranks):
        for j, receiver in enumerate(operation.ranks):
            if operation.kind == "all_reduce":
                counts[sender, receiver] += parts[i] + parts[j]
            else:
                common = intersect(operation.contributed[i], operation.received[j])
                counts[sender, receiver] += box_numel(common) if common else 0


def lower_bound_elements(source: Annotation, target: Annotation, shape: Sequence[int]) -> int:
    """Returns a lower bound on the elements that any plan must move from rank to rank.

    Of each element with a plain copy, every rank that needs it and has none receives one. Of one that exists only as S
    terms, with D ranks that need it, S + D - 2 elements move if one of these holds a term, else S + D - 1. A partial
    target needs it in one of its terms only.
    """
    source_map, target_map = shard_map(source, shape), shard_map(target, shape)
    total = 0
    for box, sources, targets in families_by_cell(source_map, target_map):
        total += box_numel(box) * _bound_of_cell(sources, targets, source.reduce == target.reduce)
    return total


def _bound_of_cell(sources: Sequence[Family], targets: Sequence[Family], may_stay_partial: bool) -> int:
    needed = {rank for family in targets if len(family) == 1 for rank in family[0]}
    complete = {rank for family in sources if len(family) == 1 for rank in family[0]}
    if complete:
        bound = len(needed - complete)
    else:
        bound = min(_bound_of_reduction(family, needed) for family in sources) if needed else 0
    bounds = [
        min(_bound_of_partial(family, target, may_stay_partial) for family in sources)
        for target in targets
        if len(target) > 1
    ]
    # Receivers of a plain value are distinct from family to family; what crosses for terms might serve several.
    return bound + sum(bounds) if all(len(family) == 1 for family in sources) else max([bound, *bounds])


def _bound_of_reduction(terms: Family, needed: set[int]) -> int:
    holds_term = any(rank in needed for term in terms for rank in term)
    return len(terms) + len(needed) - (2 if holds_term else 1)


def _bound_of_partial(terms: Family, target: Family, may_stay_partial: bool) -> int:
    if len(terms) == 1:
        return min(sum(rank not in terms[0] for rank in term) for term in target)
    if not may_stay_partial:
        return min(_bound_of_reduction(terms, set(term)) for term in target)
    ranks = {rank for term in target for rank in term}
    return sum(not ranks.intersection(term) for term in terms)
