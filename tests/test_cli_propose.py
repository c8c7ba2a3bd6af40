"""`hgraph propose`: a pool file from small profiles and lengths, its messages, and Ctrl-C."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import strategies.propose
from hgraph.memory_model import DeviceSizes, ModelSizes
from hgraph.plan import StepPlan
from hgraph.profile_file import ProfileFile, SchemeProfile, write_profile_file
from hgraph.strategy_file import load_pool
from tests.command_line import TWO_NODES, hgraph, message
from tests.proposals import COSTS

BASE = ("propose", "--profile", "costs.yaml", "--lengths", "lengths.json", "--out", "pool.yaml")
SMALL = (*BASE, "--ranks", "8", "--tokens", "4000", "--batches", "3", "--longest", "1500")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    schemes = {name: SchemeProfile(cost.a, cost.b, cost.c, max_tokens=cost.max_tokens) for name, cost in COSTS.items()}
    schemes["tp8"] = SchemeProfile(5e-5, 0.1, 9.0, origin="analytic", max_tokens=4000)
    schemes["tp2.cp2"] = SchemeProfile(5e-5, 0.16, 9.0, max_tokens=1800)
    model = ModelSizes(layers=4, hidden=64, ffn_hidden=128, heads=8, vocab=1000)
    costs = ProfileFile(schemes, model=model, device=DeviceSizes("small", 1000.0, 4))
    write_profile_file("costs.yaml", costs)
    Path("lengths.json").write_text(json.dumps([20, 40, 60, 90, 150, 220, 350, 700, 1800]))
    Path("cluster.yaml").write_text(TWO_NODES)
    return tmp_path


def proposed(*arguments: str) -> dict[str, Any]:
    result = hgraph(*arguments, "--json")
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_a_pool_that_is_ready() -> None:
    data = proposed(*SMALL)
    pool = load_pool("pool.yaml", refuse_idle=True)
    assert pool.num_ranks == 8
    assert [strategy.name for strategy in pool.strategies] == [own["name"] for own in data["strategies"]]
    assert hgraph("check", "pool.yaml", "--refuse-idle").exit_code == 0
    assert data["mean_ms"] <= data["static_ms"]
    assert data["lengths"]["num_above"] == 1
    assert set(data["left_out"]) == {"tp8", "tp2.cp2"}
    assert Path("pool.yaml").read_text().startswith("# Proposed by hgraph propose (--method search) for 8 ranks")


def test_the_table_tells_what_was_done() -> None:
    text = " ".join(hgraph(*SMALL, "--size", "2").stdout.split())
    assert "3 batches of 4,000 tokens, seed 0; 1 of 9 sequences exceed 1,500 tokens and are cut there" in text
    assert "tp8: a stage of 8 ranks spans nodes of 4, and that was not measured" in text
    assert "tp2.cp2: context parallelism can be planned, but not trained yet" in text
    assert "mean ms by number of strategies: 1:" in text and "best layout of equal replicas" in text


def test_the_same_options_give_the_same_file() -> None:
    proposed(*SMALL)
    first = Path("pool.yaml").read_text()
    proposed(*SMALL, "--force")
    assert Path("pool.yaml").read_text() == first


def test_wider_and_context_parallel_schemes_on_request() -> None:
    assert set(proposed(*SMALL, "--across-nodes", "--with-cp")["left_out"]) == set()


def test_the_published_method() -> None:
    data = proposed(*SMALL, "--method", "published", "--length-step", "100")
    pool = load_pool("pool.yaml")
    assert len(pool.strategies) == len(data["strategies"]) == data["num_candidates"]
    assert data["method"] == "published"
    assert "takes every distinct layout" in message(*SMALL, "--method", "published", "--size", "2", "--force")


def test_a_cluster_file_gives_nodes() -> None:
    data = proposed(*BASE, "--cluster", "cluster.yaml", "--tokens", "2000", "--batches", "2", "--longest", "800")
    assert data["ranks"] == 4
    assert "tp4" not in data["left_out"]  # measured, though it spans nodes of two


def test_more_nodes_like_those_of_a_cluster() -> None:
    few = ("--tokens", "20000", "--batches", "2", "--longest", "800", "--cluster", "8x8-a800", "--out", "pool.yaml")
    known = ("propose", "--profile", "llama-7b.a800-80gb", "--lengths", "lengths.json", "--ranks", "32")
    data = proposed(*known, *few, "--also", "tp4.cp2,tp16.pp2")
    assert data["ranks"] == 32
    assert {"tp4.cp2", "tp16.pp2"} <= set(data["left_out"])
    assert "tp4.cp2" not in proposed(*known, *few, "--also", "tp4.cp2", "--with-cp", "--force")["left_out"]
    assert "analytic costs depend on the links" in message(*SMALL, "--also", "tp1.cp2", "--force")


def test_communication_on_request() -> None:
    cluster = ("--cluster", "cluster.yaml", "--ranks", "8", "--communication", "overlapped")
    data = proposed(*SMALL[:-6], *cluster, "--tokens", "4000", "--batches", "2", "--longest", "1500")
    assert data["communication"] == "overlapped"
    assert ", overlapped communication counted." in Path("pool.yaml").read_text()
    text = message(*SMALL, "--communication", "serial", "--force")
    assert "--communication serial: it depends on links and sizes; give --cluster" in text


def test_what_is_refused() -> None:
    assert "expected the cluster: --cluster NAME|FILE, --ranks N, or both" in message(*BASE, "--tokens", "100")
    assert "expected a multiple of 4" in message(*BASE, "--ranks", "6", "--tokens", "100")
    assert "--batches: expected 1 or more" in message(*SMALL, "--batches", "0")
    assert "--tokens: expected 1 or more, got 0" in message(*SMALL, "--tokens", "0")
    Path("pool.yaml").write_text("mine")
    assert "give --force to write over it" in message(*SMALL)
    assert Path("pool.yaml").read_text() == "mine"


def test_a_longest_sequence_that_no_scheme_holds() -> None:
    Path("lengths.json").write_text("[5000]")
    text = message(*BASE, "--ranks", "8", "--tokens", "9000", "--batches", "1")
    assert "a sequence has 5,000 tokens; the largest limit of the schemes is 2,000" in text
    assert not Path("pool.yaml").exists()


def test_an_interrupt_writes_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))
    real = strategies.propose.plan_step

    def interrupted(*arguments: Any, **options: Any) -> StepPlan:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(strategies.propose, "plan_step", interrupted)
    result = hgraph(*SMALL)
    assert result.exit_code == 130
    assert "interrupted; the best pool so far is in pool.yaml" in result.stderr
    assert load_pool("pool.yaml").strategies
