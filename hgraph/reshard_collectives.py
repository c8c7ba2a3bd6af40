"""Recognises all-gathers and all-to-alls in what ranks need: from the boxes, never from the annotations.

(HSPMD, arXiv 2504.20490, section 4.) `ranks` of a collective ascend; its boxes say who holds what. Whoever is in no
team, or needs what no team has, is left to moves. Reductions are in `hgraph/reshard_reductions.py`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from hgraph.reshard_needs import Need, merge_boxes
from hgraph.reshard_plan import Collective, empty_box
from hgraph.reshard_teams import Team, boxes_within, first_received, one_box, tiling_teams
from hgraph.shard_map import Box, box_numel, intersect

__all__ = ["recognise_copies"]


def recognise_copies(needs: Sequence[Need], free_dims: Sequence[int] = ()) -> tuple[list[Collective], list[Need]]:
    """Returns all-gathers and all-to-alls, and the needs (of one term each) that they leave."""
    gathers, left = _all_gathers(needs)
    exchanges, left = _all_to_alls(left, free_dims)
    return [*gathers, *exchanges], left


def _without(needs: Iterable[Need], served: Mapping[Need, set[int]]) -> list[Need]:
    """Returns the needs without the receivers served."""
    left = []
    for need in needs:
        ranks = served.get(need)
        receivers = need.receivers if ranks is None else tuple(rank for rank in need.receivers if rank not in ranks)
        if receivers:
            left.append(need if receivers == need.receivers else replace(need, receivers=receivers))
    return left


def _held_parts(needs: Sequence[Need], ranks: set[int] | None = None) -> dict[int, int]:
    """Returns, by rank (of `ranks`, where given), the mask of the needs of which it has a copy."""
    parts: dict[int, int] = {}
    for number, need in enumerate(needs):
        for rank in need.terms[0]:
            if ranks is None or rank in ranks:
                parts[rank] = parts.get(rank, 0) | 1 << number
    return parts


# All-gather: a set of ranks needs one union, of which each of them (of a team) holds a part of its own.


def _all_gathers(needs: Sequence[Need]) -> tuple[list[Collective], list[Need]]:
    clusters: dict[Team, list[Need]] = {}
    for need in needs:
        if len(need.receivers) > 1 and not set(need.receivers) <= set(need.terms[0]):
            clusters.setdefault(need.receivers, []).append(need)
    found: list[Collective] = []
    served: dict[Need, set[int]] = {}
    for receivers, cluster in clusters.items():
        parts = _held_parts(cluster, set(receivers))
        for team in tiling_teams(parts, (1 << len(cluster)) - 1, {}):
            if collectives := _gather(team, parts, cluster):
                found.extend(collectives)
                for need in cluster:
                    served.setdefault(need, set()).update(team)
    return found, _without(needs, served)


def _gather(team: Team, parts: Mapping[int, int], cluster: Sequence[Need]) -> list[Collective]:
    """Returns one all-gather per box of the union; none where a member's part of one is not a box."""
    found = []
    boxes = {
        rank: [box for number, need in enumerate(cluster) if parts[rank] >> number & 1 for box in need.boxes]
        for rank in team
    }
    for union in merge_boxes(box for need in cluster for box in need.boxes):
        contributed = [boxes_within(boxes[rank], union) for rank in team]
        if any(len(part) != 1 for part in contributed):
            return []
        found.append(Collective("all_gather", team, tuple(part[0] for part in contributed), (union,) * len(team)))
    return found


# All-to-all: every sender has something for every receiver, and the one set of ranks contains the other.


def _all_to_alls(needs: Sequence[Need], free_dims: Sequence[int]) -> tuple[list[Collective], list[Need]]:
    found: list[Collective] = []
    served: dict[Need, set[int]] = {}
    for component in _components(needs):
        for collective, parts in _exchanges(component, free_dims):
            found.append(collective)
            for need, part in parts:
                served.setdefault(need, set()).update(part.receivers)
    return found, _without(needs, served)


_Parts: TypeAlias = list[tuple[Need, Need]]
"""Needs, each with what of it one team serves: one holder, and the receivers that take it from there."""


def _exchanges(component: Sequence[Need], free_dims: Sequence[int]) -> Iterator[tuple[Collective, _Parts]]:
    """Yields the exchanges within teams of holders; who holds nothing joins a team, in turn, where that makes one."""
    held = _held_parts(component)
    received = first_received(component)
    if len(held) < 2 or len(received) < 2:
        return
    teams = tiling_teams(held, (1 << len(component)) - 1, received)
    outside = sorted(received.keys() - held.keys(), key=lambda rank: (received[rank], rank))
    for number, team in enumerate(teams):
        for joined in (outside[number :: len(teams)], []):
            exchanges = list(_exchanges_of(team, {*team, *joined}, component, free_dims))
            yield from exchanges
            if exchanges or not joined:
                break


def _exchanges_of(
    team: Team, ranks: set[int], component: Sequence[Need], free_dims: Sequence[int]
) -> Iterator[tuple[Collective, _Parts]]:
    parts: dict[Need, Need] = {}
    for need in component:
        (holder,) = (rank for rank in need.terms[0] if rank in team)
        receivers = tuple(rank for rank in need.receivers if rank in ranks)
        if receivers:
            parts[replace(need, terms=((holder,),), receivers=receivers)] = need
    for connected in _components(list(parts)):
        collective = _exchange(connected, free_dims)
        if collective is not None:
            yield collective, [(parts[part], part) for part in connected]


def _exchange(parts: Sequence[Need], free_dims: Sequence[int]) -> Collective | None:
    """Returns the all-to-all of `parts`, of one holder each, or None where some pair has nothing to exchange."""
    gives: dict[int, list[Box]] = {}
    takes: dict[int, list[Box]] = {}
    counts: Counter[tuple[int, int]] = Counter()
    for part in parts:
        holder = part.terms[0][0]
        gives.setdefault(holder, []).extend(part.boxes)
        for receiver in part.receivers:
            takes.setdefault(receiver, []).extend(part.boxes)
            counts[holder, receiver] += part.numel
    if min(len(gives), len(takes)) < 2 or not (gives.keys() <= takes.keys() or takes.keys() <= gives.keys()):
        return None
    contributed = {rank: box for rank, boxes in gives.items() if (box := one_box(boxes)) is not None}
    received = {rank: box for rank, boxes in takes.items() if (box := one_box(boxes)) is not None}
    if len(contributed) < len(gives) or len(received) < len(takes):
        return None
    for (holder, given), (receiver, taken) in itertools.product(contributed.items(), received.items()):
        # What a pair exchanges must be all that its boxes share: nothing that comes from elsewhere, as another term.
        common = intersect(given, taken)
        if common is None or counts[holder, receiver] != box_numel(common):
            return None
    ranks = tuple(sorted({*gives, *takes}))
    nothing = empty_box(next(iter(contributed.values())), free_dims)
    return Collective(
        "all_to_all",
        ranks,
        tuple(contributed.get(rank, nothing) for rank in ranks),
        tuple(received.get(rank, nothing) for rank in ranks),
    )


def _components(needs: Sequence[Need]) -> list[list[Need]]:
    """Returns the needs by connected component of who sends and who receives (a rank that does both is two)."""
    leader: dict[tuple[bool, int], tuple[bool, int]] = {}

    def find(node: tuple[bool, int]) -> tuple[bool, int]:
        while leader.setdefault(node, node) != node:
            leader[node] = leader[leader[node]]
            node = leader[node]
        return node

    for need in needs:
        first = find((False, need.terms[0][0]))
        for node in (*((False, rank) for rank in need.terms[0]), *((True, rank) for rank in need.receivers)):
            leader[find(node)] = first
    components: dict[tuple[bool, int], list[Need]] = {}
    for need in needs:
        components.setdefault(find((False, need.terms[0][0])), []).append(need)
    return list(components.values())
