"""Routes bundles: which rank sends each bundle to which, so that slow links carry every element once.

A value with several terms is summed on the way: inside each node at one rank, then at one receiver, the *root*. A value
that several ranks of a node need crosses the network once, to one of them, the *entry*, which shares it. (HSPMD, arXiv
2504.20490, section 4, has resharding as send/recv and hierarchical collectives; choice by load and relays are ours.)

Senders: own copy first, then the nearer link, then the sender that is done soonest, by load and bandwidth. Entries and
ranks that sum are chosen by the least load too. Bundles are routed from the largest to the smallest, so loads balance
well. Ranks that serve those beside them more than others do are relieved at the end (`hgraph/route_chains.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy

from hgraph.bundles import Bundle
from hgraph.errors import InvalidInput
from hgraph.reshard_needs import Family
from hgraph.route_chains import relieve_busiest
from hgraph.route_loads import Loads
from hgraph.route_plan import SCRATCH, SOURCE, TARGET, Integers, Routes
from hgraph.topology import Topology, ranks_by_node

__all__ = ["check_ranks", "find_routes"]


def find_routes(bundles: Sequence[Bundle], topology: Topology) -> Routes:
    """Returns the transfers that give every receiver of every bundle its value."""
    router = _Router(topology)
    for number in sorted(range(len(bundles)), key=lambda number: -bundles[number].num_elements):
        router.route(number, bundles[number])
    return relieve_busiest(router.found.routes(router.roots, len(bundles)), bundles, topology)


def check_ranks(where: str, ranks: Sequence[int], topology: Topology) -> None:
    """Raises `InvalidInput` where `topology` has not all of `ranks`; `where` begins the message."""
    highest = max(ranks, default=0)
    if highest >= topology.num_ranks:
        raise InvalidInput(
            f"{where}: expected ranks below {topology.num_ranks}, those of topology {topology.name}; got rank "
            f"{highest}; name a topology that has it"
        )


@dataclass(slots=True)
class _Rows:
    """Ranks by node as a rectangle: `ranks[i]` are those of `nodes[i]`, filled up with -1, which is no rank."""

    nodes: Integers
    ranks: Integers


@dataclass(slots=True)
class _Terms:
    """The terms of a sum as they are taken for a root in one node.

    `at_root`: the holders of each term that is taken inside the root's node. Of the other terms, `candidates[i]`
    (filled up with -1) are the ranks of one node that hold term i; `row[i]` is that node's row in `rows`.
    """

    at_root: list[tuple[int, ...]]
    candidates: Integers
    row: Integers
    rows: _Rows


@dataclass(slots=True)
class _Found:
    """Transfers as they are found: parts that share bundle, level and origin; the first `copies` of a part copy."""

    keys: list[tuple[int, int, int, int]] = field(default_factory=list)
    senders: list[Integers] = field(default_factory=list)
    receivers: list[Integers] = field(default_factory=list)

    def add(
        self,
        bundle: int,
        level: int,
        origin: int,
        senders: Integers | Sequence[int],
        receivers: Integers | Sequence[int],
        copies: int | None = None,
    ) -> None:
        """Adds a transfer per pair; one of `senders` and `receivers` may be a single rank for all of the other."""
        if not len(senders) or not len(receivers):
            return
        count = max(len(senders), len(receivers))
        self.keys.append((bundle, level, origin, count if copies is None else copies))
        for column, ranks in ((self.senders, senders), (self.receivers, receivers)):
            array = numpy.asarray(ranks, dtype=numpy.int64)
            column.append(array if len(array) == count else numpy.repeat(array, count))

    def routes(self, roots: dict[int, int], num_bundles: int) -> Routes:
        keys = numpy.array(self.keys, dtype=numpy.int64).reshape(-1, 4)
        order = numpy.lexsort((keys[:, 0], keys[:, 1]))
        lengths = numpy.array([len(self.senders[part]) for part in order], dtype=numpy.int64)
        bundle, level, origin, copies = (numpy.repeat(column, lengths) for column in keys[order].T)
        position = numpy.arange(len(bundle)) - numpy.repeat(numpy.cumsum(lengths) - lengths, lengths)
        none = numpy.zeros(0, dtype=numpy.int64)
        sender, receiver = (
            numpy.concatenate([none, *(column[part] for part in order)]) for column in (self.senders, self.receivers)
        )
        by_bundle = numpy.full(num_bundles, -1, dtype=numpy.int64)
        by_bundle[list(roots)] = list(roots.values())
        return Routes(bundle, sender, receiver, level, origin, position >= copies, by_bundle)


class _Router:
    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.loads = Loads(topology)
        self.found = _Found()
        self.roots: dict[int, int] = {}
        self._node_of = numpy.array(topology.node_of)
        self._rows: dict[tuple[int, ...], _Rows] = {}
        self._terms: dict[tuple[Family, int], _Terms] = {}

    def route(self, number: int, bundle: Bundle) -> None:
        size = bundle.num_elements
        if bundle.is_copy:
            self._copy(number, size, bundle.terms[0], bundle.receivers, TARGET if bundle.in_target else SOURCE)
            return
        root = self._root(bundle)
        self.roots[number] = root
        if bundle.direct:
            self._reduce_directly(number, size, bundle.terms, root)
        else:
            self._reduce(number, size, self._taken(bundle.terms, root), root)
        self._copy(number, size, (root,), bundle.receivers, TARGET)

    # Copies

    def _copy(self, number: int, size: int, holders: Sequence[int], receivers: tuple[int, ...], origin: int) -> None:
        """Gives `receivers` what `holders` have: inside nodes from a holder, over the network through one entry."""
        if len(holders) > 1:
            held = set(holders)
            receivers = tuple(rank for rank in receivers if rank not in held)
        if not receivers or receivers == holders:
            return
        rows = self._by_node(receivers)
        holders_at = ranks_by_node(self.topology, holders)
        is_near = numpy.isin(rows.nodes, list(holders_at))
        for row in numpy.flatnonzero(is_near):
            near = [rank for rank in rows.ranks[row].tolist() if rank >= 0 and rank not in holders]
            senders = self.loads.take_turns(self.loads.local_out, holders_at[int(rows.nodes[row])], len(near), size)
            self.loads.local_in[near] += size
            self.found.add(number, 3, origin, senders, near)
        if not is_near.all():
            self._cross(number, size, holders, rows.ranks[~is_near], origin)

    def _cross(self, number: int, size: int, holders: Sequence[int], ranks: Integers, origin: int) -> None:
        """Sends over the network to one of each row of `ranks`, which gives it to the others of its row."""
        loads = self.loads
        entries = loads.entries(ranks)
        senders = loads.take_turns_sending(holders, len(entries), size)
        loads.add_network(senders, entries, size)
        self.found.add(number, 2, origin, senders, entries)
        others = (ranks >= 0) & (ranks != entries[:, None])
        count = others.sum(axis=1)
        if count.any():
            receivers = ranks[others]
            loads.local_out[entries] += size * count
            loads.local_in[receivers] += size
            self.found.add(number, 3, TARGET, numpy.repeat(entries, count), receivers)

    def _by_node(self, ranks: tuple[int, ...]) -> _Rows:
        if ranks not in self._rows:
            array = numpy.array(ranks, dtype=numpy.int64)
            nodes, row = numpy.unique(self._node_of[array], return_inverse=True)
            self._rows[ranks] = _Rows(nodes, _rectangle(row, array, len(nodes)))
        return self._rows[ranks]

    # Sums

    def _root(self, bundle: Bundle) -> int:
        """The receiver where terms meet: the one for which fewest nodes send sums, a holder if one is; least loaded."""
        if len(bundle.receivers) == 1:
            return bundle.receivers[0]
        node_of, loads = self.topology.node_of, self.loads
        holders = set(itertools.chain(*bundle.terms))
        nodes = {node_of[rank] for rank in holders}
        senders = {node: len(nodes) - (node in nodes) for node in {node_of[rank] for rank in bundle.receivers}}
        if any(len({node_of[rank] for rank in term}) > 1 for term in bundle.terms):
            senders = {node: len(self._taken_at(bundle.terms, node).rows.nodes) for node in senders}
        return min(
            bundle.receivers,
            key=lambda rank: (
                senders[node_of[rank]],
                rank not in holders,
                loads.network_load(rank),
                loads.local_in[rank] + loads.local_out[rank],
                rank,
            ),
        )

    def _reduce(self, number: int, size: int, taken: _Terms, root: int) -> None:
        loads = self.loads
        has_value = any(root in candidates for candidates in taken.at_root)
        has_value |= self._reduce_locally(number, size, taken.at_root, root, has_value)
        if not len(taken.rows.nodes):
            return
        summing = loads.summing(taken.rows.ranks)
        own = summing[taken.row]
        sends = ~(taken.candidates == own[:, None]).any(axis=1)
        senders = loads.local_senders(taken.candidates[sends])
        count = numpy.bincount(taken.row[sends], minlength=len(summing))
        numpy.add.at(loads.local_out, senders, size)
        loads.local_in[summing] += size * count
        loads.add_network(summing, [root] * len(summing), size)
        self.found.add(number, 0, SOURCE, senders, own[sends], copies=0)
        alone, together = summing[count == 0], summing[count > 0]
        self.found.add(number, 1, SOURCE, alone, [root], copies=int(not has_value))
        self.found.add(number, 1, SCRATCH, together, [root], copies=int(not has_value and not len(alone)))

    def _reduce_locally(
        self, number: int, size: int, terms: Sequence[Sequence[int]], root: int, has_value: bool
    ) -> bool:
        """Sends terms held in the root's node to the root; returns whether there was one to send."""
        loads = self.loads
        senders = [loads.take_turns(loads.local_out, holders, 1, size)[0] for holders in terms if root not in holders]
        loads.local_in[root] += size * len(senders)
        self.found.add(number, 0, SOURCE, senders, [root], copies=int(not has_value))
        return bool(senders)

    def _reduce_directly(self, number: int, size: int, terms: Family, root: int) -> None:
        """Sends every term to the root by itself, from the root's node where a rank there holds it."""
        loads = self.loads
        near: list[list[int]] = []
        far: list[tuple[int, ...]] = []
        for term in terms:
            at_root = ranks_by_node(self.topology, term).get(self.topology.node_of[root])
            if at_root is None:
                far.append(term)
            else:
                near.append(at_root)
        has_value = any(root in holders for holders in near)
        has_value |= self._reduce_locally(number, size, near, root, has_value)
        senders = []
        for holders in far:
            senders += loads.take_turns_sending(holders, 1, size)
            loads.add_network(senders[-1:], [root], size)
        self.found.add(number, 1, SOURCE, senders, [root], copies=int(not has_value))

    def _taken(self, terms: Family, root: int) -> _Terms:
        return self._taken_at(terms, self.topology.node_of[root])

    def _taken_at(self, terms: Family, root_node: int) -> _Terms:
        if (terms, root_node) not in self._terms:
            self._terms[terms, root_node] = self._take_terms(terms, root_node)
        return self._terms[terms, root_node]

    def _take_terms(self, terms: Family, root_node: int) -> _Terms:
        """Takes every term in the root's node where it is there, else in a node that sends anyway, else in one more."""
        term = numpy.repeat(numpy.arange(len(terms)), [len(ranks) for ranks in terms])
        rank = numpy.fromiter(itertools.chain(*terms), dtype=numpy.int64, count=len(term))
        node = self._node_of[rank]
        chosen = _choose_nodes(term, node, len(terms), root_node)
        is_at_root = chosen == root_node
        at_root = [
            tuple(rank for rank in terms[number] if self.topology.node_of[rank] == root_node)
            for number in numpy.flatnonzero(is_at_root)
        ]
        taken = (node == chosen[term]) & ~is_at_root[term]
        rank, node, term = rank[taken], node[taken], term[taken]
        place = numpy.cumsum(~is_at_root) - 1
        nodes, row = numpy.unique(node, return_inverse=True)
        order = numpy.lexsort((rank, row))
        num_away = int((~is_at_root).sum())
        row_of_term = numpy.zeros(num_away, dtype=numpy.int64)
        row_of_term[place[term]] = row
        rows = _Rows(nodes, _rectangle(row[order], rank[order], len(nodes)))
        return _Terms(at_root, _rectangle(place[term], rank, num_away), row_of_term, rows)


def _choose_nodes(term: Integers, node: Integers, num_terms: int, root_node: int) -> Integers:
    """Returns the node where each term is taken; `node[i]` is that of a holder of term `term[i]`."""
    chosen = numpy.full(num_terms, -1, dtype=numpy.int64)
    first = numpy.flatnonzero(numpy.diff(term, prepend=-1))
    is_in_one = numpy.minimum.reduceat(node, first) == numpy.maximum.reduceat(node, first)
    chosen[is_in_one] = node[first][is_in_one]
    chosen[term[node == root_node]] = root_node
    left = numpy.flatnonzero(chosen < 0)
    nodes = {number: numpy.unique(node[term == number]).tolist() for number in left.tolist()}
    used = set(chosen.tolist()) - {-1}
    for number in sorted(nodes, key=lambda number: (len(nodes[number]), number)):
        known = [place for place in nodes[number] if place in used]
        # Which of several new nodes: another for every root, so that all of them take turns.
        chosen[number] = known[0] if known else nodes[number][root_node % len(nodes[number])]
        used.add(int(chosen[number]))
    return chosen


def _rectangle(row: Integers, ranks: Integers, num_rows: int) -> Integers:
    """Returns the ranks by row, filled up with -1, in their order; the same rows as they come need not be together."""
    order = numpy.argsort(row, kind="stable")
    counts = numpy.bincount(row, minlength=num_rows)
    result = numpy.full((num_rows, int(counts.max(initial=1))), -1, dtype=numpy.int64)
    starts = numpy.cumsum(counts) - counts
    result[row[order], numpy.arange(len(row)) - starts[row[order]]] = ranks[order]
    return result
