"""Shard maps: what an annotation means for a concrete global shape.

A `ShardMap` gives each rank one `Piece`: its box (a half-open interval per dim) and which term of which family it is.
Within one *family* the global value of an element is the reduction of the distinct terms whose boxes hold it; pieces
with the same family and term hold equal values wherever their boxes meet. Several families hold the same value again
(duplicates along the hetero dim, of which at least one is partial); the family 0, term 0 of a map without partials is
the plain value.

Invariants
----------
- Every element of the global shape is covered by every family that holds any of its region (`check_shard_map`).
- Each rank has one piece; boxes lie inside the shape; uneven and empty boxes are legal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hgraph.annotation import Annotation, Subgroup
from hgraph.errors import InvalidAnnotation
from hgraph.placements import Partial, Replicate, Shard

__all__ = ["Box", "Piece", "ShardMap", "box_numel", "box_shape", "intersect", "relative", "same_map", "shard_map"]

Box: TypeAlias = tuple[tuple[int, int], ...]
"""A half-open interval (start, stop) per dim."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank holds of a tensor."""

    rank: int
    box: Box
    family: int = 0
    term: int = 0


@dataclass(frozen=True, slots=True)
class ShardMap:
    """The pieces of all ranks, in ascending order of rank, of a tensor of global shape `shape`."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    reduce: str | None = None

    def piece(self, rank: int) -> Piece:
        """Returns the piece of `rank`; an error if the rank holds none."""
        for piece in self.pieces:
            if piece.rank == rank:
                return piece
        raise InvalidAnnotation(f"shard map: rank {rank} holds nothing; ranks are {[p.rank for p in self.pieces]}")

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of what `rank` holds."""
        return box_shape(self.piece(rank).box)


def box_shape(box: Box) -> tuple[int, ...]:
    """Returns the lengths of a box."""
    return tuple(stop - start for start, stop in box)


def box_numel(box: Box) -> int:
    """Returns the number of elements of a box."""
    return math.prod(box_shape(box))


def intersect(first: Box, second: Box) -> Box | None:
    """Returns the common part of two boxes, or None where they share no element."""
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return box if all(start < stop for start, stop in box) else None


def relative(box: Box, origin: Box) -> tuple[slice, ...]:
    """Returns the slices that select `box` in a local tensor that holds `origin`."""
    return tuple(slice(start - base, stop - base) for (start, stop), (base, _) in zip(box, origin, strict=True))


def shard_map(annotation: Annotation, shape: Sequence[int]) -> ShardMap:
    """Returns the shard map of `annotation` for the global shape `shape`.

    Raises `InvalidAnnotation` where a dim does not exist or explicit sizes do not fit the shape.
    """
    shape = tuple(int(length) for length in shape)
    whole: Box = tuple((0, length) for length in shape)
    hetero_boxes = _split_box(whole, annotation.hetero, annotation.hsize, annotation)
    pieces: list[Piece] = []
    for index, (subgroup, box) in enumerate(zip(annotation.subgroups, hetero_boxes, strict=True)):
        for rank, rank_box in zip(subgroup.ranks, _rank_boxes(subgroup, box), strict=True):
            pieces.append(Piece(rank, rank_box, *_family_term(annotation, index, rank)))
    return ShardMap(shape, tuple(sorted(pieces, key=lambda piece: piece.rank)), annotation.reduce)


def same_map(first: Annotation, second: Annotation, shape: Sequence[int]) -> bool:
    """Returns whether two annotations mean the same for `shape` (nested 2x2 and flat 4 agree on 8 rows, not on 6)."""
    return first == second or shard_map(first, shape) == shard_map(second, shape)


def _family_term(annotation: Annotation, index: int, rank: int) -> tuple[int, int]:
    """Family and term; a term is named by the lowest rank of the subgroup that holds it, plus one."""
    subgroup = annotation.subgroups[index]
    partial_axes = [axis for axis, placement in enumerate(subgroup.placements) if isinstance(placement, Partial)]
    hetero_partial = isinstance(annotation.hetero, Partial)
    if not partial_axes and not hetero_partial:
        return 0, 0
    own = [subgroup.coordinates(rank)[axis] for axis in partial_axes]
    same = [r for r in subgroup.ranks if [subgroup.coordinates(r)[axis] for axis in partial_axes] == own]
    family = 0 if hetero_partial else min(subgroup.ranks) + 1
    return family, min(same) + 1


def _rank_boxes(subgroup: Subgroup, box: Box) -> list[Box]:
    """Returns the box of each rank, in the order of the ranks: every box is cut once per axis, not once per rank."""
    boxes = [box]
    for size, placement in zip(subgroup.mesh, subgroup.placements, strict=True):
        boxes = [part for whole in boxes for part in _split_box(whole, placement, size, subgroup)]
    return boxes


def _split_box(box: Box, placement: object, parts: int, where: object) -> list[Box]:
    # `where` becomes text only in a message: boxes are worked out often.
    if not isinstance(placement, Shard):
        return [box] * parts
    if placement.dim >= len(box):
        raise InvalidAnnotation(f"{where}: {placement} on a tensor of {len(box)} dims; expected a dim below {len(box)}")
    start, stop = box[placement.dim]
    result = []
    for size in placement.split(stop - start, parts):
        result.append((*box[: placement.dim], (start, start + size), *box[placement.dim + 1 :]))
        start += size
    return result


def duplicate(annotations: Iterable[Annotation]) -> Annotation:
    """Returns the union of independent copies: the subgroups of all `annotations`, duplicated along the hetero dim.

    Each of `annotations` has one subgroup.
    """
    return Annotation(_single_subgroups(annotations), Replicate())


def summed(annotations: Iterable[Annotation]) -> Annotation:
    """Returns the union whose value is the sum over all `annotations`, each of one subgroup."""
    subgroups = _single_subgroups(annotations)
    if len(subgroups) == 1:
        return Annotation(subgroups)
    return Annotation(subgroups, Partial())


def _single_subgroups(annotations: Iterable[Annotation]) -> tuple[Subgroup, ...]:
    subgroups: list[Subgroup] = []
    for annotation in annotations:
        if annotation.hsize != 1:
            raise InvalidAnnotation(f"union: expected annotations of one subgroup, got {annotation}")
        subgroups.extend(annotation.subgroups)
    return tuple(subgroups)
