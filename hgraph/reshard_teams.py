"""Finds teams of ranks: sets that hold each part of something once, and so can serve themselves by one collective.

Where several ranks hold the same thing, they are told apart by where the first box lies that they receive, then by
rank: the first holders of every part make one team, the second holders another. A mesh with a replicated axis thus
gives one team per position along that axis, whatever its ranks are named. Sets of parts are bit masks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from hgraph.placements import balanced_sizes
from hgraph.reshard_needs import Family, Need, merge_boxes
from hgraph.shard_map import Box, intersect

__all__ = ["Team", "boxes_within", "cut_boxes", "first_received", "one_box", "teams_of_terms", "tiling_teams"]

Team: TypeAlias = tuple[int, ...]
"""Ranks, ascending."""

_MAX_STEPS = 4096
"""A search for one team gives up after so many; the parts of meshes need about one per rank."""


def one_box(boxes: Iterable[Box]) -> Box | None:
    """Returns the box that the disjoint `boxes` make up, or None where they make up no single box."""
    merged = merge_boxes(boxes)
    return merged[0] if len(merged) == 1 else None


def boxes_within(boxes: Iterable[Box], whole: Box) -> tuple[Box, ...]:
    """Returns few boxes that hold what the disjoint `boxes` have in common with `whole`."""
    return merge_boxes(common for box in boxes if (common := intersect(box, whole)) is not None)


def first_received(needs: Iterable[Need]) -> dict[int, Box]:
    """Returns the first box, in the order of boxes, that each receiver of `needs` receives."""
    first: dict[int, Box] = {}
    for need in needs:
        for rank in need.receivers:
            first[rank] = min(first.get(rank, need.boxes[0]), need.boxes[0])
    return first


def _in_turn(ranks: Iterable[int], received: Mapping[int, Box]) -> list[int]:
    return sorted(ranks, key=lambda rank: (rank not in received, received.get(rank, ()), rank))


def teams_of_terms(terms: Family, received: Mapping[int, Box]) -> list[Team]:
    """Returns disjoint teams of one holder per term, as many as the scarcest term has holders.

    `received` is what `first_received` says; where a term has more holders than there are teams, receivers come first.
    """
    return [tuple(sorted(team)) for team in zip(*(_in_turn(term, received) for term in terms), strict=False)]


def tiling_teams(parts: Mapping[int, int], whole: int, received: Mapping[int, Box]) -> list[Team]:
    """Returns disjoint teams of two or more ranks whose parts make up `whole`, none twice; large parts come first."""
    ranks: dict[int, list[int]] = {}
    for rank in _in_turn(parts, received):
        if parts[rank] and parts[rank] != whole:
            ranks.setdefault(parts[rank], []).append(rank)
    teams: list[Team] = []
    while (cover := _exact_cover(ranks, whole)) is not None:
        count = min(len(ranks[part]) for part in cover)
        teams.extend(tuple(sorted(team)) for team in zip(*(ranks[part][:count] for part in cover), strict=True))
        for part in cover:
            del ranks[part][:count]
            if not ranks[part]:
                del ranks[part]
    return teams


def _exact_cover(ranks: Mapping[int, Sequence[int]], whole: int) -> list[int] | None:
    """Returns parts that make up `whole`, none twice; None where there are none or they are hard to find."""
    order = sorted(ranks, key=lambda part: (-part.bit_count(), ranks[part][0]))
    by_bit: dict[int, list[int]] = {}
    for part in order:
        for bit in _bits(part):
            by_bit.setdefault(bit, []).append(part)

    def candidates(uncovered: int) -> Iterator[int]:
        lowest = uncovered & -uncovered
        return (part for part in by_bit.get(lowest, ()) if not part & ~uncovered)

    uncovered, chosen, choices = whole, list[int](), [candidates(whole)]
    for _ in range(_MAX_STEPS):
        choice = next(choices[-1], None)
        if choice is not None:
            chosen.append(choice)
            uncovered &= ~choice
            if not uncovered:
                return chosen
            choices.append(candidates(uncovered))
        elif chosen:
            choices.pop()
            uncovered |= chosen.pop()
        else:
            return None
    return None


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest
        mask ^= lowest


def cut_boxes(boxes: Sequence[Box], count: int, free_dims: Sequence[int]) -> list[Box]:
    """Returns up to `count` disjoint slabs, across a dim that is not free, that together hold the disjoint `boxes`.

    The dim is the first that is long enough and that no box cuts, else the first that is long enough, else the longest.
    """
    starts = [min(box[dim][0] for box in boxes) for dim in range(len(boxes[0]))]
    stops = [max(box[dim][1] for box in boxes) for dim in range(len(boxes[0]))]
    bounds: Box = tuple(zip(starts, stops, strict=True))

    def preference(dim: int) -> tuple[bool, bool, int, int]:
        length = stops[dim] - starts[dim]
        is_cut = any(box[dim] != bounds[dim] for box in boxes)
        return length < count, is_cut and length >= count, 0 if length >= count else -length, dim

    dims = [dim for dim in range(len(bounds)) if dim not in free_dims]
    if not dims:
        return [bounds]
    dim = min(dims, key=preference)
    slabs, start = [], starts[dim]
    for size in balanced_sizes(stops[dim] - start, min(count, stops[dim] - start)):
        slabs.append((*bounds[:dim], (start, start + size), *bounds[dim + 1 :]))
        start += size
    return slabs
