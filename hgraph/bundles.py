"""Bundles: what many tensors need, gathered by who holds it and who needs it.

Planning works on bundles, not on tensors: elements with the same holders and receivers travel alike, whatever tensor
they belong to. Tensors with the same two annotations whose dims are cut in the same proportions have the same *pattern*,
which is worked out once, on the smallest shape that is cut so; a layer like another costs nothing.

Invariants
----------
- Boxes of a pattern are in units: multiply dim d by `Tensor.scale[d]` for elements.
- The needs of a pattern are disjoint for each receiver, and cover what the target holds (`find_needs`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hgraph.annotation import Annotation
from hgraph.placements import Shard
from hgraph.reshard_needs import Family, Need, find_needs
from hgraph.shard_map import Box, ShardMap, shard_map

__all__ = ["Bundle", "Pattern", "Tensor", "TensorReshard", "gather_bundles", "scale_box"]


@dataclass(frozen=True, slots=True)
class TensorReshard:
    """One tensor of a bridge: `name`, both annotations and the global shape."""

    name: str
    source: Annotation
    target: Annotation
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """How all tensors of one kind are cut: `needs[i]` is part of bundle `bundles[i]`."""

    source: Annotation
    target: Annotation
    shape: tuple[int, ...]
    needs: tuple[Need, ...]
    bundles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a bridge with its pattern's number and how many elements one unit of each dim is."""

    reshard: TensorReshard
    pattern: int
    scale: tuple[int, ...]

    @property
    def elements_per_unit(self) -> int:
        """Elements in a box of one unit along every dim."""
        return math.prod(self.scale)


@dataclass(slots=True)
class Bundle:
    """`num_elements` elements that have the same holders of each term and the same receivers."""

    terms: Family
    receivers: tuple[int, ...]
    num_elements: int = 0

    @property
    def is_copy(self) -> bool:
        return len(self.terms) == 1


def scale_box(box: Box, scale: Sequence[int]) -> Box:
    """Returns a box of a pattern in elements."""
    return tuple((start * unit, stop * unit) for (start, stop), unit in zip(box, scale, strict=True))


def gather_bundles(reshards: Sequence[TensorReshard]) -> tuple[list[Tensor], list[Pattern], list[Bundle]]:
    """Returns the tensors with their patterns, the patterns, and the bundles of all of them."""
    maps: dict[tuple[Annotation, tuple[int, ...]], ShardMap] = {}
    numbers: dict[tuple[Annotation, Annotation, tuple[int, ...]], int] = {}
    tensors, patterns, bundles = [], [], []
    known: dict[tuple[Family, tuple[int, ...]], int] = {}

    def mapped(annotation: Annotation, shape: tuple[int, ...]) -> ShardMap:
        if (annotation, shape) not in maps:
            maps[annotation, shape] = shard_map(annotation, shape)
        return maps[annotation, shape]

    for reshard in reshards:
        units = _units(reshard)
        key = (reshard.source, reshard.target, units)
        if key not in numbers:
            needs = find_needs(mapped(reshard.source, units), mapped(reshard.target, units))
            places = []
            for need in needs:
                place = known.setdefault((need.terms, need.receivers), len(bundles))
                if place == len(bundles):
                    bundles.append(Bundle(need.terms, need.receivers))
                places.append(place)
            numbers[key] = len(patterns)
            patterns.append(Pattern(reshard.source, reshard.target, units, needs, tuple(places)))
        scale = tuple(length // unit if unit else 1 for length, unit in zip(reshard.shape, units, strict=True))
        tensors.append(Tensor(reshard, numbers[key], scale))
    _count_elements(tensors, patterns, bundles)
    return tensors, patterns, bundles


def _count_elements(tensors: Sequence[Tensor], patterns: Sequence[Pattern], bundles: Sequence[Bundle]) -> None:
    per_pattern = [0] * len(patterns)
    for tensor in tensors:
        per_pattern[tensor.pattern] += tensor.elements_per_unit
    for pattern, count in zip(patterns, per_pattern, strict=True):
        for need, place in zip(pattern.needs, pattern.bundles, strict=True):
            bundles[place].num_elements += need.numel * count


def _units(reshard: TensorReshard) -> tuple[int, ...]:
    """Returns the smallest shape that both annotations cut in the same proportions."""
    parts = [1] * len(reshard.shape)
    fixed = [False] * len(reshard.shape)
    for annotation in (reshard.source, reshard.target):
        for subgroup in annotation.subgroups:
            counts = [1] * len(reshard.shape)
            cuts = [(annotation.hetero, annotation.hsize), *zip(subgroup.placements, subgroup.mesh, strict=True)]
            for placement, count in cuts:
                if isinstance(placement, Shard) and placement.dim < len(counts):
                    counts[placement.dim] *= count
                    fixed[placement.dim] |= placement.sizes is not None
            parts = [math.lcm(total, count) for total, count in zip(parts, counts, strict=True)]
    return tuple(
        length if keep or length % count or not length else count
        for length, count, keep in zip(reshard.shape, parts, fixed, strict=True)
    )
