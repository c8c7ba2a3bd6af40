"""Batches that cannot be trained on, and ranks that fail: what is said, that all say it, and that nothing is lost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hgraph.data import GlobalBatch, Packed, make_batch
from hgraph.data.batches import BatchState
from hgraph.errors import InvalidInput, NonFiniteLoss
from hgraph.profile import Profile, SchemeCost
from hgraph.strategy import Pool, Scheme
from runtime.program import Program
from runtime.verify_batches import Assignment
from tests.gloo_workers import GlooPool, WorkersFailed
from tests.small_pools import exact_program, pool, restore, run_step, snapshot, strategy, train_step
from tests.table import Table, table_loss

U = Scheme.uniform
THREE = pool(3, strategy("tp1 x3", U(), U(), U()), strategy("tp2, tp1", U(2), U()), strategy("tp1", U()))
EACH = (((0,),), ((1,),), ((2,),))
SOUND = [[0, 1], [1, 2], [2, 3]]
KINDS = ("master", "exp_avg", "exp_avg_sq")


def three_replicas(num_ranks: int = 3) -> Program:
    """Four token ids that cost 1, 2, 3 and 4; micro-batches of at most 8 tokens."""
    own = THREE if num_ranks == 3 else Pool(num_ranks, THREE.strategies)
    profile = Profile({str(scheme): SchemeCost(0.0, 1.0, 1.0, 8) for scheme in own.schemes}, {})
    return exact_program(Table(1.0, 2.0, 3.0, 4.0), table_loss, own, profile=profile, timeout_s=30.0)


@pytest.fixture
def program() -> Program:
    return three_replicas()


def states_equal(first: dict[int, Any], second: dict[int, Any]) -> bool:
    """Whether weights, moments and step counts of all ranks are the same to the bit."""
    return all(
        state["step"] == second[rank]["step"]
        and all(_same(state[kind][name], second[rank][kind][name]) for kind in KINDS for name in state[kind])
        for rank, state in first.items()
    )


def _same(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize(
    ("sequences", "labels", "text"),
    [
        (
            [[0, 1], [1, 2], [2, 9]],
            None,
            "step 0: sequence with id 2: tokens: id 9 at position 1 is outside the vocabulary of 4 entries "
            "(ids 0 to 3)",
        ),
        (
            SOUND,
            [None, [3, 4], None],
            "step 0: sequence with id 1: labels: id 4 at position 1 is outside the vocabulary of 4 entries "
            "(ids 0 to 3)",
        ),
    ],
)
@pytest.mark.parametrize("assignment", [EACH, ((), ((0, 1, 2),), ())])
def test_an_id_outside_the_vocabulary(
    program: Program,
    sequences: list[list[int]],
    labels: list[list[int] | None] | None,
    text: str,
    assignment: Assignment,
) -> None:
    before = snapshot(program)
    with pytest.raises(InvalidInput, match=re.escape(text)):
        train_step(program, make_batch(sequences, labels), "tp1 x3", assignment)
    assert states_equal(before, snapshot(program))
    assert program.step_count == 0
    out = program.step(SOUND)
    assert (out.step, out.tokens) == (1, 6)
    assert not states_equal(before, snapshot(program))


@pytest.mark.parametrize(
    ("sequences", "text"),
    [
        ([], "global batch 0: expected at least one sequence, got none"),
        ([[0, 1], []], "plan: sequence 1: expected a length of 1 token or more, got 0; drop empty ones first"),
        (
            [[0, 1], [0] * 9],
            "plan: sequence 1 has 9 tokens; the largest limit of the pool is 8 tokens per micro-batch "
            "(strategy tp1 x3). Cut long sequences (policy 'cut') or add a strategy with a larger limit",
        ),
        ([[0, -1]], "sequence 0: token id -1 at position 1 is negative"),
        ([[[0, 1]]], "sequence 0: expected one dim of ids, got shape [1, 2]"),
        ([[0.5]], "sequence 0: expected integers, got float64"),
    ],
)
def test_a_batch_that_cannot_be_planned(program: Program, sequences: list[Any], text: str) -> None:
    before = snapshot(program)
    with pytest.raises(InvalidInput, match=re.escape(text)):
        program.step(sequences)
    assert states_equal(before, snapshot(program))
    assert program.step(SOUND).step == 1


class Failing:
    """A data set of three sequences whose second cannot be read."""

    lengths = np.array([2, 2, 2])

    def __init__(self, what: str) -> None:
        self.what = what

    def tokens(self, index: int) -> Tensor:
        if index == 1 and self.what == "raise":
            raise OSError("disk on fire")
        return torch.tensor([0, 1, 2] if index == 1 else [1, 2])


def failing_batch(what: str) -> GlobalBatch:
    return GlobalBatch(0, 0, (0, 1, 2), (2, 2, 2), 3, Failing(what), BatchState())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("raise", "step 0: rank 1 cannot read its sequences: OSError: disk on fire"),
        ("lie", "step 0: data set, id 1: expected 2 tokens, as its lengths say, got shape [3]"),
    ],
)
def test_a_data_set_that_fails_on_one_rank(program: Program, what: str, text: str) -> None:
    before = snapshot(program)
    with pytest.raises(InvalidInput, match=re.escape(text)):
        train_step(program, failing_batch(what), "tp1 x3", EACH)
    assert states_equal(before, snapshot(program))


@pytest.mark.parametrize(
    ("name", "assignment", "where"),
    [
        ("tp1 x3", EACH, "replica 1 (tp1) with sequence ids [1]; replica 2 (tp1) with sequence ids [2]"),
        ("tp2, tp1", (((1, 2),), ((0,),)), "replica 0 (tp2) with sequence ids [1, 2]"),
    ],
)
@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_a_loss_that_is_not_finite_leaves_everything_as_it_was(
    program: Program, name: str, assignment: Any, where: str, poison: float
) -> None:
    train_step(program, make_batch(SOUND), "tp1 x3", EACH)
    # Token 3 is the second token of the last sequence; its label alone makes it count.
    batch = make_batch([[0, 1], [3, 2], [3, 3]])
    program.step_count = 7
    sound = snapshot(program)
    _poison(program, 3, poison)
    poisoned = snapshot(program)
    text = (
        f"step 7, strategy {name}: loss is not finite in {where}. Weights, moments and step count are as before the "
        "step; lower the learning rate, or look at these sequences"
    )
    with pytest.raises(NonFiniteLoss, match=re.escape(text)):
        train_step(program, batch, name, assignment)
    assert states_equal(poisoned, snapshot(program))
    restore(program, sound)
    assert np.isfinite(train_step(program, batch, name, assignment))
    assert {state["step"] for state in snapshot(program).values()} == {2}


def _poison(program: Program, row: int, value: float) -> None:
    """Sets one row of the table, wherever it lies."""
    first = 0
    for state in program.ranks.values():
        shard = state.optimizer.master["values.weight"]
        if first <= row < first + len(shard):
            shard[row - first] = value
        first += len(shard)


def test_a_gradient_that_is_not_finite_where_the_loss_is() -> None:
    def root(model: nn.Module, packed: Packed) -> Tensor:
        return (model(packed.tokens) ** 0.5).sum()

    both = pool(2, strategy("two", U(), U()))
    program = exact_program(Table(0.0, 4.0), root, both)
    before = snapshot(program)
    with pytest.raises(NonFiniteLoss, match=r"step 0, strategy two: the gradient norm is inf"):
        train_step(program, make_batch([[0, 0], [1, 1]]), "two", (((0,),), ((1,),)))
    assert states_equal(before, snapshot(program))
    assert np.isfinite(train_step(program, make_batch([[1, 1], [1, 1]]), "two", (((0,),), ((1,),))))


# Over real processes.


def bad_batches_here() -> tuple[list[str], bool, float]:
    """Returns what this rank was told, whether its state was as before, and the loss of a sound step afterwards."""
    torch.set_num_threads(1)
    program = three_replicas()
    before = snapshot(program)
    texts = []
    for batch in (make_batch([[0, 1], [1, 9], [2, 3]]), failing_batch("raise")):
        try:
            train_step(program, batch, "tp1 x3", EACH)
        except InvalidInput as error:
            texts.append(str(error))
    for sequences in ([[0] * 9], [[0, 1], []]):
        try:
            program.step(sequences)
        except InvalidInput as error:
            texts.append(str(error))
    return texts, states_equal(before, snapshot(program)), run_step(program, make_batch(SOUND), "tp1 x3", EACH).loss


@pytest.mark.gloo
def test_all_processes_raise_the_same_and_go_on(gloo: GlooPool) -> None:
    answers = gloo.run(bad_batches_here, num_ranks=3, timeout_s=120.0)
    texts, unchanged, loss = answers[0]
    assert texts == [
        "step 0: sequence with id 1: tokens: id 9 at position 1 is outside the vocabulary of 4 entries (ids 0 to 3)",
        "step 0: rank 1 cannot read its sequences: OSError: disk on fire",
        "plan: sequence 0 has 9 tokens; the largest limit of the pool is 8 tokens per micro-batch (strategy tp1 x3). "
        "Cut long sequences (policy 'cut') or add a strategy with a larger limit",
        "plan: sequence 1: expected a length of 1 token or more, got 0; drop empty ones first",
    ]
    assert unchanged
    assert loss == run_step(three_replicas(), make_batch(SOUND), "tp1 x3", EACH).loss
    assert all(answer == answers[0] for answer in answers)


def different_weights_here() -> None:
    exact_program(Table(1.0, 2.0 + dist.get_rank()), table_loss, pool(2, strategy("two", U(), U())))


@pytest.mark.gloo
def test_weights_that_differ_between_processes(gloo: GlooPool) -> None:
    with pytest.raises(WorkersFailed) as failed:
        gloo.run(different_weights_here, num_ranks=2)
    text = (
        "start-up: rank 0 and rank 1 differ in weights; seed the generator before the model is built, or load "
        "the same file"
    )
    assert set(failed.value.texts) == {0, 1}
    assert all(text in own for own in failed.value.texts.values())


def wrong_number_here() -> None:
    three_replicas()


@pytest.mark.gloo
def test_a_pool_for_another_number_of_processes(gloo: GlooPool) -> None:
    with pytest.raises(WorkersFailed) as failed:
        gloo.run(wrong_number_here, num_ranks=2)
    text = (
        "the pool is for 3 ranks, but the job has 2 processes; start it with torchrun --nproc-per-node 3, or change "
        "`ranks` in the strategy file"
    )
    assert all(text in own for own in failed.value.texts.values())
    assert len(failed.value.texts) == 2


def breaks_without_a_channel(where: str) -> tuple[str, float]:
    """One rank raises what no other does, in a script without a guard; returns what this rank was told, and when."""
    torch.set_num_threads(1)
    program = exact_program(Table(1.0, 2.0, 3.0, 4.0), table_loss, THREE, timeout_s=4.0)
    rank = dist.get_rank()
    start_s = time.monotonic()
    try:
        if where == "planning" and rank == 0:
            program.planning._here = lambda *_: 1 / 0  # type: ignore[assignment, method-assign]
        if where == "step" and rank == 1:
            program.ranks[1].executables["tp1 x3"].executor.run = lambda *_, **__: 1 / 0  # type: ignore[union-attr]
        if where == "step":
            train_step(program, make_batch(SOUND), "tp1 x3", EACH)
        program.step(SOUND)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start_s
    program.close()
    return told, seconds


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("planning", "PlanError: plan of step 1: ZeroDivisionError: division by zero"),
        ("step", "first failure: rank 1: ZeroDivisionError: division by zero"),
    ],
)
def test_what_one_rank_raises_ends_all_without_a_channel_of_the_script(gloo: GlooPool, where: str, told: str) -> None:
    answers = gloo.run(breaks_without_a_channel, where, num_ranks=3, timeout_s=60.0)
    others = answers if where == "planning" else [answers[0], answers[2]]
    assert all(told in text for text, _ in others), answers
    assert max(seconds for _, seconds in answers) < 20.0


def two_programs_after_a_failure() -> float:
    """The failure of one program is not that of the next."""
    for channel_is_told in (True, False):
        program = three_replicas()
        if channel_is_told:
            program.cluster.channel.report(KeyError("old"))  # type: ignore[attr-defined]
            program.close()
    assert program.cluster.channel.first_failure() is None  # type: ignore[attr-defined]
    loss = program.step(SOUND).loss
    program.close()
    return loss


@pytest.mark.gloo
def test_each_program_has_a_channel_of_its_own(gloo: GlooPool) -> None:
    assert len(set(gloo.run(two_programs_after_a_failure, num_ranks=3, timeout_s=60.0))) == 1


JOB = """
import os, signal, sys
import torch
from hgraph.data import make_batch
from runtime.failure_channel import FailureChannel, rank_guard
from runtime.process_groups import init_process_group_from_env
from tests.small_pools import exact_program, pool, strategy, train_step
from tests.table import Table, table_loss
from tests.test_bad_batches import EACH, SOUND, THREE

rank, _ = init_process_group_from_env("gloo", 60.0)
channel = FailureChannel.on_default_store()
fail = {"kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "raise": lambda: 1 / 0}[sys.argv[1]]
with rank_guard(channel):
    program = exact_program(Table(1.0, 2.0, 3.0, 4.0), table_loss, THREE, timeout_s=60.0, channel=channel)
    train_step(program, make_batch(SOUND), "tp1 x3", EACH)
    print("trained", flush=True)
    if rank == 1:
        executor = program.ranks[1].executables["tp1 x3"].executor
        executor.run = lambda *_, **__: fail()
    train_step(program, make_batch(SOUND), "tp1 x3", EACH)
"""


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("kill", r"first failure: rank 1: no sign of life for 8 s \(killed or frozen\)"),
        pytest.param("raise", "first failure: rank 1: ZeroDivisionError: division by zero", marks=pytest.mark.long),
    ],
)
def test_when_a_rank_fails_during_a_step_all_others_end_and_name_it(how: str, told: str, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "localhost:0", "--redirects", "3", "--log-dir", str(tmp_path / "logs")]
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    job = subprocess.Popen(
        [sys.executable, *launcher, str(script), how],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_for(lambda: len(_logs(tmp_path, "trained", "stdout.log")) == 3, 200.0)
        start_s = time.monotonic()
        assert job.wait(60.0) != 0
        assert time.monotonic() - start_s < 30.0
    finally:
        if job.poll() is None:
            os.killpg(job.pid, 9)
    assert set(_logs(tmp_path, told, "stderr.log")) >= {0, 2}


def _logs(folder: Path, text: str, name: str) -> list[int]:
    """The ranks whose log matches `text`."""
    found = (folder / "logs").rglob(name)
    return sorted(int(path.parent.name) for path in found if re.search(text, path.read_text()))


def _wait_for(holds: Any, limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {limit_s:g} s"
        time.sleep(0.1)
