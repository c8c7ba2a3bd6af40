"""Systems and the ladder: what each may choose, in order, with intervals and notes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hgraph.communication_costs import CommunicationCosts
from hgraph.errors import InvalidInput
from hgraph.memory_model import ModelSizes
from hgraph.profile import Profile, SchemeCost
from hgraph.scheme_profile import ProfileFile
from hgraph.step_parts import Part, StepClock, check_parts
from hgraph.strategy import Pool, Replica, Scheme, Strategy
from hgraph.topology import Link, uniform
from strategies.baselines import assign_balanced_finely, assign_packs, assign_padded_packs
from strategies.intervals import mean_interval, ratio_interval
from strategies.ladder import entries, homogeneous_strategies, run_ladder
from strategies.ladder_facts import rung_note, step_facts
from strategies.length_data import LengthData
from strategies.simulation import Simulation, Workload, result_data
from strategies.systems import InTurn, OneFixed, PerBatch, PlannedPool, Setting, planned_assign

PROFILE = Profile(
    {
        "tp1": SchemeCost(1e-4, 0.40, 20.0, 1_000),
        "tp2": SchemeCost(6e-5, 0.25, 18.0, 2_500),
        "tp4": SchemeCost(4e-5, 0.18, 16.0, 5_000),
        "tp1.pp2": SchemeCost(5e-5, 0.21, 12.0, 1_500),
    },
    {},
)
MODEL = ModelSizes(layers=4, hidden=64, ffn_hidden=192, heads=4, vocab=256)
CLUSTER = uniform("test", 1, 4, Link(1.0, 0.0), Link(1.0, 0.0))


def strategy(name: str, *degrees: int) -> Strategy:
    starts = np.cumsum([0, *degrees])
    replicas = zip(degrees, starts, strict=False)
    return Strategy(name, tuple(Replica(Scheme.uniform(tp), tuple(range(at, at + tp))) for tp, at in replicas))


POOL = Pool(4, (strategy("tp4", 4), strategy("tp2+2xtp1", 2, 1, 1), strategy("4xtp1", 1, 1, 1, 1)))
DATA = LengthData(np.array([20, 50, 80, 100, 150, 200, 300, 400, 700, 1_200, 2_400]), "test")
WORKLOAD = Workload(DATA, tokens=6_000, longest=2_400, count=4, calibration=2, seed=3)


def setting(communication: str = "none") -> Setting:
    costs = CommunicationCosts(MODEL, CLUSTER)
    return Setting(PROFILE, StepClock(communication, costs), 2_400)  # type: ignore[arg-type]


class TestSystems:
    def test_a_fixed_layout_holds_the_context_window_and_is_the_best_on_calibration(self) -> None:
        calibration, _ = WORKLOAD.batches()
        here = setting()
        equal = homogeneous_strategies(here, 4)
        system = OneFixed(here, equal, assign_packs)
        system.fit(calibration)
        means = {
            one.name: sum(here.clock.ms((assign_packs(one, PROFILE, own, 2_400),)) for own in calibration)
            for one in equal
            if here.limit(one) >= 2_400
        }
        assert set(means) == {"2xtp2", "tp4"}
        assert system.layout == min(means, key=means.__getitem__)

    def test_no_layout_for_the_context_window(self) -> None:
        with pytest.raises(InvalidInput, match="none of 1 strategies holds a context window of 2,400 tokens.*1,000"):
            OneFixed(setting(), [strategy("4xtp1", 1, 1, 1, 1)], assign_packs)

    def test_per_batch_takes_small_replicas_for_short_sequences_alone(self) -> None:
        here = setting()
        system = PerBatch(here, homogeneous_strategies(here, 4), assign_balanced_finely)
        names = [system.parts(lengths)[0].strategy.name for lengths in ([100] * 40, [2_400, 100])]
        assert names[0] in ("4xtp1", "2xtp1.pp2") and names[1] in ("tp4", "2xtp2")

    def test_in_turn_splits_by_length_and_pays_for_switches(self) -> None:
        lengths = [100] * 200 + [2_400] * 2
        free, paid = setting(), setting("serial")
        system = InTurn(free, homogeneous_strategies(free, 4), assign_balanced_finely)
        system.fit([lengths])
        parts = system.parts(lengths)
        assert len(parts) == 2 and parts[0].strategy.name != parts[1].strategy.name
        check_parts(parts, PROFILE, lengths)
        both_ms = sum(StepClock().ms([part]) for part in parts)
        assert free.clock.ms(parts) == pytest.approx(both_ms)
        switch_ms = paid.clock.switch_ms(parts, 1)
        assert switch_ms > 0 and paid.clock.ms(parts) > both_ms + switch_ms

    def test_in_turn_leaves_out_what_a_batch_has_no_sequence_for(self) -> None:
        here = setting()
        system = InTurn(here, homogeneous_strategies(here, 4), assign_balanced_finely)
        system.fit([[100] * 200 + [2_400] * 2])
        assert len(system.parts([100, 200])) == 1

    def test_slow_switches_leave_one_layout(self) -> None:
        slow = uniform("slow", 1, 4, Link(1e-6, 0.0), Link(1e-6, 0.0))
        here = Setting(PROFILE, StepClock("serial", CommunicationCosts(MODEL, slow)), 2_400)
        system = InTurn(here, homogeneous_strategies(here, 4), assign_balanced_finely)
        system.fit([[100] * 200 + [2_400] * 2])
        assert len(system.segments) == 1

    def test_the_planner_is_told_what_bridges_add(self) -> None:
        here = setting("serial")
        system = PlannedPool(here, POOL, planned_assign(here))
        system.fit([[100] * 20])
        expected = here.clock.costs
        assert expected is not None
        both_ms = sum(expected.bridge_ms(POOL["tp4"], kind) for kind in ("parameters", "gradients"))
        assert system.profile.bridge_ms["tp4"] == pytest.approx(both_ms)


class TestLadder:
    def test_rungs_never_lose_what_their_choice_includes(self) -> None:
        simulation = Simulation(ProfileFile.of(PROFILE, model=MODEL), POOL, CLUSTER, WORKLOAD, communication="none")
        result = simulation.run()
        assert [one.key for one in result.systems if one.is_rung] == [
            "padded", "static", "balanced", "fine", "planned", "unequal", "pool",
        ]  # fmt: skip
        assert result.speed_up("static").value == 1.0
        assert result.before("static") == "padded" and result.before("rows") is None
        assert sum(result["static"].ms) <= sum(result["padded"].ms)
        assert all(len(one.ms) == 4 for one in result.systems)
        data = result_data(result, "static", 0)
        assert [row["key"] for row in data] == [one.key for one in result.systems]

    def test_a_batch_is_timed_the_same_alone_and_among_others(self) -> None:
        simulation = Simulation(ProfileFile.of(PROFILE, model=MODEL), POOL, CLUSTER, WORKLOAD, keys=("pool",))
        clock, parts = simulation.step("pool", 2)
        assert clock.ms(parts) == simulation.run()["pool"].ms[2]

    def test_the_steps_before_are_not_timed_batches(self) -> None:
        calibration, batches = WORKLOAD.batches()
        more = replace(WORKLOAD, count=9).batches()
        assert more[0] == calibration and more[1][:4] == batches and len(calibration) == 2

    def test_wrong_input(self) -> None:
        profile = ProfileFile.of(PROFILE)
        with pytest.raises(InvalidInput, match="has no `model`, whose sizes say what is sent"):
            Simulation(profile, POOL, CLUSTER, WORKLOAD).run()
        with pytest.raises(InvalidInput, match="no system 'fastest'; there are rows, padded, static"):
            Simulation(profile, POOL, CLUSTER, WORKLOAD, communication="none", keys=("fastest",)).run()
        with pytest.raises(InvalidInput, match="expected a step from 0 to 3, got 4"):
            Simulation(profile, POOL, CLUSTER, WORKLOAD, communication="none").step("static", 4)
        two = Pool(2, (strategy("tp2", 2),))
        with pytest.raises(InvalidInput, match=r"expected pools of as many ranks, got 4 and 2 \(published\)"):
            Simulation(profile, POOL, CLUSTER, WORKLOAD, published=two, communication="none").run()
        with pytest.raises(InvalidInput, match="expected count of 1 or more, got 0"):
            replace(WORKLOAD, count=0)
        with pytest.raises(InvalidInput, match="communication 'serial': expected the costs of a cluster"):
            StepClock("serial")


class TestFactsAndNotes:
    def test_facts_by_hand(self) -> None:
        part = assign_packs(strategy("2xtp2", 2, 2), PROFILE, [2_000, 400], 2_400)
        facts = step_facts((part,), PROFILE, [2_000, 400])
        cost = PROFILE.cost("tp2")
        whole_ms = cost.micro_batch_ms([2_000, 400])
        assert facts.longest_share == pytest.approx(cost.micro_batch_ms([2_000]) / whole_ms)
        assert facts.imbalance == pytest.approx(2.0)
        assert facts.fixed_share == pytest.approx(18.0 / whole_ms)
        assert (facts.padding_share, facts.micro_batches) == (0.0, 1.0)
        assert facts.rank_ms == pytest.approx(2 * whole_ms)

    def test_padding_on_replicas_that_wait_anyway(self) -> None:
        part = assign_padded_packs(strategy("2xtp2", 2, 2), PROFILE, [2_400, 400], 2_400)
        facts = step_facts((part,), PROFILE, [2_400, 400])
        assert facts.padding_share == pytest.approx(2_000 / 4_800)
        assert facts.slowest_padding_share == 0.0

    def test_notes_say_what_decides(self) -> None:
        here = setting()
        known = entries(here, POOL)
        # One sequence of the context window and little else: it bounds every rung.
        result = run_ladder([one for one in known if one.is_rung], here, [[2_400, 30]], [[2_400, 30]] * 2)
        assert rung_note(result, "padded") == ""
        assert rung_note(result, "static").startswith("gains")
        assert "the longest sequence alone takes" in rung_note(result, "balanced")
        assert "and bounds it" in rung_note(result, "pool")
        assert "one strategy in 2 steps, tp4 in 2" in rung_note(result, "pool")


class TestIntervals:
    def test_equal_values_leave_no_doubt(self) -> None:
        interval = mean_interval([5.0] * 8)
        assert (interval.value, interval.low, interval.high) == (5.0, 5.0, 5.0)

    def test_the_interval_of_a_normal_mean(self) -> None:
        values = np.random.default_rng(1).normal(100.0, 10.0, size=400)
        interval = mean_interval(list(values))
        # 1.96 standard errors each way.
        assert interval.high - interval.low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
        assert interval == mean_interval(list(values))

    def test_ratios_are_paired(self) -> None:
        values = [1.0, 10.0, 100.0]
        interval = ratio_interval([2 * value for value in values], values)
        assert (interval.low, interval.high) == pytest.approx((2.0, 2.0))

    def test_wrong_input(self) -> None:
        with pytest.raises(InvalidInput, match="expected at least one value, got none"):
            mean_interval([])
        with pytest.raises(InvalidInput, match="ratio: expected as many of both, got 1 and 2"):
            ratio_interval([1.0], [1.0, 2.0])


def test_parts_of_a_step_are_traced_one_after_another() -> None:
    here = setting("serial")
    part = assign_packs(strategy("tp4", 4), PROFILE, [100, 200], 2_400)
    other = Part(strategy("2xtp2", 2, 2), ((), ()))
    traced = here.clock.trace((part, other))
    assert traced[1].switch_ms > 0
    assert here.clock.ms((part, other)) == pytest.approx(
        traced[1].offset_ms + max(task.end_ms for task in traced[1].tasks)
    )
