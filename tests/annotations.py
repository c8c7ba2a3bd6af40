"""Random shapes and annotations for property tests, from hypothesis.

`annotation_pairs()` draws what resharding must serve: two annotations of one shape, on overlapping or disjoint ranks in
any order, of one to four subgroups, with splits that do not divide, explicit sizes, empty boxes, duplicates and partial
terms on either tier.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hypothesis import strategies as st

from hgraph.annotation import Annotation, Subgroup
from hgraph.placements import Partial, Placement, Replicate, Shard

__all__ = ["Pair", "annotation_pairs", "annotations", "layouts", "shapes"]

NUM_RANKS = 8

Layout: TypeAlias = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Ranks and mesh of each subgroup."""


@dataclass(frozen=True, slots=True, repr=False)
class Pair:
    """Two annotations of one shape; its text can be read in a failing example."""

    source: Annotation
    target: Annotation
    shape: tuple[int, ...]

    def __repr__(self) -> str:
        return f"{str(self.source)!r} -> {str(self.target)!r} for {self.shape}"


def shapes(max_dims: int = 3, max_length: int = 9) -> st.SearchStrategy[tuple[int, ...]]:
    """Draws shapes of up to `max_dims` dims, empty ones included."""
    lengths = st.one_of(st.integers(2, max_length), st.integers(0, max_length))
    return st.lists(lengths, min_size=0, max_size=max_dims).map(tuple)


@st.composite
def annotation_pairs(draw: st.DrawFn) -> Pair:
    """Draws pairs of annotations that fit one shape; half of them share their groups and meshes."""
    shape = draw(shapes())
    layout = draw(layouts())
    source = draw(annotations(shape, layout))
    target = draw(annotations(shape, layout if draw(st.booleans()) else None))
    return Pair(source, target, shape)


@st.composite
def layouts(draw: st.DrawFn, num_ranks: int = NUM_RANKS) -> Layout:
    """Draws one to four subgroups, each with its ranks and mesh, on up to `num_ranks` ranks in any order."""
    used = draw(st.integers(1, num_ranks))
    ranks = draw(st.permutations(range(num_ranks)))[:used]
    hsize = draw(st.one_of(st.just(1), st.integers(1, min(4, used))))
    ends = [0, *sorted(draw(st.permutations(range(1, used)))[: hsize - 1]), used]
    return tuple(
        (tuple(ranks[start:stop]), draw(st.sampled_from(_meshes(stop - start))))
        for start, stop in itertools.pairwise(ends)
    )


@st.composite
def annotations(draw: st.DrawFn, shape: Sequence[int], layout: Layout | None = None) -> Annotation:
    """Draws an annotation that fits `shape`, on the subgroups of `layout` where given."""
    layout = draw(layouts()) if layout is None else layout
    partial = Partial(draw(st.sampled_from(["sum", "sum", "max"])))
    hetero = draw(_placements(len(shape), partial))
    hetero = _with_sizes(draw, hetero, len(layout), [{length} for length in shape])
    lengths = _split_lengths(hetero, len(layout), shape)
    subgroups = tuple(
        draw(_subgroups(ranks, mesh, lengths[index], partial)) for index, (ranks, mesh) in enumerate(layout)
    )
    return Annotation(subgroups, hetero)


@st.composite
def _subgroups(
    draw: st.DrawFn, ranks: tuple[int, ...], mesh: tuple[int, ...], shape: Sequence[int], partial: Partial
) -> Subgroup:
    lengths = [{length} for length in shape]
    placements = []
    for size in mesh:
        placement = _with_sizes(draw, draw(_placements(len(shape), partial)), size, lengths)
        placements.append(placement)
        if isinstance(placement, Shard):
            lengths[placement.dim] = {
                piece for length in lengths[placement.dim] for piece in placement.split(length, size)
            }
    return Subgroup(ranks, mesh, tuple(placements))


def _placements(num_dims: int, partial: Partial) -> st.SearchStrategy[Placement]:
    choices: list[Placement] = [Replicate(), partial, *(Shard(dim) for dim in range(num_dims))]
    return st.sampled_from(choices)


def _with_sizes(draw: st.DrawFn, placement: Placement, parts: int, lengths: Sequence[set[int]]) -> Placement:
    """Adds explicit sizes at times, where all the pieces that the placement splits have one length."""
    if not isinstance(placement, Shard) or len(lengths[placement.dim]) > 1 or not draw(st.booleans()):
        return placement
    (length,) = lengths[placement.dim]
    cuts = sorted(draw(st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1)))
    sizes = tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, length], strict=True))
    return Shard(placement.dim, sizes)


def _split_lengths(hetero: Placement, hsize: int, shape: Sequence[int]) -> list[tuple[int, ...]]:
    if not isinstance(hetero, Shard):
        return [tuple(shape)] * hsize
    pieces = hetero.split(shape[hetero.dim], hsize)
    return [(*shape[: hetero.dim], piece, *shape[hetero.dim + 1 :]) for piece in pieces]


def _meshes(size: int) -> list[tuple[int, ...]]:
    """Returns all ways to write `size` as a product of up to three axes of two or more."""
    if size == 1:
        return [()]
    meshes: list[tuple[int, ...]] = [(size,)]
    for first in range(2, size):
        if size % first == 0:
            meshes.extend((first, *rest) for rest in _meshes(size // first) if len(rest) < 3)
    return meshes
