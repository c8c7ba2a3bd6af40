"""`hgraph simulate` as a stranger runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hgraph.profile_file import write_profile_file
from hgraph.scheme_profile import ProfileFile
from hgraph.strategy_file import write_pool
from tests.command_line import TWO_NODES, answer, hgraph, message
from tests.test_ladder import MODEL, POOL, PROFILE


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("pool.yaml").write_text(write_pool(POOL))
    write_profile_file("profile.yaml", ProfileFile.of(PROFILE, name="made up", model=MODEL))
    Path("cluster.yaml").write_text(TWO_NODES)
    Path("lengths.json").write_text("[20, 50, 100, 200, 400, 900, 2000]")
    options = {"pool": "pool", "profile": "profile", "cluster": "cluster"}
    files = [part for name, file in options.items() for part in (f"--{name}", f"{file}.yaml")]
    counts = ["--tokens", "4000", "--longest", "2400", "--batches", "2", "--calibration", "1"]
    return ["simulate", *files, "--lengths", "lengths.json", *counts]


def test_the_table_has_every_system_and_says_what_decides(files: list[str]) -> None:
    text = answer(*files)
    assert "made up on 4 ranks, lengths.json, 4,000 tokens a step, longest 2,400; 2 steps, seed 0" in text
    assert "bridges hidden behind computation" in text
    for key in ("padded", "static", "balanced", "fine", "planned", "unequal", "pool", "in-turn", "published"):
        assert re.search(rf"│ {key} +│", text), key
    assert re.search(r"^pool: (gains|loses) ", text, re.MULTILINE)


def test_json_figure_and_trace(files: list[str]) -> None:
    wanted = ["--system", "static", "--system", "in-turn", "--figure", "l.svg", "--trace", "1", "t.json", "--json"]
    data = json.loads(answer(*files, *wanted, "--trace-system", "in-turn", "--trace-ranks"))
    assert [row["key"] for row in data["systems"]] == ["static", "in-turn"]
    assert data["systems"][0]["speed_up"][0] == 1.0
    trace = json.loads(Path("t.json").read_text())["traceEvents"]
    ends_ms = [(event["ts"] + event["dur"]) / 1e3 for event in trace if event["ph"] == "X"]
    assert max(ends_ms) == pytest.approx(data["systems"][1]["steps_ms"][1], abs=0.01)
    assert Path("l.svg").read_text().startswith("<?xml")


def test_the_same_seed_gives_the_same_numbers(files: list[str]) -> None:
    once = [answer(*files, "--system", "pool", "--json", "--seed", seed) for seed in ("3", "3", "4")]
    assert once[0] == once[1] != once[2]


class TestWrongInput:
    def test_step_of_the_trace(self, files: list[str]) -> None:
        assert "--trace: expected a step from 0 to 1, got '2'" in message(*files, "--trace", "2", "t.json")

    def test_system(self, files: list[str]) -> None:
        assert "no system 'fastest'; there are rows, padded, static" in message(*files, "--system", "fastest")

    def test_ending_of_the_figure(self, files: list[str]) -> None:
        assert "l.gif: expected a picture's ending" in message(*files, "--system", "static", "--figure", "l.gif")

    def test_context_window_that_nobody_holds(self, files: list[str]) -> None:
        text = message(*files, "--longest", "9000")
        assert "none of 4 strategies holds a context window of 9,000 tokens; the largest limit is 5,000" in text


def test_help_has_an_example() -> None:
    assert "benchmarks/pools/32b-64gpu.published.yaml" in hgraph("simulate", "--help").stdout
