"""Proves a reshard plan, whoever made it, by running it on symbols.

The tensor is cut at every border of any box of the plan or of its two shard maps. For each rank and cell the checker
keeps what the target buffer and the scratch buffer hold: a multiset of contributions, each one term of one source
family. Nothing here knows how `plan_reshard` or `plan_bridge` works.

Properties, each named in the error that reports it
---------------------------------------------------
- *well formed*: boxes lie inside the shape and are not empty (but where a free dim is); free dims are whole; the boxes
  of a collective fit its kind.
- *exact*: a rank reads only what it holds, writes only inside its target box or into scratch, and no operation reads
  what the same phase writes.
- *non-redundant*: an element is copied into a buffer once, no rank is sent a value that it holds in any buffer, and
  what is written into scratch is read later.
- *complete*: every rank of a plain target holds each term of one source family once, for each element; over the terms
  of each target family of a partial target the contributions add up to that, and copies of a term are alike.

Semantics: the target buffer starts neutral, by the target's reduction or, where the target is plain, the source's;
scratch starts empty. The operations of a phase read before any writes, and write in the order in which they are listed.
"copy" replaces.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from hgraph.errors import InvalidAnnotation, PlanError
from hgraph.reshard_plan import Collective, Destination, Move, Operation, Origin, ReshardPlan
from hgraph.shard_map import Box, Piece, ShardMap, box_numel, intersect, shard_map

__all__ = ["check_reshard", "check_shard_map"]

Cell: TypeAlias = tuple[int, ...]
Contributions: TypeAlias = tuple[tuple[int, int], ...]
"""A sorted multiset of (family, term) of the source."""


@dataclass(frozen=True, slots=True)
class _Write:
    """One operation's effect on one cell of one rank."""

    operation: Operation
    rank: int
    cell: Cell
    value: Contributions
    combines: bool
    buffer: Destination = "target"


def check_reshard(plan: ReshardPlan) -> None:
    """Proves that `plan` turns its source into its target; raises `PlanError` that names the broken property."""
    _Checker(plan).check()


def check_shard_map(pieces: ShardMap) -> None:
    """Proves the invariants of a shard map; raises `InvalidAnnotation` that names the broken one.

    Each rank has one piece, in ascending order; boxes lie inside the shape; every element is held by a family, and by
    every term of each family that holds it.
    """
    ranks = [piece.rank for piece in pieces.pieces]
    if ranks != sorted(set(ranks)):
        raise InvalidAnnotation(f"shard map: expected one piece per rank in ascending order, got ranks {ranks}")
    for piece in pieces.pieces:
        if not _is_inside(piece.box, pieces.shape):
            raise InvalidAnnotation(
                f"shard map: expected a box inside {pieces.shape} on rank {piece.rank}, got {piece.box}"
            )
    grid = _Grid(pieces.shape, (piece.box for piece in pieces.pieces))
    holders = _holders(grid, pieces)
    terms: dict[int, set[int]] = {}
    for piece in pieces.pieces:
        if box_numel(piece.box):
            terms.setdefault(piece.family, set()).add(piece.term)
    for cell in grid.cells():
        here: dict[int, set[int]] = {}
        for piece in holders.get(cell, []):
            here.setdefault(piece.family, set()).add(piece.term)
        if not here:
            raise InvalidAnnotation(f"shard map: expected every element to be held, got none of {grid.box(cell)}")
        for family, found in here.items():
            if found != terms[family]:
                raise InvalidAnnotation(
                    f"shard map: expected terms {sorted(terms[family])} of family {family} at {grid.box(cell)}, "
                    f"got {sorted(found)}"
                )


class _Grid:
    """The cells that the borders of boxes cut a shape into."""

    def __init__(self, shape: Sequence[int], boxes: Iterable[Box]) -> None:
        cuts: list[set[int]] = [{0, length} for length in shape]
        for box in boxes:
            for ends, interval in zip(cuts, box, strict=True):
                ends.update(interval)
        self._cuts = [sorted(ends) for ends in cuts]

    def cells(self, box: Box | None = None) -> Iterator[Cell]:
        """Returns the cells of `box`, or all."""
        if box is None:
            return itertools.product(*(range(len(ends) - 1) for ends in self._cuts))
        return itertools.product(
            *(
                range(bisect_left(ends, start), bisect_left(ends, stop))
                for ends, (start, stop) in zip(self._cuts, box, strict=True)
            )
        )

    def box(self, cell: Cell) -> Box:
        return tuple((ends[i], ends[i + 1]) for ends, i in zip(self._cuts, cell, strict=True))


def _holders(grid: _Grid, pieces: ShardMap) -> dict[Cell, list[Piece]]:
    result: dict[Cell, list[Piece]] = {}
    for piece in pieces.pieces:
        for cell in grid.cells(piece.box):
            result.setdefault(cell, []).append(piece)
    return result


def _is_inside(box: Box, shape: Sequence[int]) -> bool:
    return len(box) == len(shape) and all(
        0 <= start <= stop <= length for (start, stop), length in zip(box, shape, strict=True)
    )


def _boxes(operation: Operation) -> tuple[Box, ...]:
    return (operation.box,) if isinstance(operation, Move) else (*operation.contributed, *operation.received)


def _fail(name: str, message: str) -> NoReturn:
    raise PlanError(f"reshard plan is not {name}: {message}")


class _Checker:
    """The state of all ranks while a plan runs on symbols."""

    def __init__(self, plan: ReshardPlan) -> None:
        self._plan = plan
        self._source = shard_map(plan.source, plan.shape)
        self._target = shard_map(plan.target, plan.shape)
        self._source_pieces = {piece.rank: piece for piece in self._source.pieces}
        self._target_pieces = {piece.rank: piece for piece in self._target.pieces}
        for phase in plan.phases:
            for operation in phase:
                self._check_well_formed(operation)
        boxes = [piece.box for piece in (*self._source.pieces, *self._target.pieces)]
        boxes.extend(box for phase in plan.phases for operation in phase for box in _boxes(operation))
        self._grid = _Grid(plan.shape, boxes)
        self._source_holders = _holders(self._grid, self._source)
        self._target_holders = _holders(self._grid, self._target)
        self._held: dict[int, dict[Cell, Contributions]] = {rank: {} for rank in self._target_pieces}
        self._scratch: dict[tuple[int, Cell], Contributions] = {}
        self._unread: dict[tuple[int, Cell], Operation] = {}
        neutral = self._target.reduce or self._source.reduce
        self._combines_into_neutral = neutral == self._source.reduce

    def check(self) -> None:
        if not self._plan.phases:
            self._keep_source_buffers()
        for phase in self._plan.phases:
            self._run_phase(phase)
        for (rank, cell), operation in self._unread.items():
            where = self._grid.box(cell)
            _fail("non-redundant", f"nobody reads {where} of the scratch buffer of rank {rank} after {operation}")
        for cell in self._grid.cells():
            self._check_cell(cell)

    def _keep_source_buffers(self) -> None:
        before = {rank: piece.box for rank, piece in self._source_pieces.items()}
        after = {rank: piece.box for rank, piece in self._target_pieces.items()}
        if before != after:
            _fail("complete", f"expected phases to turn boxes {before} into {after}, got none")
        for rank, piece in self._source_pieces.items():
            value = ((piece.family, piece.term),)
            self._held[rank] = dict.fromkeys(self._grid.cells(piece.box), value)

    # Well formed

    def _check_well_formed(self, operation: Operation) -> None:
        plan = self._plan
        for box in _boxes(operation):
            if not _is_inside(box, plan.shape):
                _fail("well formed", f"expected boxes inside {plan.shape}, got {box} in {operation}")
            for dim, (start, stop) in enumerate(box):
                if dim in plan.free_dims and (start, stop) != (0, plan.shape[dim]):
                    _fail("well formed", f"free dim {dim} is cut by {box} in {operation}")
                if dim not in plan.free_dims and start == stop and not self._may_be_empty(box, operation):
                    _fail("well formed", f"expected no empty box, got {box} in {operation}")
        if isinstance(operation, Collective):
            _check_collective(operation)
        elif operation.combine not in ("copy", self._source.reduce):
            _fail("well formed", f"expected copy or {self._source.reduce}, got {operation}")
        if isinstance(operation, Collective) and _reduces(operation) and operation.combine != self._source.reduce:
            _fail("well formed", f"expected the reduction {self._source.reduce}, got {operation}")

    def _may_be_empty(self, box: Box, operation: Operation) -> bool:
        """Whether `box` is how a rank says that it gives or gets nothing in a collective where some ranks may not."""
        kinds = ("all_to_all", "reduce_scatter")
        at_origin = all(ends == (0, 0) for dim, ends in enumerate(box) if dim not in self._plan.free_dims)
        return isinstance(operation, Collective) and operation.kind in kinds and at_origin

    # Exact

    def _run_phase(self, phase: Sequence[Operation]) -> None:
        self._reads: set[tuple[Origin, int, Cell]] = set()
        writes = [write for operation in phase for write in self._writes(operation)]
        for write in writes:
            if (write.buffer, write.rank, write.cell) in self._reads:
                _fail("exact", f"rank {write.rank} reads {self._where(write)} in the same phase that writes it")
            if write.buffer == "scratch":
                self._apply_to_scratch(write)
            else:
                self._apply(write)

    def _writes(self, operation: Operation) -> Iterator[_Write]:
        if isinstance(operation, Move):
            yield from self._move(operation)
        elif operation.kind in ("all_reduce", "reduce_scatter"):
            yield from self._reduction(operation)
        else:
            yield from self._exchange(operation)

    def _read(self, operation: Operation, rank: int, cell: Cell, origin: Origin) -> Contributions:
        where = self._grid.box(cell)
        if origin != "source":
            self._reads.add((origin, rank, cell))
            if origin == "scratch":
                self._unread.pop((rank, cell), None)
            value = self._held.get(rank, {}).get(cell) if origin == "target" else self._scratch.get((rank, cell))
            if value is None:
                _fail(
                    "exact", f"rank {rank} reads {where} of its {origin} buffer, which holds nothing yet: {operation}"
                )
            return value
        piece = self._source_pieces.get(rank)
        if piece is None or not _covers(piece.box, where):
            _fail("exact", f"rank {rank} reads {where}, which it does not hold: {operation}")
        return ((piece.family, piece.term),)

    def _move(self, move: Move) -> Iterator[_Write]:
        for cell in self._grid.cells(move.box):
            value = self._read(move, move.sender, cell, move.origin)
            if move.sender != move.receiver and value in self._values_of(move.receiver, cell):
                _fail("non-redundant", f"rank {move.receiver} holds {self._grid.box(cell)} itself: {move}")
            yield _Write(move, move.receiver, cell, value, move.combine != "copy", move.destination)

    def _values_of(self, rank: int, cell: Cell) -> Iterator[Contributions | None]:
        """Yields what the buffers of a rank hold of a cell before the phase; None for a buffer that holds nothing."""
        own = self._source_pieces.get(rank)
        if own is not None and _covers(own.box, self._grid.box(cell)):
            yield ((own.family, own.term),)
        yield self._held.get(rank, {}).get(cell)
        yield self._scratch.get((rank, cell))

    def _reduction(self, collective: Collective) -> Iterator[_Write]:
        for rank, received in zip(collective.ranks, collective.received, strict=True):
            for cell in self._grid.cells(received):
                values = [self._read(collective, r, cell, collective.origin) for r in collective.ranks]
                yield _Write(collective, rank, cell, tuple(sorted(itertools.chain(*values))), False)

    def _exchange(self, collective: Collective) -> Iterator[_Write]:
        for sender, contributed in zip(collective.ranks, collective.contributed, strict=True):
            for receiver, received in zip(collective.ranks, collective.received, strict=True):
                for cell in self._grid.cells(intersect(contributed, received) or _nothing(received)):
                    value = self._read(collective, sender, cell, collective.origin)
                    yield _Write(collective, receiver, cell, value, False)

    def _apply(self, write: _Write) -> None:
        piece = self._target_pieces.get(write.rank)
        if piece is None or not _covers(piece.box, self._grid.box(write.cell)):
            _fail("exact", f"rank {write.rank} has no {self._where(write)} in its target box: {write.operation}")
        held = self._held[write.rank]
        before = held.get(write.cell)
        if before is not None and not write.combines:
            _fail("non-redundant", f"rank {write.rank} gets {self._where(write)} twice: {write.operation}")
        if before is None and write.combines and not self._combines_into_neutral:
            _fail("exact", f"rank {write.rank} combines into another reduction's neutral element: {write.operation}")
        held[write.cell] = tuple(sorted((*(before or ()), *write.value)))

    def _apply_to_scratch(self, write: _Write) -> None:
        place = (write.rank, write.cell)
        before = self._scratch.get(place)
        if before is not None and not write.combines:
            _fail("non-redundant", f"rank {write.rank} gets {self._where(write)} twice in scratch: {write.operation}")
        if before is None and write.combines:
            _fail("exact", f"rank {write.rank} combines {self._where(write)} into empty scratch: {write.operation}")
        self._scratch[place] = tuple(sorted((*(before or ()), *write.value)))
        self._unread[place] = write.operation

    def _where(self, write: _Write) -> Box:
        return self._grid.box(write.cell)

    # Complete

    def _check_cell(self, cell: Cell) -> None:
        source_terms: dict[int, set[int]] = {}
        for piece in self._source_holders.get(cell, []):
            source_terms.setdefault(piece.family, set()).add(piece.term)
        complete = {tuple((family, term) for term in sorted(terms)) for family, terms in source_terms.items()}
        families: dict[int, dict[int, list[int]]] = {}
        for piece in self._target_holders.get(cell, []):
            families.setdefault(piece.family, {}).setdefault(piece.term, []).append(piece.rank)
        for terms in families.values():
            self._check_family(cell, terms, complete)

    def _check_family(self, cell: Cell, terms: dict[int, list[int]], complete: set[Contributions]) -> None:
        if len(terms) == 1:
            for rank in itertools.chain(*terms.values()):
                self._check_value(cell, [rank], [self._held[rank].get(cell, ())], complete)
            return
        values: list[Contributions] = []
        for ranks in terms.values():
            found = {self._held[rank].get(cell, ()) for rank in ranks}
            if len(found) > 1:
                _fail("complete", f"ranks {ranks} should hold the same term of {self._grid.box(cell)}, got {found}")
            values.extend(found)
        self._check_value(cell, sorted(itertools.chain(*terms.values())), values, complete)
        reduces_apart = self._source.reduce not in (None, self._target.reduce)
        if reduces_apart and sum(map(bool, values)) != 1:
            _fail("complete", f"terms of a {self._source.reduce} at {self._grid.box(cell)} are spread over {values}")

    def _check_value(
        self, cell: Cell, ranks: Sequence[int], values: Sequence[Contributions], complete: set[Contributions]
    ) -> None:
        if tuple(sorted(itertools.chain(*values))) not in complete:
            where, wanted = self._grid.box(cell), sorted(complete)
            _fail(
                "complete",
                f"ranks {ranks} should hold {where}, the terms (family, term) of one of {wanted}; got {values}",
            )


def _covers(outer: Box, inner: Box) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def _nothing(box: Box) -> Box:
    return tuple((start, start) for start, _ in box)


def _reduces(collective: Collective) -> bool:
    return collective.kind in ("all_reduce", "reduce_scatter")


def _check_collective(collective: Collective) -> None:
    """Checks that the boxes of a collective fit its kind."""
    ranks, contributed, received = collective.ranks, collective.contributed, collective.received
    if len(ranks) < 2 or len(set(ranks)) != len(ranks) or not len(ranks) == len(contributed) == len(received):
        _fail("well formed", f"expected two or more distinct ranks with a box each way, got {collective}")
    if not _reduces(collective) and collective.combine != "copy":
        _fail("well formed", f"expected combine='copy' of {collective.kind}, got {collective}")
    if collective.kind == "all_reduce":
        fits = len({*contributed, *received}) == 1
    elif collective.kind == "reduce_scatter":
        fits = len(set(contributed)) == 1 and _tiles(received, contributed[0])
    elif collective.kind == "all_gather":
        fits = len(set(received)) == 1 and _tiles(contributed, received[0])
    else:
        fits = _are_disjoint(contributed) and _same_elements(contributed, received)
    if not fits:
        _fail("well formed", f"boxes do not fit the kind of {collective}")


def _are_disjoint(boxes: Sequence[Box]) -> bool:
    return not any(intersect(a, b) for a, b in itertools.combinations(boxes, 2) if box_numel(a) and box_numel(b))


def _tiles(parts: Sequence[Box], union: Box) -> bool:
    inside = all(_covers(union, part) for part in parts if box_numel(part))
    return inside and _are_disjoint(parts) and sum(map(box_numel, parts)) == box_numel(union)


def _same_elements(first: Sequence[Box], second: Sequence[Box]) -> bool:
    """Whether two lists of boxes hold the same elements."""
    grid = _Grid([max(box[dim][1] for box in first) for dim in range(len(first[0]))], (*first, *second))
    cells = [{cell for box in boxes if box_numel(box) for cell in grid.cells(box)} for boxes in (first, second)]
    return cells[0] == cells[1]
