"""The integer program: equal to enumeration, and harmless whatever its solver does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random

import cvxpy as cp
import numpy as np
import pytest

from hgraph.check_plan import check_plan
from hgraph.plan import StepPlan
from hgraph.profile import Profile, SchemeCost
from strategies import bound_program
from strategies.bound import bound_problem, closed_form_ms, least_time_ms
from strategies.bound_program import options_of, program_bound_ms
from strategies.cost import ReplicaKind, replica_kinds
from strategies.heuristic import heuristic_assignment
from strategies.integer_program import counts_program, highs, slots_program, solve
from strategies.options import PlannerOptions
from strategies.packing import Packer
from strategies.select import plan_step
from tests.planner_reference import (
    UNIFORM,
    batch,
    best_step_ms,
    cluster,
    laptop,
    pool_of,
    profile_of,
    random_small_problem,
    strategy,
)

EXACT = PlannerOptions(gap=0.0, max_nodes=1_000_000, max_programs=10, reach=1e9)


def check_against_enumeration(seed: int, most: int) -> None:
    kinds, lengths = random_small_problem(seed, most)
    best_ms = best_step_ms(kinds, lengths, simulated=False)
    program = slots_program(kinds, lengths, float("inf"))
    answer = solve(program, EXACT, -1.0, highs)
    assert answer.status == "optimal"
    assert answer.model_ms == pytest.approx(best_ms, rel=1e-6, abs=1e-6)
    assert answer.groups is not None
    assert sorted(index for own in answer.groups for group in own for index in group) == list(range(len(lengths)))
    for kind, own in zip(kinds, answer.groups, strict=False):
        times_ms = kind.micro_batch_ms([[lengths[index] for index in group] for group in own])
        assert kind.flow_ms(times_ms) <= best_ms * (1 + 1e-6) + 1e-6
        assert all(sum(lengths[index] for index in group) <= kind.max_tokens for group in own)


@pytest.mark.case(62)
@pytest.mark.parametrize("seed", range(60))
def test_the_slots_program_equals_enumeration(seed: int) -> None:
    check_against_enumeration(seed, most=5)


@pytest.mark.long
@pytest.mark.case(62)
@pytest.mark.parametrize("seed", range(2000, 2500))
def test_the_slots_program_equals_enumeration_up_to_eight_sequences(seed: int) -> None:
    check_against_enumeration(seed, most=8)


def plan_of_small_problem(seed: int, most: int) -> tuple[StepPlan, float]:
    """Returns the checked plan of one strategy, by the default options, and the optimum by enumeration."""
    kinds, lengths = random_small_problem(seed, most)
    schemes = [UNIFORM(number + 1, kind.pp) for number, kind in enumerate(kinds)]
    pool = pool_of(strategy("drawn", *schemes))
    profile = Profile({str(scheme): kind.cost for scheme, kind in zip(schemes, kinds, strict=True)}, {})
    plan = plan_step(pool, profile, lengths)
    check_plan(plan, pool, profile, lengths)
    return plan, best_step_ms(kinds, lengths, simulated=True)


def check_equal_or_flagged(seeds: Iterable[int], most: int) -> float:
    """Returns the share of plans that are optimal; of the others, the gap must cover what they miss."""
    optimal = []
    for seed in seeds:
        plan, best_ms = plan_of_small_problem(seed, most)
        assert plan.bound_ms <= best_ms * (1 + 1e-9)
        assert plan.predicted_ms >= best_ms * (1 - 1e-9)
        assert plan.predicted_ms <= best_ms * (1 + plan.gap) * (1 + 1e-9)
        optimal.append(plan.predicted_ms <= best_ms * (1 + 1e-9))
    return sum(optimal) / len(optimal)


@pytest.mark.case(62)
def test_plans_are_optimal_or_flagged() -> None:
    assert check_equal_or_flagged(range(15), most=5) >= 0.8


@pytest.mark.long
@pytest.mark.case(62)
@pytest.mark.parametrize("first", range(3000, 3500, 50))
def test_plans_are_optimal_or_flagged_up_to_eight_sequences(first: int) -> None:
    assert check_equal_or_flagged(range(first, first + 50), most=8) >= 0.7


def test_the_counts_program_reproduces_the_heuristic_and_its_cut_off() -> None:
    kinds = (
        ReplicaKind(2, "1f1b", SchemeCost(3.5e-5, 0.20, 7.0, 2048)),
        ReplicaKind(1, "1f1b", SchemeCost(6.0e-5, 0.34, 10.0, 1024)),
        ReplicaKind(1, "1f1b", SchemeCost(6.0e-5, 0.34, 10.0, 1024)),
    )
    lengths = batch(3, 2_500, 1_000)
    heuristic = heuristic_assignment(kinds, lengths, Packer(), 100)
    answer = solve(counts_program(kinds, lengths, heuristic, heuristic.ms), EXACT, -1.0, highs)
    assert answer.status == "optimal"
    assert answer.model_ms <= heuristic.ms * (1 + 2e-6)
    refused = solve(counts_program(kinds, lengths, heuristic, 0.5 * heuristic.ms), EXACT, -1.0, highs)
    assert refused.status == "infeasible" and refused.groups is None


def hard_problem() -> tuple[list[int], PlannerOptions]:
    """A batch of the laptop pool whose heuristic plan stays further than the asked gap from the bound."""
    return batch(1, 8_192, 1_000), PlannerOptions(gap=0.0, max_nodes=5)


@pytest.mark.case(61)
def test_no_time_no_incumbent_no_harm() -> None:
    pool, profile = laptop()
    lengths, _ = hard_problem()
    plan = plan_step(pool, profile, lengths, options=PlannerOptions(gap=0.0, time_limit_s=0.0))
    check_plan(plan, pool, profile, lengths)
    assert plan.solver == "heuristic (solver: no incumbent)"
    alone = plan_step(pool, profile, lengths, options=PlannerOptions(gap=0.0, program=False))
    assert plan.replicas == alone.replicas and alone.solver == "heuristic"


@pytest.mark.case(61)
def test_cvxpy_itself_hands_out_zeros_without_an_incumbent() -> None:
    kinds, lengths = random_small_problem(4, most=8)
    program = slots_program(kinds, lengths, float("inf"))
    assert highs(program.problem, PlannerOptions(time_limit_s=0.0), 0.0) == "no incumbent"
    assert program.problem.status == cp.USER_LIMIT
    assert not np.any(program.counts.value)


def fill(problem: cp.Problem, value: Callable[[cp.Variable], object]) -> None:
    for variable in problem.variables():
        variable.save_value(np.asarray(value(variable), dtype=float))


def returns_zeros(problem: cp.Problem, options: PlannerOptions, target_ms: float) -> str:
    fill(problem, lambda variable: np.zeros(variable.shape))
    return "optimal"


def returns_halves(problem: cp.Problem, options: PlannerOptions, target_ms: float) -> str:
    fill(problem, lambda variable: np.full(variable.shape, 0.5))
    return "optimal"


def returns_nan(problem: cp.Problem, options: PlannerOptions, target_ms: float) -> str:
    fill(problem, lambda variable: np.full(variable.shape, np.nan))
    return "optimal"


def returns_ones(problem: cp.Problem, options: PlannerOptions, target_ms: float) -> str:
    fill(problem, lambda variable: np.ones(variable.shape))
    return "limit"


def returns_nothing(problem: cp.Problem, options: PlannerOptions, target_ms: float) -> str:
    return "optimal"


def says_infeasible(problem: cp.Problem, options: PlannerOptions, target_ms: float) -> str:
    return "infeasible"


def times_out(problem: cp.Problem, options: PlannerOptions, target_ms: float) -> str:
    return "no incumbent"


def all_on_one_replica(problem: cp.Problem, options: PlannerOptions, target_ms: float) -> str:
    """Claims to have found the optimum, with everything in the first column."""

    def value(variable: cp.Variable) -> np.ndarray:
        first = np.zeros(variable.shape)
        if variable.ndim == 2:
            first[:, 0] = problem_counts(problem)
        return first

    fill(problem, value)
    return "optimal"


def problem_counts(problem: cp.Problem) -> np.ndarray:
    equal = next(one for one in problem.constraints if isinstance(one, cp.constraints.Equality))
    return np.asarray(equal.args[1].value)


def crashes(problem: cp.Problem, options: PlannerOptions, target_ms: float) -> str:
    raise RuntimeError("segmentation fault, nearly\nand more")


@pytest.mark.case(63, 64)
@pytest.mark.parametrize(
    ("solver", "text"),
    [
        (returns_zeros, "sequence 0 is in 0 micro-batches; expected exactly one"),
        (returns_halves, "sequence 0 is in 0 micro-batches; expected exactly one"),
        (returns_ones, "sequence 0 is in 4 micro-batches; expected exactly one"),
        (returns_nan, "optimal, but without a point"),
        (returns_nothing, "optimal, but without a point"),
        (says_infeasible, "infeasible"),
        (times_out, "no incumbent"),
        (crashes, "RuntimeError: segmentation fault, nearly"),
        (all_on_one_replica, "optimal, no faster plan"),
    ],
)
def test_a_solver_that_fails_or_lies_leaves_the_heuristic_plan(solver, text: str) -> None:  # type: ignore[no-untyped-def]
    pool, profile = laptop()
    lengths, _ = hard_problem()
    options = PlannerOptions(gap=0.0, only="tp1x4")
    plan = plan_step(pool, profile, lengths, options=options, solve_with=solver)
    check_plan(plan, pool, profile, lengths)
    assert plan.solver.startswith("heuristic (solver: ") and text in plan.solver
    alone = plan_step(pool, profile, lengths, options=PlannerOptions(program=False, only="tp1x4"))
    assert plan.replicas == alone.replicas and plan.predicted_ms == alone.predicted_ms


@pytest.mark.case(61, 63, 64)
@pytest.mark.parametrize("name", ["pp2+tp1x2", "tp2+tp1x2"])
@pytest.mark.parametrize("solver", [returns_zeros, returns_halves, says_infeasible, times_out, crashes])
def test_no_strategy_depends_on_its_solver(name: str, solver) -> None:  # type: ignore[no-untyped-def]
    pool, profile = laptop()
    lengths = batch(1, 8_192, 900)
    plan = plan_step(pool, profile, lengths, options=PlannerOptions(gap=0.0, only=name), solve_with=solver)
    check_plan(plan, pool, profile, lengths)
    assert plan.solver.startswith("heuristic (solver: ")


def test_answers_of_an_earlier_batch_are_not_taken_for_new_ones() -> None:
    pool, profile = laptop()
    options = PlannerOptions(gap=0.0, only="tp1x4", max_nodes=5)
    plan_step(pool, profile, batch(1, 8_192, 1_000), options=options)
    plan = plan_step(pool, profile, batch(1, 8_192, 1_000), options=options, solve_with=returns_nothing)
    assert plan.solver == "heuristic (solver: optimal, but without a point)"


@pytest.mark.case(59)
def test_what_was_planned_before_does_not_matter() -> None:
    pool, profile = laptop()
    options = PlannerOptions(gap=0.0, max_nodes=2, max_programs=1)
    first = plan_step(pool, profile, batch(7, 6_000, 1_000), options=options)
    plan_step(pool, profile, batch(1, 7_000, 1_500), options=options)
    assert plan_step(pool, profile, batch(7, 6_000, 1_000), options=options) == first


@pytest.mark.case(67)
def test_equal_replicas_do_not_enlarge_the_bound_program() -> None:
    """Two and 64 equal replicas are one kind: the same options, and the same program, canonicalised once."""
    kind = ReplicaKind(2, "1f1b", SchemeCost(2e-6, 0.1, 40.0, 12_000))
    sizes = []
    for number in (2, 64):
        problem = bound_problem([kind] * number, batch(number, 20_000 * number, 9_000, median=600))
        before = bound_program._program.cache_info().misses
        assert 0 < program_bound_ms(problem) < float("inf")
        sizes.append(len(options_of(problem, 2 * least_time_ms(problem, closed_form_ms))))
        if number == 64:
            assert bound_program._program.cache_info().misses == before
    assert max(sizes) <= bound_program.OPTION_STEP


def test_a_large_problem_is_solved_around_the_slowest_replica() -> None:
    pool, profile = cluster()
    kinds = replica_kinds(pool["16+4x12"], profile)
    lengths = batch(5, 120_000, 7_000, median=400)
    heuristic = heuristic_assignment(kinds, lengths, Packer(), 20)
    program = counts_program(kinds, lengths, heuristic, heuristic.ms)
    slowest = max(range(len(kinds)), key=lambda replica: heuristic.packings[replica].ms)
    assert slowest in program.column_replica and 2 <= len(program.column_replica) < len(kinds)
    assert sorted({*program.column_replica, *program.kept}) == list(range(len(kinds)))
    again = counts_program(kinds, lengths, heuristic, heuristic.ms)
    assert again.problem is program.problem
    answer = solve(program, PlannerOptions(gap=0.0, max_nodes=20), -1.0, highs)
    if answer.groups is not None:
        assert sorted(i for own in answer.groups for group in own for i in group) == list(range(len(lengths)))
        assert all(answer.groups[replica] == (own,) for replica, own in program.kept.items())


@pytest.mark.case(64)
def test_an_infeasible_optimum_names_the_limit_it_breaks() -> None:
    pool = pool_of(strategy("two", UNIFORM(), UNIFORM()))
    profile = profile_of(tp1=(1e-3, 1.0, 3.0, 10))

    def all_in_one_slot(problem: cp.Problem, options: PlannerOptions, target_ms: float) -> str:
        def value(variable: cp.Variable) -> np.ndarray:
            first = np.zeros(variable.shape)
            if variable.ndim == 2:
                first[:, 0] = 1
            return first

        fill(problem, value)
        return "optimal"

    lengths = [9, 8, 6, 5, 3]
    plan = plan_step(pool, profile, lengths, options=PlannerOptions(gap=0.0), solve_with=all_in_one_slot)
    check_plan(plan, pool, profile, lengths)
    assert plan.solver == (
        "heuristic (solver: optimal, but its plan, replica 0 (tp1), micro-batch 0: 31 tokens exceed the limit of 10)"
    )


@pytest.mark.case(65)
@pytest.mark.parametrize("pp", [1, 2])
def test_one_sequence_on_one_replica_needs_no_solver(pp: int) -> None:
    pool = pool_of(strategy("one", UNIFORM(1, pp)))
    name = "tp1" if pp == 1 else "tp1_pp2"
    profile = profile_of(**{name: (1e-3, 1.0, 3.0, 100)})
    plan = plan_step(pool, profile, [50], options=PlannerOptions(gap=0.0), solve_with=crashes)
    assert plan.replicas[0].micro_batches == ((0,),) and plan.solver == "heuristic"
    assert plan.gap == pytest.approx(0.0, abs=1e-12)


def test_the_program_finds_what_the_heuristic_misses() -> None:
    pool, profile = laptop()
    gains = []
    for seed in range(3):
        lengths = batch(seed, 4_096, 1_000)
        options = PlannerOptions(gap=0.0, max_nodes=20, max_programs=2, only="tp1x4", max_rounds=0)
        plan = plan_step(pool, profile, lengths, options=options)
        alone = plan_step(pool, profile, lengths, options=replace(options, program=False))
        check_plan(plan, pool, profile, lengths)
        assert plan.predicted_ms <= alone.predicted_ms
        gains.append(plan.solver.startswith("highs") and plan.predicted_ms < alone.predicted_ms)
    assert any(gains)


def test_programs_of_a_large_cluster_stay_sound() -> None:
    pool, profile = cluster()
    lengths = batch(5, 60_000, 7_000, median=400)
    plan = plan_step(pool, profile, lengths, options=PlannerOptions(gap=0.0, max_nodes=1))
    check_plan(plan, pool, profile, lengths)


def test_members_of_a_class_go_to_lower_replicas_first() -> None:
    kinds = [ReplicaKind(1, "1f1b", SchemeCost(0.0, 1.0, 1.0, 10))] * 2
    lengths = [5] * Random(0).randint(4, 4)
    answer = solve(slots_program(kinds, lengths, float("inf")), EXACT, -1.0, highs)
    assert answer.groups == (((0, 1),), ((2, 3),))
