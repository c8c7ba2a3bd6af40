"""Which ranks need which value of a tensor, and who holds it: the question that `plan_reshard` answers with operations.

The tensor is cut at every border of a source or target box. Inside such a cell every rank holds the same thing
throughout, so a handful of cells stands for any number of elements. Cells that ask the same question are merged again
into as few boxes as touch.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hgraph.shard_map import Box, Piece, ShardMap, box_numel

__all__ = ["Family", "Need", "families_by_cell", "find_needs", "is_in_place", "merge_boxes"]

Family: TypeAlias = tuple[tuple[int, ...], ...]
"""The ranks that hold each term of one family inside a cell; terms in ascending order of their lowest rank in the map,
ranks ascending. A family of one term is the plain value."""

_Question: TypeAlias = tuple[Family, tuple[int, ...], bool]
"""Terms, receivers, and whether the need is direct."""

_Want: TypeAlias = tuple[Family, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Need:
    """`receivers` (ascending) need the combination of `terms`, each held by the ranks named, everywhere in `boxes`.

    A plain copy has one term. `boxes` are disjoint, not empty and sorted. `direct`: no rank may sum some of the terms
    for others, since ranks that hold these terms may sum them with others for another need of the same elements, and
    scratch has room for one sum.
    """

    terms: Family
    receivers: tuple[int, ...]
    boxes: tuple[Box, ...]
    direct: bool = False

    @property
    def is_copy(self) -> bool:
        return len(self.terms) == 1

    @property
    def numel(self) -> int:
        """The number of elements of `boxes`."""
        return sum(map(box_numel, self.boxes))


def merge_boxes(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Returns few disjoint boxes with the elements of the disjoint `boxes`; a box cut by a grid comes back whole."""
    merged = sorted(boxes)
    num_dims = len(merged[0]) if merged else 0
    for dim in reversed(range(num_dims)):
        merged = _merge_along(merged, dim)
    return tuple(sorted(merged))


def _merge_along(boxes: Sequence[Box], dim: int) -> list[Box]:
    rows: dict[Box, list[tuple[int, int]]] = {}
    for box in boxes:
        rows.setdefault((*box[:dim], *box[dim + 1 :]), []).append(box[dim])
    return [
        (*rest[:dim], interval, *rest[dim:])
        for rest, intervals in rows.items()
        for interval in _merge_intervals(intervals)
    ]


def _merge_intervals(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def families_by_cell(
    source: ShardMap, target: ShardMap
) -> Iterator[tuple[Box, tuple[Family, ...], tuple[Family, ...]]]:
    """Yields every cell with the families that hold it under `source` and under `target`, in order of family number."""
    sides = [_Side(source), _Side(target)]
    cuts = [sorted({*first, *second}) for first, second in zip(sides[0].cuts, sides[1].cuts, strict=True)]
    places = [side.places(cuts) for side in sides]
    for index in itertools.product(*(range(len(ends) - 1) for ends in cuts)):
        box = tuple((ends[position], ends[position + 1]) for ends, position in zip(cuts, index, strict=True))
        first, second = (
            side.families(tuple(row[position] for row, position in zip(rows, index, strict=True)))
            for side, rows in zip(sides, places, strict=True)
        )
        yield box, first, second


class _Side:
    """One shard map cut at its own borders; each of its cells has its families worked out once."""

    def __init__(self, held: ShardMap) -> None:
        self.cuts = [
            sorted({0, length, *(end for piece in held.pieces for end in piece.box[dim])})
            for dim, length in enumerate(held.shape)
        ]
        self._pieces = _pieces_by_cell(held.pieces, self.cuts)
        self._families: dict[tuple[int, ...], tuple[Family, ...]] = {}

    def places(self, cuts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns, per dim and interval of the finer `cuts`, the interval of this side that it lies in."""
        return [
            [bisect_right(own, start) - 1 for start in finer[:-1]] for own, finer in zip(self.cuts, cuts, strict=True)
        ]

    def families(self, cell: tuple[int, ...]) -> tuple[Family, ...]:
        if cell not in self._families:
            self._families[cell] = _families(self._pieces.get(cell, ()))
        return self._families[cell]


def _pieces_by_cell(pieces: Iterable[Piece], cuts: Sequence[Sequence[int]]) -> dict[tuple[int, ...], list[Piece]]:
    result: dict[tuple[int, ...], list[Piece]] = {}
    for piece in pieces:
        ranges = [
            range(bisect_left(ends, start), bisect_left(ends, stop))
            for ends, (start, stop) in zip(cuts, piece.box, strict=True)
        ]
        for index in itertools.product(*ranges):
            result.setdefault(index, []).append(piece)
    return result


def _families(pieces: Iterable[Piece]) -> tuple[Family, ...]:
    terms: dict[int, dict[int, list[int]]] = {}
    for piece in pieces:
        terms.setdefault(piece.family, {}).setdefault(piece.term, []).append(piece.rank)
    return tuple(
        tuple(tuple(sorted(terms[family][term])) for term in sorted(terms[family])) for family in sorted(terms)
    )


def find_needs(source: ShardMap, target: ShardMap, node_of: Sequence[int] | None = None) -> tuple[Need, ...]:
    """Returns what the ranks of `target` need of `source`, largest first, so that loads balance well.

    A plain target needs the whole value; a receiver takes it from a plain copy where there is one, else from the family
    of which it holds a term itself. For a partial target, each target family gets every term of one source family once,
    where that costs the fewest messages (and, with the node of each rank, the fewest nodes to reach), in turn where
    several cost the same; where the two reductions differ, all go into one target term. Who needs the same terms of the
    same elements needs them together, so that they are summed once.
    """
    together = source.reduce is not None and target.reduce is not None and source.reduce != target.reduce
    boxes: dict[_Question, list[Box]] = {}
    known: dict[tuple[tuple[Family, ...], tuple[Family, ...]], list[_Question]] = {}
    for box, sources, targets in families_by_cell(source, target):
        if (sources, targets) not in known:
            known[sources, targets] = _questions(sources, targets, _Assigning(together, node_of, len(known)))
        for question in known[sources, targets]:
            boxes.setdefault(question, []).append(box)
    needs = [Need(terms, receivers, merge_boxes(parts), direct) for (terms, receivers, direct), parts in boxes.items()]
    return tuple(sorted(needs, key=lambda need: (-need.numel, need.boxes, need.receivers, need.terms)))


def _questions(sources: Sequence[Family], targets: Sequence[Family], assigning: _Assigning) -> list[_Question]:
    receivers: dict[Family, list[int]] = {}
    for target in targets:
        plain = len(target) == 1
        found = _plain_wants(sources, target[0]) if plain else _partial_wants(sources, target, assigning)
        for terms, ranks in found:
            receivers.setdefault(terms, []).extend(ranks)
    summed: set[tuple[int, ...]] = set()
    result = []
    for terms, ranks in receivers.items():
        direct = len(terms) > 1 and not summed.isdisjoint(terms)
        if len(terms) > 1:
            summed.update(terms)
        result.append((terms, tuple(sorted(ranks)), direct))
    return result


def _plain_wants(sources: Sequence[Family], receivers: Sequence[int]) -> list[_Want]:
    if len(sources) == 1:
        return [(sources[0], receivers)]
    chosen: dict[Family, list[int]] = {}

    def preference(family: Family, rank: int) -> tuple[bool, bool, bool, int, Family]:
        holds_term = any(rank in term for term in family)
        return len(family) > 1, not holds_term, family not in chosen, len(family), family

    holders = {rank for family in sources for term in family for rank in term}
    for rank in sorted(receivers, key=lambda rank: (rank not in holders, rank)):
        family = min(sources, key=lambda family: preference(family, rank))
        chosen.setdefault(family, []).append(rank)
    return list(chosen.items())


def _partial_wants(sources: Sequence[Family], target: Family, assigning: _Assigning) -> list[_Want]:
    best = min(sources, key=lambda family: (assigning.assign(family, target)[0], len(family), family))
    assigned: dict[int, list[tuple[int, ...]]] = {}
    for term, index in zip(best, assigning.assign(best, target)[1], strict=True):
        assigned.setdefault(index, []).append(term)
    return [(tuple(terms), target[index]) for index, terms in assigned.items()]


_Cost: TypeAlias = tuple[int, int]
"""Nodes to be reached, and messages."""


@dataclass(frozen=True, slots=True)
class _Assigning:
    """How source terms are given to target terms: `together` all to one; `turn` says which comes first of several."""

    together: bool
    node_of: Sequence[int] | None
    turn: int

    def assign(self, source: Family, target: Family) -> tuple[_Cost, list[int]]:
        """Returns the cost, and for each source term the index of the target term that takes it."""
        if self.together:
            totals = [self._sum(self._cost(term, ranks) for term in source) for ranks in target]
            return min(totals), [self._first(totals)] * len(source)
        costs = [[self._cost(term, ranks) for ranks in target] for term in source]
        nodes = [0 if self.node_of is None else self.node_of[term[0]] for term in source]
        assigned = [self._first(own, node) for own, node in zip(costs, nodes, strict=True)]
        return self._sum(own[index] for own, index in zip(costs, assigned, strict=True)), assigned

    def _cost(self, term: Sequence[int], ranks: Sequence[int]) -> _Cost:
        messages = sum(rank not in term for rank in ranks)
        if self.node_of is None:
            return 0, messages
        return len({self.node_of[rank] for rank in ranks} - {self.node_of[rank] for rank in term}), messages

    @staticmethod
    def _sum(costs: Iterable[_Cost]) -> _Cost:
        nodes, messages = zip(*costs, strict=True)
        return sum(nodes), sum(messages)

    def _first(self, costs: Sequence[_Cost], node: int = 0) -> int:
        """Returns where the least cost is; of several places, one for all terms of a node, another in every cell."""
        lowest = min(costs)
        least = [index for index, cost in enumerate(costs) if cost == lowest]
        return least[(self.turn + node) % len(least)]


def is_in_place(source: ShardMap, target: ShardMap, needs: Sequence[Need]) -> bool:
    """Whether every rank's source buffer already is a right target buffer."""
    if [(piece.rank, piece.box) for piece in source.pieces] != [(piece.rank, piece.box) for piece in target.pieces]:
        return False
    in_place = all(need.is_copy and set(need.receivers) <= set(need.terms[0]) for need in needs)
    num_needed = sum(need.numel * len(need.receivers) for need in needs)
    return in_place and num_needed == sum(box_numel(piece.box) for piece in target.pieces)
