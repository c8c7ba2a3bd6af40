"""`hg.verify` and `hgraph verify`: what they compare, that they find what is wrong, and how they say it."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import hgraph as hg
from hgraph.check_plan import check_plan
from hgraph.data import make_batch, num_targets, pack
from hgraph.errors import InvalidInput, VerificationError
from hgraph.strategy import Scheme
from runtime.cli import main
from runtime.cli.verify import tiny
from runtime.config import ModelConfig
from runtime.optimizer import AdamW
from runtime.verifier import Deviation, Verifier, constant_profile
from runtime.verify import VerifyReport, verify
from runtime.verify_batches import KINDS, draw_trial, plan_of, random_assignment
from tests.models import language_loss, llama
from tests.small_pools import pool, strategy
from tests.table import Table, table_loss

U = Scheme.uniform
TWO = pool(2, strategy("two", U(), U()), strategy("tp2", U(2)), strategy("idle", U()))
EIGHT = strategy("eight", U(2), U(1, 2), U(), U(), U(2))


def table_verifier(**settings: Any) -> Verifier:
    return Verifier(Table(1.0, 2.0, 3.0, 0.5), table_loss, TWO, **settings)


def test_the_report_of_a_pool_that_is_right() -> None:
    model = Table(1.0, 2.0, 3.0, 0.5).float()
    before = copy.deepcopy(model.state_dict())
    report = hg.verify(model, table_loss, TWO, seed=3)
    assert [result.name for result in report.results] == ["two", "tp2", "idle", "random walk"]
    assert [result.replicas for result in report.results] == ["tp1 + tp1", "tp2", "tp1", ""]
    assert [result.steps for result in report.results] == [6, 6, 6, 6]
    assert all(result.worst.error <= 1e-10 and result.tokens > 0 for result in report.results)
    assert (report.num_ranks, report.cluster, report.num_parameters) == (2, "virtual cluster", 4)
    assert (report.failure, report.seed, report.tolerance) == ("", 3, 1e-10)
    assert all(result.num_messages > 0 and result.message_bytes > 0 for result in report.results)
    assert VerifyReport.from_json(report.to_json()) == report
    assert next(model.parameters()).dtype == torch.float32
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_equal_seeds_give_equal_reports() -> None:
    first, second = (verify(Table(1.0, 2.0), table_loss, TWO, steps=2, seed=5) for _ in range(2))
    assert first == second


def test_batches_that_are_given() -> None:
    batch = make_batch([[0, 1, 2], [3]])
    report = verify(Table(1.0, 2.0, 3.0, 0.5), table_loss, TWO, batches=[batch], steps=2, walk=0)
    assert [(result.name, result.tokens) for result in report.results] == [("two", 8), ("tp2", 8), ("idle", 8)]


def test_parameters_that_are_not_trained_stay_as_they_are() -> None:
    model = llama(layers=1, hidden=8, heads=2, kv_heads=1, ffn=5, vocab_size=7)
    model.embed.weight.requires_grad_(False)
    report = verify(model, language_loss, TWO, steps=2, walk=2, optimizer=AdamW(lr=1e-3, warmup_steps=2))
    assert all(result.worst.error <= 1e-10 for result in report.results)


def test_a_loss_that_is_wrong_is_found() -> None:
    weight = [1.0]

    def changing(model: Any, packed: Any) -> torch.Tensor:
        """The graph keeps the weight that was there when it was traced."""
        return table_loss(model, packed) * weight[0]

    verifier = Verifier(Table(1.0, 2.0), changing, TWO)
    weight[0] = 2.0
    with pytest.raises(VerificationError) as failed:
        verifier.step(make_batch([[0, 1], [1, 1]]), "two", (((0,),), ((1,),)))
    assert failed.match(
        r"strategy two, step 0 \(given\): .* differs from the untouched module by 5.0e-01 of its greatest"
    )
    assert failed.match(r"expected at most 1e-10 \(3 of 4 values differ\)$")


def test_a_weight_that_is_wrong_is_found_and_named() -> None:
    verifier = table_verifier()
    batch = make_batch([[0, 1], [1, 2, 3]])
    verifier.step(batch, "two", (((0,),), ((1,),)))
    # Entry 3, on rank 1, has a label nowhere: only its weight can differ.
    verifier.program.ranks[1].optimizer.master["values.weight"][1] += 1e-8
    with pytest.raises(VerificationError) as failed:
        verifier.step(batch, "tp2", (((0, 1),),), "after a slip")
    text = (
        r"strategy tp2, step 1 \(after a slip\): weight values.weight differs from the untouched module by 3.3e-09 of "
        r"its greatest magnitude; expected at most 1e-10"
    )
    assert failed.match(text + "$")


def test_a_gradient_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica whose gradient is lost, as when a bridge forgets one."""
    verifier = table_verifier()
    executor = verifier.program.ranks[1].executables["two"].executor
    run = executor.run  # type: ignore[union-attr]

    def forgetful(*arguments: Any, **options: Any) -> Any:
        result = yield from run(*arguments, **options)
        result.gradients.clear()
        return result

    monkeypatch.setattr(executor, "run", forgetful)
    with pytest.raises(VerificationError, match=r"strategy two, step 0 \(given\): .* \(2 of 4 values differ\)"):
        verifier.step(make_batch([[0, 1], [1, 2, 3]]), "two", (((0,),), ((1,),)))


@pytest.mark.parametrize(
    ("got", "expected", "floor", "error"),
    [
        (1.0, 1.0, 0.0, 0.0),
        (0.0, 0.0, 0.0, 0.0),
        (1.0 + 1e-9, 1.0, 0.0, 1e-9),
        (2.0 + 2e-12, 2.0, 0.0, 1e-12),
        (1e-16, 0.0, 1e-15, 1e-11),  # a tenth of what the floor allows is a tenth of the tolerance
        (1e-16, 0.0, 0.0, math.inf),
        (math.nan, 1.0, 0.0, math.inf),
        (math.nan, math.nan, 0.0, math.inf),
        (1.0, math.inf, 1.0, math.inf),
    ],
)
def test_what_a_deviation_is(got: float, expected: float, floor: float, error: float) -> None:
    values = torch.tensor([[got, 0.0], [expected, 0.0]], dtype=torch.float64)
    deviation = _VERIFIER._deviation("x", values[0], values[1], floor)
    assert deviation.error == pytest.approx(error, rel=1e-4)


_VERIFIER = Verifier.__new__(Verifier)
_VERIFIER.tolerance = 1e-10


def test_deviations_read_well() -> None:
    assert str(Deviation("loss", 2.5e-16)) == "loss: 2.5e-16"


def test_what_cannot_be_verified() -> None:
    with pytest.raises(InvalidInput, match="verify: expected steps of 1 or more, got 0"):
        verify(Table(1.0, 2.0), table_loss, TWO, steps=0)
    with pytest.raises(InvalidInput, match="verify: expected at least one batch, got none"):
        verify(Table(1.0, 2.0), table_loss, TWO, batches=[])
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(InvalidInput, match="verify: 2 parameters are on meta, weight for one"):
        verify(model, table_loss, TWO)


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_a_random_assignment_is_a_valid_plan(seed: int, count: int) -> None:
    generator = random.Random(seed)
    lengths = [generator.randint(1, 9) for _ in range(count)]
    everything = pool(8, EIGHT)
    profile = constant_profile(everything)
    plan = plan_of(random_assignment(EIGHT, count, generator), EIGHT, profile, lengths, 4)
    check_plan(plan, everything, profile, lengths)
    assert (plan.step, plan.gap) == (4, 0.0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_batch_is_what_its_name_says(kind: str, seed: int) -> None:
    trial = draw_trial(kind, EIGHT, 11, random.Random(seed))
    batch = trial.batch
    rows = [pack([tokens], labels=[labels]) for tokens, labels in map(batch.sequence, range(len(batch)))]
    targets = [num_targets(row) for row in rows]
    assert sum(targets) == batch.num_targets
    assert all(int(row.tokens.max()) < 11 for row in rows)
    held = [[index for micro_batch in own for index in micro_batch] for own in trial.assignment or ()]
    assert (trial.assignment is None) == (kind == "planned")
    assert trial.assignment is None or sorted(itertools.chain(*held)) == list(range(len(batch)))
    assert (len(batch) == 1) == (kind == "one sequence")
    assert (batch.num_targets == 0) == (kind == "all masked")
    assert (set(batch.lengths) == {1}) == (kind == "sequences of one token")
    if kind == "one replica masked":
        assert any(own and sum(targets[index] for index in own) == 0 for own in held) or targets[0] == 0
    assert draw_trial(kind, EIGHT, 11, random.Random(seed)).assignment == trial.assignment


# The command.

CONFIG = """\
model: {layers: 1, heads: 2, kv_heads: 1, hidden: 64, ffn: 100, vocab_size: 4096}
pool: pool.yaml
"""
POOL = """\
version: 1
ranks: 2
template: megatron
strategies:
  - name: one
    replicas: [{tp: 2}]
  - name: two
    replicas: [{tp: 1, count: 2}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "pool.yaml").write_text(POOL)
    return tmp_path


def test_the_command_shows_a_row_per_strategy(folder: Path) -> None:
    result = CliRunner().invoke(main, ["verify", "--config", str(folder / "run.yaml"), "--steps", "1"])
    assert result.exit_code == 0, result.output
    rows = [line.split("│")[1].strip() for line in result.output.splitlines() if line.startswith("│")]
    assert rows == ["one", "two", "random walk"]
    assert (
        "difference from the untouched model, of the tensor's greatest value (2 ranks, virtual cluster)"
        in result.output
    )
    assert result.output.endswith("equal: nothing differs by more than 1e-10\n")


def test_the_command_fails_where_something_differs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.verifier.reference_step", lambda model, *_: (0.5, _ones(model)))
    result = CliRunner().invoke(main, ["verify", "--config", str(folder / "run.yaml"), "--steps", "1"])
    assert result.exit_code == 1
    rows = [line.split("│")[1].strip() for line in result.output.splitlines() if line.startswith("│")]
    assert rows == ["one"]
    assert "NOT EQUAL: strategy one, step 0 (planned): " in result.output
    assert "equal: nothing" not in result.output


def _ones(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}


def test_the_command_needs_a_pool() -> None:
    result = CliRunner().invoke(main, ["verify"])
    assert result.exit_code == 1
    assert "expected --config RUN.yaml or --pool FILE" in result.output


def test_the_help_has_an_example() -> None:
    result = CliRunner().invoke(main, ["verify", "--help"])
    assert "hgraph verify --config examples/first_light/config.yaml --gloo" in result.output


def test_the_tiny_model_keeps_layers_and_heads() -> None:
    small = tiny(ModelConfig(layers=6, heads=6, kv_heads=3, hidden=96, tie_embeddings=True))
    assert (small.layers, small.heads, small.kv_heads, small.tie_embeddings) == (6, 6, 3, True)
    assert (small.hidden, small.ffn, small.vocab_size) == (24, 29, 67)
    own = ModelConfig(factory="models:make", arguments={"size": 3})
    assert tiny(own) is own


@pytest.mark.long
@pytest.mark.gloo
def test_the_command_over_real_processes(folder: Path) -> None:
    command = [sys.executable, "-m", "runtime.cli", "verify", "--config", str(folder / "run.yaml")]
    done = subprocess.run([*command, "--steps", "2", "--gloo", "--json"], capture_output=True, text=True, timeout=250.0)
    assert done.returncode == 0, done.stderr
    virtual, processes = json.loads(done.stdout)
    assert (virtual["cluster"], processes["cluster"]) == ("virtual cluster", "processes over gloo")
    for mine, theirs in zip(virtual["results"], processes["results"], strict=True):
        assert (mine["name"], mine["tokens"]) == (theirs["name"], theirs["tokens"])
        assert (mine["num_messages"], mine["message_bytes"]) == (theirs["num_messages"], theirs["message_bytes"])
        assert theirs["gradient"]["error"] <= 1e-10
