"""Planning for a program: the same plan on every rank and in every run, ahead or not; replicas with nothing to do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hgraph.check_plan import check_plan
from hgraph.data import GlobalBatch, TokenDataset
from hgraph.errors import RankFailed
from hgraph.plan import StepPlan
from hgraph.profile import Profile, SchemeCost
from hgraph.strategy import Scheme
from runtime.cluster import ProcessCluster, SimulatedCluster, choose_cluster
from runtime.failure_channel import FailureChannel
from runtime.planning import Planning
from strategies.ahead import PlanAhead, PlannedStep, PlanTimes
from strategies.options import PlannerOptions
from strategies.service import PlanService
from tests.gloo_workers import GlooPool
from tests.models import language_loss, llama
from tests.small_pools import assert_close, draw_batch, exact_program, expected_step, pool, run_step, strategy

U = Scheme.uniform
POOL = pool(4, strategy("mixed", U(2), U(), U()), strategy("pair", U(2), U(2)), strategy("four", U(), U(), U(), U()))
PROFILE = Profile({"tp2": SchemeCost(1e-3, 0.2, 4, 300), "tp1": SchemeCost(2e-3, 0.35, 3, 150)}, {"mixed": 1.0})
OPTIONS = PlannerOptions(gap=0.0, max_nodes=3)
LENGTHS = [[250, 100, 60, 40, 7], [16] * 16, [120, 120, 110, 30, 20, 10], [9], [140, 90, 90, 80, 5, 5]]


def batches(lengths: Sequence[Sequence[int]], shuffle: int | None = None) -> list[GlobalBatch]:
    """Returns batches of these lengths; with `shuffle`, of other sequences of the data set."""
    result = []
    for index, own in enumerate(lengths):
        ids = list(range(len(own)))
        if shuffle is not None:
            random.Random(shuffle).shuffle(ids)
        dataset = TokenDataset([[0] * own[ids.index(position)] for position in range(len(own))])
        result.append(GlobalBatch(index, 0, tuple(ids), tuple(own), sum(own), dataset))
    return result


def plans_of(planning: Planning, of: Sequence[GlobalBatch]) -> list[StepPlan]:
    """Returns the plans as training gets them."""
    plans = []
    for batch in planning.ahead(of, lambda: len(plans)):
        plan, times = planning.plan(batch, len(plans) + 1)
        assert times.waited_ms >= 0
        plans.append(replace(plan, plan_ms=0.0))
    planning.close()
    return plans


def planning(ahead: PlanAhead | int, cluster: Any = None) -> Planning:
    return Planning(POOL, PROFILE, OPTIONS, ahead, cluster or SimulatedCluster(4))


@pytest.mark.case(59)
def test_plans_are_the_same_ahead_or_not_and_with_other_ids() -> None:
    in_step = plans_of(planning(0), batches(LENGTHS))
    assert [plan.step for plan in in_step] == [1, 2, 3, 4, 5]
    for plan, lengths in zip(in_step, LENGTHS, strict=True):
        check_plan(plan, POOL, PROFILE, lengths)
    assert plans_of(planning(0), batches(LENGTHS, shuffle=1)) == in_step
    assert plans_of(planning(PlanAhead(2, workers=2)), batches(LENGTHS)) == in_step


def plans_of_this_rank(wait: str) -> list[StepPlan]:
    channel = FailureChannel.on_default_store(heartbeat_s=1.0)
    cluster = choose_cluster(4, 600.0, channel)
    assert dist.get_world_size() == 4
    plans = plans_of(planning(PlanAhead(2, wait=wait), cluster), batches(LENGTHS))  # type: ignore[arg-type]
    cluster.close()
    return plans


@pytest.mark.gloo
@pytest.mark.case(59)
@pytest.mark.parametrize("wait", ["best", "first"])
def test_plans_are_the_same_on_every_rank(gloo: GlooPool, wait: str) -> None:
    """Also where a step takes whatever plan is there: rank 0 decides."""
    by_rank = gloo.run(plans_of_this_rank, wait, timeout_s=120.0)
    assert all(plans == by_rank[0] for plans in by_rank)
    if wait == "best":
        assert by_rank[0] == plans_of(planning(0), batches(LENGTHS))


def test_rank_0_answers_while_the_others_still_wait_for_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limit follows from that of the cluster, ahead or not. Without any time, the first plan is taken."""
    (batch,) = batches(LENGTHS[4:])
    patient = planning(0).plan(batch, 1)[0]
    assert patient.runs and planning(0, SimulatedCluster(4, 40.0)).limit_s == 20.0
    in_step = planning(0, SimulatedCluster(4, 0.0))
    plan = in_step.plan(batch, 1)[0]
    assert plan.solver == "heuristic (no better plan within 0 s)" and not plan.runs
    assert in_step.plan_under(1, "four", [9, 5]).plan.strategy == "four"
    limits = []

    def result(_: PlanService, number: int, timeout_s: float) -> PlannedStep:
        limits.append(timeout_s)
        return PlannedStep(plan, PlanTimes())

    monkeypatch.setattr(PlanService, "result", result)
    ahead = planning(PlanAhead(1), SimulatedCluster(4, 40.0))
    for own in ahead.ahead([batch], lambda: 0):
        ahead.plan(own, 1)
    ahead.close()
    assert limits == [20.0]


def test_a_rank_that_waits_in_vain_names_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Timed out waiting 120000ms for recv operation to complete")

    monkeypatch.setattr(dist, "broadcast_object_list", fail)
    cluster = object.__new__(ProcessCluster)
    cluster.rank, cluster.local_ranks, cluster.timeout_s, cluster._owns_channel = 1, (1,), 120.0, False
    cluster.channel = SimpleNamespace(report=lambda _: None, diagnose=lambda: "no rank has reported a failure")  # type: ignore[assignment]
    cluster.calls = SimpleNamespace(last=SimpleNamespace(name="step 7"))  # type: ignore[assignment]
    with pytest.raises(RankFailed) as caught:
        planning(0, cluster).plan(batches(LENGTHS[:1])[0], 7)
    assert str(caught.value) == (
        "rank 1: waited 0.0 s (limit 120 s) for the plan of step 7 from rank 0 (step 7)\n"
        "  Timed out waiting 120000ms for recv operation to complete\n  no rank has reported a failure"
    )


def test_batches_that_were_skipped_are_forgotten() -> None:
    ahead = planning(PlanAhead(2))
    later = []
    for number, batch in enumerate(ahead.ahead(batches(LENGTHS), lambda: 0)):
        if number % 2:
            later.append(ahead.plan(batch, number + 1)[0])
    assert [len(plan.sequences) for plan in later] == [16, 1]
    assert ahead.take_notes() == []
    ahead.close()


@pytest.mark.case(53)
@pytest.mark.parametrize("lengths", [[9, 5], [7]])
def test_fewer_sequences_than_replicas(lengths: list[int]) -> None:
    """Replicas without a sequence are idle; loss and gradients are those of the untouched module."""
    model = llama(hidden=16, heads=4, kv_heads=2, ffn=11, vocab_size=19)
    three = pool(3, strategy("three", U(), U(), U()))
    program = exact_program(model, language_loss, three)
    batch = draw_batch(0, lengths, 19)
    expected = expected_step(model, language_loss, batch)
    plan, _ = program.planning.plan(batch, 1)
    assert sum(1 for replica in plan.replicas if not replica.micro_batches) == 3 - len(lengths)
    assert_close(run_step(program, batch, "three", tuple(own.micro_batches for own in plan.replicas)), expected)
    out = program.step(batch)
    assert out.replicas_used == len(lengths) and out.loss == pytest.approx(expected.loss, rel=1e-12)
