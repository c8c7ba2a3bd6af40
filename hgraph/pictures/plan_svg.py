"""Draws the plan of a step as SVG: a bar per replica, its micro-batches stacked by cost along the time axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hgraph.pictures.svg import MONOSPACE, Canvas, elide, text_width
from hgraph.pictures.time_axis import draw_time_axis

__all__ = ["Bar", "Block", "plan_svg"]

_MARGIN, _CHART_WIDTH, _TEXT_SIZE, _NUMBER_SIZE = 20.0, 980.0, 11.0, 10.0
_TALL, _LOW, _MANY = 30.0, 14.0, 40
"""Height of a row, of one among many, and how many are many."""

_APART = 3.0
"""Pixels between lines that end sequences, at least."""

_STYLES = {
    "text": f"font-family:{MONOSPACE};font-size:{_TEXT_SIZE}px;fill:#1f2933",
    ".title": "font-size:17px;font-weight:bold",
    ".right": "text-anchor:end",
    ".small": "font-size:9px",
    ".tick": "font-size:10px;fill:#616e7c;text-anchor:middle",
    ".number": f"font-size:{_NUMBER_SIZE}px;text-anchor:middle",
    ".even": "fill:#cfe2fb;stroke:#3b74c0;stroke-width:0.8",
    ".odd": "fill:#a9ccf5;stroke:#3b74c0;stroke-width:0.8",
    ".deciding": "fill:#f9d8a8;stroke:#a8660a;stroke-width:1.6",
    ".part": "stroke:#ffffff;stroke-width:1",
    ".waits": "fill:url(#hatch);stroke:#cbd2d9;stroke-width:0.8",
    ".grid": "stroke:#e4e7eb;stroke-width:1",
    ".end": "stroke:#b3261e;stroke-width:1.4;stroke-dasharray:4 3",
    ".bound": "stroke:#4b8f3a;stroke-width:1.4;stroke-dasharray:1.6 3",
}
_HATCH = (
    '<pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="7" height="7" fill="#f5f7fa"/><rect width="1.4" height="7" fill="#d5dbe1"/></pattern>'
)


@dataclass(frozen=True, slots=True)
class Block:
    """One micro-batch: its time in one stage, what stands on it where it fits, and what the pointer shows.

    `parts_ms`: what its sequences take of it, in turn; the rest is what every micro-batch takes.
    """

    ms: float
    text: str
    tooltip: str
    parts_ms: tuple[float, ...] = ()
    is_deciding: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """One replica: its micro-batches in the order they run, and the whole time of its schedule, `total_ms`."""

    name: str
    blocks: tuple[Block, ...]
    total_ms: float
    note: str = ""


def plan_svg(bars: Sequence[Bar], title: str, *, step_ms: float, bound_ms: float) -> str:
    """Returns the picture of a plan as an SVG document.

    A replica's bar is as long as its schedule takes: one box for each micro-batch, as wide as it takes in one stage,
    with white lines between its sequences, and hatched what a stage waits for the others. The micro-batch of the
    sequence that decides is orange. A dashed red line marks the end of the step, bridges included, a dotted green one
    the lower bound of the pool.
    """
    end_ms = max([step_ms, bound_ms, *(bar.total_ms for bar in bars)])
    scale = _CHART_WIDTH / end_ms if end_ms > 0 else 0.0
    row = _LOW if len(bars) > _MANY else _TALL
    left = _MARGIN + max((text_width(bar.name, _TEXT_SIZE) for bar in bars), default=0.0) + 10
    canvas = Canvas()
    canvas.text(_MARGIN, _MARGIN + 16, title, "title")
    _draw_legend(canvas, _MARGIN + 30)
    top = _MARGIN + 64
    bottom = top + row * len(bars)
    for index, bar in enumerate(bars):
        _draw_bar(canvas, bar, left, top + index * row, row, scale)
    for value_ms, classes in ((bound_ms, "bound"), (step_ms, "end")):
        canvas.line((left + value_ms * scale, top - 4), (left + value_ms * scale, bottom + 2), classes)
    bottom = draw_time_axis(canvas, left, bottom + 4, _CHART_WIDTH, end_ms, scale)
    notes = max((text_width(bar.note, _TEXT_SIZE) for bar in bars), default=0.0)
    width = max(left + _CHART_WIDTH + 12 + notes, _MARGIN + text_width(title, 17)) + _MARGIN
    return canvas.render(width, bottom + _MARGIN, title, _STYLES, _HATCH)


def _draw_bar(canvas: Canvas, bar: Bar, left: float, top: float, row: float, scale: float) -> None:
    height = row - 3
    small = " small" if row < _TALL else ""
    baseline = top + height / 2 + 4
    canvas.text(left - 10, baseline, bar.name, f"right{small}")
    work_ms = sum(block.ms for block in bar.blocks)
    if bar.total_ms > work_ms and bar.blocks:
        tooltip = f"waits {bar.total_ms - work_ms:.4g} ms for other stages"
        canvas.rect(left + work_ms * scale, top, (bar.total_ms - work_ms) * scale, height, "waits", 0, tooltip)
    x = left
    for index, block in enumerate(bar.blocks):
        width = block.ms * scale
        classes = "deciding" if block.is_deciding else ("even", "odd")[index % 2]
        canvas.rect(x, top, width, height, classes, 0, block.tooltip)
        _draw_parts(canvas, block, x, top, height, scale)
        if text_width(block.text, _NUMBER_SIZE) + 4 <= width:
            canvas.text(x + width / 2, baseline, block.text, f"number{small}")
        x += width
    canvas.text(left + _CHART_WIDTH + 12, baseline, elide(bar.note, 60), f"note{small}")


def _draw_parts(canvas: Canvas, block: Block, x: float, top: float, height: float, scale: float) -> None:
    """Draws the ends of sequences that can be told apart."""
    drawn = x
    for part_ms in block.parts_ms:
        x += part_ms * scale
        if x - drawn >= _APART:
            canvas.line((x, top + 2), (x, top + height - 2), "part")
            drawn = x


def _draw_legend(canvas: Canvas, y: float) -> None:
    x = _MARGIN
    entries = (
        ("even", "micro-batch: its tokens, lines between sequences"),
        ("deciding", "holds the sequence that decides"),
        ("waits", "waits for other stages"),
    )
    for classes, text in entries:
        canvas.rect(x, y, 22, 14, classes)
        canvas.text(x + 28, y + 11, text, "legend")
        x += 28 + text_width(text, _TEXT_SIZE) + 20
    for classes, text in (("end", "end of the step, with bridges"), ("bound", "lower bound of the pool")):
        canvas.line((x + 11, y - 1), (x + 11, y + 15), classes)
        canvas.text(x + 20, y + 11, text, "legend")
        x += 20 + text_width(text, _TEXT_SIZE) + 20
