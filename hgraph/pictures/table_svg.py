"""Draws a table as SVG: strategies, plans, whatever has rows and columns."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hgraph.errors import InvalidInput
from hgraph.pictures.svg import MONOSPACE, Canvas, text_width

__all__ = ["table_svg"]

_MARGIN, _SIZE, _LINE, _GAP = 20.0, 12.0, 17.0, 14.0
_NUMBER = re.compile(r"[+-]?[\d,]*\.?\d+(e[+-]?\d+)?( ?(%|x|ms|s|B|kB|MB|GB|KiB|MiB|GiB))?|-|")

_STYLES = {
    "text": f"font-family:{MONOSPACE};font-size:{_SIZE}px;fill:#1f2933",
    ".title": "font-size:17px;font-weight:bold",
    ".head": "font-weight:bold;fill:#ffffff",
    ".right": "text-anchor:end",
    ".head-row": "fill:#3e4c59",
    ".marked": "fill:#fff3d6",
    ".even": "fill:#ffffff",
    ".odd": "fill:#f1f4f7",
    ".rule": "stroke:#cbd2d9;stroke-width:1",
    ".border": "fill:none;stroke:#9aa5b1;stroke-width:1.2",
}


def table_svg(
    headers: Sequence[str], rows: Sequence[Sequence[object]], title: str, marked_rows: Sequence[int] = ()
) -> str:
    """Returns a table as an SVG document.

    Cells are written by `str`; a cell may have several lines. Columns of numbers stand to the right. `marked_rows` are
    the indices of rows to be highlighted, such as the strategy that was chosen.
    """
    cells = [[str(cell).split("\n") for cell in row] for row in rows]
    for index, row in enumerate(cells):
        if len(row) != len(headers):
            raise InvalidInput(
                f"table {title}: row {index}: expected {len(headers)} cells, one per header, got {len(row)}"
            )
    widths = [
        max(text_width(line, _SIZE) for line in [header, *(line for row in cells for line in row[column])]) + 2 * _GAP
        for column, header in enumerate(headers)
    ]
    numeric = [all(_NUMBER.fullmatch(line) for row in cells for line in row[column]) for column in range(len(headers))]
    lefts = [_MARGIN + sum(widths[:column]) for column in range(len(headers))]
    canvas = Canvas()
    canvas.text(_MARGIN, _MARGIN + 16, title, "title")
    top = y = _MARGIN + 32
    canvas.rect(_MARGIN, y, sum(widths), _LINE + 8, "head-row")
    y = _draw_row(canvas, [[header] for header in headers], "head", y, lefts, widths, numeric)
    for index, row in enumerate(cells):
        height = max((len(cell) for cell in row), default=1) * _LINE + 8
        fill = "marked" if index in marked_rows else ("odd" if index % 2 else "even")
        canvas.rect(_MARGIN, y, sum(widths), height, fill)
        y = _draw_row(canvas, row, "cell", y, lefts, widths, numeric)
    for left in lefts[1:]:
        canvas.line((left, top), (left, y), "rule")
    canvas.rect(_MARGIN, top, sum(widths), y - top, "border")
    width = max(sum(widths), text_width(title, 17)) + 2 * _MARGIN
    return canvas.render(width, y + _MARGIN, title, _STYLES)


def _draw_row(
    canvas: Canvas,
    row: Sequence[Sequence[str]],
    classes: str,
    y: float,
    lefts: Sequence[float],
    widths: Sequence[float],
    numeric: Sequence[bool],
) -> float:
    """Draws the text of one row; returns its bottom."""
    for cell, left, width, right in zip(row, lefts, widths, numeric, strict=True):
        x = left + width - _GAP if right else left + _GAP
        for index, line in enumerate(cell):
            canvas.text(x, y + 4 + (index + 0.75) * _LINE, line, f"{classes} right" if right else classes)
    return y + max((len(cell) for cell in row), default=1) * _LINE + 8
