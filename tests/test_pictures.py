"""Pictures: valid, deterministic, complete, and without overlaps."""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ElementTree
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hgraph.annotation import Annotation
from hgraph.errors import InvalidInput
from hgraph.pictures import (
    LegendEntry,
    PictureCluster,
    PictureEdge,
    PictureGraph,
    PictureNode,
    fill_class_of,
    to_dot,
    to_svg,
)
from hgraph.pictures.layers import Item, assign_layers, order_layers
from hgraph.pictures.palette import FILLS
from hgraph.pictures.routing import Cell, Net, make_grid, route_nets

SVG = "{http://www.w3.org/2000/svg}"
Rectangle = tuple[float, float, float, float]
Point = tuple[float, float]


@st.composite
def graphs(draw: st.DrawFn) -> PictureGraph:
    """Random graphs: some nodes in clusters, edges along the order of nodes."""
    clusters = tuple(PictureCluster(f"c{i}", f"stage {i}", i % 2, i // 2) for i in range(draw(st.integers(0, 3))))
    homes = st.sampled_from([None, *(cluster.id for cluster in clusters)])
    shapes = st.sampled_from(["box", "pill", "hexagon"])
    lines = st.sampled_from(["", "[T, 64]", "[T, 64]\n0-3[S(0)]"])
    count = draw(st.integers(1, 14))
    fills = st.sampled_from(sorted(FILLS))
    nodes = tuple(
        PictureNode(f"n{i}", f"label_{i}", draw(lines), draw(homes), draw(fills), draw(shapes)) for i in range(count)
    )
    pairs = [(i, j) for j in range(count) for i in range(j)]
    chosen = draw(st.lists(st.sampled_from(pairs), max_size=25, unique=True)) if pairs else []
    style = st.sampled_from(["data", "message", "reference"])
    edges = tuple(PictureEdge(f"n{i}", f"n{j}", style=draw(style)) for i, j in chosen)
    return PictureGraph("random", nodes, edges, clusters)


def node_boxes(svg: str) -> dict[str, Rectangle]:
    """Returns left, top, right, bottom of every drawn node by its SVG id."""
    result = {}
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        shape = next(child for child in group if child.get("class", "").startswith("node "))
        if shape.tag == f"{SVG}rect":
            x, y, width, height = (float(shape.get(name, "")) for name in ("x", "y", "width", "height"))
            result[group.get("id", "")] = (x, y, x + width, y + height)
            continue
        points = [tuple(map(float, pair.split(","))) for pair in shape.get("points", "").split()]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        result[group.get("id", "")] = (min(xs), min(ys), max(xs), max(ys))
    return result


def line_points(svg: str) -> list[Point]:
    """Returns points along every drawn line, close together."""
    result: list[Point] = []
    for path in ElementTree.fromstring(svg).iter(f"{SVG}path"):
        if path.get("class", "").startswith("edge "):
            result += along(path.get("d", ""))
    return result


def along(data: str) -> list[Point]:
    """Returns points along path data of the commands M, L, V, C and Q."""
    result: list[Point] = []
    for command, text in re.findall(r"([MLVCQ])([^MLVCQ]*)", data):
        numbers = list(map(float, text.split()))
        if command == "V":
            numbers = [result[-1][0], *numbers]
        corners = list(zip(numbers[::2], numbers[1::2], strict=True))
        if command == "M":
            result += corners
            continue
        controls = [result[-1], *corners]
        result += [bezier(controls, step / 24) for step in range(1, 25)]
    return result


def bezier(controls: list[Point], t: float) -> Point:
    while len(controls) > 1:
        controls = [(a[0] + (b[0] - a[0]) * t, a[1] + (b[1] - a[1]) * t) for a, b in pairwise(controls)]
    return controls[0]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


class TestGraphSvg:
    @given(graphs())
    @settings(max_examples=25, deadline=None)
    def test_nodes_do_not_overlap(self, graph: PictureGraph) -> None:
        boxes = node_boxes(to_svg(graph))
        assert len(boxes) == len(graph.nodes)
        for a, b in combinations(boxes.values(), 2):
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]

    @given(graphs())
    @settings(max_examples=25, deadline=None)
    def test_lines_do_not_cross_nodes(self, graph: PictureGraph) -> None:
        svg = to_svg(graph)
        boxes = node_boxes(svg).values()
        for x, y in line_points(svg):
            assert not any(box[0] + 1 < x < box[2] - 1 and box[1] + 1 < y < box[3] - 1 for box in boxes)

    def test_lines_of_a_low_node_pass_below_its_tall_neighbour(self) -> None:
        nodes = [PictureNode("low", "low"), PictureNode("tall", "tall", "\n".join(["line"] * 12))]
        nodes += [PictureNode("c", "c"), PictureNode("d", "d", "\n".join(["line"] * 12))]
        edges = [PictureEdge(source, target) for source in ("low", "tall") for target in ("c", "d")]
        svg = to_svg(PictureGraph("heights", tuple(nodes), tuple(edges)))
        boxes = node_boxes(svg).values()
        for x, y in line_points(svg):
            assert not any(box[0] + 1 < x < box[2] - 1 and box[1] + 1 < y < box[3] - 1 for box in boxes)

    @given(graphs())
    @settings(max_examples=15, deadline=None)
    def test_nodes_lie_in_the_frame_of_their_cluster(self, graph: PictureGraph) -> None:
        svg = to_svg(graph)
        boxes = node_boxes(svg)
        frames = [
            tuple(float(rect.get(name, "")) for name in ("x", "y", "width", "height"))
            for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect")
            if rect.get("class") == "cluster"
        ]
        assert len(frames) == len(graph.clusters)
        for cluster, (x, y, width, height) in zip(graph.clusters, frames, strict=True):
            for index, node in enumerate(graph.nodes):
                box = boxes[f"n{index}"]
                outside = box[2] < x or box[0] > x + width or box[3] < y or box[1] > y + height
                inside = x < box[0] and box[2] < x + width and y < box[1] and box[3] < y + height
                assert inside if node.cluster == cluster.id else outside

    @given(graphs())
    @settings(max_examples=15, deadline=None)
    def test_same_graph_same_text(self, graph: PictureGraph) -> None:
        assert to_svg(graph) == to_svg(graph)

    def test_text_legend_titles_and_links_are_there(self) -> None:
        nodes = (
            PictureNode("a", "mm_1", "[T, 64]\n0-1[P]", "s0", "partial"),
            PictureNode("b", "all_reduce", "0-1[P] -> 0-1[R]", "s0", "communication", "hexagon"),
            PictureNode("c", "silu", "<T & 64>", "s1", "replicate", tooltip="model.py:7"),
        )
        edges = (
            PictureEdge("a", "b", "term"),
            PictureEdge("b", "c", style="message"),
            PictureEdge("a", "c", style="reference"),
        )
        clusters = (PictureCluster("s0", "stage 0"), PictureCluster("s1", "stage 1", 1))
        svg = to_svg(PictureGraph("two stages", nodes, edges, clusters))
        found = texts(svg)
        for text in ("two stages", "stage 0", "stage 1", "mm_1", "0-1[P]", "<T & 64>", "term", "← mm_1"):
            assert text in found
        assert FILLS["partial"].meaning in found
        assert FILLS["shard0"].meaning not in found
        root = ElementTree.fromstring(svg)
        assert [link.get("href") for link in root.iter(f"{SVG}a")] == ["#n0"]
        assert "model.py:7" in [title.text for title in root.iter(f"{SVG}title")]
        styles = [path.get("class") for path in root.iter(f"{SVG}path")]
        assert "edge message" in styles

    def test_values_with_a_long_life_are_named_when_they_crowd(self) -> None:
        chain = [PictureNode(f"f{i}", f"f{i}") for i in range(30)] + [PictureNode(f"b{i}", f"b{i}") for i in range(30)]
        edges = [PictureEdge(a.id, b.id) for a, b in pairwise(chain)]
        saved = [PictureEdge(f"f{i}", f"b{29 - i}") for i in range(30)]
        svg = to_svg(PictureGraph("saved", tuple(chain), (*edges, *saved)))
        named = [text for text in texts(svg) if text.startswith("← ")]
        assert "← f0" in named
        assert "← f28" not in named
        assert 10 <= len(named) < 30

    def test_an_edge_against_the_flow_is_named(self) -> None:
        nodes = (PictureNode("a", "first"), PictureNode("b", "second"))
        assert "← second" in texts(to_svg(PictureGraph("loop", nodes, (PictureEdge("b", "a"),))))

    def test_characters_that_xml_forbids(self) -> None:
        svg = to_svg(PictureGraph("a\x00b", (PictureNode("n", 'quote " and \x1b', tooltip="\x02"),)))
        assert 'quote " and \ufffd' in texts(svg)

    def test_empty_graph(self) -> None:
        assert texts(to_svg(PictureGraph("empty", ()))) == ["empty"]

    def test_four_hundred_nodes_take_seconds_at_most(self) -> None:
        nodes = tuple(PictureNode(f"n{i}", f"node_{i}", "[T, 64]", f"s{i // 200}") for i in range(400))
        steps = [(i, i + step) for i in range(400) for step in (1, 7, 30) if i + step < 400]
        clusters = (PictureCluster("s0", "stage 0"), PictureCluster("s1", "stage 1", 1))
        start = time.perf_counter()
        to_svg(PictureGraph("large", nodes, tuple(PictureEdge(f"n{i}", f"n{j}") for i, j in steps), clusters))
        assert time.perf_counter() - start < 20.0


class TestLayers:
    def test_parameters_lie_right_above_their_use(self) -> None:
        nodes = ["x", "a", "b", "w", "mm"]
        layer = assign_layers(nodes, [("x", "a"), ("a", "b"), ("b", "mm"), ("w", "mm")], (), ())
        assert layer == {"x": 0, "a": 1, "b": 2, "w": 2, "mm": 3}

    def test_entries_above_exits_below(self) -> None:
        layer = assign_layers(["a"], [("in", "a"), ("a", "out")], ["in"], ["out"])
        assert layer == {"in": 0, "a": 1, "out": 2}

    def test_edges_of_one_source_share_their_bends(self) -> None:
        edges = [("a", "b"), ("b", "c"), ("c", "d"), ("a", "c"), ("a", "d")]
        layering = order_layers(assign_layers(["a", "b", "c", "d"], edges, (), ()), edges)
        assert [item for row in layering.layers for item in row if item.bend is not None] == [
            Item("a", 1),
            Item("a", 2),
        ]

    def test_crossings_are_removed(self) -> None:
        edges = [("a", "x"), ("b", "y"), ("c", "x")]
        layering = order_layers(assign_layers(["a", "b", "c", "x", "y"], edges, (), ()), edges)
        upper, lower = ([item.id for item in row] for row in layering.layers)
        places = [lower.index(dict(edges)[name]) for name in upper]
        assert places in ([0, 0, 1], [0, 1, 1])


class TestRouting:
    def test_every_line_has_a_track_of_its_own(self) -> None:
        cells = {"a": Cell(0, 0, 100, 50), "b": Cell(1, 0, 80, 200), "c": Cell(0, 1, 90, 40)}
        nets = [Net("a", "b", 10, 20), Net("a", "b", 30, 40), Net("a", "c", 50, 60), Net("c", "a", 5, 6)]
        routes = route_nets(cells, nets)
        used = [("row", route.below) for route in routes]
        used += [("row", route.above) for route in routes if route.above]
        used += [("column", route.column) for route in routes if route.column]
        assert len(used) == len(set(used)) == 10
        grid = make_grid(cells, routes)
        assert grid.points(nets[2], routes[2])[0] == (grid.origin["a"][0] + 50, grid.origin["a"][1] + 50)
        assert grid.points(nets[2], routes[2])[-1] == (grid.origin["c"][0] + 60, grid.origin["c"][1])

    def test_gutters_are_as_wide_as_their_tracks(self) -> None:
        cells = {"a": Cell(0, 0, 100, 50), "b": Cell(1, 0, 80, 200)}
        nets = [Net("a", "b", 10, 20)] * 7
        routes = route_nets(cells, nets)
        grid = make_grid(cells, routes)
        columns = [grid.points(net, route)[2][0] for net, route in zip(nets, routes, strict=True)]
        assert grid.origin["a"][0] + 100 < min(columns)
        assert max(columns) < grid.origin["b"][0]


class TestGraphValues:
    @pytest.mark.parametrize(
        ("nodes", "edges", "clusters", "message"),
        [
            (["a", "a"], [], [], "node id a is used twice"),
            (["a"], [("a", "b")], [], "edge a -> b: no node 'b'"),
            (["a"], [], [("c", 0, 0), ("c", 1, 0)], "cluster id c is used twice"),
            (["a"], [], [("c", 0, 0), ("d", 0, 0)], "place of clusters column 0, row 0 is used twice"),
            (["a"], [], [("c", -1, 0)], "expected an id and a place of 0 or more, got -1, 0"),
            (["a\nb"], [], [], "expected an id of one line"),
        ],
    )
    def test_wrong_graphs_cannot_be_built(
        self, nodes: list[str], edges: list[tuple[str, str]], clusters: list[tuple[str, int, int]], message: str
    ) -> None:
        with pytest.raises(InvalidInput, match=message):
            PictureGraph(
                "wrong",
                tuple(PictureNode(name, name) for name in nodes),
                tuple(PictureEdge(*edge) for edge in edges),
                tuple(PictureCluster(name, name, column, row) for name, column, row in clusters),
            )

    def test_wrong_words(self) -> None:
        with pytest.raises(InvalidInput, match="expected a fill class among replicate, .* got 'blue'"):
            PictureNode("a", "a", fill_class="blue")
        with pytest.raises(InvalidInput, match="expected a shape box, pill or hexagon, got 'star'"):
            PictureNode("a", "a", shape="star")  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="expected a style data, message or reference, got 'thick'"):
            PictureEdge("a", "b", style="thick")  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="node a: there is no cluster 'c'"):
            PictureGraph("wrong", (PictureNode("a", "a", cluster="c"),))
        with pytest.raises(InvalidInput, match="legend: there is no fill class 'blue'"):
            PictureGraph("wrong", (), legend=(LegendEntry("blue", "sky"),))

    @pytest.mark.parametrize(
        ("text", "fill_class"),
        [
            ("0-1[R]", "replicate"),
            ("3[]", "replicate"),
            ("0-3[S(0)]", "shard0"),
            ("0-3[S(1:2,2,1,1)]", "shard1"),
            ("0-1[S(3)]", "shard2"),
            ("0-3[P]", "partial"),
            ("0-3[2x2: S(0), P]", "partial"),
            ("0-3[2x2: S(0), R]", "mixed"),
            ("0-3[2x2: S(0), S(1)]", "mixed"),
            ("0-1[S(0)] + 2[] @ R", "mixed"),
            ("0[] + 1[] @ R", "replicate"),
            ("0[] + 1[] @ S(0)", "shard0"),
            ("0-1[S(0)] + 2-3[S(0)] @ P", "partial"),
        ],
    )
    def test_fill_class_of_annotations(self, text: str, fill_class: str) -> None:
        assert fill_class_of(Annotation.parse(text)) == fill_class


class TestDot:
    def test_whole_text(self) -> None:
        nodes = (
            PictureNode("a", 'mm "1"', "[T, 64]", "s0", "shard0"),
            PictureNode("b", "send", "", None, "communication", "hexagon", tooltip="line 1\nline 2"),
        )
        graph = PictureGraph(
            "small", nodes, (PictureEdge("a", "b", "x", "message"),), (PictureCluster("s0", "stage 0"),)
        )
        assert to_dot(graph).splitlines() == [
            "digraph picture {",
            '  graph [label="small", labelloc=t, fontname="sans-serif", rankdir=TB];',
            '  node [style="filled", fontname="monospace", fontsize=11];',
            '  edge [fontname="monospace", fontsize=9];',
            '  "b" [label="send", shape=hexagon, fillcolor="#b3261e", color="#6d120d", fontcolor="#ffffff", '
            'penwidth=2, tooltip="line 1\\nline 2"];',
            "  subgraph cluster_0 {",
            '    label="stage 0"; style=rounded;',
            '    "a" [label="mm \\"1\\"\\n[T, 64]", shape=box, fillcolor="#cdebd0", color="#3f8f4a", '
            'fontcolor="#1f2933"];',
            "  }",
            '  "a" -> "b" [color="#b3261e", penwidth=2, label="x"];',
            "  subgraph cluster_legend {",
            '    label="legend"; style=dashed;',
            '    "legend 0" [label="S(0): split along dim 0", shape=box, fillcolor="#cdebd0", color="#3f8f4a", '
            'fontcolor="#1f2933"];',
            '    "legend 1" [label="communication between ranks", shape=box, fillcolor="#b3261e", color="#6d120d", '
            'fontcolor="#ffffff"];',
            "  }",
            "}",
        ]

    @given(graphs())
    @settings(max_examples=15, deadline=None)
    def test_every_node_and_edge_is_there(self, graph: PictureGraph) -> None:
        text = to_dot(graph)
        assert all(f'"{node.id}" [label="{node.label}' in text for node in graph.nodes)
        assert text.count(" -> ") == len(graph.edges)
        assert text.count("{") == text.count("}")
