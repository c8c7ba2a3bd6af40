"""Heat maps of traffic: every figure is there, and stands where it should."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import numpy
import pytest

from hgraph.errors import InvalidInput
from hgraph.pictures import heat_map_svg, quantity
from hgraph.pictures.heat_map import MOST_RANKS
from hgraph.topology import Link, Node, Topology, uniform

SVG = "{http://www.w3.org/2000/svg}"
LINK = Link(1.0, 0.0)
SIZES = [4, 16, 64, MOST_RANKS, 1024]


def nodes_of_eight(num_ranks: int) -> Topology:
    return uniform("eights", max(1, num_ranks // 8), min(8, num_ranks), LINK, LINK)


def random_traffic(num_ranks: int, seed: int = 0) -> numpy.ndarray:
    """Returns bytes between ranks, about a third of the pairs, more inside nodes; ranks keep some too."""
    generator = numpy.random.default_rng(seed)
    amounts = generator.integers(1, 10_000_000, (num_ranks, num_ranks)) * (generator.random((num_ranks,) * 2) < 0.3)
    node = numpy.array(nodes_of_eight(num_ranks).node_of)
    return numpy.where(node[:, None] == node[None, :], 10 * amounts, amounts)


def elements(svg: str, tag: str, name: str) -> list[ElementTree.Element]:
    """Returns the elements of a tag that have a class."""
    return [e for e in ElementTree.fromstring(svg).iter(SVG + tag) if name in e.get("class", "").split()]


def tooltips(svg: str) -> dict[tuple[str, str], int]:
    """Returns the exact figure of each cell, by sender and receiver."""
    found = {}
    for cell in elements(svg, "rect", "cell"):
        title = cell.find(f"{SVG}title")
        if title is not None and title.text is not None:
            match = re.fullmatch(r"(.+) -> (.+): \S+ \S+ \(([\d,]+) bytes\)", title.text)
            if match:
                found[match[1], match[2]] = int(match[3].replace(",", ""))
    return found


def box_of(element: ElementTree.Element) -> tuple[float, float, float, float]:
    x, y, width, height = (float(element.get(name, "")) for name in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


class TestFigures:
    @pytest.mark.parametrize("num_ranks", [4, 16, 64, MOST_RANKS])
    def test_every_pair_has_a_cell_with_its_figure(self, num_ranks: int) -> None:
        amounts = random_traffic(num_ranks)
        expected = {
            (f"rank {i}", f"rank {j}"): int(amounts[i, j])
            for i, j in zip(*numpy.nonzero(amounts), strict=True)
            if i != j
        }
        assert tooltips(heat_map_svg(amounts, "traffic", nodes_of_eight(num_ranks))) == expected

    def test_many_ranks_are_added_up_to_nodes(self) -> None:
        amounts, topology = random_traffic(1024), nodes_of_eight(1024)
        svg = heat_map_svg(amounts, "traffic", topology)
        found = tooltips(svg)
        assert found["node3", "node5"] == amounts[24:32, 40:48].sum()
        inside = amounts[24:32, 24:32].sum() - amounts[24:32, 24:32].trace()
        assert f"inside node3: {quantity(inside)} ({inside:,} bytes)" in svg
        assert "receiving node" in svg and "rank" not in svg.replace("traffic", "")

    def test_ranks_of_one_node_stay_ranks_however_many(self) -> None:
        assert "receiving rank" in heat_map_svg(numpy.ones((130, 130)), "traffic")

    def test_cells_stand_in_the_row_of_the_sender_and_the_column_of_the_receiver(self) -> None:
        amounts = numpy.zeros((4, 4))
        amounts[1, 3] = 5
        (cell,) = (
            e for e in elements(heat_map_svg(amounts, "one"), "rect", "cell") if e.find(f"{SVG}title") is not None
        )
        (frame,) = elements(heat_map_svg(amounts, "one"), "rect", "frame")
        side = float(cell.get("width", ""))
        assert (box_of(cell)[0] - box_of(frame)[0], box_of(cell)[1] - box_of(frame)[1]) == (3 * side, side)

    def test_ranks_stand_node_by_node(self) -> None:
        topology = Topology("mixed", (Node("even", (0, 2), LINK, LINK), Node("odd", (1, 3), LINK, LINK)))
        amounts = numpy.zeros((4, 4))
        amounts[0, 2], amounts[2, 1] = 7, 3
        svg = heat_map_svg(amounts, "mixed", topology)
        classes = {
            e.get("class", "").split()[1][:-1]
            for e in elements(svg, "rect", "cell")
            if e.find(f"{SVG}title") is not None
        }
        assert classes == {"local", "network"}
        columns = [e.text for e in elements(svg, "text", "middle") if e.get("class") == "middle"]
        assert columns[:4] == ["0", "2", "1", "3"]

    def test_numbers_are_in_cells_where_they_fit(self) -> None:
        amounts = numpy.zeros((4, 4))
        amounts[0, 1], amounts[2, 3] = 1_230_000, 2_000
        texts = [e.text for e in elements(heat_map_svg(amounts, "few"), "text", "middle")]
        assert "1.23" in texts and "<.01" in texts
        amounts = numpy.zeros((64, 64))
        amounts[0, 1] = 1_230_000
        texts = [e.text for e in elements(heat_map_svg(amounts, "many"), "text", "middle")]
        assert texts.count("1.23") == 1, "the end of the scale alone"

    def test_the_darkest_step_is_the_greatest_amount_of_its_kind(self) -> None:
        svg = heat_map_svg(random_traffic(16), "traffic", nodes_of_eight(16))
        for kind, most in (("local", 10), ("network", 1)):
            amounts = random_traffic(16)
            numpy.fill_diagonal(amounts, 0)
            node = numpy.array(nodes_of_eight(16).node_of)
            same = node[:, None] == node[None, :]
            expected = amounts[same if kind == "local" else ~same].max()
            titles = [e.find(f"{SVG}title") for e in elements(svg, "rect", f"{kind}7")]
            assert any(f"({expected:,} bytes)" in (t.text or "") for t in titles if t is not None), most

    def test_loads_are_told(self) -> None:
        amounts = numpy.array([[0, 3000, 1000], [0, 0, 0], [0, 2000, 0]])
        svg = heat_map_svg(amounts, "loads")
        assert "sent by each rank; mean 2.00 kB, greatest 4.00 kB (2.00 of it)" in svg
        assert "received by each rank; mean 2.00 kB, greatest 5.00 kB (2.50 of it)" in svg

    def test_nothing_moves(self) -> None:
        svg = heat_map_svg(numpy.diag([5.0, 6.0]), "still")
        assert "nothing moves" in svg and not elements(svg, "rect", "bar") and not tooltips(svg)


class TestLooks:
    @pytest.mark.parametrize("num_ranks", SIZES)
    def test_labels_do_not_overlap(self, num_ranks: int) -> None:
        svg = heat_map_svg(random_traffic(num_ranks), "traffic", nodes_of_eight(num_ranks))
        rows: dict[float, list[tuple[float, float]]] = {}
        for element in elements(svg, "text", "middle"):
            if element.get("transform") is None:
                size = 9 if "small" in element.get("class", "") else 11
                half = len(element.text or "") * size * 0.602 / 2
                x = float(element.get("x", ""))
                rows.setdefault(float(element.get("y", "")), []).append((x - half, x + half))
        for spans in rows.values():
            spans.sort()
            assert all(left[1] <= right[0] for left, right in pairwise(spans))

    @pytest.mark.parametrize("num_ranks", SIZES)
    def test_everything_lies_on_the_picture(self, num_ranks: int) -> None:
        svg = heat_map_svg(random_traffic(num_ranks), "traffic", nodes_of_eight(num_ranks))
        root = ElementTree.fromstring(svg)
        width, height = float(root.get("width", "")), float(root.get("height", ""))
        for element in root.iter(f"{SVG}text"):
            if element.get("transform") is None and "middle" not in element.get("class", ""):
                right = float(element.get("x", "")) + ("right" not in element.get("class", "")) * (
                    len(element.text or "") * (9 if "small" in element.get("class", "") else 11) * 0.602
                )
                assert 0 <= right <= width and 0 <= float(element.get("y", "")) <= height, element.text
        for element in root.iter(f"{SVG}rect"):
            if element.get("class") is not None:
                left, top, right, bottom = box_of(element)
                assert 0 <= left <= right <= width and 0 <= top <= bottom <= height
        assert width < 1500

    def test_nodes_are_outlined(self) -> None:
        svg = heat_map_svg(random_traffic(16), "traffic", nodes_of_eight(16))
        (frame,) = elements(svg, "rect", "frame")
        first, second = (box_of(element) for element in elements(svg, "rect", "inside"))
        assert first[:2] == box_of(frame)[:2] and second[2:] == box_of(frame)[2:] and first[2:] == second[:2]

    def test_the_same_traffic_gives_the_same_bytes(self) -> None:
        first, second = (heat_map_svg(random_traffic(16), "t", nodes_of_eight(16)) for _ in range(2))
        assert first == second


class TestErrors:
    @pytest.mark.parametrize(
        ("amounts", "message"),
        [
            (numpy.zeros((2, 3)), r"expected a square matrix, a row and a column per rank; got shape \(2, 3\)"),
            (numpy.zeros((0, 0)), "expected a square matrix"),
            (numpy.zeros(4), "expected a square matrix"),
            (numpy.zeros((3, 3)), "expected a row for each of the 8 ranks of eights, got 3"),
            (numpy.full((8, 8), -1.0), "expected amounts of 0 bytes or more, got others"),
            (numpy.full((8, 8), numpy.nan), "expected amounts of 0 bytes or more, got others"),
        ],
    )
    def test_wrong_matrices(self, amounts: numpy.ndarray, message: str) -> None:
        with pytest.raises(InvalidInput, match=message):
            heat_map_svg(amounts, "wrong", nodes_of_eight(8))


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (640, "640 B"),
        (999.4, "999 B"),
        (1000, "1.00 kB"),
        (9_996_000, "10.0 MB"),
        (123_456_789, "123 MB"),
        (2.5e12, "2.50 TB"),
    ],
)
def test_quantities(num_bytes: float, text: str) -> None:
    assert quantity(num_bytes) == text
