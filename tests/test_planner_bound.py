"""The lower bounds: below every plan, close to it, equal to their definition in other code, right with any solver."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import cvxpy as cp
import numpy as np
import pytest

from hgraph.profile import SchemeCost
from hgraph.simulate import schedule_ms
from strategies.bound import bound_problem, certificate, closed_form_ms, least_time_ms
from strategies.bound_program import Prices, _Groups, options_of, program_bound_ms, refutes
from strategies.cost import ReplicaKind, replica_kinds
from strategies.heuristic import heuristic_assignment
from strategies.packing import Packer
from strategies.schedule_cuts import capacities_ms, long_capacities_ms
from tests import schedule_cuts_table
from tests.planner_reference import (
    batch,
    best_step_ms,
    cluster,
    laptop,
    linear_bound_ms,
    option_bound_ms,
    random_small_problem,
)

SLACK = 1.0 + 1e-9


def bounds_ms(kinds: list[ReplicaKind], lengths: list[int]) -> tuple[float, float]:
    problem = bound_problem(kinds, lengths)
    return least_time_ms(problem, closed_form_ms), program_bound_ms(problem)


def check_small_case(seed: int, most: int) -> float:
    """Returns how much of the optimum the bound reaches; both bounds, and both for GPipe, whose time is the flow."""
    kinds, lengths = random_small_problem(seed, most)
    best_ms = best_step_ms(kinds, lengths, simulated=True)
    closed_ms, program_ms = bounds_ms(kinds, lengths)
    assert closed_ms <= best_ms * SLACK
    assert closed_ms <= program_ms <= best_ms * SLACK
    flow_kinds = [replace(kind, schedule="gpipe") for kind in kinds]
    best_flow_ms = best_step_ms(kinds, lengths, simulated=False)
    closed_flow_ms, program_flow_ms = bounds_ms(flow_kinds, lengths)
    assert closed_flow_ms <= program_flow_ms <= best_flow_ms * SLACK
    return program_ms / best_ms if best_ms > 0 else 1.0


def test_no_plan_is_faster_than_the_bound() -> None:
    reached = [check_small_case(seed, most=4) for seed in range(10)]
    assert np.mean(reached) >= 0.97 and np.median(reached) >= 0.999


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 1400, 50))
def test_no_plan_is_faster_than_the_bound_on_more_cases(first: int) -> None:
    reached = [check_small_case(seed, most=6 if seed % 10 == 0 else 5) for seed in range(first, first + 50)]
    assert np.mean(reached) >= 0.96 and np.median(reached) >= 0.99


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("pp", [1, 2, 3, 5, 8])
def test_no_micro_batches_do_more_work_than_the_capacity(pp: int, schedule: str) -> None:
    random = Random(pp)
    for _ in range(150):
        v, fixed_ms = random.randint(1, 30), random.choice([0.0, 1.0, 30.0])
        spread = random.choice([0.1, 1.0, 3.0])
        works_ms = [random.lognormvariate(3.0, spread) for _ in range(v)]
        works_ms.sort(reverse=random.random() < 0.5) if random.random() < 0.6 else None
        kind = ReplicaKind(pp, schedule, SchemeCost(0.0, 1.0, fixed_ms, 100))
        times_ms = [fixed_ms + work for work in works_ms]
        taken_ms = schedule_ms(schedule, pp, times_ms) * SLACK
        shortest_ms = random.choice([0.0, min(works_ms)])
        long_ms = np.array([max(times_ms), sorted(times_ms)[v // 2], 0.0])
        assert sum(works_ms) <= capacities_ms(kind, taken_ms, 45, shortest_ms)[v - 1]
        capacity = long_capacities_ms(kind, taken_ms, 45, long_ms, shortest_ms)
        assert np.all(sum(works_ms) <= capacity[:, v - 1])
        assert np.all(capacity[0] <= capacity[2])


@pytest.mark.parametrize(("pp", "v"), [(2, 3), (2, 8), (3, 5), (4, 12)])
def test_the_best_micro_batches_reach_the_capacity(pp: int, v: int) -> None:
    """The linear program of the paths also gives micro-batch times: run in 1F1B, they need what the cuts say."""
    program = schedule_cuts_table.PathProgram(pp, v)
    for fixed_share in (0.0, 0.1, 0.5):
        program.weights(fixed_share)
        works = program.times() - fixed_share / v
        taken = schedule_ms("1f1b", pp, list(program.times()))
        kind = ReplicaKind(pp, "1f1b", SchemeCost(0.0, 1.0, fixed_share / v, 100))
        assert capacities_ms(kind, taken, v)[v - 1] == pytest.approx(works.sum(), rel=5e-3)


def test_unequal_micro_batches_beat_equal_ones() -> None:
    """Twelve on two stages: 4 % less than equal ones; small ones first, and a tail that falls to half."""
    program = schedule_cuts_table.PathProgram(2, 12)
    program.weights(0.0)
    assert schedule_ms("1f1b", 2, list(program.times())) <= 0.96 * schedule_ms("1f1b", 2, [1 / 12] * 12)


def test_the_shipped_cuts_are_those_of_the_generator() -> None:
    shipped = schedule_cuts_table.TABLE.read_text(encoding="utf-8")
    made = schedule_cuts_table.table(stages=(2, 3), most=5, most_long=3)
    for stages, cuts in made.items():
        own = schedule_cuts_table.json.loads(shipped)[stages]
        assert np.allclose(np.concatenate(own["short"][:5]), np.concatenate(cuts["short"]), atol=3e-6)
        for mine, theirs in zip(own["long"], cuts["long"], strict=False):
            assert [len(position) for position in mine] == [len(position) for position in theirs]


@pytest.mark.parametrize("seed", range(12))
def test_the_program_solves_the_documented_definition(seed: int) -> None:
    kinds, lengths = random_small_problem(seed, most=8, pipelines=(1,))
    closed_ms, program_ms = bounds_ms(kinds, lengths)
    assert linear_bound_ms(kinds, lengths) <= program_ms * (1 + 2e-3)
    defined_ms = option_bound_ms(kinds, lengths)
    assert defined_ms * (1 - 2e-3) <= program_ms <= max(defined_ms, closed_ms) * (1 + 1e-6)


def test_whole_micro_batches_and_longest_sequences_are_where_the_program_gains() -> None:
    pool, profile = cluster()
    gains = {}
    for name, lengths in {
        "16x4": batch(1, 200_000, 32_768, median=1500, spread=1.3),
        "8.3+4x10": batch(3, 200_000, 24_000, median=400, spread=1.5),
    }.items():
        kinds = replica_kinds(pool[name], profile)
        plan_ms = heuristic_assignment(kinds, lengths, Packer(), 100).ms
        problem = bound_problem(kinds, lengths)
        closed_ms, program_ms = least_time_ms(problem, closed_form_ms), program_bound_ms(problem, plan_ms)
        assert program_ms <= plan_ms
        gains[name] = (plan_ms / closed_ms - 1, plan_ms / program_ms - 1)
    assert gains["16x4"][0] >= 0.01 and gains["16x4"][1] <= 0.005
    assert gains["8.3+4x10"][1] <= gains["8.3+4x10"][0] - 0.02


def test_a_bound_as_high_as_the_plan_is_enough() -> None:
    pool, profile = laptop()
    lengths = batch(1, 8_192, 1_000)
    problem = bound_problem(replica_kinds(pool["tp2+tp1x2"], profile), lengths)
    assert program_bound_ms(problem, 1.0) == least_time_ms(problem, closed_form_ms)
    far_ms = program_bound_ms(problem)
    assert program_bound_ms(problem, far_ms * 0.999) <= far_ms * 0.999 * SLACK


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
    assert program_bound_ms(bound_problem([cheap, dear], [10])) == pytest.approx(11.0)


def test_a_sequence_nobody_holds_has_no_time() -> None:
    kind = ReplicaKind(1, "1f1b", SchemeCost(0.0, 1.0, 1.0, 10))
    assert program_bound_ms(bound_problem([kind], [11])) == float("inf")


@pytest.mark.parametrize("seed", range(8))
def test_any_weights_give_a_bound(seed: int) -> None:
    random = np.random.default_rng(seed)
    kinds, lengths = random_small_problem(seed, most=4)
    problem = bound_problem(kinds, lengths)
    best_ms = best_step_ms(kinds, lengths, simulated=True) * SLACK
    for _ in range(20):
        weights = random.normal(size=problem.constant_GT.shape)
        assert certificate(problem, weights, problem.eligible_KT(best_ms)) <= best_ms
    assert certificate(problem, np.zeros_like(problem.constant_GT), problem.eligible_KT(best_ms)) == 0.0


@pytest.mark.parametrize("seed", range(12))
def test_no_prices_refute_a_time_that_a_plan_reaches(seed: int) -> None:
    random = np.random.default_rng(seed)
    kinds, lengths = random_small_problem(seed, most=4)
    best_ms = best_step_ms(kinds, lengths, simulated=True) * (1 + 1e-6)
    problem = bound_problem(kinds, lengths)
    options, groups = options_of(problem, best_ms * 1.5), _Groups.of(problem)
    shape = (len(groups.count_J), len(options))
    for _ in range(60):
        work, tokens, halves = random.exponential(size=(3, len(options))) * random.integers(0, 2, (3, len(options)))
        whole = random.exponential(size=shape) * random.integers(0, 2, shape)
        prices = Prices(work, tokens * random.choice([0.01, 1.0]), halves, whole * random.choice([0.1, 10.0]))
        assert not refutes(problem, options, groups, prices, best_ms)
        assert not refutes(problem, options, groups, prices, best_ms * 1.4)


@pytest.mark.parametrize("fault", ["raises", "does nothing", "lies"])
def test_a_solver_that_fails_leaves_the_closed_form(fault: str) -> None:
    kinds, lengths = random_small_problem(33, most=4)

    def broken(program: cp.Problem) -> None:
        if fault == "raises":
            raise cp.error.SolverError("broken")
        program._status = None
        if fault == "lies":
            program._status = cp.OPTIMAL
            for variable in program.variables():
                variable.save_value(np.full(variable.shape, 0.001))
            for number, constraint in enumerate(program.constraints):
                constraint.dual_variables[0].save_value(np.full(constraint.shape, 10.0**number))

    problem = bound_problem(kinds, lengths)
    value = program_bound_ms(problem, solve_with=broken)
    assert least_time_ms(problem, closed_form_ms) <= value
    assert value <= best_step_ms(kinds, lengths, simulated=True) * SLACK
