"""`hgraph train` over real processes: what it writes, what it prints, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hgraph.check_plan import check_plan
from hgraph.data import TokenDataset, global_batches
from hgraph.profile_file import read_profile_file
from hgraph.strategy_file import load_pool
from runtime.config import load_config
from runtime.saved_plans import read_plans
from tests.jobs import alive, gone_within, members_of

pytestmark = pytest.mark.gloo

FIELDS = [
    "step",
    "strategy",
    "replicas",
    "idle_ranks",
    "loss",
    "grad_norm",
    "tokens",
    "tokens_per_s",
    "predicted_ms",
    "measured_ms",
    "solver",
    "bound_programs",
    "bound_gain",
    "integer_programs",
    "solver_gain",
    "first_plan_ms",
    "plan_ms",
    "plan_wait_ms",
    "bridge_bytes",
    "compiled_graphs",
]
CONFIG = """\
name: tiny
steps: {steps}
num_processes: 4
tokens_per_step: 800
pool: pool.yaml
model: {{vocab_size: 300, hidden: 16, layers: 1, heads: 4, kv_heads: 2, ffn: 32}}
data: {{kind: tokens, paths: [data.jsonl], vocab_size: 300, max_length: 512, policy: cut}}
optimizer: {{warmup_steps: 2}}
memory: {{budget_mib: 64, max_tokens: {{tp1: 128, tp2: 256, tp4: 512}}}}
calibration: {{lengths: [16, 64, 128], repeats: 1, cache: cache}}
"""
POOL = """\
version: 1
ranks: 4
template: megatron
strategies:
  - name: tp4
    replicas:
      - {tp: 4}
  - name: tp2+tp1x2
    replicas:
      - {tp: 2}
      - {tp: 1, count: 2}
  - name: tp1x4
    replicas:
      - {tp: 1, count: 4}
"""
SMALL_POOL = """\
version: 1
ranks: 2
template: megatron
strategies:
  - name: tp2
    replicas:
      - {tp: 2}
"""


def write_files(folder: Path) -> Path:
    (folder / "pool.yaml").write_text(POOL)
    lengths = [500, 200, 100, 60, 40, 30, 20, 100, 90, 70, 50, 210, 30, 40, 20, 10] * 4
    rows = [json.dumps({"tokens": [(7 * i + j) % 300 for j in range(n)]}) for i, n in enumerate(lengths)]
    (folder / "data.jsonl").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of six steps: its folder, and what it printed."""
    folder = write_files(tmp_path_factory.mktemp("finished"))
    job = start(folder, 6, "--name", "run-1", "optimizer.lr=2e-3")
    out, err = job.communicate(timeout=240)
    assert job.returncode == 0, err
    return folder, out


def start(folder: Path, steps: int, *arguments: str) -> subprocess.Popen[str]:
    (folder / "config.yaml").write_text(CONFIG.format(steps=steps))
    command = [sys.executable, "-m", "runtime.cli", "train", "config.yaml", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_run_leaves_metrics_plans_and_configuration(finished: tuple[Path, str]) -> None:
    folder, out = finished
    run = folder / "runs" / "run-1"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert all(list(line) == FIELDS for line in metrics)
    assert len({line["compiled_graphs"] for line in metrics}) == 1, "nothing is compiled after the first step"
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    config = load_config(run / "config.yaml")
    assert config.optimizer.lr == 2e-3 and config.name == "run-1"
    plans = read_plans(run / "plans.jsonl").steps.values()
    assert [saved.plan.strategy for saved in plans] == [line["strategy"] for line in metrics]
    assert "steps per strategy" in out and "unigram entropy" in out and "(tp4)" in out
    assert out.count("step   1 ") == 1, "one process prints"


def test_plans_that_were_written_hold_for_the_cached_profile(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    (cached,) = (folder / "cache").glob("profile-*.yaml")
    profile, pool = read_profile_file(cached).profile(4), load_pool(folder / "pool.yaml")
    lengths = [len(json.loads(line)["tokens"]) for line in (folder / "data.jsonl").read_text().splitlines()]
    plans = read_plans(folder / "runs/run-1/plans.jsonl").steps.values()
    dataset = TokenDataset([[0] * length for length in lengths])
    for saved, batch in zip(plans, global_batches(dataset, tokens_per_step=800, max_steps=6), strict=True):
        assert saved.lengths == batch.lengths
        check_plan(saved.plan, pool, profile, batch.lengths)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "doing"),
    [
        (signal.SIGINT, "trains"),
        pytest.param(signal.SIGINT, "compiles", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, "trains", marks=pytest.mark.long),
    ],
)
def test_an_interrupt_ends_every_process(folder: Path, number: int, doing: str) -> None:
    (folder / "pool.yaml").write_text(SMALL_POOL)
    job = start(folder, 500, "--nproc", "2", "data.max_length=256")
    metrics = folder / "runs" / "tiny" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    assert job.stdout is not None
    while doing == "compiles" and not job.stdout.readline().startswith("model: "):
        assert job.poll() is None, job.communicate()[1]
    while doing == "trains" and not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert job.poll() is None, job.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    members = members_of(job.pid)
    assert len(members) >= (4 if doing == "trains" else 3), "a launcher, two ranks, a planner"
    job.send_signal(number)
    _, err = job.communicate(timeout=60)
    word = "interrupted\n" if number == signal.SIGINT else "terminated\n"
    assert job.returncode == 128 + number
    assert err.endswith(word) and err.count("interrupted") + err.count("terminated") == 1 and "Traceback" not in err
    assert gone_within(5.0, members), alive(members)
    assert doing == "compiles" or metrics.read_text().endswith("\n"), "whole lines are kept"


def test_a_pool_for_another_number_of_ranks_is_refused(folder: Path) -> None:
    job = start(folder, 3, "--nproc", "2")
    _, err = job.communicate(timeout=120)
    assert job.returncode == 1
    assert "pool.yaml is for 4 ranks, but num_processes is 2" in err
    assert "Traceback" not in err


@pytest.mark.long
def test_an_error_of_all_ranks_is_shown_once(folder: Path) -> None:
    (folder / "pool.yaml").write_text(SMALL_POOL)
    job = start(folder, 3, "--nproc", "2", "memory.budget_mib=0.001", "memory.max_tokens={}")
    _, err = job.communicate(timeout=120)
    assert job.returncode == 1
    assert err.count("leaves no room for a token in 0.001 MiB per rank") == 1
    assert "Traceback" not in err
