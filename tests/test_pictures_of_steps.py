"""Pictures of schedules and tables."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from hgraph.errors import InvalidInput
from hgraph.pictures import grid_svg, grids_svg, table_svg
from hgraph.schedule import build_schedule
from hgraph.simulate import SimulatedStep, simulate

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def simulated(name: str, num_stages: int, times: list[float]) -> SimulatedStep:
    schedule = build_schedule(name, num_stages, len(times))
    return simulate(schedule, times, [2 * time for time in times], tokens=[100] * len(times))


class TestScheduleSvg:
    def test_boxes_are_as_long_as_the_passes(self) -> None:
        root = ElementTree.fromstring(grid_svg(simulated("1f1b", 2, [4.0, 8.0])))
        rects = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class", "").split()[0:1] in (["F"], ["B"])]
        passes = [rect for rect in rects if len(rect)]
        widths = sorted(round(float(rect.get("width", "")), 1) for rect in passes)
        assert len(widths) == 8
        assert widths == pytest.approx(sorted([widths[0] * factor for factor in (1, 1, 2, 2, 2, 2, 4, 4)]), abs=0.5)

    def test_numbers_and_notes(self) -> None:
        found = texts(grid_svg(simulated("gpipe", 2, [4.0, 8.0, 6.0])))
        assert found[0] == "gpipe: 2 stages, 3 micro-batches"
        assert found.count("0") == found.count("2") == 4
        assert "31% idle, holds 3 micro-batches, 300 tokens" in found

    def test_replicas_share_one_axis_and_may_be_empty(self) -> None:
        parts = [("replica 0", simulated("1f1b", 2, [4.0])), ("replica 1", simulated("1f1b", 1, []))]
        found = texts(grids_svg(parts, "step 3"))
        assert "replica 0: 24 ms, 50% idle" in found
        assert "replica 1: nothing to do" in found
        assert found[-1] == "24"

    def test_nothing_at_all(self) -> None:
        assert "nothing to do" in texts(grid_svg(simulated("1f1b", 2, [])))
        assert "nothing to do" in texts(grids_svg([], "empty"))

    def test_tooltips_say_when(self) -> None:
        root = ElementTree.fromstring(grid_svg(simulated("1f1b", 1, [1.5])))
        assert "0B0: 1.5 to 4.5 ms, 3 ms" in [title.text for title in root.iter(f"{SVG}title")]


class TestTableSvg:
    def test_cells_lines_and_marks(self) -> None:
        svg = table_svg(["strategy", "ms"], [["a & b", 12.5], ["tp2\ntp1", "-"]], "candidates", marked_rows=[1])
        assert texts(svg) == ["candidates", "strategy", "ms", "a & b", "12.5", "tp2", "tp1", "-"]
        root = ElementTree.fromstring(svg)
        assert [rect.get("class") for rect in root.iter(f"{SVG}rect")][1:] == ["head-row", "even", "marked", "border"]
        anchors = {text.text: text.get("class") for text in root.iter(f"{SVG}text")}
        assert anchors["12.5"] == "cell right"
        assert anchors["tp2"] == "cell"

    def test_rows_have_a_cell_per_header(self) -> None:
        with pytest.raises(InvalidInput, match="table t: row 1: expected 2 cells, one per header, got 1"):
            table_svg(["a", "b"], [[1, 2], [3]], "t")

    def test_no_rows(self) -> None:
        assert texts(table_svg(["a"], [], "empty")) == ["empty", "a"]
