"""All ways to give ranks a sum, by brute force: the independent judge of lower bounds and least loads.

A state says, per rank, which terms it knows. A transfer joins what the sender knows to what the receiver knows: any
two parts may be joined, which a real plan cannot always do (it would count a term twice), so the search allows all
plans and more. What it cannot do, no plan can.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TypeAlias

from hgraph.bundles import Bundle
from hgraph.topology import Link, Node, Topology

__all__ = ["all_loads", "every_bundle", "fewest", "small_topology"]

State: TypeAlias = tuple[int, ...]
Loads: TypeAlias = tuple[tuple[int, ...], ...]
"""Per rank: transfers out and in over the network, out and in inside the node."""


def small_topology(sizes: Sequence[int], ranks_per_port: int = 1) -> Topology:
    """Returns nodes of the given numbers of ranks."""
    link = Link(1.0, 0.0)
    firsts = itertools.accumulate([0, *sizes])
    nodes = [
        Node(f"node{at}", tuple(range(first, first + size)), link, link, ranks_per_port=ranks_per_port)
        for at, (first, size) in enumerate(zip(firsts, sizes, strict=False))
    ]
    return Topology("small", tuple(nodes))


def every_bundle(num_ranks: int, max_terms: int) -> Iterator[Bundle]:
    """Yields every bundle on `num_ranks` ranks: each rank holds one term or none and is a receiver or not."""
    for held in itertools.product(range(-1, max_terms), repeat=num_ranks):
        terms = [tuple(rank for rank in range(num_ranks) if held[rank] == term) for term in range(max(held) + 1)]
        lowest = [term[0] for term in terms if term]
        if not terms or not all(terms) or lowest != sorted(lowest):
            continue
        for receives in itertools.product((False, True), repeat=num_ranks):
            receivers = tuple(rank for rank in range(num_ranks) if receives[rank])
            if receivers:
                yield Bundle(tuple(terms), receivers, 1)


def _start(bundle: Bundle, num_ranks: int) -> State:
    return tuple(
        sum(1 << term for term, holders in enumerate(bundle.terms) if rank in holders) for rank in range(num_ranks)
    )


def fewest(bundle: Bundle, topology: Topology, price: Callable[[int, int], int]) -> int:
    """Returns the least total price of transfers by which all receivers come to know all terms; any rank may relay."""
    size, every_term = topology.num_ranks, (1 << len(bundle.terms)) - 1
    best = {_start(bundle, size): 0}
    queue = [(0, _start(bundle, size))]
    while queue:
        paid, state = heapq.heappop(queue)
        if all(state[rank] == every_term for rank in bundle.receivers):
            return paid
        if paid > best[state]:
            continue
        for sender, receiver in itertools.permutations(range(size), 2):
            joined = state[sender] | state[receiver]
            if joined == state[receiver]:
                continue
            after = (*state[:receiver], joined, *state[receiver + 1 :])
            total = paid + price(sender, receiver)
            if total < best.get(after, total + 1):
                best[after] = total
                heapq.heappush(queue, (total, after))
    raise AssertionError("no plan")


def all_loads(bundle: Bundle, topology: Topology, num_network: int, num_local: int) -> frozenset[Loads]:
    """Returns the loads of every plan of just so many transfers in which only holders and receivers carry anything."""
    size, every_term = topology.num_ranks, (1 << len(bundle.terms)) - 1
    carriers = sorted({rank for term in bundle.terms for rank in term}.union(bundle.receivers))
    node_of = topology.node_of

    @cache
    def rest(state: State, network: int, local: int) -> frozenset[Loads]:
        if all(state[rank] == every_term for rank in bundle.receivers):
            return frozenset({((0,) * size,) * 4}) if network == local == 0 else frozenset()
        found = set()
        for sender, receiver in itertools.permutations(carriers, 2):
            joined = state[sender] | state[receiver]
            crosses = node_of[sender] != node_of[receiver]
            if joined == state[receiver] or not (network if crosses else local):
                continue
            after = (*state[:receiver], joined, *state[receiver + 1 :])
            for loads in rest(after, network - crosses, local - (not crosses)):
                row = 0 if crosses else 2
                found.add(_one_more(_one_more(loads, row, sender), row + 1, receiver))
        return frozenset(found)

    return rest(_start(bundle, size), num_network, num_local)


def _one_more(loads: Loads, row: int, rank: int) -> Loads:
    changed = (*loads[row][:rank], loads[row][rank] + 1, *loads[row][rank + 1 :])
    return (*loads[:row], changed, *loads[row + 1 :])
