"""What every plan must lay on somebody: the demands behind the least possible greatest loads.

Consider the plans in which only holders and receivers of a bundle carry it (its *carriers* C), any rank that has it
may pass it on, and which send the least over the network. A *demand* `(A, k, e)` says that in every such plan the
ranks of A together send (or receive) k transfers of e elements; if it is *capped*, these can be chosen so that no rank
has more than one of them. The demands of one bundle stand for different transfers, so their loads add up.

H_t are the holders of term t, R the receivers, `|n` means those in node n, D the nodes with receivers, N the fewest
transfers over the network and M the fewest in all (`hgraph/lower_bound.py`, whose proof names v, t and U as used
here).

Network (true of any plan of such carriers):

- out: a node, or a set of nodes, that alone holds a term some node of D lacks sends at least once: (C|nodes, 1). Sets
  that share no node are different transfers. The rest: (C, N - those).
- in: a node of D that does not hold all terms receives at least once: (C|n, 1). The rest: (C, N - those).

Inside nodes, for a copy: a node n with a holder gets nothing over the network, so all receivers there that have no
copy get theirs inside, (R|n without H, all of them, capped), and a holder sends first, (H|n, 1), then any carrier,
(C|n, the rest). Into a node without holders exactly one transfer leads, so (R|n, |R|n| - 1, capped) are received, and
sent by (R|n, |R|n| - 1).

Inside nodes, for a sum: let s be the number of terms that lie in n alone (all of them, if n needs the value and holds
every term). In a plan that sends the least over the network, transfers over it before time t form a tree towards v, so
n sends one message before t, or is v and sends none; all s terms must have come together in n by then, or by the time
the first rank of v has all. So s - 1 terms leave their holders inside n: (holders of these, s - 1, capped) send, (C|n,
s - 1) receive. Later one transfer at most leads into n over the network (none if n is v, one of whose ranks already
has all), so (R|n, |R|n| - 1, capped) receive inside n, sent by (C|n, |R|n| - 1).

Where n alone needs the value and s > 0, n is v (another v would cost a transfer more), and no transfer over the network
brings terms of n back to it. If, moreover, no receiver holds one of these terms, each of the s leaves its holder, and
each receiver gets something, inside n: one more of (holders, capped) and one more of (R|n, capped). The same holds
where n needs the value and holds all terms. What M - N leaves: (C, the rest).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from hgraph.bundles import Bundle
from hgraph.lower_bound import LowerBound, lower_bound
from hgraph.topology import Topology

__all__ = ["Demand", "Demands", "find_demands"]

Ranks: TypeAlias = frozenset[int]


@dataclass(frozen=True, slots=True)
class Demand:
    """The members of `members` bear `amount` elements, each at most `cap` of them."""

    members: tuple[int, ...]
    amount: float
    cap: float


@dataclass(slots=True)
class Demands:
    """Demands of many bundles on one kind of resource; those of the same members are added up."""

    free: dict[Ranks, int] = field(default_factory=lambda: defaultdict(int))
    capped: dict[tuple[Ranks, int], int] = field(default_factory=lambda: defaultdict(int))

    def add(self, members: Iterable[int], transfers: int, num_elements: int, *, capped: bool = False) -> None:
        """Notes that `members` bear `transfers` of `num_elements`; nothing where there is none."""
        chosen = frozenset(members)
        if transfers <= 0 or not num_elements:
            return
        if capped and transfers > 1:
            self.capped[chosen, transfers] += num_elements
        else:
            self.free[chosen] += transfers * num_elements

    def on(self, member_of: Sequence[int]) -> list[Demand]:
        """Returns the demands on the members (ranks, ports, nodes) that the ranks belong to, in a fixed order."""
        free: dict[tuple[int, ...], int] = defaultdict(int)
        for ranks, amount in self.free.items():
            free[tuple(sorted({member_of[rank] for rank in ranks}))] += amount
        result = [Demand(members, amount, amount) for members, amount in sorted(free.items())]
        for (ranks, transfers), size in sorted(self.capped.items(), key=lambda item: (sorted(item[0][0]), item[0][1])):
            per_member: dict[int, int] = defaultdict(int)
            for rank in ranks:
                per_member[member_of[rank]] += 1
            cap = size * max(per_member.values())
            result.append(Demand(tuple(sorted(per_member)), transfers * size, cap))
        return result


@dataclass(frozen=True, slots=True)
class FoundDemands:
    """The demands on sending and receiving over each class of link."""

    network_out: Demands
    network_in: Demands
    local_out: Demands
    local_in: Demands


def find_demands(bundles: Sequence[Bundle], topology: Topology, least: LowerBound | None = None) -> FoundDemands:
    """Returns the demands of `bundles`; `least` is their lower bound where it is known already."""
    least = least or lower_bound(bundles, topology)
    found = FoundDemands(Demands(), Demands(), Demands(), Demands())
    for bundle, network, local in zip(bundles, least.network.tolist(), least.local.tolist(), strict=True):
        if not bundle.num_elements:
            continue
        reader = _Reader(bundle, topology.node_of)
        _network_demands(found, reader, network)
        if bundle.is_copy:
            _local_demands_of_copy(found, reader)
        else:
            _local_demands_of_sum(found, reader, local)
    return found


class _Reader:
    """A bundle by node: `terms[n]` are the terms with a holder in n, `only_in[t]` the nodes that hold term t."""

    def __init__(self, bundle: Bundle, node_of: Sequence[int]) -> None:
        self.size = bundle.num_elements
        self.holders = frozenset(rank for term in bundle.terms for rank in term)
        self.carriers = self.holders.union(bundle.receivers)
        self.nodes_of_term = [frozenset(node_of[rank] for rank in term) for term in bundle.terms]
        self.complete = frozenset.intersection(*self.nodes_of_term)
        self.receivers_in: dict[int, set[int]] = defaultdict(set)
        self.holders_in: dict[int, set[int]] = defaultdict(set)
        self.carriers_in: dict[int, set[int]] = defaultdict(set)
        for ranks, by_node in (
            (bundle.receivers, self.receivers_in),
            (self.holders, self.holders_in),
            (self.carriers, self.carriers_in),
        ):
            for rank in ranks:
                by_node[node_of[rank]].add(rank)
        self.needing = frozenset(self.receivers_in)
        self.terms = bundle.terms
        self.node_of = node_of

    def terms_gathered_in(self, node: int) -> list[int]:
        """The terms that must come together inside `node`."""
        if node in self.complete and node in self.needing:
            return list(range(len(self.terms)))
        return [term for term, nodes in enumerate(self.nodes_of_term) if nodes == {node}]

    def meets_in(self, node: int) -> bool:
        """Whether all terms come together in `node`, and stay there once they have."""
        return node in self.needing and (node in self.complete or len(self.needing) == 1)

    def holders_of(self, terms: Iterable[int], node: int) -> set[int]:
        return {rank for term in terms for rank in self.terms[term] if self.node_of[rank] == node}


def _network_demands(found: FoundDemands, bundle: _Reader, fewest: int) -> None:
    left = fewest
    taken: set[int] = set()
    for nodes in sorted(set(bundle.nodes_of_term), key=lambda nodes: (len(nodes), sorted(nodes))):
        if bundle.needing - nodes and taken.isdisjoint(nodes):
            taken |= nodes
            found.network_out.add(_ranks_in(bundle.carriers_in, nodes), 1, bundle.size)
            left -= 1
    found.network_out.add(bundle.carriers, left, bundle.size)
    lacking = bundle.needing - bundle.complete
    for node in sorted(lacking):
        found.network_in.add(bundle.carriers_in[node], 1, bundle.size)
    found.network_in.add(bundle.carriers, fewest - len(lacking), bundle.size)


def _ranks_in(by_node: dict[int, set[int]], nodes: Iterable[int]) -> set[int]:
    return {rank for node in nodes for rank in by_node[node]}


def _local_demands_of_copy(found: FoundDemands, bundle: _Reader) -> None:
    for node, receivers in sorted(bundle.receivers_in.items()):
        if node in bundle.complete:
            without = receivers - bundle.holders
            found.local_in.add(without, len(without), bundle.size, capped=True)
            found.local_out.add(bundle.holders_in[node], min(len(without), 1), bundle.size)
            found.local_out.add(bundle.carriers_in[node], len(without) - 1, bundle.size)
        else:
            found.local_in.add(receivers, len(receivers) - 1, bundle.size, capped=True)
            found.local_out.add(receivers, len(receivers) - 1, bundle.size)


def _local_demands_of_sum(found: FoundDemands, bundle: _Reader, fewest: int) -> None:
    left = fewest
    for node, carriers in sorted(bundle.carriers_in.items()):
        gathered = bundle.terms_gathered_in(node)
        receivers = bundle.receivers_in.get(node, set())
        holders = bundle.holders_of(gathered, node)
        sums, copies = max(len(gathered) - 1, 0), max(len(receivers) - 1, 0)
        apart = int(bundle.meets_in(node) and bool(gathered) and receivers.isdisjoint(holders))
        found.local_out.add(holders, sums + apart, bundle.size, capped=True)
        found.local_in.add(carriers, sums, bundle.size)
        found.local_out.add(carriers, copies, bundle.size)
        found.local_in.add(receivers, copies + apart, bundle.size, capped=True)
        left -= sums + copies + apart
    found.local_out.add(bundle.carriers, left, bundle.size)
    found.local_in.add(bundle.carriers, left, bundle.size)
