"""The lower bound: below every plan, equal to its definition solved by other code, right even if the solver is not."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import pytest

from hgraph.profile import SchemeCost
from strategies import bound_program
from strategies.bound import bound_problem, certificate, closed_form_ms, least_time_ms
from strategies.bound_program import program_bound_ms
from strategies.cost import ReplicaKind, replica_kinds
from tests.planner_reference import batch, best_step_ms, cluster, laptop, linear_bound_ms, random_small_problem


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_is_faster_than_the_bound(seed: int) -> None:
    kinds, lengths = random_small_problem(seed, most=4)
    best_ms = best_step_ms(kinds, lengths, simulated=True)
    problem = bound_problem(kinds, lengths)
    assert least_time_ms(problem, closed_form_ms) <= best_ms * (1 + 1e-9)
    assert program_bound_ms(problem) <= best_ms * (1 + 1e-9)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_no_plan_is_faster_than_the_bound_on_more_cases(seed: int) -> None:
    kinds, lengths = random_small_problem(seed, most=5)
    best_ms = best_step_ms(kinds, lengths, simulated=True)
    assert program_bound_ms(bound_problem(kinds, lengths)) <= best_ms * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_the_program_solves_the_documented_definition(seed: int) -> None:
    kinds, lengths = random_small_problem(seed, most=12)
    assert program_bound_ms(bound_problem(kinds, lengths)) == pytest.approx(linear_bound_ms(kinds, lengths), rel=1e-6)


@pytest.mark.parametrize("seed", range(40))
def test_the_closed_form_is_the_program_or_below(seed: int) -> None:
    kinds, lengths = random_small_problem(seed, most=20)
    problem = bound_problem(kinds, lengths)
    closed_ms, program_ms = least_time_ms(problem, closed_form_ms), program_bound_ms(problem)
    assert closed_ms <= program_ms * (1 + 1e-9)
    if problem.num_kinds == 1:
        assert closed_ms == pytest.approx(program_ms, rel=1e-6)


@pytest.mark.parametrize("make", [laptop, cluster])
def test_closed_form_and_program_agree_on_usual_batches(make) -> None:  # type: ignore[no-untyped-def]
    pool, profile = make()
    lengths = batch(1, 8_192, 1_000) if make is laptop else batch(1, 100_000, 7_000, median=400)
    for one in pool.strategies:
        problem = bound_problem(replica_kinds(one, profile), lengths)
        assert least_time_ms(problem, closed_form_ms) == pytest.approx(program_bound_ms(problem), rel=1e-3)


def test_one_replica_is_bounded_exactly() -> None:
    kind = ReplicaKind(1, "1f1b", SchemeCost(0.01, 1.0, 7.0, 10))
    # 6+4 and 5+5 fill two micro-batches: work 30.77, twice c.
    problem = bound_problem([kind], [6, 4, 5, 5])
    expected_ms = sum(kind.cost.sequence_ms(length) for length in (6, 4, 5, 5)) + 14.0
    assert least_time_ms(problem, closed_form_ms) == pytest.approx(expected_ms)
    # Three of 6 cannot share, though 18 tokens would fit two micro-batches.
    assert least_time_ms(bound_problem([kind], [6, 6, 6]), closed_form_ms) == pytest.approx(3 * (0.36 + 6 + 7))


def test_the_longest_sequence_passes_every_stage_twice() -> None:
    kind = ReplicaKind(4, "1f1b", SchemeCost(0.0, 1.0, 5.0, 100))
    assert least_time_ms(bound_problem([kind, kind], [100, 1]), closed_form_ms) == pytest.approx(4 * 105.0)


def test_an_expensive_replica_may_stay_empty() -> None:
    cheap = ReplicaKind(1, "1f1b", SchemeCost(0.0, 1.0, 1.0, 100))
    dear = ReplicaKind(8, "1f1b", SchemeCost(0.0, 1.0, 1000.0, 100))
    problem = bound_problem([cheap, dear], [10])
    assert program_bound_ms(problem) == pytest.approx(11.0)


def test_a_sequence_nobody_holds_has_no_time() -> None:
    kind = ReplicaKind(1, "1f1b", SchemeCost(0.0, 1.0, 1.0, 10))
    assert program_bound_ms(bound_problem([kind], [11])) == float("inf")


@pytest.mark.parametrize("seed", range(10))
def test_any_weights_give_a_bound(seed: int) -> None:
    random = np.random.default_rng(seed)
    kinds, lengths = random_small_problem(seed, most=4)
    problem = bound_problem(kinds, lengths)
    best_ms = best_step_ms(kinds, lengths, simulated=True)
    for _ in range(20):
        weights = random.normal(size=problem.constant_GT.shape)
        assert certificate(problem, weights, problem.eligible_KT(best_ms * (1 + 1e-9))) <= best_ms * (1 + 1e-9)
    assert certificate(problem, np.zeros_like(problem.constant_GT), problem.eligible_KT(best_ms)) == 0.0


@pytest.mark.parametrize("fault", ["raises", "does nothing", "lies"])
def test_a_solver_that_fails_leaves_the_closed_form(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, lengths = random_small_problem(7, most=20)

    def broken(program: cp.Problem) -> None:
        if fault == "raises":
            raise cp.error.SolverError("broken")
        if fault == "lies":
            program._status = cp.OPTIMAL
            for constraint in program.constraints:
                constraint.dual_variables[0].save_value(np.full(constraint.shape, 1e9))

    monkeypatch.setattr(bound_program, "solve_with_highs", broken)
    problem = bound_problem(kinds, lengths)
    value = program_bound_ms(problem)
    assert least_time_ms(problem, closed_form_ms) <= value <= linear_bound_ms(kinds, lengths) * (1 + 1e-9)
