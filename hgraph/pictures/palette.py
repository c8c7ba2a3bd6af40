"""Colours of pictures: one fill class per kind of placement, one look for communication.

Fills are light with dark text, and differ in lightness as well as in hue; communication alone is dark, so that it
stands out. `FILLS` is the whole table: class -> (fill, border, text, what the legend says).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from hgraph.annotation import Annotation
from hgraph.placements import Partial, Replicate, Shard

__all__ = ["FILLS", "Fill", "fill_class_of"]


class Fill(NamedTuple):
    """Colours of a fill class as `#rrggbb`, and the words of its legend entry."""

    fill: str
    border: str
    text: str
    meaning: str


FILLS: Mapping[str, Fill] = MappingProxyType(
    {
        "replicate": Fill("#e9edf1", "#8393a3", "#1f2933", "R: every rank holds all of it"),
        "shard0": Fill("#cdebd0", "#3f8f4a", "#1f2933", "S(0): split along dim 0"),
        "shard1": Fill("#cfe2fb", "#3b74c0", "#1f2933", "S(1): split along dim 1"),
        "shard2": Fill("#e2d8f6", "#7a5cc0", "#1f2933", "S(2) and above: split along a later dim"),
        "partial": Fill("#ffe3a8", "#c68a10", "#1f2933", "P: terms of a sum"),
        "mixed": Fill("#f9d3e3", "#b8437a", "#1f2933", "several: axes or subgroups differ"),
        "communication": Fill("#b3261e", "#6d120d", "#ffffff", "communication between ranks"),
        "plain": Fill("#ffffff", "#9aa5b1", "#1f2933", "no annotation"),
    }
)


def fill_class_of(annotation: Annotation) -> str:
    """Returns the fill class of a value with this annotation: a key of `FILLS`."""
    placements = {placement for subgroup in annotation.subgroups for placement in subgroup.placements}
    placements |= {annotation.hetero}
    if any(isinstance(placement, Partial) for placement in placements):
        return "partial"
    dims = {placement.dim for placement in placements if isinstance(placement, Shard)}
    if not dims:
        return "replicate"
    some_only = len({subgroup.placements for subgroup in annotation.subgroups}) > 1
    split_and_copied = any(isinstance(p, Replicate) for s in annotation.subgroups for p in s.placements)
    if len(dims) > 1 or some_only or split_and_copied:
        return "mixed"
    return f"shard{min(dims.pop(), 2)}"
