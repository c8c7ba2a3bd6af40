"""Lower bound: the fewest transfers that can give the receivers of each bundle its value.

A transfer takes one element, or a sum of terms of it, from one place to another. The same argument holds for nodes
(transfers over the network) and for ranks (transfers in all); a *place* is one of them. Take any plan and list its
transfers in the order in which they take effect.

**Terms.** Until a place knows all terms no place is *complete*. Let v be the first that is, at time t. The transfers up
to t connect v with a holder of every term; connecting k places takes k - 1 transfers. Every other place that needs the
value is not complete at t, so at least one transfer reaches it later. With U the places connected, v among them, and D
those that need the value: |U| - 1 + |D \\ {v}| transfers. If each term has one place, S of them in all, U = S and v are
best chosen where S and D meet, |S| + |D| - 2, and else anywhere in S or D, |S| + |D| - 1.

**Several holders of a term.** U may be any set with a holder of every term. A v outside of D can be replaced by one in
D at no loss (U grows by one place at most, D \\ {v} shrinks by one), so the bound is the least over v in D of
h(v) + |D| - 1, where h(v) is the fewest places, beside v, that hold the terms v does not. That is a set cover: found
exactly where at most `MAX_EXACT_TERMS` terms are left after simple reductions; otherwise terms that share no place
bound it from below, and a greedy choice says how many are enough.

**Copies, and places that hold all terms.** They are complete from the start; every other place in D is reached by one
transfer: |D \\ complete|. A plain copy is the case of one term; each node of D that holds one saves a transfer.

Both are reached: gather at v along a star, then send to all of D. Ranks hold one term at most, so for ranks h(v) is the
number of terms v does not hold.

What local links must carry is the difference: a plan that sends the least over the network moves at least (all) -
(network) inside nodes. The bound is that of the bundles: where an annotation offers several families to reduce, the
choice has been made (`hgraph/reshard_needs.py`), and a bundle whose terms may not be summed on their way (`direct`) may
need more. The rule is that of HSPMD's hierarchical reductions (arXiv 2504.20490, section 4) and of gossiping; its proof
and the general form are ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy

from hgraph.bundles import Bundle
from hgraph.reshard_needs import Family
from hgraph.topology import Topology

__all__ = ["MAX_EXACT_TERMS", "Fewest", "LowerBound", "fewest_places", "fewest_transfers", "lower_bound"]

MAX_EXACT_TERMS = 12

Places: TypeAlias = frozenset[int]


class Fewest(NamedTuple):
    """The fewest are at least `least`, and `enough` are enough; the two are equal but for entangled holders."""

    least: int
    enough: int


@dataclass(frozen=True, slots=True, eq=False)
class LowerBound:
    """The fewest transfers of each bundle, per element, and the bundles' sizes.

    `network` is for transfers over the network, `total` for those over either class of link, and `local` for those
    inside nodes where as few as can be go over the network.
    """

    network: numpy.ndarray
    total: numpy.ndarray
    local: numpy.ndarray
    num_elements: numpy.ndarray

    @property
    def network_elements(self) -> int:
        """The fewest elements over the network."""
        return int(self.network @ self.num_elements)

    @property
    def total_elements(self) -> int:
        """The fewest elements from rank to rank, over either class of link."""
        return int(self.total @ self.num_elements)

    @property
    def local_elements(self) -> int:
        """The fewest elements inside nodes, for plans that send the least over the network."""
        return int(self.local @ self.num_elements)


def lower_bound(bundles: Sequence[Bundle], topology: Topology) -> LowerBound:
    """Returns the fewest transfers of each bundle. Bundles whose terms lie in the same nodes are worked out once."""
    node_of = topology.node_of
    nodes: dict[tuple[int, ...], Places] = {}
    families: dict[Family, tuple[Places, ...]] = {}
    known: dict[tuple[tuple[Places, ...], Places], Fewest] = {}

    def places(ranks: tuple[int, ...]) -> Places:
        if ranks not in nodes:
            nodes[ranks] = frozenset(node_of[rank] for rank in ranks)
        return nodes[ranks]

    found = []
    for bundle in bundles:
        if bundle.terms not in families:
            families[bundle.terms] = tuple(sorted(map(places, bundle.terms), key=sorted))
        key = families[bundle.terms], places(bundle.receivers)
        if key not in known:
            known[key] = fewest_transfers(*key)
        network, total = known[key], _fewest_between_ranks(bundle)
        found.append((network.least, total, max(total - network.enough, 0), bundle.num_elements))
    return LowerBound(*numpy.array(found, dtype=numpy.int64).reshape(-1, 4).T)


def _fewest_between_ranks(bundle: Bundle) -> int:
    """Returns the fewest transfers between ranks, each of which holds one term at most."""
    if bundle.is_copy:
        return len(bundle.receivers) - len(set(bundle.receivers).intersection(bundle.terms[0]))
    receivers = set(bundle.receivers)
    meet = any(not receivers.isdisjoint(term) for term in bundle.terms)
    return len(bundle.terms) + len(receivers) - (2 if meet else 1)


def fewest_transfers(terms: Iterable[Places], needed: Places) -> Fewest:
    """Returns the fewest transfers that give all of `needed` the sum of `terms`, each held by the places named."""
    terms = tuple(terms)
    complete = frozenset.intersection(*terms)
    if complete:
        return Fewest(len(needed - complete), len(needed - complete))
    more = [fewest_places([term for term in terms if place not in term]) for place in sorted(needed)]
    others = len(needed) - 1
    return Fewest(min(each.least for each in more) + others, min(each.enough for each in more) + others)


def fewest_places(terms: Iterable[Places]) -> Fewest:
    """Returns the least number of places that together hold every term."""
    left = _without_implied(terms)
    forced = {place for term in left if len(term) == 1 for place in term}
    left = [term for term in left if forced.isdisjoint(term)]
    if not left:
        return Fewest(len(forced), len(forced))
    if len(left) > MAX_EXACT_TERMS:
        return Fewest(len(forced) + _disjoint(left), len(forced) + _greedy(left))
    smallest = min(left, key=lambda term: (len(term), sorted(term)))
    rests = [fewest_places([term for term in left if place not in term]) for place in sorted(smallest)]
    count = len(forced) + 1
    return Fewest(count + min(rest.least for rest in rests), count + min(rest.enough for rest in rests))


def _without_implied(terms: Iterable[Places]) -> list[Places]:
    """Leaves out terms whose places include all those of another: whoever holds the other one holds them too."""
    unique = sorted(set(terms), key=len)
    return [term for at, term in enumerate(unique) if not any(other <= term for other in unique[:at])]


def _disjoint(terms: Sequence[Places]) -> int:
    """Returns how many of `terms` were found that share no place; each needs a place of its own."""
    taken: set[int] = set()
    count = 0
    for term in sorted(terms, key=lambda term: (len(term), sorted(term))):
        if taken.isdisjoint(term):
            taken |= term
            count += 1
    return count


def _greedy(terms: Sequence[Places]) -> int:
    """Returns how many places hold all `terms` where each is chosen to hold the most of those left."""
    left = list(terms)
    count = 0
    while left:
        held = Counter(place for term in left for place in term)
        chosen = max(sorted(held), key=lambda place: held[place])
        left = [term for term in left if chosen not in term]
        count += 1
    return count
