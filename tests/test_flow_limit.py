"""What `benchmarks/flow_limit.py` proves: below no plan's flow time, and close to the least."""

from __future__ import annotations

from statistics import mean

from benchmarks.flow_limit import least_flow_ms, may_fit
from strategies.cost import replica_kinds
from tests.planner_reference import batch, best_step_ms, cluster, random_small_problem


def test_no_plan_has_less_flow_time_than_is_proved() -> None:
    reached = []
    for seed in range(12):
        kinds, lengths = random_small_problem(seed, most=4)
        best_ms = best_step_ms(kinds, lengths, simulated=False)
        if best_ms == 0:
            continue
        least_ms = least_flow_ms(kinds, lengths, 1.02 * best_ms)
        assert least_ms <= best_ms * (1 + 1e-6)
        reached.append(least_ms / best_ms)
    assert mean(reached) >= 0.9


def test_a_strategy_that_cannot_hold_the_longest_sequence_is_refuted_at_any_time() -> None:
    pool, profile = cluster()
    kinds = replica_kinds(pool.strategies[-1], profile)
    assert not may_fit(kinds, [20_000, *batch(0, 10_000, 2_000)], 1e9)
    assert may_fit(kinds, [10_000, *batch(0, 10_000, 2_000)], 1e9)
