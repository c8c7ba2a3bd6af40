"""Routes and bundles: their invariants, each broken once, and crossings counted by hand and on random bundles."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import numpy
import pytest
from hypothesis import given, settings

from hgraph.bundles import Bundle, gather_bundles
from hgraph.check_routes import check_routes
from hgraph.errors import InvalidInput, PlanError
from hgraph.route_plan import SCRATCH, SOURCE, TARGET, Routes
from hgraph.routes import find_routes
from hgraph.topology import Link, Node, Topology
from tests.bridge_samples import BridgeSample, bridge_samples, nodes

PAIRS = nodes((0, 1), (2, 3), (4, 5), (6, 7))


def routed(topology: Topology, *bundles: Bundle) -> Routes:
    routes = find_routes(bundles, topology)
    check_routes(routes, bundles, topology)
    return routes


def listed(routes: Routes) -> list[tuple[int, int, int, int]]:
    """Returns (level, sender, receiver, origin) of each transfer."""
    columns = (routes.level, routes.sender, routes.receiver, routes.origin)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def crossings(routes: Routes, topology: Topology) -> int:
    """Returns the number of transfers over the network."""
    node_of = numpy.array(topology.node_of)
    return int((node_of[routes.sender] != node_of[routes.receiver]).sum())


# Counted by hand


def test_four_nodes_that_need_what_one_of_them_holds_are_crossed_into_three_times() -> None:
    routes = routed(PAIRS, Bundle(((0,),), (0, 3, 5, 6), 1))
    assert crossings(routes, PAIRS) == 3
    assert listed(routes) == [(2, 0, 3, SOURCE), (2, 0, 5, SOURCE), (2, 0, 6, SOURCE)]


def test_two_receivers_in_a_node_are_served_by_one_crossing() -> None:
    routes = routed(PAIRS, Bundle(((0,),), (2, 3), 1))
    assert listed(routes) == [(2, 0, 2, SOURCE), (3, 2, 3, TARGET)]


def test_a_receiver_beside_a_holder_is_served_inside_the_node() -> None:
    routes = routed(PAIRS, Bundle(((0, 2),), (0, 1, 3), 1))
    assert listed(routes) == [(3, 0, 1, SOURCE), (3, 2, 3, SOURCE)]


def test_two_terms_of_a_node_cross_as_one_sum() -> None:
    routes = routed(PAIRS, Bundle(((0,), (1,)), (2,), 1))
    assert listed(routes) == [(0, 1, 0, SOURCE), (1, 0, 2, SCRATCH)]
    assert routes.roots.tolist() == [2]
    assert routes.combines.tolist() == [True, False]


def test_sums_meet_in_a_node_that_holds_a_term() -> None:
    routes = routed(PAIRS, Bundle(((0,), (1,), (4,)), (4, 6), 1))
    assert routes.roots.tolist() == [4]
    assert listed(routes) == [(0, 1, 0, SOURCE), (1, 0, 4, SCRATCH), (2, 4, 6, TARGET)]
    assert routes.combines.tolist() == [True, True, False]


def test_of_replicated_terms_one_copy_is_reduced() -> None:
    routes = routed(PAIRS, Bundle(((0, 2), (1, 3)), (4,), 1))
    assert len(routes) == 2 and crossings(routes, PAIRS) == 1


def test_terms_that_the_node_of_the_root_has_are_not_fetched_from_another() -> None:
    routes = routed(PAIRS, Bundle(((0, 2), (1, 3)), (3,), 1))
    assert listed(routes) == [(0, 2, 3, SOURCE)]


def test_the_root_is_where_fewest_sums_must_come() -> None:
    # Rank 0 holds a term, but in the node of rank 5 nothing would have to cross at all.
    routes = routed(PAIRS, Bundle(((0, 4), (5,)), (0, 5), 1))
    assert routes.roots.tolist() == [5]
    assert listed(routes) == [(0, 4, 5, SOURCE), (2, 5, 0, TARGET)]


def test_a_direct_bundle_is_not_summed_on_the_way() -> None:
    routes = routed(PAIRS, Bundle(((0,), (1,), (3,)), (2,), 1, direct=True))
    assert listed(routes) == [(0, 3, 2, SOURCE), (1, 0, 2, SOURCE), (1, 1, 2, SOURCE)]
    assert routes.combines.tolist() == [False, True, True]


def test_what_holders_have_in_their_target_buffers_is_read_there() -> None:
    routes = routed(PAIRS, Bundle(((0,),), (1, 2), 1, in_target=True))
    assert listed(routes) == [(2, 0, 2, TARGET), (3, 0, 1, TARGET)]


def test_what_every_receiver_holds_does_not_move() -> None:
    assert len(routed(PAIRS, Bundle(((0, 1, 2),), (0, 2), 1))) == 0
    assert len(routed(PAIRS)) == 0


def test_the_holders_of_one_bundle_take_turns() -> None:
    routes = routed(PAIRS, Bundle(((0, 1),), (2, 4, 6), 1))
    assert routes.sender.tolist() == [0, 1, 0]


def test_a_holder_with_half_the_bandwidth_sends_half_as_much() -> None:
    links = [Link(10.0, 1.0), Link(5.0, 1.0), Link(10.0, 1.0)]
    mixed = Topology(
        "mixed", tuple(Node(f"node{n}", (2 * n, 2 * n + 1), Link(100.0, 1.0), link) for n, link in enumerate(links))
    )
    bundles = [Bundle(((0, 2),), (4,), 10 + number) for number in range(9)]
    senders = routed(mixed, *bundles).sender.tolist()
    assert (senders.count(0), senders.count(2)) == (6, 3)
    assert routed(PAIRS, *bundles).sender.tolist().count(2) in (4, 5)


def test_senders_receivers_and_ranks_that_sum_take_turns() -> None:
    copies = [Bundle(((0, 1),), (2, 3), 8) for _ in range(4)]
    routes = routed(PAIRS, *copies)
    assert numpy.bincount(routes.sender[routes.level == 2]).tolist() == [2, 2]
    assert numpy.bincount(routes.receiver[routes.level == 2]).tolist() == [0, 0, 2, 2]
    sums = [Bundle(((0,), (1,)), (2,), 8) for _ in range(4)]
    routes = routed(PAIRS, *sums)
    assert numpy.bincount(routes.sender[routes.level == 1]).tolist() == [2, 2]


def test_the_largest_bundle_is_routed_first() -> None:
    small, large = Bundle(((0, 1),), (2,), 1), Bundle(((0, 1),), (4,), 9)
    routes = routed(PAIRS, small, large)
    assert dict(zip(routes.bundle.tolist(), routes.sender.tolist(), strict=True)) == {1: 0, 0: 1}


# Chains: rank 0 serves the ranks beside it, and is relieved by one of them

THREE_AND_ONE = nodes((0, 1, 2), (3,))


def levels_of(routes: Routes, sender: int, receiver: int) -> list[int]:
    """Returns the levels of the transfers of a pair of ranks."""
    return routes.level[(routes.sender == sender) & (routes.receiver == receiver)].tolist()


def test_the_busiest_rank_serves_one_that_serves_another() -> None:
    routes = routed(THREE_AND_ONE, Bundle(((0,),), (1, 2, 3), 8))
    assert listed(routes) == [(2, 0, 3, SOURCE), (2, 0, 1, SOURCE), (3, 1, 2, TARGET)]


@pytest.mark.parametrize("is_root_a_holder", [True, False])
def test_the_busiest_root_is_sent_a_sum(is_root_a_holder: bool) -> None:
    terms = ((0,), (1,), (2,), (3,))[1 - is_root_a_holder :]
    routes = routed(THREE_AND_ONE, Bundle(terms, (0,), 8))
    assert listed(routes) == [(0, 2, 1, SOURCE), (1, 1, 0, SCRATCH), (1, 3, 0, SOURCE)]
    assert routes.into_scratch.tolist() == [True, False, False]
    assert routes.combines.tolist() == [True, is_root_a_holder, True]


def test_without_a_network_there_is_no_chain() -> None:
    routes = routed(nodes((0, 1, 2)), Bundle(((0,),), (1, 2), 8))
    assert listed(routes) == [(3, 0, 1, SOURCE), (3, 0, 2, SOURCE)]


def test_terms_that_may_not_be_summed_on_the_way_make_no_chain() -> None:
    routes = routed(THREE_AND_ONE, Bundle(((1,), (2,), (3,)), (0,), 8, direct=True))
    assert listed(routes) == [(0, 1, 0, SOURCE), (0, 2, 0, SOURCE), (1, 3, 0, SOURCE)]


def test_a_rank_is_not_relieved_below_one_that_cannot_be() -> None:
    topology = nodes((0, 1, 2), (3, 4, 5))
    routes = routed(topology, Bundle(((0,),), (1, 2, 3, 4, 5), 8))
    assert levels_of(routes, 0, 1) == levels_of(routes, 0, 2) == [3]
    topology = nodes((0, 1, 2), (3, 4, 5), (6, 7))
    bundles = (Bundle(((0,),), (1, 2, 6), 100), Bundle(((3,),), (4, 5), 10), Bundle(((6,),), (7,), 50))
    routes = routed(topology, *bundles)
    assert levels_of(routes, 0, 1) == [2] and levels_of(routes, 3, 4) == levels_of(routes, 3, 5) == [3]


def test_a_relay_is_not_relieved_itself() -> None:
    from_0, from_1 = Bundle(((0,),), (1, 2, 3), 300), Bundle(((1,),), (0, 2), 100)
    routes = routed(THREE_AND_ONE, from_0, from_1, Bundle(((2,),), (1,), 350), Bundle(((0,),), (1,), 80))
    assert levels_of(routes, 0, 1) == [2, 2] and levels_of(routes, 1, 2) == [3, 3] and levels_of(routes, 1, 0) == [3]


def test_two_hubs_share_a_relay_that_is_no_hub() -> None:
    from_0, from_1 = Bundle(((0,),), (1, 2, 3), 300), Bundle(((1,),), (0, 2), 100)
    routes = routed(THREE_AND_ONE, from_0, from_1, Bundle(((1,),), (0,), 250))
    assert levels_of(routes, 0, 2) == levels_of(routes, 1, 2) == [2]
    assert levels_of(routes, 2, 0) == levels_of(routes, 2, 1) == [3]


def test_all_that_a_hub_sends_its_relay_goes_in_one_level() -> None:
    big, small = Bundle(((0,),), (1, 2, 3), 100), Bundle(((0,),), (1,), 1)
    assert levels_of(routed(THREE_AND_ONE, big, small), 0, 1) == [2, 2]
    big, small = Bundle(((0,), (1,), (2,), (3,)), (0,), 100), Bundle(((1,), (3,)), (0,), 1)
    assert levels_of(routed(THREE_AND_ONE, big, small), 1, 0) == [1, 1]


def copies(size: int) -> tuple[Bundle, ...]:
    """Returns bundles of which the last, of `size`, enters the node of rank 0 there; of the first, 0 is the hub."""
    return (
        Bundle(((0,),), (1, 2, 3), 1000),
        *(Bundle(((3,),), (rank,), 200) for rank in (1, 2)),
        Bundle(((3,),), (0, 1, 2), size),
    )


def sums(size: int) -> tuple[Bundle, ...]:
    """Returns the mirror image of `copies`."""
    return (
        Bundle(((0,), (1,), (2,), (3,)), (0,), 1000),
        *(Bundle(((rank,),), (3,), 200) for rank in (1, 2)),
        Bundle(((0,), (1,), (2,)), (3,), size),
    )


def test_a_relay_becomes_the_entry_of_a_small_bundle_in_place_of_its_hub() -> None:
    routes = routed(THREE_AND_ONE, *copies(10))
    assert levels_of(routes, 0, 1) == [2] and levels_of(routes, 1, 2) == [3, 3]
    of_last = routes.bundle == 3
    assert list(zip(routes.sender[of_last], routes.receiver[of_last], strict=True)) == [(3, 1), (1, 0), (1, 2)]
    routes = routed(THREE_AND_ONE, *sums(10))
    of_last = routes.bundle == 3
    assert levels_of(routes, 1, 0) == [1] and levels_of(routes, 2, 1) == [0, 0]
    assert list(zip(routes.sender[of_last], routes.receiver[of_last], strict=True)) == [(0, 1), (2, 1), (1, 3)]


def test_where_a_large_bundle_would_enter_elsewhere_there_is_no_chain() -> None:
    routes = routed(THREE_AND_ONE, *copies(100))
    assert levels_of(routes, 0, 1) == levels_of(routes, 0, 2) == [3, 3]
    routes = routed(THREE_AND_ONE, *sums(100))
    assert levels_of(routes, 1, 0) == levels_of(routes, 2, 0) == [0, 0]


# Invariants, each broken once

BUNDLES = (
    Bundle(((0,), (1,), (4,)), (2, 3, 6), 1),
    Bundle(((0,),), (1, 4, 5), 1),
)
"""Routes: 1 -> 0 (sum), 0 and 4 -> 2 (sums), 2 -> 6, 0 -> 4 (copies), 2 -> 3, 0 -> 1, 4 -> 5 (inside nodes)."""


def changed(routes: Routes, at: int, **fields: int) -> Routes:
    """Returns routes in which a transfer has other fields."""
    arrays = {name: getattr(routes, name).copy() for name in fields}
    for name, value in fields.items():
        arrays[name][at] = value
    return replace(routes, **arrays)


COLUMNS = [field.name for field in dataclasses.fields(Routes) if field.name != "roots"]


def without(routes: Routes, at: int) -> Routes:
    return replace(routes, **{name: numpy.delete(getattr(routes, name), at) for name in COLUMNS})


def twice(routes: Routes, at: int, **fields: int) -> Routes:
    """Returns routes with a transfer inserted, which has other fields, behind transfer `at`."""
    arrays = {name: getattr(routes, name) for name in COLUMNS}
    more = {name: numpy.insert(array, at + 1, fields.get(name, array[at])) for name, array in arrays.items()}
    return replace(routes, **more)


BROKEN = {
    "levels in another order": (lambda r: changed(r, 0, level=3), "not ordered"),
    "carried by a stranger": (lambda r: changed(r, 0, sender=7), "not carried by holders and receivers alone"),
    "a sender that has nothing": (lambda r: changed(r, 7, origin=SOURCE), "not held: the sender .* source"),
    "a sum that nobody made": (lambda r: changed(r, 1, origin=SCRATCH), "not held: the sender .* scratch"),
    "read before it comes": (lambda r: changed(r, 3, sender=3), "not held: the sender .* target"),
    "a term that is missing": (lambda r: without(r, 0), "not held|not complete"),
    "a term that comes twice": (lambda r: twice(r, 1, combines=1), "not complete|not crossing once"),
    "a value that is missing": (lambda r: without(r, len(r) - 1), "not complete: expected terms"),
    "a value that comes twice": (lambda r: twice(r, len(r) - 1), "not complete: .* meets terms"),
    "a sum onto nothing": (lambda r: changed(r, 1, combines=1), "not complete: .* meets nothing"),
    "a sum that replaces": (lambda r: changed(r, 2, combines=0), "not complete: .* meets terms"),
    "a node crossed into twice": (
        lambda r: changed(r, len(r) - 1, level=3, sender=0, origin=SOURCE),
        "not crossing once: copies cross 2 times into node 2",
    ),
    "two sums of one node": (lambda r: twice(without(r, 0), 0, sender=1, origin=SOURCE), "not held|not crossing once"),
}


def test_the_sample_of_the_broken_routes_is_right() -> None:
    assert [(sender, receiver) for _, sender, receiver, _ in listed(routed(PAIRS, *BUNDLES))] == [
        (1, 0), (4, 2), (0, 2), (2, 6), (0, 4), (2, 3), (0, 1), (4, 5),
    ]  # fmt: skip


def test_copies_and_sums_of_a_pair_go_in_one_level() -> None:
    for bundle, at, level, kind in (
        (Bundle(((0,),), (1,), 1), 0, 2, "copies from rank 0 to rank 1"),
        (Bundle(((1,),), (0,), 1), 0, 2, "copies from rank 1 to rank 0"),
        (Bundle(((0,), (1,)), (0,), 1), 1, 1, "sums from rank 1 to rank 0"),
    ):
        routes = changed(find_routes([bundle, bundle], PAIRS), at, level=level)
        order = numpy.lexsort((routes.bundle, routes.level))
        routes = replace(routes, **{field: getattr(routes, field)[order] for field in COLUMNS})
        with pytest.raises(PlanError, match=f"not one level per pair: expected {kind} in one level, got levels"):
            check_routes(routes, [bundle, bundle], PAIRS)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_routes_are_refused(name: str) -> None:
    breaks, message = BROKEN[name]
    with pytest.raises(PlanError, match=message):
        check_routes(breaks(find_routes(BUNDLES, PAIRS)), BUNDLES, PAIRS)


@pytest.mark.parametrize(
    ("terms", "receivers"),
    [((), (1,)), (((0,), ()), (1,)), (((0,), (0, 1)), (1,)), (((0,),), ()), (((0,),), (2, 1)), (((0,),), (1, 1))],
)
def test_a_bundle_has_disjoint_terms_and_ascending_receivers(
    terms: tuple[tuple[int, ...], ...], receivers: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidInput, match="bundle: expected disjoint terms, each with a holder, and ascending"):
        Bundle(terms, receivers, 1)


@settings(max_examples=100, deadline=None)
@given(bridge_samples(2))
def test_routes_of_any_tensors_hold(sample: BridgeSample) -> None:
    _, _, bundles = gather_bundles(sample.reshards)
    routed(sample.topology, *bundles)
