"""Recognises collectives in what ranks need: from the boxes, never from the annotations (HSPMD, arXiv 2504.20490).

Where several ranks hold the same thing, they are told apart by order: the first holders of every part make one *team*,
the second holders another. A mesh with a replicated axis thus gives one collective per position along that axis.
`ranks` of a collective ascend; its boxes say who holds what.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from hgraph.reshard_needs import Need, merge_boxes
from hgraph.reshard_plan import Collective, Combine
from hgraph.shard_map import Box, intersect

__all__ = ["Spread", "recognise_copies", "recognise_reductions"]

Team: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """`receivers` still need `boxes`, which `holders` have complete in their target buffers after the first phase."""

    holders: tuple[int, ...]
    receivers: tuple[int, ...]
    boxes: tuple[Box, ...]


def recognise_copies(needs: Sequence[Need]) -> tuple[list[Collective], list[Need]]:
    """Returns all-gathers and all-to-alls, and the needs (of one term each) that they leave."""
    gathers, left = _all_gathers(needs)
    exchanges, left = _all_to_alls(left)
    return [*gathers, *exchanges], left


def recognise_reductions(needs: Sequence[Need], combine: Combine) -> tuple[list[Collective], list[Need], list[Spread]]:
    """Returns all-reduces and reduce-scatters, the needs that no rank has after them, and those that some have."""
    shares = [_Share(need, team) for need in needs for team in _teams(need)]
    reduces = _all_reduces(shares, combine)
    scatters = _reduce_scatters(shares, combine)
    complete: dict[Need, set[int]] = {need: set() for need in needs}
    for share in shares:
        if share.is_done:
            complete[share.need].update(share.receivers)
    left = [need for need in needs if not complete[need]]
    spreads = []
    for need, holders in complete.items():
        receivers = tuple(rank for rank in need.receivers if rank not in holders)
        if holders and receivers:
            spreads.append(Spread(tuple(sorted(holders)), receivers, need.boxes))
    return [*reduces, *scatters], left, spreads


def _one_box(boxes: Iterable[Box]) -> Box | None:
    """Returns the box that the disjoint `boxes` make up, or None where they make up no single box."""
    merged = merge_boxes(boxes)
    return merged[0] if len(merged) == 1 else None


# All-gather: a set of ranks needs several parts, each of which one rank (of each team) of the set holds.


def _all_gathers(needs: Sequence[Need]) -> tuple[list[Collective], list[Need]]:
    clusters: dict[tuple[int, ...], list[Need]] = {}
    for need in needs:
        if not set(need.receivers) <= set(need.terms[0]):
            clusters.setdefault(need.receivers, []).append(need)
    found: list[Collective] = []
    served: dict[Need, set[int]] = {}
    for receivers, cluster in clusters.items():
        collectives = _gather_cluster(receivers, cluster)
        found.extend(collectives)
        ranks = {rank for collective in collectives for rank in collective.ranks}
        served.update((need, ranks) for need in cluster)
    return found, _without(needs, served)


def _without(needs: Iterable[Need], served: dict[Need, set[int]]) -> list[Need]:
    """Returns the needs without the receivers served."""
    left = []
    for need in needs:
        receivers = tuple(rank for rank in need.receivers if rank not in served.get(need, ()))
        if receivers:
            left.append(replace(need, receivers=receivers))
    return left


def _gather_cluster(receivers: tuple[int, ...], cluster: Sequence[Need]) -> list[Collective]:
    union = _one_box(box for need in cluster for box in need.boxes)
    parts = [need.boxes[0] for need in cluster]
    holders = [tuple(rank for rank in need.terms[0] if rank in receivers) for need in cluster]
    ranks = [rank for part_holders in holders for rank in part_holders]
    if (
        len(cluster) < 2
        or union is None
        or any(len(need.boxes) > 1 for need in cluster)
        or not _tiles_one_dim(parts, union)
        or len({len(part_holders) for part_holders in holders}) != 1
        or len(set(ranks)) != len(ranks)
    ):
        return []
    collectives = []
    for team in zip(*holders, strict=True):
        contributed = dict(zip(team, parts, strict=True))
        team = tuple(sorted(team))
        boxes = tuple(contributed[rank] for rank in team)
        collectives.append(Collective("all_gather", team, boxes, (union,) * len(team)))
    return collectives


def _tiles_one_dim(parts: Iterable[Box], union: Box) -> bool:
    """Whether every part spans `union` in all dims but one, the same for all."""
    cut = {dim for part in parts for dim, interval in enumerate(part) if interval != union[dim]}
    return len(cut) == 1


# All-to-all: ranks swap parts so that each pair, in both directions, has one box to exchange.


@dataclass(frozen=True, slots=True)
class _Edge:
    """One rank's part of a need: `holder` has `boxes`, `receiver` needs them."""

    holder: int
    receiver: int
    need: Need


def _all_to_alls(needs: Sequence[Need]) -> tuple[list[Collective], list[Need]]:
    edges = [
        _Edge(holder, receiver, need)
        for need in needs
        if len(need.terms[0]) == len(need.receivers)
        for holder, receiver in _pairs(need)
    ]
    found: list[Collective] = []
    served: dict[Need, set[int]] = {}
    for component in _components(edges):
        collective = _exchange(component)
        if collective is None:
            continue
        found.append(collective)
        for edge in component:
            served.setdefault(edge.need, set()).add(edge.receiver)
    return found, _without(needs, served)


def _pairs(need: Need) -> list[tuple[int, int]]:
    """Returns (holder, receiver) for each receiver; a receiver that holds its part has it from itself."""
    receivers = [rank for rank in need.receivers if rank not in need.terms[0]]
    holders = [rank for rank in need.terms[0] if rank not in need.receivers]
    own = [(rank, rank) for rank in need.receivers if rank in need.terms[0]]
    return [*own, *zip(holders, receivers, strict=True)]


def _components(edges: Sequence[_Edge]) -> list[list[_Edge]]:
    """Returns the edges by connected component of their ranks."""
    leader: dict[int, int] = {}

    def find(rank: int) -> int:
        while leader.setdefault(rank, rank) != rank:
            rank = leader[rank]
        return rank

    for edge in edges:
        first, second = sorted((find(edge.holder), find(edge.receiver)))
        leader[second] = first
    components: dict[int, list[_Edge]] = {}
    for edge in edges:
        components.setdefault(find(edge.holder), []).append(edge)
    return list(components.values())


def _exchange(edges: Sequence[_Edge]) -> Collective | None:
    ranks = tuple(sorted({edge.holder for edge in edges}))
    if len(ranks) < 2 or set(ranks) != {edge.receiver for edge in edges}:
        return None
    boxes: dict[tuple[int, int], list[Box]] = {}
    for edge in edges:
        boxes.setdefault((edge.holder, edge.receiver), []).extend(edge.need.boxes)
    contributed = [_one_box(box for r in ranks for box in boxes.get((rank, r), ())) for rank in ranks]
    received = [_one_box(box for r in ranks for box in boxes.get((r, rank), ())) for rank in ranks]
    whole_contributed = tuple(box for box in contributed if box is not None)
    whole_received = tuple(box for box in received if box is not None)
    if not len(whole_contributed) == len(whole_received) == len(ranks):
        return None
    for holder, given in zip(ranks, whole_contributed, strict=True):
        for receiver, taken in zip(ranks, whole_received, strict=True):
            # Where copies were paired so that two teams are linked, a pair has less to exchange than its boxes share.
            common = intersect(given, taken)
            if common is None or merge_boxes(boxes.get((holder, receiver), ())) != (common,):
                return None
    return Collective("all_to_all", ranks, whole_contributed, whole_received)


# Reductions: a team holds each term of a need once.


@dataclass(slots=True)
class _Share:
    """The part of a need that one team could serve: its members among the receivers."""

    need: Need
    team: Team
    is_done: bool = False

    @property
    def receivers(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.need.receivers if rank in self.team)


def _teams(need: Need) -> list[Team]:
    """Returns teams of one holder per term, ascending: all where each term has equally many holders, else one."""
    if len({len(term) for term in need.terms}) == 1:
        return [tuple(sorted(team)) for team in zip(*need.terms, strict=True)]
    return [tuple(sorted(next((r for r in term if r in need.receivers), term[0]) for term in need.terms))]


def _all_reduces(shares: Sequence[_Share], combine: Combine) -> list[Collective]:
    boxes: dict[Team, list[Box]] = {}
    for share in shares:
        if share.receivers == share.team:
            boxes.setdefault(share.team, []).extend(share.need.boxes)
            share.is_done = True
    return [
        Collective("all_reduce", team, (box,) * len(team), (box,) * len(team), combine)
        for team, parts in boxes.items()
        for box in merge_boxes(parts)
    ]


def _reduce_scatters(shares: Sequence[_Share], combine: Combine) -> list[Collective]:
    single: dict[Team, list[_Share]] = {}
    for share in shares:
        if len(share.receivers) == 1 and not share.is_done:
            single.setdefault(share.team, []).append(share)
    found = []
    for team, team_shares in single.items():
        parts: dict[int, list[Box]] = {rank: [] for rank in team}
        for share in team_shares:
            parts[share.receivers[0]].extend(share.need.boxes)
        union = _one_box(box for boxes in parts.values() for box in boxes)
        received = [_one_box(parts[rank]) for rank in team]
        boxes = tuple(box for box in received if box is not None)
        if union is None or len(boxes) != len(team):
            continue
        found.append(Collective("reduce_scatter", team, (union,) * len(team), boxes, combine))
        for share in team_shares:
            share.is_done = True
    return found
