"""Routes: which rank sends each bundle to which, and in which order, so that slow links carry every element once.

A value with several terms is summed on the way: inside each node at one rank, then at one receiver, the *root*. A value
that several ranks of a node need crosses the network once, to one of them, the *entry*, which shares it. (HSPMD, arXiv
2504.20490, section 4, has resharding as send/recv and hierarchical collectives; choice by load and relays are ours.)

Senders: own copy first, then the nearer link, then the least loaded sender. Entries and ranks that sum are chosen by the
least load too. Bundles are routed from the largest to the smallest, so loads balance well.

Four levels run one after another, and no pair of ranks is in two levels of one copy or of one reduction to one receiver:

0. sums inside a node; 1. sums to the root over the network; 2. copies over the network; 3. copies inside a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy

from hgraph.bundles import Bundle
from hgraph.reshard_needs import Family
from hgraph.topology import Topology, ranks_by_node

__all__ = ["NUM_LEVELS", "SCRATCH", "SOURCE", "TARGET", "Routes", "find_routes"]

Integers: TypeAlias = numpy.ndarray
NUM_LEVELS = 4
SOURCE, TARGET, SCRATCH = 0, 1, 2
"""Where a sender reads: its source buffer, its target buffer, or what it has summed for others."""


@dataclass(frozen=True, slots=True)
class Routes:
    """Transfers between ranks, one per entry of the arrays, in ascending order of level.

    `bundle`, `sender`, `receiver`, `level` and `origin` (`SOURCE`, `TARGET` or `SCRATCH`) have one value per transfer.
    A receiver of level 0 adds to its scratch buffer, or to its target where it is the bundle's root (`roots`, -1 where
    nothing is summed); level 1 adds to the root's target; levels 2 and 3 write the target.
    """

    bundle: Integers
    sender: Integers
    receiver: Integers
    level: Integers
    origin: Integers
    roots: Integers

    def __len__(self) -> int:
        return len(self.bundle)


def find_routes(bundles: Sequence[Bundle], topology: Topology) -> Routes:
    """Returns the transfers that give every receiver of every bundle its value."""
    router = _Router(topology)
    order = sorted(range(len(bundles)), key=lambda number: -bundles[number].num_elements)
    for number in order:
        router.route(number, bundles[number])
    return router.routes(len(bundles))


@dataclass(slots=True)
class _Rows:
    """Ranks by node as a rectangle: `ranks[i]` are those of `nodes[i]`, filled up with the rank that does not exist."""

    nodes: Integers
    ranks: Integers

    @property
    def is_filled(self) -> Integers:
        return self.ranks >= 0


@dataclass(slots=True)
class _Terms:
    """The terms of a sum as they are taken for a root in one node.

    `at_root`: candidates of each term taken inside the root's node. Other terms: row i of `candidates` (filled up with
    -1) are the ranks of one node that hold term i; `row[i]` is that node's row in `rows`.
    """

    at_root: list[tuple[int, ...]]
    candidates: Integers
    row: Integers
    rows: _Rows


class _Loads:
    """Elements sent and received so far, per rank and link class; the last entry stands for no rank and is infinite."""

    def __init__(self, topology: Topology) -> None:
        def zeros() -> numpy.ndarray:
            loads = numpy.zeros(topology.num_ranks + 1)
            loads[-1] = numpy.inf
            return loads

        self.network_out, self.network_in, self.local_out, self.local_in = zeros(), zeros(), zeros(), zeros()

    @staticmethod
    def least(loads: numpy.ndarray, second: numpy.ndarray, candidates: Integers) -> Integers:
        """Returns, per row of `candidates`, the one with the least load; `second` decides between equals, then order."""
        primary = loads[candidates]
        ties = primary == primary.min(axis=-1, keepdims=True)
        chosen = numpy.where(ties, second[candidates], numpy.inf).argmin(axis=-1)
        return numpy.take_along_axis(candidates, chosen[..., None], axis=-1)[..., 0]


@dataclass(slots=True)
class _Found:
    """Transfers as they are found: arrays of senders and receivers with what they have in common."""

    parts: list[tuple[int, int, int, Integers, Integers]] = field(default_factory=list)

    def add(self, bundle: int, level: int, origin: int, senders: Integers | int, receivers: Integers | int) -> None:
        first, second = numpy.broadcast_arrays(numpy.atleast_1d(senders), numpy.atleast_1d(receivers))
        if len(first):
            self.parts.append((bundle, level, origin, first, second))


class _Router:
    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.loads = _Loads(topology)
        self.found = _Found()
        self.roots: dict[int, int] = {}
        self._rows: dict[tuple[int, ...], _Rows] = {}
        self._terms: dict[tuple[Family, int], _Terms] = {}

    def routes(self, num_bundles: int) -> Routes:
        parts = self.found.parts
        lengths = [len(senders) for *_, senders, _ in parts]
        columns = [numpy.repeat(numpy.array([part[at] for part in parts], dtype=numpy.int64), lengths) for at in range(3)]
        bundle, level, origin = columns
        none = [numpy.zeros(0, dtype=numpy.int64)]
        sender = numpy.concatenate([part[3] for part in parts] or none)
        receiver = numpy.concatenate([part[4] for part in parts] or none)
        roots = numpy.full(num_bundles, -1, dtype=numpy.int64)
        roots[list(self.roots)] = list(self.roots.values())
        order = numpy.lexsort((sender, bundle, level))
        return Routes(bundle[order], sender[order], receiver[order], level[order], origin[order], roots)

    def route(self, number: int, bundle: Bundle) -> None:
        size = bundle.num_elements
        if bundle.is_copy:
            self._copy(number, size, bundle.terms[0], bundle.receivers, SOURCE)
            return
        root = self._root(bundle)
        self.roots[number] = root
        self._reduce(number, size, bundle.terms, root)
        self._copy(number, size, (root,), bundle.receivers, TARGET)

    # Copies

    def _copy(self, number: int, size: int, holders: Sequence[int], receivers: Sequence[int], origin: int) -> None:
        """Gives `receivers` what `holders` have: inside nodes from a holder, over the network through one entry."""
        without = tuple(rank for rank in receivers if rank not in holders) if len(holders) > 1 else receivers
        if not without or (len(without) == 1 and without[0] in holders):
            return
        rows = self._by_node(without)
        holders_at = ranks_by_node(self.topology, holders)
        is_near = numpy.isin(rows.nodes, list(holders_at))
        for row in numpy.flatnonzero(is_near):
            near = [rank for rank in rows.ranks[row] if rank >= 0 and rank not in holders]
            self._share_from(number, size, holders_at[int(rows.nodes[row])], near, origin)
        far = numpy.flatnonzero(~is_near)
        if len(far):
            self._cross(number, size, holders, _Rows(rows.nodes[far], rows.ranks[far]), origin)

    def _share_from(self, number: int, size: int, holders: Sequence[int], near: Sequence[int], origin: int) -> None:
        loads = self.loads
        for receiver in near:
            sender = holders[0] if len(holders) == 1 else min(holders, key=lambda rank: (loads.local_out[rank], rank))
            loads.local_out[sender] += size
            loads.local_in[receiver] += size
            self.found.add(number, 3, origin, sender, int(receiver))

    def _cross(self, number: int, size: int, holders: Sequence[int], rows: _Rows, origin: int) -> None:
        loads = self.loads
        entries = loads.least(loads.network_in, loads.local_out, rows.ranks)
        loads.network_in[entries] += size
        if len(holders) == 1:
            self.found.add(number, 2, origin, holders[0], entries)
            loads.network_out[holders[0]] += size * len(entries)
        else:
            for entry in entries:
                sender = min(holders, key=lambda rank: (loads.network_out[rank], rank))
                loads.network_out[sender] += size
                self.found.add(number, 2, origin, sender, int(entry))
        others = rows.is_filled & (rows.ranks != entries[:, None])
        count = others.sum(axis=1)
        if count.any():
            receivers = rows.ranks[others]
            loads.local_out[entries] += size * count
            loads.local_in[receivers] += size
            self.found.add(number, 3, TARGET, numpy.repeat(entries, count), receivers)

    # Sums

    def _root(self, bundle: Bundle) -> int:
        """The receiver where terms meet: in a node that holds a term, itself a holder if one is; the least loaded."""
        if len(bundle.receivers) == 1:
            return bundle.receivers[0]
        node_of = self.topology.node_of
        holders = {rank for term in bundle.terms for rank in term}
        nodes = {node_of[rank] for rank in holders}
        loads = self.loads
        return min(
            bundle.receivers,
            key=lambda rank: (
                node_of[rank] not in nodes,
                rank not in holders,
                loads.network_in[rank] + loads.network_out[rank],
                loads.local_in[rank] + loads.local_out[rank],
                rank,
            ),
        )

    def _reduce(self, number: int, size: int, terms: Family, root: int) -> None:
        loads = self.loads
        taken = self._taken(terms, root)
        for candidates in taken.at_root:
            if root in candidates:
                continue
            sender = min(candidates, key=lambda rank: (loads.local_out[rank], rank))
            loads.local_out[sender] += size
            loads.local_in[root] += size
            self.found.add(number, 0, SOURCE, sender, root)
        if not len(taken.rows.nodes):
            return
        summing = loads.least(loads.network_out, loads.local_in, taken.rows.ranks)
        own = summing[taken.row]
        sends = ~(taken.candidates == own[:, None]).any(axis=1)
        senders = loads.least(loads.local_out, loads.local_out, taken.candidates[sends])
        count = numpy.bincount(taken.row[sends], minlength=len(summing))
        numpy.add.at(loads.local_out, senders, size)
        loads.local_in[summing] += size * count
        loads.network_out[summing] += size
        loads.network_in[root] += size * len(summing)
        self.found.add(number, 0, SOURCE, senders, own[sends])
        self.found.add(number, 1, SOURCE, summing[count == 0], root)
        self.found.add(number, 1, SCRATCH, summing[count > 0], root)

    def _taken(self, terms: Family, root: int) -> _Terms:
        node = self.topology.node_of[root]
        if (terms, node) not in self._terms:
            self._terms[terms, node] = self._choose_nodes(terms, node)
        return self._terms[terms, node]

    def _choose_nodes(self, terms: Family, root_node: int) -> _Terms:
        """Takes every term in the root's node where it is there, else in a node that sends anyway, else in one more."""
        by_node = [ranks_by_node(self.topology, term) for term in terms]
        chosen: dict[int, int] = {}
        used: list[int] = []
        for term in sorted(range(len(terms)), key=lambda term: (len(by_node[term]), term)):
            nodes = sorted(by_node[term])
            if root_node in nodes:
                chosen[term] = root_node
                continue
            # Which of several nodes: another for every root, so that all of them take turns.
            known = [node for node in nodes if node in used]
            chosen[term] = known[0] if known else nodes[root_node % len(nodes)]
            if not known:
                used.append(chosen[term])
        at_root = [tuple(by_node[term][root_node]) for term in range(len(terms)) if chosen[term] == root_node]
        away = [term for term in range(len(terms)) if chosen[term] != root_node]
        lists = [by_node[term][chosen[term]] for term in away]
        together: dict[int, dict[int, None]] = {node: {} for node in sorted(used)}
        for term, ranks in zip(away, lists, strict=True):
            together[chosen[term]].update(dict.fromkeys(ranks))
        nodes = list(together)
        row = numpy.array([nodes.index(chosen[term]) for term in away], dtype=numpy.int64)
        rows = _Rows(numpy.array(nodes, dtype=numpy.int64), _rectangle([sorted(ranks) for ranks in together.values()]))
        return _Terms(at_root, _rectangle(lists), row, rows)

    def _by_node(self, ranks: tuple[int, ...]) -> _Rows:
        if ranks not in self._rows:
            by_node = ranks_by_node(self.topology, ranks)
            nodes = sorted(by_node)
            self._rows[ranks] = _Rows(
                numpy.array(nodes, dtype=numpy.int64), _rectangle([by_node[node] for node in nodes])
            )
        return self._rows[ranks]


def _rectangle(rows: Sequence[Sequence[int]]) -> Integers:
    width = max((len(row) for row in rows), default=1)
    result = numpy.full((len(rows), width), -1, dtype=numpy.int64)
    for at, row in enumerate(rows):
        result[at, : len(row)] = row
    return result
