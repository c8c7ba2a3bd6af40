"""Layered layout, first half: which layer each item is on, and in which order within its layer.

After Sugiyama, Tagawa and Toda (1981). The items are nodes, *entries* and *exits* (where lines come in from above and
leave below), and *bends*: an edge that spans several layers passes through one bend on each. All edges of one source
share their bends, so that a value with many users is one line with branches.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Item", "Layering", "assign_layers", "order_layers"]

_SWEEPS = 12


@dataclass(frozen=True, slots=True)
class Item:
    """A node (`bend` None), or the bend of the edges of node `id` on layer `bend`."""

    id: str
    bend: int | None = None


@dataclass(frozen=True, slots=True)
class Layering:
    """`layers[k]` are the items of layer k from left to right; `segments` join items of neighbouring layers."""

    layers: tuple[tuple[Item, ...], ...]
    segments: tuple[tuple[Item, Item], ...]


def assign_layers(
    nodes: Sequence[str], edges: Iterable[tuple[str, str]], entries: Sequence[str], exits: Sequence[str]
) -> dict[str, int]:
    """Returns the layer of each node, entry and exit, from 0.

    `nodes` are in order of the flow and every edge goes along it. Entries lie above all nodes, exits below. Each node
    lies as high as it can, then as low as it can where that does not make its edges longer in sum.
    """
    before: dict[str, list[str]] = defaultdict(list)
    after: dict[str, list[str]] = defaultdict(list)
    for source, target in edges:
        before[target].append(source)
        after[source].append(target)
    layer = dict.fromkeys(entries, 0)
    first = 1 if entries else 0
    for node in nodes:
        layer[node] = max((layer[source] + 1 for source in before[node]), default=first)
    last = max(layer.values(), default=0)
    layer.update(dict.fromkeys(exits, last + 1))
    for node in reversed(nodes):
        lowest = min((layer[target] for target in after[node]), default=layer[node] + 1) - 1
        if len(after[node]) >= len(before[node]):
            layer[node] = max(layer[node], lowest)
    return layer


def order_layers(layer: Mapping[str, int], edges: Iterable[tuple[str, str]]) -> Layering:
    """Returns items and segments with few crossings: sweeps of sorting by the mean place of neighbours, best kept."""
    segments = _segments(layer, edges)
    rows = _initial_order(layer, segments)
    above: dict[Item, list[Item]] = defaultdict(list)
    below: dict[Item, list[Item]] = defaultdict(list)
    for upper, lower in segments:
        above[lower].append(upper)
        below[upper].append(lower)
    best, fewest = [list(row) for row in rows], _crossings(rows, below)
    for sweep in range(_SWEEPS):
        downwards = sweep % 2 == 0
        indices = range(1, len(rows)) if downwards else range(len(rows) - 2, -1, -1)
        for index in indices:
            neighbours = rows[index - 1] if downwards else rows[index + 1]
            rows[index] = _sorted_by_mean(rows[index], neighbours, above if downwards else below)
        crossings = _crossings(rows, below)
        if crossings < fewest:
            best, fewest = [list(row) for row in rows], crossings
    return Layering(tuple(map(tuple, best)), tuple(segments))


def _segments(layer: Mapping[str, int], edges: Iterable[tuple[str, str]]) -> list[tuple[Item, Item]]:
    """Returns each edge as a chain of segments; chains of one source share their beginning."""
    result: dict[tuple[Item, Item], None] = {}
    for source, target in edges:
        item = Item(source)
        for index in range(layer[source] + 1, layer[target]):
            bend = Item(source, index)
            result[item, bend] = None
            item = bend
        result[item, Item(target)] = None
    return list(result)


def _initial_order(layer: Mapping[str, int], segments: Sequence[tuple[Item, Item]]) -> list[list[Item]]:
    """Returns the items of each layer as a walk along the segments meets them, so that chains start side by side."""
    below: dict[Item, list[Item]] = defaultdict(list)
    for upper, lower in segments:
        below[upper].append(lower)
    rows: list[list[Item]] = [[] for _ in range(max(layer.values(), default=-1) + 1)]
    seen: set[Item] = set()
    for node in sorted(layer, key=lambda node: layer[node]):
        stack = [Item(node)]
        while stack:
            item = stack.pop()
            if item in seen:
                continue
            seen.add(item)
            rows[layer[item.id] if item.bend is None else item.bend].append(item)
            stack.extend(reversed(below[item]))
    return rows


def _sorted_by_mean(row: list[Item], neighbours: list[Item], joined: Mapping[Item, list[Item]]) -> list[Item]:
    """Returns the row sorted by the mean place of each item's neighbours; items without any keep their place."""
    place = {item: index for index, item in enumerate(neighbours)}
    share = max(len(neighbours), 1) / max(len(row), 1)
    keys = {}
    for index, item in enumerate(row):
        places = [place[other] for other in joined.get(item, ())]
        keys[item] = sum(places) / len(places) if places else index * share
    return sorted(row, key=lambda item: keys[item])


def _crossings(rows: Sequence[Sequence[Item]], below: Mapping[Item, list[Item]]) -> int:
    """Returns the number of pairs of segments that cross."""
    total = 0
    for upper, lower in pairwise(rows):
        place = {item: index for index, item in enumerate(lower)}
        seen: list[int] = []
        for item in upper:
            ends = sorted(place[other] for other in below.get(item, ()))
            total += sum(len(seen) - bisect_left(seen, end + 1) for end in ends)
            for end in ends:
                insort(seen, end)
    return total
