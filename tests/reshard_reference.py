"""Runs reshard plans on numpy arrays, straight from the definitions in `hgraph/reshard_plan.py`, and checks the result.

Values are whole numbers, so sums are exact in any order. Whatever a plan may not read is NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hgraph.reshard_plan import Collective, Move, ReshardPlan
from hgraph.shard_map import Box, ShardMap, relative, shard_map

Buffers = dict[int, np.ndarray]


def is_right(plan: ReshardPlan, seed: int = 0) -> bool:
    """Returns whether `plan`, run on random values, gives every rank of the target what its piece means."""
    generator = np.random.default_rng(seed)
    value = generator.integers(-1000, 1000, size=plan.shape).astype(np.float64)
    source_map, target_map = shard_map(plan.source, plan.shape), shard_map(plan.target, plan.shape)
    buffers = run(plan, scatter(source_map, value, generator))
    return is_value(target_map, buffers, value)


def scatter(pieces: ShardMap, value: np.ndarray, generator: np.random.Generator) -> Buffers:
    """Returns what each rank holds of `value`; terms of partials are random."""
    terms: dict[tuple[int, int], np.ndarray] = {}
    for family in {piece.family for piece in pieces.pieces}:
        numbers = sorted({piece.term for piece in pieces.pieces if piece.family == family})
        for number, array in zip(numbers, _terms(value, len(numbers), pieces.reduce, generator), strict=True):
            terms[family, number] = np.asarray(array)
    whole = tuple((0, length) for length in pieces.shape)
    return {
        piece.rank: terms[piece.family, piece.term][*relative(piece.box, whole), ...].copy() for piece in pieces.pieces
    }


def _terms(value: np.ndarray, count: int, reduce: str | None, generator: np.random.Generator) -> list[np.ndarray]:
    if count == 1:
        return [value]
    if reduce == "max":
        winner = generator.integers(0, count, size=value.shape)
        lower = [value - generator.integers(1, 1000, size=value.shape) for _ in range(count)]
        return [np.where(winner == index, value, lower[index]) for index in range(count)]
    others = [generator.integers(-1000, 1000, size=value.shape).astype(np.float64) for _ in range(count - 1)]
    return [*others, value - sum(others)]


def run(plan: ReshardPlan, sources: Buffers) -> Buffers:
    """Returns the target buffers after running `plan` on the source buffers."""
    if plan.is_nothing:
        return {rank: array.copy() for rank, array in sources.items()}
    source_map, target_map = shard_map(plan.source, plan.shape), shard_map(plan.target, plan.shape)
    neutral = -np.inf if (target_map.reduce or source_map.reduce) == "max" else 0.0
    origins = {piece.rank: piece.box for piece in source_map.pieces}
    places = {piece.rank: piece.box for piece in target_map.pieces}
    targets = {rank: np.full([stop - start for start, stop in box], neutral) for rank, box in places.items()}
    scratch: Buffers = {}

    def read(rank: int, box: Box, origin: str) -> np.ndarray:
        if origin == "scratch":
            return scratch[rank][_slices(box)].copy()
        buffers, boxes = (sources, origins) if origin == "source" else (targets, places)
        return _global_view(buffers[rank], boxes[rank], plan.shape)[_slices(box)].copy()

    for phase in plan.phases:
        writes = [write for operation in phase for write in _writes(operation, read)]
        for rank, box, array, combine, destination in writes:
            if destination == "scratch":
                view = scratch.setdefault(rank, np.full(plan.shape, np.nan))[_slices(box)]
            else:
                view = targets[rank][*relative(box, places[rank]), ...]
            if combine == "copy":
                view[...] = array
            else:
                view[...] = view + array if combine == "sum" else np.maximum(view, array)
    return targets


def _global_view(array: np.ndarray, box: Box, shape: tuple[int, ...]) -> np.ndarray:
    result = np.full(shape, np.nan)
    result[_slices(box)] = array
    return result


def _slices(box: Box) -> tuple[Any, ...]:
    """Returns an index that gives a view, also of a tensor without dims."""
    return (*(slice(start, stop) for start, stop in box), ...)


def _writes(operation, read):
    """Yields (rank, box, array, combine, destination) for all that an operation writes."""
    if isinstance(operation, Move):
        yield (
            operation.receiver,
            operation.box,
            read(operation.sender, operation.box, operation.origin),
            operation.combine,
            operation.destination,
        )
    elif operation.kind in ("all_reduce", "reduce_scatter"):
        for rank, box in zip(operation.ranks, operation.received, strict=True):
            if any(start == stop for start, stop in box):
                continue
            arrays = [read(other, box, operation.origin) for other in operation.ranks]
            reduce = np.sum if operation.combine == "sum" else np.max
            yield rank, box, reduce(arrays, axis=0), "copy", "target"
    else:
        yield from _exchanges(operation, read)


def _exchanges(operation: Collective, read):
    for sender, contributed in zip(operation.ranks, operation.contributed, strict=True):
        for receiver, received in zip(operation.ranks, operation.received, strict=True):
            pairs = zip(contributed, received, strict=True)
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in pairs)
            if all(start < stop for start, stop in common):
                yield receiver, common, read(sender, common, operation.origin), "copy", "target"


def is_value(pieces: ShardMap, buffers: Buffers, value: np.ndarray) -> bool:
    """Returns whether `buffers` hold `value` as `pieces` say; copies of one term must be alike."""
    families: dict[int, dict[int, list[int]]] = {}
    boxes = {piece.rank: piece.box for piece in pieces.pieces}
    if {rank: array.shape for rank, array in buffers.items()} != {
        rank: tuple(stop - start for start, stop in box) for rank, box in boxes.items()
    }:
        return False
    for piece in pieces.pieces:
        families.setdefault(piece.family, {}).setdefault(piece.term, []).append(piece.rank)
    return all(_is_family_right(terms, boxes, buffers, value, pieces.reduce) for terms in families.values())


def _is_family_right(terms, boxes, buffers: Buffers, value: np.ndarray, reduce: str | None) -> bool:
    arrays = []
    for ranks in terms.values():
        array = np.full(value.shape, np.nan)
        for rank in ranks:
            view = array[_slices(boxes[rank])]
            if not np.all(np.isnan(view) | (view == buffers[rank])):
                return False
            view[...] = buffers[rank]
        arrays.append(array)
    combined = np.max(arrays, axis=0) if reduce == "max" else np.sum(arrays, axis=0)
    covered = ~np.isnan(arrays[0])
    return bool(np.all(combined[covered] == value[covered]))
