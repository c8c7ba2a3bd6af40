"""SVG primitives: a canvas that collects shapes and text and writes one deterministic, valid document.

Text is measured by counting characters of a monospaced font, so that a picture is the same everywhere and needs no
font files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape, quoteattr

__all__ = ["MONOSPACE", "Canvas", "Point", "elide", "number", "rounded_path", "text_width"]

MONOSPACE = "'DejaVu Sans Mono', Menlo, Consolas, 'Liberation Mono', monospace"
_ADVANCE = 0.602
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

Point = tuple[float, float]


def text_width(text: str, font_size: float) -> float:
    """Returns the width in pixels of one line of monospaced text."""
    return len(text) * font_size * _ADVANCE


def elide(text: str, max_characters: int) -> str:
    """Returns text of at most `max_characters`, its middle left out where it is longer."""
    if len(text) <= max_characters:
        return text
    head = (max_characters - 1) * 2 // 3
    tail = max_characters - 1 - head
    return f"{text[:head]}…{text[len(text) - tail :]}"


def number(value: float) -> str:
    """Returns a coordinate with at most one decimal."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def rounded_path(points: Sequence[Point], radius: float = 6.0) -> str:
    """Returns path data of straight lines through `points` whose corners are rounded."""
    parts = [f"M{number(points[0][0])} {number(points[0][1])}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        first, last = _towards(corner, before, radius), _towards(corner, after, radius)
        parts.append(f"L{number(first[0])} {number(first[1])}")
        parts.append(f"Q{number(corner[0])} {number(corner[1])} {number(last[0])} {number(last[1])}")
    parts.append(f"L{number(points[-1][0])} {number(points[-1][1])}")
    return "".join(parts)


def _towards(start: Point, end: Point, distance: float) -> Point:
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = (dx * dx + dy * dy) ** 0.5
    if not length:
        return start
    share = min(distance, length / 2) / length
    return (start[0] + dx * share, start[1] + dy * share)


class Canvas:
    """Collects elements; `render` writes the document. Colours and fonts come from CSS classes given to `render`."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def element(self, name: str, attributes: Mapping[str, str | float], content: str = "") -> None:
        """Adds an element; `content` is markup that is already escaped."""
        text = "".join(
            f" {key}={quoteattr(_clean(value) if isinstance(value, str) else number(value))}"
            for key, value in attributes.items()
        )
        self._parts.append(f"<{name}{text}>{content}</{name}>" if content else f"<{name}{text}/>")

    def rect(
        self, x: float, y: float, width: float, height: float, classes: str, radius: float = 0, tooltip: str = ""
    ) -> None:
        attributes: dict[str, str | float] = {"class": classes, "x": x, "y": y, "width": width, "height": height}
        if radius:
            attributes["rx"] = radius
        self.element("rect", attributes, self._title(tooltip))

    def polygon(self, points: Sequence[Point], classes: str) -> None:
        text = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self.element("polygon", {"class": classes, "points": text})

    def path(self, data: str, classes: str, marker: str | None = None) -> None:
        attributes: dict[str, str | float] = {"class": classes, "d": data}
        if marker:
            attributes["marker-end"] = f"url(#{marker})"
        self.element("path", attributes)

    def line(self, start: Point, end: Point, classes: str) -> None:
        self.element("line", {"class": classes, "x1": start[0], "y1": start[1], "x2": end[0], "y2": end[1]})

    def text(self, x: float, y: float, content: str, classes: str) -> None:
        """Adds one line of text with its baseline at `y`; the class says how it is anchored."""
        self.element("text", {"class": classes, "x": x, "y": y}, escape(_clean(content)))

    def open_group(self, identifier: str = "", tooltip: str = "") -> None:
        attribute = f" id={quoteattr(_clean(identifier))}" if identifier else ""
        self._parts.append(f"<g{attribute}>{self._title(tooltip)}")

    def close_group(self) -> None:
        self._parts.append("</g>")

    def open_link(self, identifier: str) -> None:
        self._parts.append(f"<a href={quoteattr('#' + _clean(identifier))}>")

    def close_link(self) -> None:
        self._parts.append("</a>")

    @staticmethod
    def _title(tooltip: str) -> str:
        return f"<title>{escape(_clean(tooltip))}</title>" if tooltip else ""

    def render(self, width: float, height: float, title: str, styles: Mapping[str, str], markers: str = "") -> str:
        """Returns the document; `styles` maps CSS selectors to declarations, `markers` goes into `<defs>`."""
        css = "".join(f"{selector}{{{declarations}}}\n" for selector, declarations in styles.items())
        size = f'width="{number(width)}" height="{number(height)}" viewBox="0 0 {number(width)} {number(height)}"'
        head = [
            '<?xml version="1.0" encoding="UTF-8"?>',
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(_clean(title))}</title>",
            f"<defs><style>\n{css}</style>{markers}</defs>",
            f'<rect width="{number(width)}" height="{number(height)}" fill="#ffffff"/>',
        ]
        return "\n".join([*head, *self._parts, "</svg>"]) + "\n"


def _clean(text: str) -> str:
    """Returns text without the characters that XML does not allow."""
    return _ILLEGAL.sub("\ufffd", text)
