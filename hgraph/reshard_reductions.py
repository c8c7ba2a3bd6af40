"""Recognises all-reduces and reduce-scatters in what ranks need: from the boxes, never from the annotations.

(HSPMD, arXiv 2504.20490, section 4.) A *team* holds each term of a need once. One team, all of which receives, makes an
all-reduce; teams of which each member receives parts of its own, a reduce-scatter. Where terms have several holders,
so that there are several teams, what they need is divided among them: each element is reduced by one team and then
shared. Teams of two reduce everything each, since that moves no more and takes one phase; so do teams on other nodes,
since sharing would cross the network.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hgraph.reshard_needs import Family, Need, merge_boxes
from hgraph.reshard_plan import Collective, Combine, empty_box
from hgraph.reshard_teams import Team, boxes_within, cut_boxes, first_received, one_box, teams_of_terms
from hgraph.shard_map import Box, intersect

__all__ = ["Spread", "recognise_reductions"]


@dataclass(frozen=True, slots=True)
class Spread:
    """`receivers` still need `boxes`, which `holders` have complete in their target buffers after the first phase."""

    holders: tuple[int, ...]
    receivers: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class _Share:
    """The part of a need that one team could serve: `receivers` are members that take `boxes` together."""

    need: Need
    team: Team
    receivers: Team
    boxes: tuple[Box, ...]


def recognise_reductions(
    needs: Sequence[Need], combine: Combine, free_dims: Sequence[int] = (), node_of: Sequence[int] | None = None
) -> tuple[list[Collective], list[Need], list[Spread]]:
    """Returns all-reduces and reduce-scatters, the needs that no rank has after them, and those that some have.

    `node_of` is the node of each rank, where that is known.
    """
    shares = list(_shares(needs, free_dims, node_of))
    complete = [share for share in shares if share.receivers == share.team]
    reduces = _all_reduces(complete, combine)
    partly = (share for share in shares if share.receivers != share.team)
    scatters, scattered = _reduce_scatters(_one_receiver_each(partly, free_dims), combine, free_dims)
    left: list[Need] = []
    spreads: list[Spread] = []
    done: dict[Need, list[_Share]] = {need: [] for need in needs}
    for share in (*complete, *scattered):
        done[share.need].append(share)
    for need, own_shares in done.items():
        for boxes, holders in _holders_by_box(need, own_shares):
            receivers = tuple(rank for rank in need.receivers if rank not in holders)
            if not holders:
                left.append(replace(need, boxes=boxes))
            elif receivers:
                spreads.append(Spread(tuple(sorted(holders)), receivers, boxes))
    return [*reduces, *scatters], left, spreads


# Shares: who reduces what


def _shares(needs: Sequence[Need], free_dims: Sequence[int], node_of: Sequence[int] | None) -> Iterator[_Share]:
    """Yields what each team is to reduce: everything that members need, or its part where several teams could."""
    clusters: dict[tuple[Team, ...], list[Need]] = {}
    for terms, group in _by_terms(needs).items():
        possible = teams_of_terms(terms, first_received(group))
        for need in group:
            able = [team for team in possible if not set(team).isdisjoint(need.receivers)]
            for teams in _by_nodes(able, node_of):
                clusters.setdefault(teams, []).append(need)
    for number, (teams, cluster) in enumerate(clusters.items()):
        if len(teams) < 2 or len(teams[0]) == 2:
            parts = [(team, need, need.boxes) for need in cluster for team in teams]
        else:
            parts = list(_divided(teams, cluster, free_dims, number))
        for team, need, boxes in parts:
            yield _Share(need, team, tuple(rank for rank in need.receivers if rank in team), boxes)


def _by_nodes(teams: Iterable[Team], node_of: Sequence[int] | None) -> Iterable[tuple[Team, ...]]:
    """Returns the teams, those on the same nodes together."""
    groups: dict[frozenset[int], list[Team]] = {}
    for team in teams:
        nodes = frozenset(() if node_of is None else (node_of[rank] for rank in team))
        groups.setdefault(nodes, []).append(team)
    return map(tuple, groups.values())


def _by_terms(needs: Sequence[Need]) -> dict[Family, list[Need]]:
    groups: dict[Family, list[Need]] = {}
    for need in needs:
        groups.setdefault(need.terms, []).append(need)
    return groups


def _divided(
    teams: Sequence[Team], cluster: Sequence[Need], free_dims: Sequence[int], first: int
) -> Iterator[tuple[Team, Need, tuple[Box, ...]]]:
    """Yields a slab of what `cluster` needs for each team, beginning with team number `first`."""
    slabs = cut_boxes([box for need in cluster for box in need.boxes], len(teams), free_dims)
    for number, slab in enumerate(slabs):
        team = teams[(first + number) % len(teams)]
        for need in cluster:
            if boxes := boxes_within(need.boxes, slab):
                yield team, need, boxes


def _one_receiver_each(shares: Iterable[_Share], free_dims: Sequence[int]) -> Iterator[_Share]:
    """Yields shares with one receiver, cut where several members take the same."""
    for share in shares:
        if len(share.receivers) == 1:
            yield share
            continue
        slabs = cut_boxes(share.boxes, len(share.receivers), free_dims)
        for receiver, slab in zip(share.receivers, slabs, strict=False):
            if boxes := boxes_within(share.boxes, slab):
                yield _Share(share.need, share.team, (receiver,), boxes)


# Collectives


def _holders_by_box(need: Need, shares: Sequence[_Share]) -> Iterator[tuple[tuple[Box, ...], frozenset[int]]]:
    """Yields boxes that together are the need's, each with the ranks that have it complete after `shares`."""
    if all(share.boxes == need.boxes for share in shares):
        yield need.boxes, frozenset(rank for share in shares for rank in share.receivers)
        return
    borders = [box for share in shares for box in share.boxes]
    groups: dict[frozenset[int], list[Box]] = {}
    for cell in (cell for box in need.boxes for cell in _cells(box, borders)):
        holding = (share for share in shares if any(intersect(cell, box) is not None for box in share.boxes))
        groups.setdefault(frozenset(rank for share in holding for rank in share.receivers), []).append(cell)
    for holders, cells in groups.items():
        yield merge_boxes(cells), holders


def _cells(box: Box, borders: Iterable[Box]) -> Iterator[Box]:
    """Yields what `box` is cut into at every border of the others."""
    cuts = [set(interval) for interval in box]
    for other in borders:
        for ends, (start, stop), interval in zip(cuts, box, other, strict=True):
            ends.update(end for end in interval if start < end < stop)
    return itertools.product(*(itertools.pairwise(sorted(ends)) for ends in cuts))


def _all_reduces(shares: Iterable[_Share], combine: Combine) -> list[Collective]:
    boxes: dict[Team, list[Box]] = {}
    for share in shares:
        boxes.setdefault(share.team, []).extend(share.boxes)
    return [
        Collective("all_reduce", team, (box,) * len(team), (box,) * len(team), combine)
        for team, parts in boxes.items()
        for box in merge_boxes(parts)
    ]


def _reduce_scatters(
    shares: Iterable[_Share], combine: Combine, free_dims: Sequence[int]
) -> tuple[list[Collective], list[_Share]]:
    """Returns reduce-scatters of boxes that the members of a team divide among them, and the shares so served."""
    by_team: dict[Team, list[_Share]] = {}
    for share in shares:
        by_team.setdefault(share.team, []).append(share)
    found: list[Collective] = []
    served: list[_Share] = []
    for team, team_shares in by_team.items():
        for union in merge_boxes(box for share in team_shares for box in share.boxes):
            inside = [replace(share, boxes=boxes_within(share.boxes, union)) for share in team_shares]
            inside = [share for share in inside if share.boxes]
            received = _received(team, inside)
            if received is None:
                continue
            nothing = empty_box(union, free_dims)
            parts = tuple(received.get(rank, nothing) for rank in team)
            found.append(Collective("reduce_scatter", team, (union,) * len(team), parts, combine))
            served.extend(inside)
    return found, served


def _received(team: Team, shares: Sequence[_Share]) -> dict[int, Box] | None:
    """Returns the box of each member that receives any, or None where these are fewer than two or not one box each."""
    parts: dict[int, list[Box]] = {}
    for share in shares:
        parts.setdefault(share.receivers[0], []).extend(share.boxes)
    received = {rank: box for rank, boxes in parts.items() if (box := one_box(boxes)) is not None}
    return received if len(received) == len(parts) >= 2 else None
