"""A time axis for pictures whose bars start at 0 ms."""

from __future__ import annotations

import math

from hgraph.pictures.svg import Canvas

__all__ = ["draw_time_axis"]


def draw_time_axis(canvas: Canvas, left: float, y: float, width: float, end_ms: float, scale: float) -> float:
    """Draws an axis to `end_ms`, `scale` units to a ms, below bars; returns its bottom."""
    canvas.line((left, y), (left + width, y), "grid")
    if not end_ms > 0:
        canvas.text(left, y + 16, "nothing to do", "")
        return y + 20
    distance_ms = _tick_ms(end_ms)
    for index in range(math.floor(end_ms / distance_ms + 1e-9) + 1):
        x = left + index * distance_ms * scale
        canvas.line((x, y), (x, y + 5), "grid")
        label = f"{index * distance_ms:.6g}"
        canvas.text(x, y + 17, f"{label} ms" if index == 0 else label, "tick")
    return y + 20


def _tick_ms(end_ms: float) -> float:
    """Returns a round distance of ticks, such that there are about ten."""
    power = 10.0 ** math.floor(math.log10(end_ms / 10))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if end_ms / (factor * power) <= 12)
