"""Layered layout, second half: where each item lies, in pixels.

Each layer is placed by least squares: items want to lie at the weighted mean of their neighbours' places, and must
keep their order and distances. That is isotonic regression, solved exactly by merging blocks; a few sweeps over the
layers settle the whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hgraph.pictures.layers import Item, Layering

__all__ = ["Frame", "place_items"]

_Joined: TypeAlias = Mapping[Item, Sequence[Item]]

_SWEEPS = 64
NODE_GAP = 22.0
LINE_GAP = 12.0
LAYER_GAP = 26.0


@dataclass(frozen=True, slots=True)
class Frame:
    """Placed items of one cluster: centre x per item, top and height per layer, and the size of the whole."""

    x: Mapping[Item, float]
    top: tuple[float, ...]
    height_of_layer: tuple[float, ...]
    width: float
    height: float


def place_items(layering: Layering, sizes: Mapping[str, tuple[float, float]]) -> Frame:
    """Returns the places of all items; `sizes` gives width and height of nodes, what is not in it is a line."""
    items = [item for row in layering.layers for item in row]
    widths = {item: sizes.get(item.id, (0.0, 0.0))[0] if item.bend is None else 0.0 for item in items}
    above: dict[Item, list[Item]] = defaultdict(list)
    below: dict[Item, list[Item]] = defaultdict(list)
    for upper, lower in layering.segments:
        above[lower].append(upper)
        below[upper].append(lower)
    x: dict[Item, float] = {}
    for row in layering.layers:
        x.update(_spread(row, widths, dict.fromkeys(row, 0.0), dict.fromkeys(row, 1.0)))
    for sweep in range(_SWEEPS):
        rows = layering.layers if sweep % 2 == 0 else layering.layers[::-1]
        # At first each layer follows the one before it, so that the whole moves; then all settle between neighbours.
        settling = sweep >= _SWEEPS // 2
        one_side = ((above, below),) if sweep % 2 == 0 else ((below, above),)
        for row in rows:
            sides = ((above, below), (below, above)) if settling else one_side
            x.update(_place_row(row, widths, x, sides))
    left = min((x[item] - widths[item] / 2 for item in x), default=0.0)
    right = max((x[item] + widths[item] / 2 for item in x), default=0.0)
    heights = tuple(
        max((sizes.get(item.id, (0.0, 0.0))[1] for item in row if item.bend is None), default=0.0)
        for row in layering.layers
    )
    tops = [0.0]
    for height in heights:
        tops.append(tops[-1] + height + LAYER_GAP)
    total = max(tops[-1] - LAYER_GAP, 0.0)
    return Frame({item: value - left for item, value in x.items()}, tuple(tops[:-1]), heights, right - left, total)


def _place_row(
    row: Sequence[Item],
    widths: Mapping[Item, float],
    x: Mapping[Item, float],
    sides: Sequence[tuple[_Joined, _Joined]],
) -> dict[Item, float]:
    wanted: dict[Item, float] = {}
    weights: dict[Item, float] = {}
    for item in row:
        pulls = [
            (x[other], _weight(item, other, len(side[item]) == 1 == len(back.get(other, ()))))
            for side, back in sides
            for other in side.get(item, ())
        ]
        weight = sum(weight for _, weight in pulls)
        wanted[item] = sum(place * weight for place, weight in pulls) / weight if weight else x[item]
        weights[item] = weight or 0.1
    return _spread(row, widths, wanted, weights)


def _weight(item: Item, other: Item, only_one: bool) -> float:
    """Returns how much a segment wants to be upright: lines more than nodes, chains more than branches."""
    bends = (item.bend is not None) + (other.bend is not None)
    return (4.0 if only_one else 1.0, 2.0, 8.0)[bends]


def _spread(
    row: Sequence[Item], widths: Mapping[Item, float], wanted: Mapping[Item, float], weights: Mapping[Item, float]
) -> dict[Item, float]:
    """Returns the places nearest to `wanted` (weighted least squares) that keep the row's order and gaps."""
    offsets: list[float] = []
    for index, item in enumerate(row):
        gap = 0.0 if index == 0 else _distance(row[index - 1], item, widths)
        offsets.append((offsets[-1] if offsets else 0.0) + gap)
    blocks: list[tuple[float, float, int]] = []
    for item, offset in zip(row, offsets, strict=True):
        block = (weights[item] * (wanted[item] - offset), weights[item], 1)
        while blocks and blocks[-1][0] / blocks[-1][1] > block[0] / block[1]:
            pull, weight, count = blocks.pop()
            block = (pull + block[0], weight + block[1], count + block[2])
        blocks.append(block)
    places = [pull / weight for pull, weight, count in blocks for _ in range(count)]
    return {item: place + offset for item, place, offset in zip(row, places, offsets, strict=True)}


def _distance(left: Item, right: Item, widths: Mapping[Item, float]) -> float:
    gap = NODE_GAP if widths[left] and widths[right] else LINE_GAP
    return (widths[left] + widths[right]) / 2 + gap
