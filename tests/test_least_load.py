"""The least possible greatest loads: by hand, never above what brute force finds, never spoilt by a bad solver."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import cvxpy as cp
import numpy as np
import pytest

import strategies.least_load as module
from hgraph.bundles import Bundle
from hgraph.lower_bound import lower_bound
from hgraph.topology import Topology
from strategies.least_load import certificate, greatest_load, least_loads
from strategies.load_demands import Demand
from tests.transfer_search import Loads, all_loads, every_bundle, small_topology

TOLERANCE = 1e-6  # of the solver, relative to loads of at most 10

NAMES = ("network sender", "network receiver", "local sender", "local receiver")


def numbers(bundles: Sequence[Bundle], topology: Topology) -> dict[str, float]:
    return {name: round(found.num_elements, 6) for name, found in least_loads(bundles, topology).items()}


# By hand


def test_one_copy_into_two_nodes_may_be_passed_on() -> None:
    found = numbers([Bundle(((0,),), (1, 2, 3, 4, 5), 6)], small_topology([2, 2, 2]))
    assert found["network sender"] == 3  # rank 0 or 1 sends first, either half of it if the bundle is cut
    assert found["network receiver"] == 3  # so does either rank of the other nodes
    assert found["node receiver"] == 6
    assert found["local receiver"] == 6  # rank 1 gets all of it from rank 0
    assert found["local sender"] == 6


def test_two_owners_of_one_node_balance_what_they_share() -> None:
    topology = small_topology([2, 2])
    found = numbers([Bundle(((0,),), (2, 3), 4), Bundle(((1,),), (2, 3), 4)], topology)
    assert found["network sender"] == 4 and found["node sender"] == 8
    assert found["network receiver"] == 4 and found["node receiver"] == 8
    assert found["local sender"] == 4 and found["local receiver"] == 4


def test_terms_are_summed_before_they_cross() -> None:
    topology = small_topology([2, 2])
    found = numbers([Bundle(((0,), (1,), (2,)), (2,), 8)], topology)
    assert found["network sender"] == 4  # either rank of node 0 may send the sum
    assert found["node sender"] == 8 and found["node receiver"] == 8
    assert found["local sender"] == 4 and found["local receiver"] == 4


def test_a_term_beside_an_owner_that_holds_none_has_to_move() -> None:
    found = numbers([Bundle(((0,), (2,)), (1,), 8)], small_topology([2, 1]))
    assert found["local sender"] == 8 and found["local receiver"] == 8


def test_a_port_bears_what_its_ranks_send() -> None:
    topology = small_topology([4, 4], ranks_per_port=2)
    found = numbers([Bundle(((rank,),), (4, 5, 6, 7), 4) for rank in range(4)], topology)
    assert found["network sender"] == 4 and found["port sender"] == 8 and found["node sender"] == 16
    assert found["network receiver"] == 4 and found["port receiver"] == 8


def test_nothing_moves() -> None:
    assert set(numbers([Bundle(((0, 1),), (0, 1), 5)], small_topology([1, 1])).values()) == {0}
    assert set(numbers([], small_topology([1, 1])).values()) == {0}


# By brute force


def least_by_search(bundles: Sequence[Bundle], topology: Topology) -> list[dict[str, int]]:
    """Returns the greatest loads of every combination of plans of the bundles, whole bundles being sent."""
    bound = lower_bound(bundles, topology)
    choices: list[list[Loads]] = []
    for bundle, network, local in zip(bundles, bound.network.tolist(), bound.local.tolist(), strict=True):
        found = next(plans for more in range(3) if (plans := all_loads(bundle, topology, network, local + more)))
        choices.append(sorted(found))
    sizes = [bundle.num_elements for bundle in bundles]
    result = []
    for combination in itertools.product(*choices):
        total = sum(size * np.array(loads) for size, loads in zip(sizes, combination, strict=True))
        greatest = dict(zip(("network sender", "network receiver", "local sender", "local receiver"),
                            (total[row].max() for row in range(4)), strict=True))  # fmt: skip
        for row, direction in ((0, "sender"), (1, "receiver")):
            for name, member_of in (("port", topology.port_of()), ("node", np.array(topology.node_of))):
                greatest[f"{name} {direction}"] = np.bincount(member_of, total[row]).max()
        result.append(greatest)
    return result


def check(bundles: Sequence[Bundle], topology: Topology) -> tuple[int, int]:
    """Returns how many of the eight bounds are reached, and how many there are; none may be above what a plan does."""
    plans = least_by_search(bundles, topology)
    reached = 0
    bounds = least_loads(bundles, topology)
    for name, bound in bounds.items():
        best = min(plan[name] for plan in plans)
        assert bound.num_elements <= best + TOLERANCE, (name, bound, best, bundles)
        assert bound.is_optimum
        reached += bound.num_elements >= best - TOLERANCE
    return reached, len(bounds)


def sweep(sizes: Sequence[int], seed: int, count: int, ranks_per_port: int = 1) -> tuple[int, int]:
    topology = small_topology(sizes, ranks_per_port)
    generator = random.Random(seed)
    known = list(every_bundle(topology.num_ranks, 3))
    reached, total = 0, 0
    for _ in range(count):
        chosen = [
            Bundle(bundle.terms, bundle.receivers, generator.randint(1, 3)) for bundle in generator.sample(known, 2)
        ]
        if len({(bundle.terms, bundle.receivers) for bundle in chosen}) == len(chosen):
            first, second = check(chosen, topology)
            reached, total = reached + first, total + second
    return reached, total


@pytest.mark.parametrize(
    ("sizes", "seed", "count", "ranks_per_port"), [([2, 2], 0, 12, 2), ([2, 1, 1], 1, 12, 1), ([3, 1], 2, 8, 1)]
)
def test_never_above_the_best_plan(sizes: list[int], seed: int, count: int, ranks_per_port: int) -> None:
    reached, total = sweep(sizes, seed, count, ranks_per_port)
    assert total and reached > total / 3  # a relaxation: whole bundles are what the search sends


@pytest.mark.long
@pytest.mark.parametrize("sizes", [[2, 2], [2, 1, 1], [3, 1], [1, 1, 1], [2, 2, 1]])
def test_never_above_the_best_of_many(sizes: list[int]) -> None:
    sweep(sizes, 7, 20 if sum(sizes) > 4 else 150)


# Solvers


@pytest.mark.parametrize("fault", ["raises", "no status", "wrong duals"])
def test_a_solver_that_fails_weakens_the_bound_only(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    demands = [Demand((0, 1), 4.0, 4.0), Demand((0,), 3.0, 3.0), Demand((2, 1), 1.0, 1.0)]
    right = greatest_load(demands)
    assert right.num_elements == pytest.approx(3.5) and right.is_optimum

    def solve(problem: cp.Problem) -> None:
        if fault == "raises":
            raise cp.error.SolverError("no")
        if fault == "wrong duals":
            problem.solve(solver=cp.HIGHS)
            problem.constraints[2].dual_variables[0].save_value(np.array([9.0, -3.0, np.nan]))

    monkeypatch.setattr(module, "solve_with_highs", solve)
    found = greatest_load(demands)
    assert 8 / 3 - 1e-9 <= found.num_elements <= 3.5 + 1e-9
    if fault != "wrong duals":
        assert not found.is_optimum and found.num_elements == pytest.approx(8 / 3)


def test_programs_that_are_too_large_have_a_bound_without_a_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PAIRS", 1)
    found = greatest_load([Demand((0, 1), 4.0, 4.0), Demand((0,), 4.0, 4.0), Demand((2,), 3.0, 3.0)])
    assert found.num_elements == 4.0 and not found.is_optimum


def test_any_weights_prove_a_bound() -> None:
    allowed = np.array([[True, True, False], [True, True, True]])
    amounts, caps = np.array([4.0, 4.0]), np.array([4.0, 2.0])
    best = greatest_load([Demand((0, 1), 4.0, 4.0), Demand((0, 1, 2), 4.0, 2.0)]).num_elements
    assert best == pytest.approx(3.0)
    generator = np.random.default_rng(0)
    for _ in range(200):
        assert certificate(allowed, amounts, caps, generator.random(3)) <= best + 1e-9
    assert certificate(allowed, amounts, caps, np.array([1.0, 1.0, 0.0])) == pytest.approx(best)
    assert certificate(allowed, amounts, caps, np.zeros(3)) == 0.0
