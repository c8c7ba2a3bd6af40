"""Measures and draws the nodes of a graph picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hgraph.pictures.graph import PictureNode
from hgraph.pictures.svg import Canvas, elide, text_width

__all__ = ["NODE_STYLES", "NodeBox", "measure_node"]

_LABEL_SIZE, _SUBLABEL_SIZE, _REFERENCE_SIZE = 12.0, 10.5, 9.5
_LABEL_LINE, _SUBLABEL_LINE, _REFERENCE_LINE = 15.0, 13.5, 12.5
_PADDING_X, _PADDING_Y, _HEXAGON_POINT = 9.0, 5.0, 12.0
_LABEL_CHARACTERS, _SUBLABEL_CHARACTERS, _REFERENCE_CHARACTERS = 36, 48, 18
_REFERENCES_SHOWN = 3

NODE_STYLES = {
    ".label": f"font-size:{_LABEL_SIZE}px;font-weight:bold;text-anchor:middle",
    ".sublabel": f"font-size:{_SUBLABEL_SIZE}px;text-anchor:middle",
    ".reference": f"font-size:{_REFERENCE_SIZE}px;font-style:italic;fill:#52606d;text-anchor:start",
    "a:hover .reference": "text-decoration:underline",
}


@dataclass(frozen=True, slots=True)
class NodeBox:
    """A node as it is drawn: lines of text and size in pixels. `references` are (id, text) of edges not drawn."""

    node: PictureNode
    sublabel_lines: tuple[str, ...]
    references: tuple[tuple[str, str], ...]
    more_references: str
    width: float
    height: float

    def draw(self, canvas: Canvas, x: float, y: float, identifier: str) -> None:
        """Draws the node with its centre at `x` and its top at `y`."""
        canvas.open_group(identifier, self._tooltip())
        self._draw_shape(canvas, x, y)
        baseline = y + _PADDING_Y + _LABEL_SIZE - 1
        fill = f"text-{self.node.fill_class}"
        canvas.text(x, baseline, elide(self.node.label, _LABEL_CHARACTERS), f"label {fill}")
        baseline += _SUBLABEL_LINE + 0.5
        for line in self.sublabel_lines:
            canvas.text(x, baseline, line, f"sublabel {fill}")
            baseline += _SUBLABEL_LINE
        self._draw_references(canvas, x, baseline - 1)
        canvas.close_group()

    def _draw_shape(self, canvas: Canvas, x: float, y: float) -> None:
        left, right, bottom = x - self.width / 2, x + self.width / 2, y + self.height
        classes = f"node fill-{self.node.fill_class}"
        if self.node.shape == "hexagon":
            middle, inset = (y + bottom) / 2, _HEXAGON_POINT
            top_row = [(left + inset, y), (right - inset, y), (right, middle)]
            canvas.polygon([*top_row, (right - inset, bottom), (left + inset, bottom), (left, middle)], classes)
            return
        radius = 4.0 if self.node.shape == "box" else min(self.height / 2, 14.0)
        canvas.rect(left, y, self.width, self.height, classes, radius)

    def _draw_references(self, canvas: Canvas, x: float, baseline: float) -> None:
        texts = _reference_texts(self.references, self.more_references)
        place = x - text_width("".join(texts), _REFERENCE_SIZE) / 2
        for (target, _), text in zip([*self.references, ("", "")], texts, strict=False):
            if target:
                canvas.open_link(target)
            canvas.text(place, baseline, text, "reference")
            if target:
                canvas.close_link()
            place += text_width(text, _REFERENCE_SIZE)

    def _tooltip(self) -> str:
        return self.node.tooltip or "\n".join(part for part in (self.node.label, self.node.sublabel) if part)


def measure_node(node: PictureNode, references: Sequence[tuple[str, str]]) -> NodeBox:
    """Returns the box of a node; `references` are (id of the drawn source, its label)."""
    lines = tuple(elide(line, _SUBLABEL_CHARACTERS) for line in node.sublabel.splitlines())
    shown = tuple((target, elide(text, _REFERENCE_CHARACTERS)) for target, text in references[:_REFERENCES_SHOWN])
    hidden = len(references) - len(shown)
    more = f" +{hidden} more" if hidden else ""
    widths = [text_width(elide(node.label, _LABEL_CHARACTERS), _LABEL_SIZE)]
    widths += [text_width(line, _SUBLABEL_SIZE) for line in lines]
    widths.append(text_width("".join(_reference_texts(shown, more)), _REFERENCE_SIZE))
    padding = _PADDING_X + (_HEXAGON_POINT if node.shape == "hexagon" else 0.0)
    height = 2 * _PADDING_Y + _LABEL_LINE + len(lines) * _SUBLABEL_LINE + bool(shown) * _REFERENCE_LINE
    return NodeBox(node, lines, shown, more, round(max(widths) + 2 * padding), round(height))


def _reference_texts(references: Sequence[tuple[str, str]], more: str) -> list[str]:
    """Returns the pieces of the line that names references."""
    texts = [f"{'← ' if index == 0 else ', '}{text}" for index, (_, text) in enumerate(references)]
    return [*texts, more] if more else texts
