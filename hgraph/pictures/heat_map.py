"""Draws who sends how much to whom as SVG: a cell per pair of ranks, bars for what each sends and receives.

Rows send, columns receive. Ranks stand node by node; what stays inside a node and what crosses the network have a
colour and a scale each, for the network is many times slower and mostly carries less. Beyond `MOST_RANKS` ranks on
several nodes, a cell is a pair of nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy

from hgraph.errors import InvalidInput
from hgraph.pictures.svg import MONOSPACE, Canvas, elide, number, text_width
from hgraph.topology import Topology, single_node

__all__ = ["MOST_RANKS", "heat_map_svg", "quantity"]

MOST_RANKS = 128
"""Beyond so many ranks a cell is a pair of nodes."""

_MARGIN, _TEXT, _SMALL, _TITLE = 24.0, 11.0, 9.0, 17.0
_LARGEST_CELL, _SMALLEST_CELL, _MAP_WIDTH = 56, 8, 900
_NUMBERED_CELL, _LABELLED_BAR = 40, 11
"""A cell of this many pixels or more holds a number; a bar as thick as that has one beside it."""
_BAR_LENGTH, _BAR_GAP = 120.0, 14.0
_STEPS, _DARK_STEPS, _SWATCH = 8, 3, 46.0
_KINDS = (("local", "inside a node"), ("network", "over the network"))
_ENDS = {"local": ("#deebf7", "#08468b"), "network": ("#fde3c8", "#9c2f02")}
"""The lightest and the darkest colour of each kind."""
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


@dataclass(frozen=True, slots=True)
class _Map:
    """What is drawn: `amounts[i, j]` goes from place i to place j; `blocks` are (node, first place, places)."""

    what: str
    amounts: numpy.ndarray
    labels: tuple[str, ...]
    names: tuple[str, ...]
    blocks: tuple[tuple[str, int, int], ...]
    local: numpy.ndarray

    @property
    def size(self) -> int:
        return len(self.labels)

    @property
    def cell(self) -> int:
        """The side of a cell in pixels."""
        return int(min(_LARGEST_CELL, max(_SMALLEST_CELL, _MAP_WIDTH / self.size)))

    def most(self, kind: str) -> float:
        """The greatest amount of any cell of a kind."""
        chosen = self.amounts[self.local if kind == "local" else ~self.local]
        return float(chosen.max()) if chosen.size else 0.0

    def parts(self, axis: int) -> dict[str, numpy.ndarray]:
        """What each place sends (`axis` 1) or receives (0), by kind."""
        return {
            "local": (self.amounts * self.local).sum(axis=axis),
            "network": (self.amounts * ~self.local).sum(axis=axis),
        }


def heat_map_svg(num_bytes: numpy.ndarray, title: str, topology: Topology | None = None) -> str:
    """Returns the traffic between ranks as an SVG document.

    `num_bytes[i, j]` is what rank i sends to rank j; what a rank keeps does not count. Cells have the exact figure as a
    tooltip, and as a number where they are large enough. Without `topology`, all ranks are in one node.

    Raises `InvalidInput` where the matrix is not square, holds what is below 0, or has another size than the topology.
    """
    num_bytes = numpy.asarray(num_bytes, dtype=float)
    _check(num_bytes, topology)
    drawn = _arrange(num_bytes, topology or single_node(len(num_bytes)))
    canvas = Canvas()
    canvas.text(_MARGIN, _MARGIN + 16, title, "title")
    y, legend_width = _draw_legend(canvas, drawn, _MARGIN + 46)
    named = len(drawn.blocks) > 1 and drawn.what == "rank"
    names_width = max(text_width(name, _TEXT) for name, *_ in drawn.blocks) + 10 if named else 0.0
    left = _MARGIN + names_width + max(text_width(label, _TEXT) for label in drawn.labels) + 8
    top = y + (48 if named else 32)
    side = drawn.size * drawn.cell
    canvas.text(left + side / 2, y + 10, f"receiving {drawn.what}", "axis middle")
    place = f"translate(15 {number(top + side / 2)}) rotate(-90)"
    turned: dict[str, str | float] = {"class": "axis middle", "transform": place}
    canvas.element("text", turned, f"sending {drawn.what}")
    _draw_labels(canvas, drawn, left, top, _MARGIN if named else None)
    _draw_cells(canvas, drawn, left, top)
    _draw_blocks(canvas, drawn, left, top)
    right, bottom = _draw_bars(canvas, drawn, left, top)
    width = max(right, _MARGIN + legend_width, _MARGIN + text_width(title, _TITLE)) + _MARGIN
    return canvas.render(width, bottom + _MARGIN, title, _styles())


def quantity(num_bytes: float) -> str:
    """Returns bytes in the unit that people would choose: `1.23 GB` (10^9 bytes), `640 B`."""
    unit, size = _unit(num_bytes)
    return f"{_figure(num_bytes, size)} {unit}"


def _check(num_bytes: numpy.ndarray, topology: Topology | None) -> None:
    shape = num_bytes.shape
    if len(shape) != 2 or shape[0] != shape[1] or not shape[0]:
        raise InvalidInput(f"heat map: expected a square matrix, a row and a column per rank; got shape {shape}")
    if topology is not None and topology.num_ranks != shape[0]:
        raise InvalidInput(
            f"heat map: expected a row for each of the {topology.num_ranks} ranks of {topology.name}, got {shape[0]}"
        )
    if not (num_bytes >= 0).all():
        raise InvalidInput("heat map: expected amounts of 0 bytes or more, got others")


def _arrange(num_bytes: numpy.ndarray, topology: Topology) -> _Map:
    """Returns the ranks node by node, or the nodes where there are too many ranks."""
    traffic = num_bytes.copy()
    numpy.fill_diagonal(traffic, 0.0)
    node_of = numpy.array(topology.node_of)
    if len(traffic) > MOST_RANKS and not topology.is_one_node:
        count = len(topology.nodes)
        member = numpy.zeros((count, len(traffic)))
        member[node_of, numpy.arange(len(traffic))] = 1.0
        indices = tuple(map(str, range(count)))
        names = tuple(node.name for node in topology.nodes)
        alone = tuple((name, place, 1) for place, name in enumerate(names))
        return _Map("node", member @ traffic @ member.T, indices, names, alone, numpy.eye(count, dtype=bool))
    order = [rank for node in topology.nodes for rank in sorted(node.ranks)]
    blocks, first = [], 0
    for node in topology.nodes:
        blocks.append((node.name, first, len(node.ranks)))
        first += len(node.ranks)
    local = node_of[order][:, None] == node_of[order][None, :]
    names = tuple(f"rank {rank}" for rank in order)
    return _Map("rank", traffic[numpy.ix_(order, order)], tuple(map(str, order)), names, tuple(blocks), local)


def _unit(num_bytes: float) -> tuple[str, float]:
    return next((pair for pair in _UNITS if num_bytes >= pair[1]), _UNITS[-1])


def _figure(num_bytes: float, size: float) -> str:
    """Returns three digits of an amount in units of `size` bytes."""
    value = num_bytes / size
    if size == 1.0 and value == int(value):
        return f"{value:.0f}"
    if 0 < value < 0.005:
        return "<.01"
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"


def _step(value: float, most: float) -> int:
    """Returns which of the equal steps from 0 to `most` a value above 0 is in."""
    return min(_STEPS - 1, max(0, math.ceil(value / most * _STEPS - 1e-9) - 1))


def _draw_legend(canvas: Canvas, drawn: _Map, y: float) -> tuple[float, float]:
    """Draws the scale of each kind that there is; returns the bottom and the width."""
    shown = [(kind, words) for kind, words in _KINDS if drawn.most(kind) > 0]
    if not shown:
        canvas.text(_MARGIN, y + 11, "nothing moves", "legend")
        return y + 30, text_width("nothing moves", _TEXT)
    start = _MARGIN + max(text_width(words, _TEXT) for _, words in shown) + 24
    for kind, words in shown:
        most = drawn.most(kind)
        unit, size = _unit(most)
        canvas.text(_MARGIN, y + 11, words, "legend")
        for step in range(_STEPS):
            canvas.rect(start + step * _SWATCH, y, _SWATCH, 14, f"cell {kind}{step}")
        for step in range(_STEPS + 1):
            text = _figure(most * step / _STEPS, size)
            canvas.text(start + step * _SWATCH, y + 26, text, "small middle")
        whole = drawn.what == "node" and kind == "local"
        pair = "inside one node" if whole else f"from one {drawn.what} to another"
        canvas.text(start + _STEPS * _SWATCH + 22, y + 11, f"{unit} {pair}", "legend")
        y += 38
    note = "white: nothing; grey: what a rank keeps" if drawn.what == "rank" else "white: nothing"
    canvas.text(_MARGIN, y + 6, note, "legend")
    return y + 28, start + _STEPS * _SWATCH + 22 + text_width("MB from one rank to another", _TEXT)


def _draw_labels(canvas: Canvas, drawn: _Map, left: float, top: float, names_at: float | None) -> None:
    """Draws the number of every place, or of every second, fourth and so on where they would touch."""
    cell, size = drawn.cell, _TEXT if drawn.cell >= 20 else _SMALL
    widest = max(text_width(label, size) for label in drawn.labels) + 2
    every = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128) if cell * step >= max(widest, size))
    classes = "" if size == _TEXT else "small"
    for place in range(0, drawn.size, every):
        middle = place * cell + cell / 2
        canvas.text(left + middle, top - 6, drawn.labels[place], f"{classes} middle".strip())
        canvas.text(left - 6, top + middle + size * 0.36, drawn.labels[place], f"{classes} right".strip())
    if names_at is None:
        return
    fits = cell * min(length for *_, length in drawn.blocks) >= 12
    for name, first, length in drawn.blocks if fits else ():
        middle = (first + length / 2) * cell
        shown = elide(name, max(2, int(length * cell / text_width("0", _TEXT)) - 1))
        canvas.text(left + middle, top - 22, shown, "node middle")
        canvas.text(names_at, top + middle + 4, name, "node")


def _draw_cells(canvas: Canvas, drawn: _Map, left: float, top: float) -> None:
    cell, numbered = drawn.cell, drawn.cell >= _NUMBERED_CELL
    most = {kind: drawn.most(kind) for kind, _ in _KINDS}
    canvas.rect(left, top, drawn.size * cell, drawn.size * cell, "map")
    for place in range(drawn.size if drawn.what == "rank" else 0):
        canvas.rect(left + place * cell, top + place * cell, cell, cell, "own")
    for row, column in zip(*(indices.tolist() for indices in numpy.nonzero(drawn.amounts)), strict=True):
        value = float(drawn.amounts[row, column])
        kind = "local" if drawn.local[row, column] else "network"
        step = _step(value, most[kind])
        x, y = left + column * cell, top + row * cell
        inside = f"{drawn.names[row]} -> {drawn.names[column]}" if row != column else f"inside {drawn.names[row]}"
        canvas.rect(x, y, cell, cell, f"cell {kind}{step}", tooltip=f"{inside}: {quantity(value)} ({value:,.0f} bytes)")
        if numbered:
            shade = "light" if step >= _STEPS - _DARK_STEPS else ""
            text = _figure(value, _unit(most[kind])[1])
            canvas.text(x + cell / 2, y + cell / 2 + 4, text, f"middle {shade}".strip())


def _draw_blocks(canvas: Canvas, drawn: _Map, left: float, top: float) -> None:
    """Draws lines between nodes and a frame around what stays inside each."""
    cell, side = drawn.cell, drawn.size * drawn.cell
    canvas.rect(left, top, side, side, "frame")
    for _, first, _ in drawn.blocks[1:] if drawn.what == "rank" else ():
        canvas.line((left, top + first * cell), (left + side, top + first * cell), "border")
        canvas.line((left + first * cell, top), (left + first * cell, top + side), "border")
    for _, first, length in drawn.blocks:
        canvas.rect(left + first * cell, top + first * cell, length * cell, length * cell, "inside")


def _draw_bars(canvas: Canvas, drawn: _Map, left: float, top: float) -> tuple[float, float]:
    """Draws what each place sends, at the right, and receives, below, on one scale; returns right and bottom."""
    cell, side = drawn.cell, drawn.size * drawn.cell
    sent, received = drawn.parts(1), drawn.parts(0)
    totals = (sent["local"] + sent["network"], received["local"] + received["network"])
    most = max(float(total.max()) for total in totals)
    scale = _BAR_LENGTH / most if most else 0.0
    x, y = left + side + _BAR_GAP, top + side + _BAR_GAP
    for place in range(drawn.size):
        ends = [0.0, 0.0]
        for kind, _ in _KINDS:
            lengths = (float(sent[kind][place]) * scale, float(received[kind][place]) * scale)
            at = place * cell + 1
            if lengths[0]:
                canvas.rect(x + ends[0], top + at, lengths[0], cell - 2, f"bar {kind}-bar")
            if lengths[1]:
                canvas.rect(left + at, y + ends[1], cell - 2, lengths[1], f"bar {kind}-bar")
            ends = [ends[0] + lengths[0], ends[1] + lengths[1]]
        middle = place * cell + cell / 2
        if cell >= _LABELLED_BAR:
            canvas.text(x + ends[0] + 5, top + middle + 3, quantity(float(totals[0][place])), "small")
        if cell >= _NUMBERED_CELL:
            canvas.text(left + middle, y + ends[1] + 12, quantity(float(totals[1][place])), "small middle")
    heads = [_bar_head("sent", drawn.what, totals[0]), _bar_head("received", drawn.what, totals[1])]
    bottom = y + (_BAR_LENGTH if most else 0.0) + 30
    for line, text in enumerate(heads):
        canvas.text(left, bottom + 15 * line, text, "legend")
    right = x + (_BAR_LENGTH if most else 0.0) + 70
    return max(right, left + max(text_width(text, _TEXT) for text in heads)), bottom + 15


def _bar_head(verb: str, what: str, totals: numpy.ndarray) -> str:
    side = "bars at the right" if verb == "sent" else "bars below"
    greatest, mean = float(totals.max()), float(totals.mean())
    ratio = f" ({greatest / mean:.2f} of it)" if mean else ""
    return f"{side}: {verb} by each {what}; mean {quantity(mean)}, greatest {quantity(greatest)}{ratio}"


def _styles() -> dict[str, str]:
    styles = {
        "text": f"font-family:{MONOSPACE};font-size:{_TEXT}px;fill:#1f2933",
        ".title": f"font-size:{_TITLE}px;font-weight:bold",
        ".axis": "font-weight:bold;fill:#3e4c59",
        ".node": "font-weight:bold;fill:#3e4c59",
        ".small": f"font-size:{_SMALL}px",
        ".middle": "text-anchor:middle",
        ".right": "text-anchor:end",
        ".light": "fill:#ffffff",
        ".map": "fill:#ffffff",
        ".own": "fill:#d6d5d0",
        ".cell": "stroke:#ffffff;stroke-width:0.5",
        ".border": "stroke:#9aa5b1;stroke-width:1",
        ".inside": "fill:none;stroke:#1f2933;stroke-width:1.8",
        ".frame": "fill:none;stroke:#9aa5b1;stroke-width:1.2",
    }
    for kind, _ in _KINDS:
        for step in range(_STEPS):
            styles[f".{kind}{step}"] = f"fill:{_colour(kind, step)}"
        styles[f".{kind}-bar"] = f"fill:{_colour(kind, _STEPS - 3)}"
    return styles


def _colour(kind: str, step: int) -> str:
    light, dark = ([int(end[at : at + 2], 16) for at in (1, 3, 5)] for end in _ENDS[kind])
    share = step / (_STEPS - 1)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(light, dark, strict=True))
