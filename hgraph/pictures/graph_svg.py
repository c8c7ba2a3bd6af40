"""Draws a picture graph as SVG, without any program or font outside Python.

Each cluster is laid out in layers on its own (`layers`, `coordinates`); clusters stand on a grid and are joined through
its gutters (`routing`); what would bury the flow is named instead of drawn (`references`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hgraph.pictures.coordinates import Frame, place_items
from hgraph.pictures.graph import PictureCluster, PictureEdge, PictureGraph, PictureNode
from hgraph.pictures.layers import Item, Layering, assign_layers, order_layers
from hgraph.pictures.node_boxes import NODE_STYLES, NodeBox, measure_node
from hgraph.pictures.palette import FILLS
from hgraph.pictures.references import drawn_edges
from hgraph.pictures.routing import Cell, Grid, Net, Route, make_grid, route_nets
from hgraph.pictures.svg import MONOSPACE, Canvas, Point, number, rounded_path, text_width

__all__ = ["to_svg"]

_NO_CLUSTER = ""
_ENTRY, _EXIT = "\nentry ", "\nexit "
_MARGIN, _PADDING, _TITLE_BAR, _SWATCH = 20.0, 14.0, 26.0, 14.0
_TITLE_SIZE, _CLUSTER_TITLE_SIZE, _LEGEND_SIZE, _EDGE_LABEL_SIZE = 17.0, 13.0, 11.0, 9.5
_MARKERS = "".join(
    f'<marker id="{name}" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="{size}" markerHeight="{size}" '
    f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0.8L8 4L0 7.2z" fill="{colour}"/></marker>'
    for name, size, colour in (("arrow-data", 7, "#616e7c"), ("arrow-message", 10, "#b3261e"))
)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A cluster laid out: its items, their places within the frame, and the boxes of its nodes."""

    cluster: PictureCluster
    framed: bool
    layering: Layering
    frame: Frame
    boxes: Mapping[str, NodeBox]
    left: float
    top: float
    width: float
    height: float


def to_svg(graph: PictureGraph) -> str:
    """Returns the graph as an SVG document: layers from top to bottom, framed clusters, a legend, links, tooltips."""
    identifiers = {node.id: f"n{index}" for index, node in enumerate(graph.nodes)}
    lines = drawn_edges(graph)
    placed = _place_clusters(graph, lines, identifiers)
    cells = {name: Cell(p.cluster.column, p.cluster.row, p.width, p.height) for name, p in placed.items()}
    nets = _nets(graph, lines, placed)
    routes = route_nets(cells, list(nets))
    grid = make_grid(cells, routes)
    canvas = Canvas()
    canvas.text(_MARGIN, _MARGIN + _TITLE_SIZE, graph.title, "title")
    legend_width, legend_bottom = _draw_legend(canvas, graph, max(grid.width, 640.0))
    offset = (_MARGIN, legend_bottom + 18)
    messages = {edge.source for edge in lines if edge.style == "message"}
    for name, cluster in placed.items():
        _draw_frame(canvas, cluster, _moved(grid.origin[name], offset))
    _draw_nets(canvas, grid, nets, routes, offset, messages)
    for name, cluster in placed.items():
        origin = _moved(grid.origin[name], offset)
        _draw_lines(canvas, cluster, origin, messages, {(e.source, e.target): e.label for e in lines if e.label})
        _draw_nodes(canvas, cluster, origin, identifiers)
        _draw_frame_title(canvas, cluster, origin)
    title_width = text_width(graph.title, _TITLE_SIZE)
    width = max(grid.width, legend_width, title_width) + 2 * _MARGIN
    return canvas.render(width, offset[1] + grid.height + _MARGIN, graph.title, _styles(), _MARKERS)


def _exit_id(source: str) -> str:
    return _EXIT + source


def _entry_id(source: str) -> str:
    return _ENTRY + source


def _place_clusters(
    graph: PictureGraph, lines: Sequence[PictureEdge], identifiers: Mapping[str, str]
) -> dict[str, _Placed]:
    """Returns every cluster laid out; nodes without a cluster stand, unframed, in a column before the first."""
    references: dict[str, list[tuple[str, str]]] = defaultdict(list)
    labels = {node.id: node.label for node in graph.nodes}
    drawn = set(lines)
    for edge in dict.fromkeys(edge for edge in graph.edges if edge not in drawn):
        references[edge.target].append((identifiers[edge.source], labels[edge.source]))
    members: dict[str, list[PictureNode]] = defaultdict(list)
    for node in graph.nodes:
        members[node.cluster or _NO_CLUSTER].append(node)
    loose = members[_NO_CLUSTER]
    first_column = 1 if loose and graph.clusters else 0
    result: dict[str, _Placed] = {}
    if loose:
        result[_NO_CLUSTER] = _place_cluster(PictureCluster("loose", ""), False, loose, lines, references)
    for cluster in graph.clusters:
        moved = PictureCluster(cluster.id, cluster.title, cluster.column + first_column, cluster.row)
        result[cluster.id] = _place_cluster(moved, True, members[cluster.id], lines, references)
    return result


def _place_cluster(
    cluster: PictureCluster,
    framed: bool,
    nodes: Sequence[PictureNode],
    lines: Sequence[PictureEdge],
    references: Mapping[str, Sequence[tuple[str, str]]],
) -> _Placed:
    inside = {node.id for node in nodes}
    edges: list[tuple[str, str]] = []
    entries: dict[str, None] = {}
    exits: dict[str, None] = {}
    for edge in lines:
        if edge.target in inside and edge.source not in inside:
            entries[_entry_id(edge.source)] = None
            edges.append((_entry_id(edge.source), edge.target))
        if edge.source in inside and edge.target not in inside:
            exits[_exit_id(edge.source)] = None
            edges.append((edge.source, _exit_id(edge.source)))
        if edge.source in inside and edge.target in inside:
            edges.append((edge.source, edge.target))
    edges = list(dict.fromkeys(edges))
    layer = assign_layers([node.id for node in nodes], edges, list(entries), list(exits))
    layering = order_layers(layer, edges)
    boxes = {node.id: measure_node(node, references.get(node.id, ())) for node in nodes}
    frame = place_items(layering, {name: (box.width, box.height) for name, box in boxes.items()})
    padding = _PADDING if framed else 0.0
    top = padding + _TITLE_BAR if framed else 0.0
    title_width = text_width(cluster.title, _CLUSTER_TITLE_SIZE)
    width = max(frame.width, title_width) + 2 * padding
    left = (width - frame.width) / 2
    return _Placed(cluster, framed, layering, frame, boxes, left, top, width, top + frame.height + padding)


def _nets(graph: PictureGraph, lines: Sequence[PictureEdge], placed: Mapping[str, _Placed]) -> dict[Net, str]:
    """Returns one net per value and cluster that it goes to, with the node that gives the value."""
    cluster = {node.id: node.cluster or _NO_CLUSTER for node in graph.nodes}
    result: dict[Net, str] = {}
    for edge in lines:
        source, target = cluster[edge.source], cluster[edge.target]
        if source == target:
            continue
        exit_x = placed[source].left + placed[source].frame.x[Item(_exit_id(edge.source))]
        entry_x = placed[target].left + placed[target].frame.x[Item(_entry_id(edge.source))]
        net = Net(source, target, exit_x, entry_x)
        result[net] = edge.source
    return result


def _draw_nets(
    canvas: Canvas,
    grid: Grid,
    nets: Mapping[Net, str],
    routes: Sequence[Route],
    offset: Point,
    messages: set[str],
) -> None:
    for (net, source), route in zip(nets.items(), routes, strict=True):
        points = [_moved(point, offset) for point in grid.points(net, route)]
        canvas.path(rounded_path(points), "edge message" if source in messages else "edge data")


def _moved(point: Point, offset: Point) -> Point:
    return (point[0] + offset[0], point[1] + offset[1])


def _draw_frame(canvas: Canvas, placed: _Placed, origin: Point) -> None:
    if not placed.framed:
        return
    canvas.rect(*origin, placed.width, placed.height, "cluster", 8)


def _draw_frame_title(canvas: Canvas, placed: _Placed, origin: Point) -> None:
    """Draws the title over the lines that pass it."""
    if placed.framed:
        canvas.text(origin[0] + _PADDING, origin[1] + 19, placed.cluster.title, "cluster-title")


def _draw_lines(
    canvas: Canvas, placed: _Placed, origin: Point, messages: set[str], labels: Mapping[tuple[str, str], str]
) -> None:
    """Draws the segments of a cluster: curves between layers, straight through the layers that they pass."""
    arrivals = _arrivals(placed)
    layer_of = {item: index for index, row in enumerate(placed.layering.layers) for item in row}
    for upper, lower in placed.layering.segments:
        source = upper.id.removeprefix(_ENTRY)
        style = "message" if source in messages else "data"
        reaches_node = lower.bend is None and lower.id in placed.boxes
        points = _segment_points(placed, upper, lower, layer_of, arrivals.get((upper, lower), 0.0), origin)
        canvas.path(_curve(points), f"edge {style}", f"arrow-{style}" if reaches_node else None)
        label = labels.get((source, lower.id)) if reaches_node else None
        if label:
            (x0, leaves), (x1, reaches) = points[1:3]
            canvas.text((x0 + x1) / 2 + 5, (leaves + reaches) / 2 + 3, label, "edge-label")


def _segment_points(
    placed: _Placed, upper: Item, lower: Item, layer_of: Mapping[Item, int], shift: float, origin: Point
) -> list[Point]:
    """Returns where a segment starts, leaves its layer, reaches the next one and ends; it curves between layers."""
    frame, dx, dy = placed.frame, origin[0] + placed.left, origin[1] + placed.top
    above, below = layer_of[upper], layer_of[lower]
    x0, x1 = dx + frame.x[upper], dx + frame.x[lower] + shift
    start = origin[1] if upper.bend is None and upper.id.startswith(_ENTRY) else dy + _bottom(placed, upper, above)
    end = dy + (
        frame.top[below] + frame.height_of_layer[below] if lower.bend is not None else _top(placed, lower, below)
    )
    if lower.bend is None and lower.id.startswith(_EXIT):
        end = origin[1] + placed.height
    leaves, reaches = dy + frame.top[above] + frame.height_of_layer[above], dy + frame.top[below]
    return [(x0, start), (x0, leaves), (x1, reaches), (x1, end)]


def _curve(points: Sequence[Point]) -> str:
    """Returns path data: straight down, a curve with upright ends, straight down."""
    (x0, start), (_, leaves), (x1, reaches), (_, end) = points
    half = (reaches - leaves) / 2
    curve = (
        f"C{number(x0)} {number(leaves + half)} {number(x1)} {number(reaches - half)} {number(x1)} {number(reaches)}"
    )
    return f"M{number(x0)} {number(start)}V{number(leaves)}{curve}V{number(end)}"


def _arrivals(placed: _Placed) -> dict[tuple[Item, Item], float]:
    """Returns where each segment meets the top of its node, from the centre: side by side, in the order they come."""
    incoming: dict[Item, list[Item]] = defaultdict(list)
    for upper, lower in placed.layering.segments:
        if lower.id in placed.boxes and lower.bend is None:
            incoming[lower].append(upper)
    result = {}
    for lower, uppers in incoming.items():
        step = min(14.0, (placed.boxes[lower.id].width - 24.0) / max(len(uppers), 1))
        uppers.sort(key=lambda item: placed.frame.x[item])
        for index, upper in enumerate(uppers):
            result[upper, lower] = (index - (len(uppers) - 1) / 2) * step
    return result


def _top(placed: _Placed, item: Item, layer: int) -> float:
    slack = placed.frame.height_of_layer[layer] - _height(placed, item, layer)
    return placed.frame.top[layer] + slack / 2


def _bottom(placed: _Placed, item: Item, layer: int) -> float:
    return _top(placed, item, layer) + _height(placed, item, layer)


def _height(placed: _Placed, item: Item, layer: int) -> float:
    if item.bend is None and item.id in placed.boxes:
        return placed.boxes[item.id].height
    return placed.frame.height_of_layer[layer]


def _draw_nodes(canvas: Canvas, placed: _Placed, origin: Point, identifiers: Mapping[str, str]) -> None:
    for index, row in enumerate(placed.layering.layers):
        for item in row:
            if item.bend is not None or item.id not in placed.boxes:
                continue
            x = origin[0] + placed.left + placed.frame.x[item]
            y = origin[1] + placed.top + _top(placed, item, index)
            placed.boxes[item.id].draw(canvas, x, y, identifiers[item.id])


def _draw_legend(canvas: Canvas, graph: PictureGraph, max_width: float) -> tuple[float, float]:
    """Draws the legend in rows below the title; returns its width and its bottom."""
    x, y, widest = _MARGIN, _MARGIN + _TITLE_SIZE + 14, 0.0
    for entry in graph.legend_entries:
        width = _SWATCH + 6 + text_width(entry.text, _LEGEND_SIZE) + 20
        if x > _MARGIN and x + width > _MARGIN + max_width:
            x, y = _MARGIN, y + 20
        canvas.rect(x, y, _SWATCH, _SWATCH, f"node fill-{entry.fill_class}", 3)
        canvas.text(x + _SWATCH + 6, y + 11, entry.text, "legend")
        x += width
        widest = max(widest, x - _MARGIN)
    return widest, y + (_SWATCH if graph.legend_entries else -14)


def _styles() -> dict[str, str]:
    """Returns the style sheet of graph pictures."""
    styles = {
        "text": f"font-family:{MONOSPACE};fill:#1f2933",
        ".title": f"font-size:{_TITLE_SIZE}px;font-weight:bold",
        ".legend": f"font-size:{_LEGEND_SIZE}px",
        ".cluster": "fill:#f7f9fb;stroke:#9aa5b1;stroke-width:1.2",
        ".cluster-title": (
            f"font-size:{_CLUSTER_TITLE_SIZE}px;font-weight:bold;fill:#3e4c59;"
            "stroke:#f7f9fb;stroke-width:4px;paint-order:stroke"
        ),
        ".edge": "fill:none;stroke-linecap:round",
        ".data": "stroke:#616e7c;stroke-width:1.1",
        ".message": "stroke:#b3261e;stroke-width:2.2",
        ".edge-label": (
            f"font-size:{_EDGE_LABEL_SIZE}px;fill:#3e4c59;text-anchor:start;"
            "stroke:#f7f9fb;stroke-width:3px;paint-order:stroke"
        ),
        ".node": "stroke-width:1.3",
    }
    for name, fill in FILLS.items():
        styles[f".fill-{name}"] = f"fill:{fill.fill};stroke:{fill.border}"
        styles[f".text-{name}"] = f"fill:{fill.text}"
    return {**styles, **NODE_STYLES}
