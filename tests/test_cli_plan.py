"""`hgraph plan` for many batches, with explanations and pictures, as a stranger meets it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hgraph.profile import Profile, SchemeCost
from hgraph.profile_file import ProfileFile, write_profile_file
from tests.command_line import POOL, answer, message

COSTS = Profile(
    {
        "tp2.pp2": SchemeCost(1e-4, 0.05, 2.0, 400),
        "tp2": SchemeCost(2e-4, 0.10, 2.0, 200),
        "tp1": SchemeCost(4e-4, 0.20, 1.0, 100),
    },
    {"mixed": 3.0},
)
SCHEMES = {"large": ["tp2.pp2"], "mixed": ["tp2", "tp1", "tp1"], "small": ["tp1", "tp1", "tp1"]}
RANKS = {"large": [range(4)], "mixed": [range(2), [2], [3]], "small": [[0], [1], [2]]}
BATCHES = [[150, 40, 40, 40], [300], [90, 10, 10, 80, 70, 60, 5], [1], []]
PLAN = ("plan", "--pool", "pool.yaml", "--profile", "costs.yaml")
KEYS = [
    "strategy",
    "flow_ms",
    "simulated_ms",
    "bound_ms",
    "gap",
    "solver",
    "runs",
    "idle_ranks",
    "latency_ms",
    "total_ms",
    "replicas",
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pool.yaml").write_text(POOL)
    (tmp_path / "batches.json").write_text(json.dumps(BATCHES))
    write_profile_file("costs.yaml", ProfileFile.of(COSTS))
    return tmp_path


def slot_ms(scheme: str, lengths: Sequence[int]) -> float:
    cost = COSTS.schemes[scheme]
    return cost.c + sum(cost.a * length**2 + cost.b * length for length in lengths)


def one_f_one_b_ms(pp: int, times_ms: Sequence[float]) -> float:
    """Two stages by hand: the second runs F and B of each in turn; the first is one micro-batch ahead."""
    if pp == 1 or not times_ms:
        return sum(times_ms)
    assert len(times_ms) == 1, "a single micro-batch passes every stage"
    return pp * times_ms[0]


def check(data: dict[str, Any], lengths: Sequence[int]) -> None:
    """Recomputes what is said of one batch from its micro-batches."""
    assert list(data) == KEYS
    schemes = SCHEMES[data["strategy"]]
    seen = sorted(index for own in data["replicas"] for micro_batch in own["micro_batches"] for index in micro_batch)
    assert seen == list(range(len(lengths)))
    flow_ms, simulated_ms = [], []
    for scheme, own in zip(schemes, data["replicas"], strict=True):
        assert list(own) == ["tp", "pp", "cp", "ms", "micro_batches"]
        pp = 2 if "pp2" in scheme else 1
        assert (own["tp"], own["pp"], own["cp"]) == (int(scheme[2]), pp, 1)
        batches = [[lengths[index] for index in micro_batch] for micro_batch in own["micro_batches"]]
        assert all(sum(batch) <= COSTS.schemes[scheme].max_tokens for batch in batches)
        times_ms = [slot_ms(scheme, batch) for batch in batches]
        assert own["ms"] == pytest.approx(one_f_one_b_ms(pp, times_ms))
        flow_ms.append(sum(times_ms) + (pp - 1) * max(times_ms, default=0.0))
        simulated_ms.append(own["ms"])
    bridge_ms = COSTS.bridge_ms.get(data["strategy"], 0.0)
    replicas = zip(data["replicas"], RANKS[data["strategy"]], strict=True)
    busy = {rank for own, ranks in replicas if own["micro_batches"] for rank in ranks}
    assert data["idle_ranks"] == [rank for rank in range(4) if rank not in busy]
    assert data["flow_ms"] == pytest.approx(max(flow_ms))
    assert data["simulated_ms"] == pytest.approx(max(simulated_ms) + bridge_ms)
    if not lengths:
        assert data["gap"] == 0.0 and data["bound_ms"] == data["simulated_ms"] == bridge_ms
        return
    assert data["bound_ms"] <= data["simulated_ms"] * (1 + 1e-9)
    assert data["gap"] == pytest.approx(data["simulated_ms"] / data["bound_ms"] - 1, abs=1e-9)
    assert 0 < data["latency_ms"] <= data["total_ms"]


def test_json_of_many_batches_can_be_recomputed() -> None:
    data = json.loads(answer(*PLAN, "--batches", "batches.json", "--json"))
    for one, lengths in zip(data, BATCHES, strict=True):
        check(one, lengths)
    assert [one["strategy"] for one in data][1] == "large"


def test_without_the_solver_the_first_plan_is_taken() -> None:
    data = json.loads(answer(*PLAN, "--batches", "batches.json", "--json", "--no-solver"))
    for one, lengths in zip(data, BATCHES, strict=True):
        check(one, lengths)
        assert one["solver"] in ("heuristic", "none: an empty batch") and one["latency_ms"] <= one["total_ms"]
        assert one["runs"] == {"bound": 0, "integer": 0, "bound_gain_ms": 0.0, "integer_gain_ms": 0.0}


def test_one_strategy_for_all_batches() -> None:
    data = json.loads(answer(*PLAN, "--batches", "batches.json", "--json", "--strategy", "large"))
    assert {one["strategy"] for one in data} == {"large"}


def test_a_table_of_many_batches() -> None:
    text = answer(*PLAN, "--batches", "batches.json")
    assert "5 batches on 4 ranks" in text
    assert re.search(r"│ +1 │ +1 │ +300 │ +300 │ large +│", text)
    assert re.search(r"mean simulated [\d.]+ ms; gap [\d.]+% median, [\d.]+% at most; first checked plan after", text)
    assert re.search(r"\d of 5 plans leave ranks idle, 4 of 4 at most", text)
    assert re.search(
        r"the program of the bound ran \d+ times for \d of 5 and raised the bounds by [\d.]+%; the integer program ran "
        r"\d+ times for \d, found a better plan for \d, and saved [\d.]+% of all predicted time",
        text,
    )


def test_a_published_profile_by_name() -> None:
    pool = "version: 1\nranks: 16\nstrategies: [{name: s, replicas: [{tp: 8, count: 2}]}]\n"
    Path("sixteen.yaml").write_text(pool)
    Path("b.json").write_text("[[4000, 100, 2000]]")
    arguments = ("plan", "--pool", "sixteen.yaml", "--profile", "llama-13b.a800-80gb", "--batches", "b.json", "--json")
    (one,) = json.loads(answer(*arguments))
    assert one["strategy"] == "s" and [own["tp"] for own in one["replicas"]] == [8, 8]


def test_stages_of_different_degrees_are_listed() -> None:
    stages = "[{tp: 2, layers: 3}, {tp: 1, layers: 1}]"
    Path("pool.yaml").write_text(f"version: 1\nranks: 3\nstrategies: [{{name: s, replicas: [{{stages: {stages}}}]}}]\n")
    costs = Profile({"tp2+tp1(3,1)": SchemeCost(0, 1.0, 1.0, 50)}, {})
    write_profile_file("costs.yaml", ProfileFile.of(costs))
    Path("b.json").write_text("[[4]]")
    (one,) = json.loads(answer(*PLAN, "--batches", "b.json", "--json"))
    assert one["replicas"][0]["tp"] == [2, 1] and one["replicas"][0]["cp"] == 1 and one["replicas"][0]["pp"] == 2


def test_every_fault_of_the_batches_at_once() -> None:
    Path("bad.json").write_text('[[1, 0, "x"], [], 7, {"lengths": [1]}, [2.5, true, null, 3]]')
    text = message(*PLAN, "--batches", "bad.json")
    assert "bad.json: 7 problems" in text
    for part in (
        "batch 0, sequence 1: expected a length of 1 token or more, got 0",
        "batch 0, sequence 2: expected a length of 1 token or more, got text 'x'",
        "batch 2: expected a list of lengths, got 7",
        "batch 3: expected a list of lengths, got a mapping",
        "batch 4, sequence 0: expected a length of 1 token or more, got 2.5",
        "batch 4, sequence 1: expected a length of 1 token or more, got true",
        "batch 4, sequence 2: expected a length of 1 token or more, got nothing",
    ):
        assert part in text


def test_every_sequence_that_nobody_can_hold_at_once() -> None:
    Path("long.json").write_text("[[5, 401], [3], [400, 900]]")
    text = message(*PLAN, "--batches", "long.json")
    assert "long.json: 2 problems" in text
    limit = "the largest limit of the pool is 400 tokens per micro-batch (strategy large)"
    assert f"batch 0, sequence 1: 401 tokens; {limit}" in text and f"batch 2, sequence 1: 900 tokens; {limit}" in text
    assert "the largest limit of small is 100 tokens" in message(
        *PLAN, "--batches", "batches.json", "--strategy", "small"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "{}",
            "b.json: expected a list of batches, each a list of lengths, such as [[100, 2000], [300]], got a mapping",
        ),
        ("[]", "b.json: expected a list of batches, each a list of lengths"),
        ("[[1,", "b.json: line 1: JSON syntax"),
    ],
)
def test_no_batches(text: str, expected: str) -> None:
    Path("b.json").write_text(text)
    assert expected in message(*PLAN, "--batches", "b.json")


def test_batches_are_alone() -> None:
    text = message(*PLAN, "--batches", "batches.json", "--lengths", "3", "--explain")
    assert "--batches plans a file of batches; --lengths and --explain are for one batch" in text


def test_many_batches_need_neither_torch_nor_the_solver() -> None:
    code = (
        "import sys\nfrom runtime.cli import main\n"
        f"main({[*PLAN, '--batches', 'batches.json', '--json', '--no-solver']!r}, standalone_mode=False)\n"
        "print({'torch', 'cvxpy'} & set(sys.modules), file=sys.stderr)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120, env=environment
    )
    assert result.stderr == "set()\n" and len(json.loads(result.stdout)) == len(BATCHES)


def test_explain_tells_all() -> None:
    text = answer(*PLAN, "--lengths", "150,3x40", "--explain")
    assert "Micro-batches, in the order they run" in text and re.search(r"│ +0 │ +0 │ 150 +│ +150 │ +[\d.]+ │", text)
    assert re.search(r"One more strategy (in the pool \(\d+ tried|would gain nothing: \d+ tried)", text)
    assert re.search(
        r"replica 0 \(tp2\) decides, in it most of all sequence 0 of 150 tokens: alone in its micro-batch it would "
        r"take [\d.]+ ms, 100% of the replica's time; without it the step would take [\d.]+ ms, [\d.]+% less",
        text,
    )


def test_explain_as_json() -> None:
    data = json.loads(answer(*PLAN, "--lengths", "150,3x40", "--explain", "--json"))
    assert data["deciding"]["sequence"] == 0 and data["deciding"]["length"] == 150
    assert data["one_more"]["num_tried"] > 0
    for own in data["replicas"]:
        assert [len(batch) for batch in own["micro_batches"]] == [len(batch) for batch in own["micro_batch_lengths"]]
        assert own["stage_ms"] == pytest.approx(sum(own["micro_batch_ms"]))
    assert "deciding" not in json.loads(answer(*PLAN, "--lengths", "150,3x40", "--json"))


def test_the_picture_is_written() -> None:
    text = answer(*PLAN, "--lengths", "150,3x40", "--picture", "out/plan.svg")
    assert text.endswith("wrote out/plan.svg\n")
    assert Path("out/plan.svg").read_text().startswith("<?xml")
    Path("taken").write_text("")
    assert "expected a folder to write to" in message(*PLAN, "--lengths", "9", "--picture", "taken/plan.svg")
