"""`hgraph train --replay`: plans as a run left them, run again to the last bit, and refused where they do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hgraph.check_plan import check_plan, check_sequenced_plan
from hgraph.data import make_batch
from hgraph.errors import FileErrors, InvalidInput
from hgraph.plan import SequencedPlan
from hgraph.profile import Profile, SchemeCost
from hgraph.strategy import Pool, Scheme
from runtime.cli.train import command
from runtime.config import RunConfig, load_config
from runtime.saved_plans import SavedPlans, read_plans, saved_plan
from runtime.train import train
from strategies.select import plan_step
from tests.small_pools import pool, strategy

U = Scheme.uniform
POOL = pool(4, strategy("tp4", U(4)), strategy("tp2+tp1x2", U(2), U(), U()), strategy("tp1x4", U(), U(), U(), U()))
PROFILE = Profile(
    {"tp4": SchemeCost(1e-5, 0.1, 5, 512), "tp2": SchemeCost(2e-5, 0.2, 4, 256), "tp1": SchemeCost(3e-5, 0.4, 3, 128)},
    {"tp4": 1.0},
)
LENGTHS = [(500, 200, 100), (100, 60, 40, 30), (20, 20, 90, 100, 3)]


def batch_of(lengths: tuple[int, ...]) -> Any:
    return make_batch([[1] * length for length in lengths])


def write(path: Path, plans: dict[int, Any] | None = None) -> Path:
    """Writes the plans of three steps as a run does."""
    lines = []
    for step, lengths in enumerate(LENGTHS, start=1):
        plan = (plans or {}).get(step) or plan_step(POOL, PROFILE, lengths, step=step)
        lines.append(saved_plan(plan, POOL, lengths, step).to_json() + "\n")
    path.write_text("".join(lines))
    return path


@pytest.fixture
def saved(tmp_path: Path) -> SavedPlans:
    return read_plans(write(tmp_path / "plans.jsonl"))


def test_what_was_saved_is_replayed(saved: SavedPlans) -> None:
    assert list(saved.steps) == [1, 2, 3]
    for step, lengths in enumerate(LENGTHS, start=1):
        made = plan_step(POOL, PROFILE, lengths, step=step)
        plan = saved.plan(step, batch_of(lengths), POOL, PROFILE)
        assert plan.solver == f"replayed ({made.solver})"
        assert [own.micro_batches for own in plan.replicas] == [own.micro_batches for own in made.replicas]
        assert plan.predicted_ms == pytest.approx(made.predicted_ms, rel=1e-12)
        check_plan(plan, POOL, PROFILE, lengths)


def test_times_are_those_of_the_run_that_replays(saved: SavedPlans) -> None:
    slower = replace(
        PROFILE, schemes={name: replace(cost, c=10 * cost.c, b=2 * cost.b) for name, cost in PROFILE.schemes.items()}
    )
    plan = saved.plan(2, batch_of(LENGTHS[1]), POOL, slower)
    assert plan.predicted_ms > saved.steps[2].plan.predicted_ms
    check_plan(plan, POOL, slower, LENGTHS[1])


def test_plans_in_parts_are_replayed(tmp_path: Path) -> None:
    parts = [plan_step(pool(4, POOL[name]), PROFILE, own, step=1) for name, own in (("tp4", [500]), ("tp1x4", [100]))]
    rest = plan_step(pool(4, POOL["tp2+tp1x2"]), PROFILE, [200], step=1)
    plans = (parts[0].renumbered([0]), rest.renumbered([1]), parts[1].renumbered([2]))
    read = read_plans(write(tmp_path / "plans.jsonl", {1: SequencedPlan(plans)}))
    plan = read.plan(1, batch_of(LENGTHS[0]), POOL, PROFILE)
    assert isinstance(plan, SequencedPlan) and plan.strategy == "tp4, then tp2+tp1x2, then tp1x4"
    check_sequenced_plan(plan, POOL, PROFILE, LENGTHS[0])


@pytest.mark.parametrize(
    ("step", "lengths", "expected"),
    [
        (4, (10,), "step 4: expected a plan to replay, got none; the file has steps 1 to 3"),
        (2, (100, 60), "step 2: the batch is not that of the plan: expected 4 sequences, got 2; are data and seed"),
        (
            2,
            (100, 61, 41, 30),
            "step 2: the batch is not that of the plan: expected sequence 1 to have 60 tokens, got 61; 2 of 4 lengths",
        ),
    ],
)
def test_another_batch_is_refused(saved: SavedPlans, step: int, lengths: tuple[int, ...], expected: str) -> None:
    with pytest.raises(InvalidInput, match=f"plans.jsonl: {expected}"):
        saved.plan(step, batch_of(lengths), POOL, PROFILE)


def test_another_pool_is_refused(saved: SavedPlans) -> None:
    lacking = pool(4, POOL["tp2+tp1x2"], POOL["tp1x4"])
    with pytest.raises(InvalidInput, match="step 1: strategy 'tp4' is not in the pool; there are tp2[+]tp1x2, tp1x4"):
        saved.check_pool(lacking)
    other = Pool(4, (strategy("tp4", U(2), U(2)), *POOL.strategies[1:]))
    text = "step 1: strategy tp4 is not as it was: expected the replicas tp4 0-3, the pool has tp2 0-1, tp2 2-3"
    with pytest.raises(InvalidInput, match=text):
        saved.plan(1, batch_of(LENGTHS[0]), other, PROFILE)
    saved.check_pool(POOL)


def test_faults_of_a_file_come_together(tmp_path: Path) -> None:
    path = write(tmp_path / "plans.jsonl")
    lines = path.read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | {"lengths": [3, "x"], "version": 1})
    lines += [json.dumps(json.loads(lines[2]) | {"version": 7}), lines[0], '{"step": 9}', "{"]
    path.write_text("\n".join(lines) + '\n{"version": 1, "st')
    with pytest.raises(FileErrors) as caught:
        read_plans(path)
    text = str(caught.value)
    for part in (
        "line 2: lengths[1]: expected an integer, got text 'x'",
        "line 4: version: expected 1, got 7",
        "line 5: step: step 1 has a plan already",
        "line 6: lengths: expected a value, got nothing",
        "line 7: ",
    ):
        assert part in text
    assert "line 8" not in text, "an interrupted run leaves part of a line"


def test_no_plans_at_all(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("")
    with pytest.raises(FileErrors, match="expected a plan a line, as a run leaves them in plans.jsonl, got none"):
        read_plans(tmp_path / "p.jsonl")
    with pytest.raises(InvalidInput, match="expected a file that can be read"):
        read_plans(tmp_path / "none.jsonl")


CONFIG = """\
name: first
steps: 4
num_processes: 1
tokens_per_step: 400
pool: pool.yaml
model: {vocab_size: 300, hidden: 16, layers: 1, heads: 4, kv_heads: 4, ffn: 16}
data: {kind: tokens, paths: [data.jsonl], vocab_size: 300, max_length: 250, policy: cut}
optimizer: {warmup_steps: 2}
memory: {budget_mib: 64, max_tokens: {tp1: 128, tp2: 256}}
calibration: {lengths: [8, 16, 32], repeats: 1, cache: null}
planner: {depth: 1, program: false}
"""
POOL_FILE = """\
version: 1
ranks: 2
strategies:
  - {name: tp2, replicas: [{tp: 2}]}
  - {name: tp1x2, replicas: [{tp: 1, count: 2}]}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pool.yaml").write_text(POOL_FILE)
    (tmp_path / "config.yaml").write_text(CONFIG)
    lengths = [250, 100, 60, 40, 30, 20, 100, 90, 70, 50, 110, 30, 40, 20, 10] * 3
    rows = [json.dumps({"tokens": [(7 * i + j) % 300 for j in range(n)]}) for i, n in enumerate(lengths)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path


def metrics(config: RunConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]


def test_a_replayed_run_has_the_same_losses_to_the_last_bit(folder: Path) -> None:
    """Costs are measured anew, and the planner would choose otherwise: only the file decides."""
    first = load_config("config.yaml")
    train(first)
    plans = first.folder / "plans.jsonl"
    again = load_config("config.yaml", ["name=again"])
    train(again, replay=plans)
    ours, theirs = metrics(again), metrics(first)
    for name in ("step", "strategy", "loss", "grad_norm", "tokens"):
        assert [line[name] for line in ours] == [line[name] for line in theirs]
    assert {line["solver"] for line in ours} == {"replayed (heuristic)"}
    assert all(line["first_plan_ms"] is None and line["plan_wait_ms"] == 0 for line in ours)
    assert "4 replayed, none made" in (again.folder / "summary.txt").read_text()
    assert "ran in none of 4 steps" in (first.folder / "summary.txt").read_text()
    _other_strategies(plans)
    changed = load_config("config.yaml", ["name=changed"])
    train(changed, replay=plans)
    assert {line["strategy"] for line in metrics(changed)} == {"tp2"}
    with pytest.raises(InvalidInput, match="plans.jsonl: step 1: the batch is not that of the plan"):
        train(load_config("config.yaml", ["name=other", "seed=1"]), replay=plans)


def _other_strategies(path: Path) -> None:
    """Puts every sequence of every step on tp2, one a micro-batch: plans that no planner would make."""
    lines = []
    for line in path.read_text().splitlines():
        data = json.loads(line)
        micro_batches = [[index] for index in range(len(data["lengths"]))]
        data["layout"] = {"tp2": ["tp2 0-1"]}
        data["plan"] |= {"strategy": "tp2", "replicas": [{"micro_batches": micro_batches, "predicted_ms": 1.0}]}
        lines.append(json.dumps(data) + "\n")
    path.write_text("".join(lines))


def test_the_command_line_checks_the_plans_before_anything_starts(folder: Path) -> None:
    def failure(*arguments: str) -> str:
        with pytest.raises(InvalidInput) as caught:
            CliRunner().invoke(command, ["config.yaml", *arguments], catch_exceptions=False)
        return str(caught.value)

    path = write(folder / "plans.jsonl")
    assert "strategy 'tp4' is not in the pool; there are tp2, tp1x2" in failure("--replay", str(path))
    assert "none.jsonl: expected a file that can be read" in failure("--replay", "none.jsonl")
    (folder / "runs" / "first").mkdir(parents=True)
    own = write(folder / "runs" / "first" / "plans.jsonl")
    assert "is what this run would write; give the run another --name" in failure("--replay", str(own))
