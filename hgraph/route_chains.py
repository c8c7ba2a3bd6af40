"""Relieves the busiest ranks by chains: of the ranks of a node that one of them serves, one serves another.

A rank that has a value, the *hub*, serves every rank beside it; a rank where terms meet, a hub too, is sent each from
beside it. Where that makes it the busiest, it serves one of them, the *relay*, by level 2 instead of 3, and the relay
serves others by level 3. Sums are the mirror image: others send the relay their terms by level 0, and the relay sends
the hub the sum by level 1. Both levels run anyway where something crosses the network, and elsewhere chains are not
begun. They move nothing more: what one rank is spared another does.

A pair of ranks meets in one level of copies and in one of sums, so that it has one message per bucket. Hence

- a hub has one relay, and no relay is a hub;
- whatever else the hub sends its relay goes by level 2 as well, for it has that from the start. Where it is the entry
  of a bundle, which has the value by level 3 only, the relay becomes the entry in its place. Only pairs for which this
  is next to nothing are chosen, because entries balance what crosses the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy

from hgraph.bundles import Bundle
from hgraph.route_plan import SCRATCH, TARGET, Integers, Routes
from hgraph.topology import Topology

__all__ = ["relieve_busiest"]

MOST_EXCHANGED = 0.01
"""For at most this part of the first bundle that it passes on a relay becomes the entry in place of its hub."""


def relieve_busiest(routes: Routes, bundles: Sequence[Bundle], topology: Topology) -> Routes:
    """Returns `routes`, those of `find_routes`, with chains where a node's busiest rank is relieved by them."""
    relief = _Relief(routes, bundles, topology)
    is_relieved = [
        relief.relieve(_Kind(3, 2, relief.sender, relief.receiver)),
        relief.relieve(_Kind(0, 1, relief.receiver, relief.sender)),
    ]
    return relief.routes() if any(is_relieved) else routes


@dataclass(frozen=True, slots=True)
class _Kind:
    """Copies or sums: the level inside nodes, that over the network, and per transfer who serves whom.

    `hub` sends copies, or receives terms and adds them up; `spoke` is the rank at the other end.
    """

    inner: int
    outer: int
    hub: Integers
    spoke: Integers

    @property
    def is_sum(self) -> bool:
        return self.inner == 0


@dataclass(frozen=True, slots=True)
class _Star:
    """Transfers of one bundle between a hub and others of its node; `serving[rank]` is that of `rank`."""

    size: int
    serving: dict[int, int]


class _Relief:
    """Transfers in columns, which are changed in place; levels stay in their order until `routes` sorts them."""

    def __init__(self, routes: Routes, bundles: Sequence[Bundle], topology: Topology) -> None:
        self.before, self.topology = routes, topology
        self.bundle = routes.bundle
        self.sender, self.receiver = routes.sender.copy(), routes.receiver.copy()
        self.level, self.origin = routes.level.copy(), routes.origin.copy()
        self.size = numpy.array([bundle.num_elements for bundle in bundles], dtype=numpy.int64)
        self.is_direct = numpy.array([bundle.direct for bundle in bundles], dtype=bool)
        self.starts = numpy.searchsorted(routes.level, numpy.arange(5))

    def relieve(self, kind: _Kind) -> bool:
        """Puts chains in place of stars of one kind; returns whether there are any."""
        inner, outer = (slice(*self.starts[level : level + 2]) for level in (kind.inner, kind.outer))
        if not len(self.bundle[outer]):
            return False
        # Who has a copy only by the outer level, or sends its sum by it: an entry, or a rank that sums for the root.
        is_entry = numpy.zeros(len(self.size) * self.topology.num_ranks, dtype=bool)
        is_entry[self._key(kind.spoke, outer)] = True
        entry_serves = is_entry[self._key(kind.hub, inner)]
        stars, loads = self._stars(kind, inner, entry_serves), self._loads(kind)
        # Nothing is gained by relieving a hub below the load of a rank that nobody can relieve.
        enough = int(numpy.delete(loads, list(stars)).max(initial=0))
        if all(loads[hub] <= enough for hub in stars):
            return False
        served = inner.start + numpy.flatnonzero(entry_serves)
        chains = _Chains(stars, loads.tolist(), enough, self._exchanged(kind, served, stars))
        for node in self.topology.nodes:
            for at, to_relay in chains.choose(node.ranks):
                self._pass_on(kind, at, to_relay)
        relay_of = numpy.array(chains.relay_of)
        self._exchange(kind, outer, served, relay_of)
        self.level[inner][relay_of[kind.hub[inner]] == kind.spoke[inner]] = kind.outer
        return bool((relay_of >= 0).any())

    def _key(self, rank: Integers, at: slice | Integers) -> Integers:
        return self.bundle[at] * self.topology.num_ranks + rank[at]

    def _stars(self, kind: _Kind, inner: slice, entry_serves: Integers) -> dict[int, list[_Star]]:
        """Returns, by hub, the transfers by which one that is no entry serves several ranks, the largest first."""
        own = inner.start + numpy.flatnonzero(~entry_serves)
        own = own[~self.is_direct[self.bundle[own]]]
        _, place, counts = numpy.unique(self._key(kind.hub, own), return_inverse=True, return_counts=True)
        own = own[counts[place] > 1]
        found: dict[tuple[int, int], dict[int, int]] = {}
        columns = (self.bundle[own], kind.hub[own], kind.spoke[own], own)
        for bundle, hub, spoke, at in zip(*(column.tolist() for column in columns), strict=True):
            found.setdefault((bundle, hub), {})[spoke] = at
        result: dict[int, list[_Star]] = {}
        for bundle, hub in sorted(found, key=lambda star: (-self.size[star[0]], star)):
            result.setdefault(hub, []).append(_Star(int(self.size[bundle]), found[bundle, hub]))
        return result

    def _loads(self, kind: _Kind) -> Integers:
        """Returns what each rank sends inside its node, or receives there where terms are summed."""
        loads = numpy.zeros(self.topology.num_ranks, dtype=numpy.int64)
        for level in (0, 3):
            at = slice(*self.starts[level : level + 2])
            loads += numpy.bincount(kind.hub[at], self.size[self.bundle[at]], len(loads)).astype(numpy.int64)
        return loads

    def _exchanged(self, kind: _Kind, served: Integers, stars: dict[int, list[_Star]]) -> dict[tuple[int, int], int]:
        """Returns, by hub and rank of a star, for how many elements the rank would become the entry instead."""
        width = max(len(node.ranks) for node in self.topology.nodes)
        place = numpy.zeros(self.topology.num_ranks, dtype=numpy.int64)
        for node in self.topology.nodes:
            place[list(node.ranks)] = numpy.arange(len(node.ranks))
        pair = kind.hub[served] * width + place[kind.spoke[served]]
        elements = numpy.bincount(pair, self.size[self.bundle[served]], len(place) * width)
        pairs = {(hub, rank) for hub, found in stars.items() for star in found for rank in star.serving}
        return {(hub, rank): int(elements[hub * width + place[rank]]) for hub, rank in pairs}

    def _pass_on(self, kind: _Kind, at: int, to_relay: int) -> None:
        """Makes the relay, served by the transfer `to_relay`, the hub of the transfer `at`."""
        kind.hub[at] = kind.spoke[to_relay]
        if kind.is_sum:
            self.origin[to_relay] = SCRATCH
        else:
            self.origin[at] = TARGET

    def _exchange(self, kind: _Kind, outer: slice, served: Integers, relay_of: Integers) -> None:
        """Makes relays the entries of bundles where their hubs were and served them; `served`: by entries."""
        to_relay = served[relay_of[kind.hub[served]] == kind.spoke[served]]
        leaves = numpy.zeros(len(self.size) * self.topology.num_ranks, dtype=bool)
        leaves[self._key(kind.hub, to_relay)] = True
        kind.spoke[to_relay] = kind.hub[to_relay]
        at = served[leaves[self._key(kind.hub, served)]]
        kind.hub[at] = relay_of[kind.hub[at]]
        at = outer.start + numpy.flatnonzero(leaves[self._key(kind.spoke, outer)])
        kind.spoke[at] = relay_of[kind.spoke[at]]

    def routes(self) -> Routes:
        """Returns the transfers in the order of routes."""
        before = self.before
        first = _first_at_roots(before)
        is_copied = numpy.zeros(len(self.size), dtype=bool)  # into a root that holds no term the first one is a copy
        is_copied[before.bundle[first]] = ~before.combines[first]
        order = numpy.lexsort((self.bundle, self.level))
        columns = {name: getattr(self, name)[order] for name in ("bundle", "sender", "receiver", "level", "origin")}
        routes = replace(before, **columns, combines=columns["level"] < 2)
        first = _first_at_roots(routes)
        routes.combines[first] = ~is_copied[routes.bundle[first]]
        return routes


def _first_at_roots(routes: Routes) -> Integers:
    """Returns, of each bundle that is summed, the first transfer into its root's target."""
    at = numpy.flatnonzero(routes.level < 2)
    at = at[routes.receiver[at] == routes.roots[routes.bundle[at]]]
    return at[numpy.unique(routes.bundle[at], return_index=True)[1]]


class _Chains:
    """Chooses chains: the busiest rank of a node hands transfers over to the least loaded rank that it serves."""

    def __init__(
        self, stars: dict[int, list[_Star]], loads: list[int], enough: int, exchanged: dict[tuple[int, int], int]
    ) -> None:
        """`loads`: elements by rank, to be brought to `enough`; `exchanged` as `_Relief._exchanged` returns it."""
        self.stars, self.loads, self.enough, self.exchanged = stars, loads, enough, exchanged
        self.relay_of = [-1] * len(loads)
        self._relays: set[int] = set()

    def choose(self, ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields a transfer of a hub among `ranks` and that by which the relay gets what it passes on instead."""
        while self.loads[hub := max(ranks, key=lambda rank: (self.loads[rank], -rank))] > self.enough:
            chain = next(filter(None, (self._chain(hub, star) for star in self.stars.get(hub, ()))), None)
            if chain is None:
                return
            yield chain

    def _chain(self, hub: int, star: _Star) -> tuple[int, int] | None:
        relays = [rank for rank in star.serving if self._may_relieve(rank, hub, star.size)]
        if len(star.serving) == 1 or not relays:
            return None
        relay = min(relays, key=lambda rank: (self.loads[rank], rank))
        self.relay_of[hub] = relay
        self._relays.add(relay)
        self.loads[hub] -= star.size
        self.loads[relay] += star.size
        other = max(rank for rank in star.serving if rank != relay)
        return star.serving.pop(other), star.serving[relay]

    def _may_relieve(self, rank: int, hub: int, size: int) -> bool:
        if self.loads[rank] + size >= self.loads[hub]:
            return False
        if self.relay_of[hub] >= 0:
            return rank == self.relay_of[hub]
        is_free = self.relay_of[rank] < 0 and hub not in self._relays
        return is_free and self.exchanged[hub, rank] <= MOST_EXCHANGED * size
