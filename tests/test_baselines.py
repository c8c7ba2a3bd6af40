"""Baselines: packing and dispatch by rule, against published numbers and by hand; the published algorithm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hgraph.errors import InvalidInput, PlanError
from hgraph.profile import Profile, SchemeCost
from hgraph.step_parts import MicroBatch, Part, StepClock, check_parts
from hgraph.strategy import Pool, Replica, Scheme, Strategy
from strategies.baselines import (
    Assign,
    assign_balanced,
    assign_balanced_finely,
    assign_packs,
    assign_padded_packs,
    assign_padded_rows,
    balanced_packs,
    first_fit_decreasing,
)
from strategies.published import published_plan

PUBLISHED = json.loads((Path(__file__).parent / "published_baselines.json").read_text())
CASES = [
    pytest.param(case, own, id=f"{case['id']}/tp{own['tp']}.pp{own['pp']}")
    for case in PUBLISHED["cases"]
    for own in case["homogeneous"]
]
ASSIGNS: list[Assign] = [assign_packs, assign_balanced, assign_balanced_finely, assign_padded_packs, assign_padded_rows]


def equal_replicas(tp: int, pp: int, count: int) -> Strategy:
    scheme = Scheme.uniform(tp, pp)
    size = scheme.num_ranks
    return Strategy("equal", tuple(Replica(scheme, tuple(range(i * size, (i + 1) * size))) for i in range(count)))


def slots_ms(part: Part) -> float:
    """The published packing cost: (pp - 1 + v) times the longest micro-batch of a replica, the greatest."""
    rows = zip(part.strategy.replicas, part.replicas, strict=True)
    return max((replica.scheme.pp - 1 + len(own)) * max(one.ms for one in own) for replica, own in rows if own)


class TestPublishedNumbers:
    @pytest.mark.parametrize(("case", "own"), CASES)
    def test_static_baselines(self, case: dict[str, Any], own: dict[str, Any]) -> None:
        strategy = equal_replicas(own["tp"], own["pp"], own["replicas"])
        cost = SchemeCost(own["a"], own["b"], own["c"], own["max_tokens"])
        profile = Profile({str(strategy.replicas[0].scheme): cost}, {})
        for assign, expected in ((assign_packs, own["packed"]), (assign_padded_packs, own["padded"])):
            part = assign(strategy, profile, case["lengths"], case["context"])
            assert [slots_ms(part), StepClock().flow_ms([part])] == pytest.approx(expected, abs=2e-3)
        part = assign_balanced_finely(strategy, profile, case["lengths"], case["context"])
        # With one stage the published least time; with more, ours is the least simulated time, theirs the least flow.
        flow_ms = StepClock().flow_ms([part])
        if own["pp"] == 1:
            assert flow_ms == pytest.approx(own["balanced"][1], abs=2e-3)
        else:
            assert flow_ms >= own["balanced"][1] - 2e-3
            assert StepClock().ms([part]) <= own["balanced"][1] * 1.001


COST = SchemeCost(1e-3, 0.1, 10.0, 100)
PROFILE = Profile({"tp1": COST, "tp1.pp2": COST, "tp2": SchemeCost(5e-4, 0.06, 8.0, 200)}, {})


class TestPacking:
    @pytest.mark.case(32)
    def test_first_fit_decreasing_at_capacities_that_are_no_powers_of_two(self) -> None:
        assert [len(first_fit_decreasing(range(8), [4] * 8, capacity)) for capacity in (9, 8, 16)] == [4, 4, 2]

    @pytest.mark.case(46)
    def test_the_cap_counts_before_the_least_number_of_packs(self) -> None:
        packs = balanced_packs(range(8), [7] * 8, SchemeCost(0.0, 1.0, 0.0, 8), 7)
        assert packs is None
        assert len(balanced_packs(range(8), [7] * 8, SchemeCost(0.0, 1.0, 0.0, 8), 8) or []) == 8

    def test_fine_packing_never_drops_where_balanced_packs_find_no_room(self) -> None:
        # 63 sequences of 51 tokens, two of which never share 100: more packs than the numbers that are tried.
        lengths = [51] * 63
        part = assign_balanced_finely(equal_replicas(1, 1, 1), PROFILE, lengths, 100)
        check_parts([part], PROFILE, lengths)
        assert len(part.replicas[0]) == 63

    def test_padding_is_charged_b_a_token(self) -> None:
        part = assign_padded_packs(equal_replicas(1, 1, 1), PROFILE, [30], 80)
        assert part.replicas == ((MicroBatch((0,), 80, COST.micro_batch_ms([30]) + 0.1 * 50),),)

    def test_padded_rows_cost_as_the_longest_of_their_micro_batch(self) -> None:
        part = assign_padded_rows(equal_replicas(1, 1, 1), PROFILE, [30, 10, 40, 5], 80)
        first, second = part.replicas[0]
        assert (first.sequences, first.tokens, first.ms) == ((0, 1), 60, COST.micro_batch_ms([30, 30]))
        assert (second.sequences, second.tokens) == ((2, 3), 80)

    @given(st.lists(st.integers(1, 80), min_size=1, max_size=40), st.integers(1, 4), st.sampled_from(ASSIGNS))
    @settings(deadline=None, max_examples=25)
    def test_every_sequence_runs_once_within_the_limits(self, lengths: list[int], count: int, assign: Assign) -> None:
        for pp in (1, 2):
            check_parts([assign(equal_replicas(1, pp, count), PROFILE, lengths, 80)], PROFILE, lengths)


class TestCheckParts:
    def test_a_sequence_that_is_missing_and_one_that_runs_twice(self) -> None:
        strategy = equal_replicas(1, 1, 1)
        once = MicroBatch((0,), 5, 1.0)
        with pytest.raises(PlanError, match="sequence 1 runs 0 times; expected exactly once"):
            check_parts([Part(strategy, ((once,),))], PROFILE, [5, 5])
        with pytest.raises(PlanError, match="sequence 0 runs 2 times"):
            check_parts([Part(strategy, ((once, once),))], PROFILE, [5])

    def test_too_many_tokens(self) -> None:
        part = Part(equal_replicas(1, 1, 1), ((MicroBatch((0,), 101, 1.0),),))
        with pytest.raises(PlanError, match="tp1: a micro-batch of 101 tokens does not hold .* limit of 100"):
            check_parts([part], PROFILE, [101])

    def test_replicas_of_a_part(self) -> None:
        with pytest.raises(InvalidInput, match="part equal: expected micro-batches of 2 replicas, got 1"):
            Part(equal_replicas(1, 1, 2), ((),))


class TestPublishedAlgorithm:
    unequal = Strategy("unequal", (Replica(Scheme.uniform(2), (0, 1)), Replica(Scheme.uniform(1), (2,))))

    def test_the_longest_decides_which_strategies_are_considered(self) -> None:
        pool = Pool(3, (equal_replicas(1, 1, 3), self.unequal))
        plan = published_plan(pool, PROFILE, [150, 20, 30])
        assert plan.part.strategy.name == "unequal"
        with pytest.raises(InvalidInput, match="no strategy holds the longest sequence, 201 tokens"):
            published_plan(pool, PROFILE, [201])

    def test_its_two_estimates(self) -> None:
        # One replica, one stage: dispatch sees no c, packing charges every micro-batch as the longest.
        pool = Pool(1, (equal_replicas(1, 1, 1),))
        plan = published_plan(pool, PROFILE, [60, 50, 40])
        assert plan.dispatch_ms == pytest.approx(sum(map(COST.sequence_ms, (60, 50, 40))))
        assert plan.packing_ms == pytest.approx(2 * COST.micro_batch_ms([50, 40]))

    def test_a_strategy_with_an_idle_replica_is_rejected_unless_all_have_one(self) -> None:
        pool = Pool(3, (equal_replicas(1, 1, 3), self.unequal))
        assert published_plan(pool, PROFILE, [80, 80]).part.strategy.name == "unequal"
        assert published_plan(pool, PROFILE, [80]).part.strategy.name in ("equal", "unequal")

    @given(st.lists(st.integers(1, 200), min_size=1, max_size=30))
    @settings(deadline=None, max_examples=25)
    def test_its_plans_are_sound_and_the_same_every_time(self, lengths: list[int]) -> None:
        pool = Pool(3, (equal_replicas(1, 1, 3), self.unequal))
        plan = published_plan(pool, PROFILE, lengths)
        check_parts([plan.part], PROFILE, lengths)
        assert plan == published_plan(pool, PROFILE, lengths)
