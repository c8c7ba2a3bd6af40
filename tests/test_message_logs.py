"""The same program on the virtual cluster and over four real processes: equal to the untouched module on both, with the
same messages on every rank, the same strategies chosen, and nothing compiled after the start.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import pytest
import torch

from hgraph.profile import Profile, SchemeCost
from hgraph.strategy import Scheme
from runtime.messages import Message
from runtime.planning import Planning
from runtime.verifier import Comparison, Verifier
from runtime.verify_batches import KINDS, Trial, draw_trial
from strategies.options import PlannerOptions
from tests.gloo_workers import GlooPool
from tests.models import language_loss, llama
from tests.small_pools import draw_batch, overridden, pool, stages, strategy, train_step

pytestmark = pytest.mark.gloo

U = Scheme.uniform
POOL = pool(
    4,
    strategy("het", U(2), U(1), U(1)),
    strategy("tp2.pp2", U(2, 2)),
    strategy("tp3 ahead of tp1", stages((3, 1), (1, 1))),
    strategy("unequal subgroups", overridden(3, layers__1__mlp="0-1[S(2)] + 2[] @ S(1)")),
    strategy("three idle ranks", U(1)),
)
NAMES = [one.name for one in POOL.strategies]
VOCABULARY = 31
# A long sequence fits tp2 and its pipeline alone: the second of three steps needs another strategy.
LIMITS = {"tp1": 20, "tp2": 20, "tp2.pp2": 100, "tp3+tp1(1,1)": 20, str(POOL.schemes[-1]): 20}


@dataclass(frozen=True, slots=True)
class Run:
    """What one process saw; `logs` holds, for each trial and each rank of the process, its messages."""

    comparisons: list[Comparison]
    logs: list[dict[int, list[Message]]]
    losses: list[float]
    chosen: list[str]
    compiled_graphs: list[int]
    uneven_s: float


def run_here() -> Run:
    """Trains on the cluster of this process: one rank of a job, or all ranks simulated."""
    torch.set_num_threads(1)
    model = llama(hidden=24, ffn=25, vocab_size=VOCABULARY, tie_embeddings=True)
    verifier = Verifier(model, language_loss, POOL, timeout_s=60.0)
    program, graphs = verifier.program, [verifier.program.compiled_graphs]
    trials = list(_trials(verifier))
    comparisons = [verifier.run(trial, name) for name, trial in trials]
    logs, losses = [], []
    for name, trial in trials:
        if trial.assignment is not None:
            losses.append(train_step(program, trial.batch, name, trial.assignment))
            logs.append({rank: list(program.cluster.log_of(rank)) for rank in program.cluster.local_ranks})
    start_s = time.monotonic()
    uneven = (tuple((index,) for index in range(5)), ((5,),), ())
    train_step(program, draw_batch(9, [95] * 5 + [100], VOCABULARY), "het", uneven)
    uneven_s = time.monotonic() - start_s
    costs = {name: SchemeCost(0.0, 1.0, 1.0, limit) for name, limit in LIMITS.items()}
    program.planning = Planning(POOL, Profile(costs, {}), PlannerOptions(), 0, program.cluster)
    steps = [program.step(draw_batch(seed, lengths, VOCABULARY)) for seed, lengths in enumerate([[9, 9], [40], [8, 7]])]
    graphs += [step.compiled_graphs for step in steps]
    return Run(comparisons, logs, losses, [step.strategy for step in steps], graphs, uneven_s)


def _trials(verifier: Verifier) -> list[tuple[str, Trial]]:
    """Every strategy on a batch of random dispatch and on one of another kind, in turn, then a walk."""
    generator = random.Random(5)
    kinds = [kind for kind in KINDS if kind != "random dispatch"]
    drawn = []
    for number, name in enumerate(NAMES):
        drawn += [(name, "random dispatch"), (name, kinds[number % len(kinds)])]
    drawn += [(generator.choice(NAMES), "random dispatch") for _ in range(4)]
    return [(name, draw_trial(kind, POOL[name], VOCABULARY, generator)) for name, kind in drawn]


@pytest.fixture(scope="module")
def virtual() -> Run:
    return run_here()


@pytest.fixture(scope="module")
def processes(gloo: GlooPool) -> list[Run]:
    return gloo.run(run_here, timeout_s=280.0)


def test_real_processes_equal_the_untouched_module(processes: list[Run], virtual: Run) -> None:
    for run in (*processes, virtual):
        assert len(run.comparisons) == 2 * len(NAMES) + 4
        for comparison in run.comparisons:
            assert comparison.worst.error <= 1e-10, comparison
    assert all(run.comparisons == processes[0].comparisons for run in processes)


def test_every_rank_sends_the_same_messages_on_both(processes: list[Run], virtual: Run) -> None:
    assert len(virtual.logs) == len(processes[0].logs) > 2 * len(NAMES)
    for number, by_rank in enumerate(virtual.logs):
        for rank, log in by_rank.items():
            assert processes[rank].logs[number][rank] == log, (number, rank)
    assert sum(len(log) for log in virtual.logs[0].values()) > 20


def test_losses_are_the_same_on_every_rank_and_on_both(processes: list[Run], virtual: Run) -> None:
    for run in processes:
        assert run.losses == processes[0].losses
    assert processes[0].losses == pytest.approx(virtual.losses, rel=1e-12)


@pytest.mark.case(69)
def test_replicas_with_five_micro_batches_and_with_one_end_together(processes: list[Run]) -> None:
    assert all(run.uneven_s < 30.0 for run in processes)


@pytest.mark.case(75)
def test_all_ranks_choose_the_same_strategy_and_compile_nothing(processes: list[Run], virtual: Run) -> None:
    for run in (*processes, virtual):
        assert run.chosen == virtual.chosen
        assert run.compiled_graphs == [virtual.compiled_graphs[0]] * 4
    assert virtual.chosen[1] == "tp2.pp2"
    assert virtual.chosen[0] == virtual.chosen[2] != virtual.chosen[1]
