"""Bundles: what many tensors need, gathered by who holds it and who needs it.

Planning works on bundles, not on tensors: elements with the same holders and receivers travel alike, whatever tensor
they belong to. Tensors with the same two annotations whose dims are cut in the same proportions have one *pattern*,
which is worked out once, on the smallest shape that is cut so; a layer like another costs nothing.

Invariants
----------
- Terms of a bundle are disjoint and not empty; receivers ascend, and there is one at least.
- Boxes of a pattern are in units: multiply dim d by `Tensor.scale[d]` for elements.
- The needs of a pattern are disjoint for each receiver, and cover what the target holds (`find_needs`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hgraph.annotation import Annotation
from hgraph.errors import InvalidInput
from hgraph.placements import Shard
from hgraph.reshard_needs import Family, Need, find_needs, is_in_place
from hgraph.shard_map import Box, ShardMap, shard_map
from hgraph.topology import Topology

__all__ = ["Bundle", "Pattern", "Tensor", "TensorReshard", "gather_bundles", "scale_box"]


@dataclass(frozen=True, slots=True)
class TensorReshard:
    """One tensor of a bridge: `name`, both annotations and the global shape."""

    name: str
    source: Annotation
    target: Annotation
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bundle:
    """`num_elements` elements that have the same holders of each term and the same receivers.

    `direct`: no rank may sum terms on their way (`Need.direct`). `in_target`: the holders, of one term, have it in
    their target buffers.
    """

    terms: Family
    receivers: tuple[int, ...]
    num_elements: int
    direct: bool = False
    in_target: bool = False

    def __post_init__(self) -> None:
        are_disjoint = len(set().union(*self.terms)) == sum(map(len, self.terms))
        ascend = list(self.receivers) == sorted(set(self.receivers))
        if not self.terms or not all(self.terms) or not are_disjoint or not self.receivers or not ascend:
            raise InvalidInput(
                f"bundle: expected disjoint terms, each with a holder, and ascending receivers, one at least; got "
                f"terms {self.terms} and receivers {self.receivers}"
            )

    @property
    def is_copy(self) -> bool:
        return len(self.terms) == 1


@dataclass(frozen=True, slots=True)
class Pattern:
    """How all tensors of one kind are cut: `needs[i]` is part of bundle `bundles[i]`.

    `is_in_place`: every rank's source buffer already is a right target buffer.
    """

    source: Annotation
    target: Annotation
    shape: tuple[int, ...]
    needs: tuple[Need, ...]
    bundles: tuple[int, ...]
    is_in_place: bool


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


def scale_box(box: Box, scale: Sequence[int]) -> Box:
    """Returns a box of a pattern in elements."""
    return tuple((start * unit, stop * unit) for (start, stop), unit in zip(box, scale, strict=True))


def gather_bundles(
    reshards: Sequence[TensorReshard], topology: Topology | None = None
) -> tuple[list[Tensor], list[Pattern], list[Bundle]]:
    """Returns the tensors with their patterns, the patterns, and the bundles of all of them.

    With a topology, terms of a partial target go to terms in their own node where they can.

    Raises `InvalidAnnotation` where an annotation does not fit its tensor's shape.
    """
    gathering = _Gathering(None if topology is None else topology.node_of)
    tensors = [gathering.tensor(reshard) for reshard in reshards]
    return tensors, gathering.patterns, gathering.bundles(tensors)


_Cuts: TypeAlias = tuple[list[int], list[bool]]
"""Per dim, into how many equal parts an annotation cuts it, and whether it states sizes."""


def _annotation_cuts(annotation: Annotation, num_dims: int) -> _Cuts:
    parts, fixed = [1] * num_dims, [False] * num_dims
    hetero = (annotation.hetero, annotation.hsize)
    for placements, mesh in {(subgroup.placements, subgroup.mesh) for subgroup in annotation.subgroups}:
        counts = [1] * num_dims
        for placement, count in (hetero, *zip(placements, mesh, strict=True)):
            if isinstance(placement, Shard) and placement.dim < num_dims:
                counts[placement.dim] *= count
                fixed[placement.dim] |= placement.sizes is not None
        parts = [math.lcm(first, second) for first, second in zip(parts, counts, strict=True)]
    return parts, fixed


class _Gathering:
    """Patterns and the keys of bundles as they are met."""

    def __init__(self, node_of: Sequence[int] | None) -> None:
        self._node_of = node_of
        self.patterns: list[Pattern] = []
        self._pattern_numbers: dict[tuple[int, int, tuple[int, ...]], int] = {}
        self._annotations = _Numbers()
        self._cuts: dict[tuple[int, int], _Cuts] = {}
        self._maps: dict[tuple[int, tuple[int, ...]], ShardMap] = {}
        self._bundles: dict[tuple[Family, tuple[int, ...], bool], int] = {}

    def tensor(self, reshard: TensorReshard) -> Tensor:
        units = self._units(reshard)
        key = (self._annotations.number(reshard.source), self._annotations.number(reshard.target), units)
        if key not in self._pattern_numbers:
            self._pattern_numbers[key] = len(self.patterns)
            self.patterns.append(self._pattern(reshard, units))
        scale = tuple(length // unit if unit else 1 for length, unit in zip(reshard.shape, units, strict=True))
        return Tensor(reshard, self._pattern_numbers[key], scale)

    def bundles(self, tensors: Sequence[Tensor]) -> list[Bundle]:
        """Returns the bundles of all patterns, with the elements that `tensors` have of them."""
        per_pattern = [0] * len(self.patterns)
        for tensor in tensors:
            per_pattern[tensor.pattern] += tensor.elements_per_unit
        sizes = [0] * len(self._bundles)
        for pattern, count in zip(self.patterns, per_pattern, strict=True):
            for need, number in zip(pattern.needs, pattern.bundles, strict=True):
                sizes[number] += need.numel * count
        return [
            Bundle(terms, receivers, size, direct)
            for (terms, receivers, direct), size in zip(self._bundles, sizes, strict=True)
        ]

    def _pattern(self, reshard: TensorReshard, units: tuple[int, ...]) -> Pattern:
        source, target = self._map(reshard.source, units), self._map(reshard.target, units)
        needs = find_needs(source, target, self._node_of)
        bundles = tuple(
            self._bundles.setdefault((need.terms, need.receivers, need.direct), len(self._bundles)) for need in needs
        )
        in_place = is_in_place(source, target, needs)
        return Pattern(reshard.source, reshard.target, units, needs, bundles, in_place)

    def _units(self, reshard: TensorReshard) -> tuple[int, ...]:
        """Returns the smallest shape that both annotations cut in the same proportions."""
        num_dims = len(reshard.shape)
        parts, fixed = [1] * num_dims, [False] * num_dims
        for annotation in (reshard.source, reshard.target):
            key = (self._annotations.number(annotation), num_dims)
            if key not in self._cuts:
                self._cuts[key] = _annotation_cuts(annotation, num_dims)
            counts, states_sizes = self._cuts[key]
            parts = [math.lcm(first, second) for first, second in zip(parts, counts, strict=True)]
            fixed = [first or second for first, second in zip(fixed, states_sizes, strict=True)]
        return tuple(
            length if keep or length % count else min(count, length)
            for length, count, keep in zip(reshard.shape, parts, fixed, strict=True)
        )

    def _map(self, annotation: Annotation, shape: tuple[int, ...]) -> ShardMap:
        key = (self._annotations.number(annotation), shape)
        if key not in self._maps:
            self._maps[key] = shard_map(annotation, shape)
        return self._maps[key]


class _Numbers:
    """Numbers annotations, hashing each object once: for a thousand ranks a hash takes longer than all else."""

    def __init__(self) -> None:
        self._numbers: dict[Annotation, int] = {}
        self._by_address: dict[int, int] = {}
        self._kept: list[Annotation] = []

    def number(self, annotation: Annotation) -> int:
        """Returns the same number for equal annotations."""
        if id(annotation) not in self._by_address:
            self._kept.append(annotation)  # so that no other object gets its address
            self._by_address[id(annotation)] = self._numbers.setdefault(annotation, len(self._numbers))
        return self._by_address[id(annotation)]
