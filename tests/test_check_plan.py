"""The checker of step plans: each property, broken once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hgraph.check_plan import check_plan
from hgraph.errors import PlanError
from hgraph.plan import Candidate, ReplicaPlan, StepPlan
from hgraph.profile import Profile, SchemeCost
from hgraph.strategy import Pool, Replica, Scheme, Strategy

SCHEME = Scheme.uniform()
POOL = Pool(
    3,
    (
        Strategy("two", (Replica(SCHEME, (0,)), Replica(SCHEME, (1,)))),
        Strategy("pipe", (Replica(Scheme.uniform(1, 2), (0, 1)), Replica(SCHEME, (2,)))),
    ),
)
PROFILE = Profile({"tp1": SchemeCost(0.0, 1.0, 2.0, 10), "tp1.pp2": SchemeCost(0.0, 3.0, 6.0, 20)}, {"two": 4.0})
LENGTHS = [6, 4, 9]
CANDIDATES = (Candidate("two", 18.0, 15.0, "taken"), Candidate("pipe", None, 40.0, "slow"))
# Replica 0 runs 6 and 4 in one micro-batch: 12 ms; replica 1 runs 9: 11 ms; bridges 4 ms.
PLAN = StepPlan(
    3,
    "two",
    (ReplicaPlan(((0, 1),), 12.0), ReplicaPlan(((2,),), 11.0)),
    16.0,
    15.0,
    16 / 15 - 1,
    "heuristic",
    flow_ms=12.0,
)


def replicas(*micro_batches: tuple[tuple[int, ...], ...]) -> tuple[ReplicaPlan, ...]:
    times = [
        sum(sum(LENGTHS[i] for i in group) + 2.0 for group in own if max(group, default=0) < 3) for own in micro_batches
    ]
    return tuple(ReplicaPlan(own, time) for own, time in zip(micro_batches, times, strict=True))


def test_a_sound_plan_passes() -> None:
    check_plan(PLAN, POOL, PROFILE, LENGTHS)


def test_a_pipelined_plan_passes_with_its_schedule() -> None:
    # One micro-batch of 10 tokens: 36 ms in each of two stages.
    pipe = (ReplicaPlan(((0, 1),), 72.0), ReplicaPlan(((2,),), 11.0))
    check_plan(StepPlan(0, "pipe", pipe, 72.0, 72.0, 0.0, "heuristic", flow_ms=72.0), POOL, PROFILE, LENGTHS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "three"}, "plan of step 3: strategy 'three' is not in the pool; there are ['two', 'pipe']"),
        ({"replicas": PLAN.replicas[:1]}, "plan of step 3, strategy two: expected 2 replicas, got 1"),
        ({"replicas": replicas(((0, 1),), ())}, "sequence 2 is in 0 micro-batches; expected exactly one"),
        ({"replicas": replicas(((0, 1),), ((2,), (1,)))}, "sequence 1 is in 2 micro-batches; expected exactly one"),
        ({"replicas": replicas(((0, 1), ()), ((2,),))}, "strategy two, replica 0: micro-batch 1 is empty"),
        ({"replicas": replicas(((0, 1),), ((2, 3),))}, "replica 1, micro-batch 0: sequence 3 is not in the batch of 3"),
        (
            {"replicas": replicas(((0, 1),), ((2, -1),))},
            "replica 1, micro-batch 0: sequence -1 is not in the batch of 3",
        ),
        (
            {"replicas": replicas(((0, 2),), ((1,),))},
            "strategy two, replica 0 (tp1), micro-batch 0: 15 tokens exceed the limit of 10",
        ),
        (
            {"replicas": (replace(PLAN.replicas[0], predicted_ms=12.1), PLAN.replicas[1])},
            "replica 0 (tp1): predicted_ms: expected 12.0, got 12.1",
        ),
        ({"predicted_ms": 12.0}, "predicted_ms (slowest replica plus bridges): expected 16.0, got 12.0"),
        ({"bound_ms": 17.0, "gap": 16 / 17 - 1}, "bound_ms 17.0 is above the predicted time of 16.0 ms"),
        ({"bound_ms": float("nan")}, "bound_ms: expected a finite number of 0 or more, got nan"),
        ({"gap": 0.5}, "gap: expected 0.0666"),
        ({"candidates": (Candidate("four", None, None, ""),)}, "candidate 'four' is listed 1 times"),
        ({"flow_ms": 16.0}, "plan of step 3, strategy two: flow_ms (slowest replica): expected 12.0, got 16.0"),
        ({"candidates": CANDIDATES[1:] * 2}, "candidate 'pipe' is listed 2 times"),
        (
            {"candidates": (Candidate("two", 16.0, 15.0, ""), Candidate("pipe", 20.0, 21.0, ""))},
            "candidate pipe: bound_ms 21.0 is above its predicted time of 20.0 ms",
        ),
        (
            {"candidates": (Candidate("two", 16.0, 15.0, ""), Candidate("pipe", None, 14.0, ""))},
            "bound_ms (the least of the candidates'): expected 14.0, got 15.0",
        ),
        ({"flow_ms": 11.0}, "flow_ms (slowest replica): expected 12.0, got 11.0"),
        (
            {"candidates": (Candidate("pipe", 15.0, 1.0, "", flow_ms=15.9),)},
            "candidate pipe was planned at 15.0 ms, faster than the plan's 16.0 ms",
        ),
        (
            {"candidates": (Candidate("pipe", 15.0, 1.0, ""),)},
            "candidate pipe was planned at 15.0 ms, faster than the plan's 16.0 ms",
        ),
    ],
)
def test_each_broken_property_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError) as error:
        check_plan(replace(PLAN, **change), POOL, PROFILE, LENGTHS)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_a_faster_candidate_of_more_flow_time_may_be_passed_over() -> None:
    candidates = (Candidate("pipe", 15.0, 15.0, "its flow time is more", flow_ms=16.1),)
    check_plan(replace(PLAN, candidates=candidates), POOL, PROFILE, LENGTHS)


@pytest.mark.case(49)
def test_the_limit_counts_true_lengths() -> None:
    wide = Profile({"tp1": SchemeCost(0.0, 1.0, 2.0, 16_384)}, {})
    lengths = [100] * 100
    pool = Pool(1, (Strategy("one", (Replica(SCHEME, (0,)),)),))
    plan = StepPlan(
        0, "one", (ReplicaPlan((tuple(range(100)),), 10_002.0),), 10_002.0, 10_002.0, 0.0, "heuristic", flow_ms=10_002.0
    )
    check_plan(plan, pool, wide, lengths)


def test_a_plan_reads_back_from_its_text_and_still_passes() -> None:
    plan = replace(PLAN, candidates=(Candidate("two", 16.0, 15.0, "taken"), CANDIDATES[1]))
    again = StepPlan.from_json(plan.to_json())
    assert again == plan
    check_plan(again, POOL, PROFILE, LENGTHS)
