"""The lower bound: by hand, by brute force, and as what plans reach."""

from __future__ import annotations

import itertools
import random

import pytest

from hgraph.bundles import Bundle
from hgraph.lower_bound import MAX_EXACT_TERMS, fewest_places, fewest_transfers, lower_bound
from hgraph.routes import find_routes
from hgraph.topology import Topology
from tests.transfer_search import every_bundle, fewest, small_topology


def places(*groups: str) -> list[frozenset[int]]:
    """`places("01", "2")`: two terms, the first in places 0 and 1, the second in place 2."""
    return [frozenset(map(int, group)) for group in groups]


def of(terms: list[frozenset[int]], needed: str) -> int:
    found = fewest_transfers(terms, frozenset(map(int, needed)))
    assert found.least == found.enough
    return found.least


# By hand


@pytest.mark.parametrize(
    ("terms", "needed", "expected"),
    [
        (places("0", "1", "2"), "0", 2),  # meet: |S| + |D| - 2
        (places("0", "1", "2"), "012", 4),
        (places("0", "1", "2"), "23", 3),
        (places("0", "1"), "2", 2),  # apart: |S| + |D| - 1
        (places("0", "1"), "23", 3),
        (places("0", "0"), "0", 0),
        (places("0", "0"), "12", 2),
        (places("0"), "123", 3),  # copies: one holder, none of them needs it
        (places("01"), "0123", 2),  # two holders that need it save one each
        (places("01", "01"), "012", 1),  # places that hold all terms
        (places("01", "12"), "1", 0),
        (places("01", "12", "3"), "1", 1),
        (places("01", "02", "3", "4"), "5", 3),  # one place for the first two
        (places("01", "12", "20"), "3", 2),  # no place for all three: a cover
    ],
)
def test_fewest_transfers(terms: list[frozenset[int]], needed: str, expected: int) -> None:
    assert of(terms, needed) == expected


def test_terms_of_one_node_cross_once_and_are_summed_inside() -> None:
    topology = small_topology([2, 2])
    bundle = Bundle(((0,), (1,), (2,), (3,)), (3,), 10)
    bound = lower_bound([bundle], topology)
    assert (bound.network_elements, bound.local_elements, bound.total_elements) == (10, 20, 30)


def test_copies_cross_once_into_each_node_without_one() -> None:
    topology = small_topology([2, 2, 2])
    bundle = Bundle(((0, 2),), (0, 1, 2, 3, 4, 5), 7)
    bound = lower_bound([bundle], topology)
    assert (bound.network_elements, bound.local_elements, bound.total_elements) == (7, 21, 28)


def test_no_bundles() -> None:
    assert lower_bound([], small_topology([1])).network_elements == 0


def test_entangled_terms_leave_a_gap_that_holds_the_truth() -> None:
    generator = random.Random(0)
    for _ in range(30):
        terms = [frozenset(generator.sample(range(9), 2)) for _ in range(20)]
        found = fewest_places(terms)
        truth = next(
            count
            for count in range(10)
            if any(all(term & set(chosen) for term in terms) for chosen in itertools.combinations(range(9), count))
        )
        assert found.least <= truth <= found.enough
        if len(set(terms)) <= MAX_EXACT_TERMS:
            assert found.least == found.enough


# By brute force


def check_by_search(bundle: Bundle, topology: Topology) -> None:
    node_of = topology.node_of
    bound = lower_bound([bundle], topology)
    network = fewest(bundle, topology, lambda sender, receiver: int(node_of[sender] != node_of[receiver]))
    total = fewest(bundle, topology, lambda sender, receiver: 1)
    assert (int(bound.network[0]), int(bound.total[0])) == (network, total), bundle
    routes = find_routes([bundle], topology)
    crosses = [node_of[s] != node_of[r] for s, r in zip(routes.sender.tolist(), routes.receiver.tolist(), strict=True)]
    if all(len({node_of[rank] for rank in term}) == 1 for term in bundle.terms) or bundle.is_copy:
        assert sum(crosses) == network, bundle
        assert len(routes) - sum(crosses) == bound.local[0], bundle


@pytest.mark.parametrize("sizes", [[1, 1, 1], [2, 1], [3], [2, 2]])
def test_every_small_case(sizes: list[int]) -> None:
    """Every bundle on up to four ranks: what the search finds, and what `find_routes` reaches."""
    topology = small_topology(sizes)
    bundles = list(every_bundle(topology.num_ranks, 3))
    chosen = bundles if len(bundles) < 500 else random.Random(1).sample(bundles, 300)
    for bundle in chosen:
        check_by_search(bundle, topology)


@pytest.mark.parametrize("sizes", [[2, 2, 1], [3, 1, 1], [1, 4]])
def test_five_ranks(sizes: list[int]) -> None:
    topology = small_topology(sizes)
    for bundle in random.Random(2).sample(list(every_bundle(5, 3)), 15):
        check_by_search(bundle, topology)


@pytest.mark.long
@pytest.mark.parametrize("sizes", [[2, 2, 1], [3, 1, 1], [1, 4], [2, 3], [5]])
def test_many_of_five_ranks(sizes: list[int]) -> None:
    topology = small_topology(sizes)
    for bundle in random.Random(3).sample(list(every_bundle(5, 3)), 400):
        check_by_search(bundle, topology)
