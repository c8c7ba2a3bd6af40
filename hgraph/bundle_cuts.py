"""Cuts large bundles where ranks could share the work of moving them.

A bundle is routed as a whole: one sender, one entry per node, one root. Where there is a choice of these and the bundle
is large beside what a rank moves on average, it is cut into parts that are routed by themselves, so that all candidates
can take a share. Bridges from and to an optimizer layout of one owner per element hardly need it; switches between
compute layouts, of which every replica holds a copy, do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hgraph.bundles import Bundle, Pattern, Tensor, scale_box
from hgraph.reshard_needs import Need
from hgraph.shard_map import Box
from hgraph.topology import Topology, ranks_by_node

__all__ = ["cut_bundles"]

_SHARE = 0.1
"""A bundle is large from this part of the mean load of a rank on."""


def cut_bundles(
    tensors: Sequence[Tensor],
    patterns: Sequence[Pattern],
    bundles: Sequence[Bundle],
    topology: Topology,
    smallest_part: int,
) -> tuple[list[Tensor], list[Pattern], list[Bundle]]:
    """Returns the same with large bundles cut, into at most twice as many parts as a role has candidates.

    Parts have about `smallest_part` elements or more: small ones cost messages and even out little.
    """
    counts = _num_parts(bundles, topology, smallest_part)
    if max(counts, default=1) == 1:
        return list(tensors), list(patterns), list(bundles)
    cutting = _Cutting(patterns, bundles, counts)
    cut = [cutting.tensor(tensor) for tensor in tensors]
    return cut, cutting.patterns, cutting.bundles(cut)


def _num_parts(bundles: Sequence[Bundle], topology: Topology, smallest_part: int) -> list[int]:
    moved = sum(bundle.num_elements * (len(bundle.terms) + len(bundle.receivers) - 1) for bundle in bundles)
    limit = max(_SHARE * moved / topology.num_ranks, smallest_part)
    return [_parts_of(bundle, topology, limit) for bundle in bundles]


def _parts_of(bundle: Bundle, topology: Topology, limit: float) -> int:
    if bundle.num_elements <= limit:
        return 1
    choices = _num_choices(bundle, topology)
    return 1 if choices == 1 else min(2 * choices, math.ceil(bundle.num_elements / limit))


def _num_choices(bundle: Bundle, topology: Topology) -> int:
    """Returns how many ranks could take the role for which there are most candidates."""
    lacking = [rank for rank in bundle.receivers if not bundle.is_copy or rank not in bundle.terms[0]]
    if not lacking:
        return 1
    receivers = ranks_by_node(topology, lacking)
    if bundle.is_copy:
        near = {topology.node_of[rank] for rank in bundle.terms[0]}
        entries = [len(ranks) for node, ranks in receivers.items() if node not in near]
        return max([len(bundle.terms[0]), *entries])
    holders = ranks_by_node(topology, [rank for term in bundle.terms for rank in term])
    return max(len(lacking), *map(len, holders.values()))


class _Cutting:
    """Patterns and bundles as they are after cutting; part k of bundle b has the number `_first[b] + k`."""

    def __init__(self, patterns: Sequence[Pattern], bundles: Sequence[Bundle], counts: Sequence[int]) -> None:
        self.patterns: list[Pattern] = []
        self._old, self._counts = patterns, counts
        self._parts = [(bundle, part) for bundle, count in zip(bundles, counts, strict=True) for part in range(count)]
        self._first = [0]
        for count in counts:
            self._first.append(self._first[-1] + count)
        self._numbers: dict[tuple[int, int, int], int] = {}

    def tensor(self, tensor: Tensor) -> Tensor:
        pattern = self._old[tensor.pattern]
        most = max((self._counts[number] for number in pattern.bundles), default=1)
        dim, factor = _where_to_cut(tensor.scale, most)
        key = (tensor.pattern, dim, factor)
        if key not in self._numbers:
            self._numbers[key] = len(self.patterns)
            self.patterns.append(self._cut(pattern, dim, factor))
        scale = tuple(unit // factor if at == dim else unit for at, unit in enumerate(tensor.scale))
        return Tensor(tensor.reshard, self._numbers[key], scale)

    def bundles(self, tensors: Sequence[Tensor]) -> list[Bundle]:
        """Returns all parts, with the elements that `tensors` have of them."""
        per_pattern = [0] * len(self.patterns)
        for tensor in tensors:
            per_pattern[tensor.pattern] += tensor.elements_per_unit
        sizes = [0] * len(self._parts)
        for pattern, count in zip(self.patterns, per_pattern, strict=True):
            for need, number in zip(pattern.needs, pattern.bundles, strict=True):
                sizes[number] += need.numel * count
        return [replace(bundle, num_elements=size) for (bundle, _), size in zip(self._parts, sizes, strict=True)]

    def _cut(self, pattern: Pattern, dim: int, factor: int) -> Pattern:
        finer = tuple(factor if at == dim else 1 for at in range(len(pattern.shape)))
        needs: list[Need] = []
        numbers: list[int] = []
        for need, number in zip(pattern.needs, pattern.bundles, strict=True):
            boxes = [scale_box(box, finer) for box in need.boxes]
            for part in range(self._counts[number]):
                pieces = (_part_of(box, dim, part, self._counts[number]) for box in boxes)
                own = tuple(piece for piece in pieces if piece is not None)
                if own:
                    needs.append(replace(need, boxes=own))
                    numbers.append(self._first[number] + part)
        shape = tuple(length * unit for length, unit in zip(pattern.shape, finer, strict=True))
        return replace(pattern, shape=shape, needs=tuple(needs), bundles=tuple(numbers))


def _where_to_cut(scale: Sequence[int], count: int) -> tuple[int, int]:
    """Returns a dim and how much finer its units must be: equal parts if a dim allows it, else its single elements."""
    if count == 1 or not scale:
        return 0, 1
    for dim, unit in enumerate(scale):
        if unit % count == 0:
            return dim, count
    dim = max(range(len(scale)), key=lambda dim: scale[dim])
    return dim, scale[dim]


def _part_of(box: Box, dim: int, part: int, count: int) -> Box | None:
    """Returns one of `count` nearly equal parts of a box along `dim`; None where it is empty. A scalar is not cut."""
    if count == 1 or not box:
        return box if part == 0 else None
    start, stop = box[dim]
    own = (start + (stop - start) * part // count, start + (stop - start) * (part + 1) // count)
    return (*box[:dim], own, *box[dim + 1 :]) if own[0] < own[1] else None
