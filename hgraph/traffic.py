"""Traffic: what a plan puts on every link of a cluster, in bytes, messages and predicted milliseconds.

`traffic(plan, element_bytes)` takes a `BridgePlan` (its own topology) or a `ReshardPlan` (any topology). What stays on
a rank is no traffic. A message is all that goes from one rank to another in one level of one bucket of a bridge, or in
one phase of a single tensor's plan. A collective counts as its members' direct exchange, an all-reduce as a
reduce-scatter of balanced parts and an all-gather of them, as in `reshard_bytes`.

Time is a model: levels (phases) run one after another. Within one, every rank's sending and receiving sides of its
local link, and those of every network port, work at once; each takes its bytes over its bandwidth plus the latencies of
its messages, and the level takes as long as the busiest. Computation that hides it, contention inside the network and
the time to pack and sum are not in it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy

from hgraph.bridge_plan import BridgePlan
from hgraph.bundles import TensorReshard, gather_bundles
from hgraph.errors import InvalidInput
from hgraph.lower_bound import lower_bound
from hgraph.placements import balanced_sizes
from hgraph.reshard_plan import Collective, Move, ReshardPlan
from hgraph.shard_map import box_numel, intersect
from hgraph.topology import LinkClass, Topology

__all__ = ["Load", "ReshardCost", "Traffic", "reshard_cost", "traffic"]

Integers: TypeAlias = numpy.ndarray
LINK_CLASSES: tuple[LinkClass, ...] = ("local", "network")


@dataclass(frozen=True, slots=True)
class Load:
    """Bytes on the members of one kind of resource: the `greatest`, which `member` bears, and the `mean` over all."""

    greatest: int
    mean: float
    member: int

    @property
    def ratio(self) -> float:
        """Greatest over mean; 1 where nothing is moved."""
        return self.greatest / self.mean if self.mean else 1.0


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes from rank to rank: entry i of the arrays says that in `level[i]` `sender[i]` sends to `receiver[i]`.

    `num_bytes[i]` go in `messages[i]` messages; each (level, sender, receiver) appears once. `peak_extra_bytes` is what
    each rank needs at most, beside source and target buffers, for messages in both directions and sums on the way: in a
    bridge, those of the two buckets that are in flight at one time.
    """

    topology: Topology
    element_bytes: int
    sender: Integers
    receiver: Integers
    level: Integers
    num_bytes: Integers
    messages: Integers
    num_buckets: int
    peak_extra_bytes: Integers

    @cached_property
    def is_network(self) -> Integers:
        """Per entry, whether it crosses from node to node."""
        node = self._node
        return node[self.sender] != node[self.receiver]

    @cached_property
    def _node(self) -> Integers:
        return numpy.array(self.topology.node_of, dtype=numpy.int64)

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())

    @property
    def num_messages(self) -> int:
        return int(self.messages.sum())

    def class_bytes(self, link_class: LinkClass) -> int:
        """Returns the bytes over all links of a class."""
        return int(self.num_bytes[self._in(link_class)].sum())

    def sent(self, link_class: LinkClass) -> Integers:
        """Returns the bytes that each rank sends over links of a class."""
        return self._total(self.sender, link_class, self.topology.num_ranks)

    def received(self, link_class: LinkClass) -> Integers:
        """Returns the bytes that each rank receives over links of a class."""
        return self._total(self.receiver, link_class, self.topology.num_ranks)

    @property
    def port_sent(self) -> Integers:
        """Bytes out of each network port, numbered as in `Topology.port_of`."""
        return self._total(self._port[self.sender], "network", self._num_ports)

    @property
    def port_received(self) -> Integers:
        """Bytes into each network port."""
        return self._total(self._port[self.receiver], "network", self._num_ports)

    @property
    def node_sent(self) -> Integers:
        """Bytes out of each node, over the network."""
        return self._total(self._node[self.sender], "network", len(self.topology.nodes))

    @property
    def node_received(self) -> Integers:
        """Bytes into each node, over the network."""
        return self._total(self._node[self.receiver], "network", len(self.topology.nodes))

    def loads(self) -> dict[str, Load]:
        """Returns the greatest and mean load by resource and direction, such as `network sender` or `port receiver`."""
        found = {
            "network sender": self.sent("network"),
            "network receiver": self.received("network"),
            "port sender": self.port_sent,
            "port receiver": self.port_received,
            "node sender": self.node_sent,
            "node receiver": self.node_received,
            "local sender": self.sent("local"),
            "local receiver": self.received("local"),
        }
        return {name: Load(int(loads.max()), float(loads.mean()), int(loads.argmax())) for name, loads in found.items()}

    def matrix(self, link_class: LinkClass | None = None) -> Integers:
        """Returns the bytes from rank (row) to rank (column), of one class of links or of both."""
        size = self.topology.num_ranks
        chosen = slice(None) if link_class is None else self._in(link_class)
        result = numpy.zeros((size, size), dtype=numpy.int64)
        numpy.add.at(result, (self.sender[chosen], self.receiver[chosen]), self.num_bytes[chosen])
        return result

    @cached_property
    def level_ms(self) -> tuple[float, ...]:
        """Predicted milliseconds of each level."""
        count = int(self.level.max()) + 1 if len(self.level) else 0
        return tuple(self._busiest_ms(self.level == level) for level in range(count))

    @property
    def ms(self) -> float:
        """Predicted milliseconds of the whole plan."""
        return sum(self.level_ms)

    def _busiest_ms(self, chosen: Integers) -> float:
        network = chosen & self.is_network
        local = chosen & ~self.is_network
        return max(
            self._resource_ms(local, self.sender, self._local_gb_s),
            self._resource_ms(local, self.receiver, self._local_gb_s),
            self._resource_ms(network, self._port[self.sender], self._port_gb_s),
            self._resource_ms(network, self._port[self.receiver], self._port_gb_s),
        )

    def _resource_ms(self, chosen: Integers, member: Integers, gb_s: Integers) -> float:
        size = len(gb_s)
        moved = numpy.bincount(member[chosen], self.num_bytes[chosen].astype(float), minlength=size)
        waited_us = numpy.bincount(
            member[chosen], (self.messages * self._entry_latency_us)[chosen].astype(float), minlength=size
        )
        return float((moved / gb_s / 1e6 + waited_us / 1e3).max())

    @cached_property
    def _entry_latency_us(self) -> Integers:
        nodes = self.topology.nodes
        network = numpy.array([node.network.latency_us for node in nodes])
        local = numpy.array([node.local.latency_us for node in nodes])
        first, second = self._node[self.sender], self._node[self.receiver]
        return numpy.where(self.is_network, numpy.maximum(network[first], network[second]), local[first])

    @cached_property
    def _local_gb_s(self) -> Integers:
        return numpy.array([node.local.bandwidth_gb_s for node in self.topology.nodes])[self._node]

    @cached_property
    def _port_gb_s(self) -> Integers:
        result = numpy.zeros(self._num_ports)
        result[self._port] = numpy.array([node.network.bandwidth_gb_s for node in self.topology.nodes])[self._node]
        return result

    @cached_property
    def _port(self) -> Integers:
        return self.topology.port_of()

    @property
    def _num_ports(self) -> int:
        return int(self._port.max()) + 1

    def _in(self, link_class: LinkClass) -> Integers:
        return self.is_network if link_class == "network" else ~self.is_network

    def _total(self, member: Integers, link_class: LinkClass, size: int) -> Integers:
        chosen = self._in(link_class)
        result = numpy.zeros(size, dtype=numpy.int64)
        numpy.add.at(result, member[chosen], self.num_bytes[chosen])
        return result


def traffic(plan: BridgePlan | ReshardPlan, element_bytes: int, topology: Topology | None = None) -> Traffic:
    """Returns what `plan` puts on the links, at `element_bytes` bytes an element.

    A bridge plan knows its topology; a single tensor's plan needs one. Raises `InvalidInput` where it is missing,
    another one, or smaller than the plan's ranks.
    """
    if isinstance(plan, BridgePlan):
        if topology not in (None, plan.topology):
            raise InvalidInput(
                f"traffic: expected topology {plan.topology.name}, for which the bridge was planned, got "
                f"{topology.name if topology else None}; plan it for the other one"
            )
        return _bridge_traffic(plan, element_bytes)
    ranks = {*plan.source.ranks, *plan.target.ranks}
    if topology is None or max(ranks) >= topology.num_ranks:
        got = "none" if topology is None else f"{topology.name} with {topology.num_ranks}"
        raise InvalidInput(f"traffic: expected a topology of {max(ranks) + 1} or more ranks, got {got}")
    return _tensor_traffic(plan, element_bytes, topology)


def _bridge_traffic(plan: BridgePlan, element_bytes: int) -> Traffic:
    routes, size = plan.routes, plan.topology.num_ranks
    code = (routes.level * size + routes.sender) * size + routes.receiver
    # Exact in float64: the elements of a bridge are far below 2^53.
    elements = numpy.bincount(code, plan.elements()[routes.bundle].astype(float)).astype(numpy.int64)
    moved = numpy.flatnonzero(elements)
    return Traffic(
        topology=plan.topology,
        element_bytes=element_bytes,
        sender=moved // size % size,
        receiver=moved % size,
        level=moved // size // size,
        num_bytes=elements[moved] * element_bytes,
        messages=_bucket_messages(plan, code, len(elements))[moved],
        num_buckets=len(plan.buckets),
        peak_extra_bytes=_peak_elements(plan) * element_bytes,
    )


def _bucket_messages(plan: BridgePlan, code: Integers, num_codes: int) -> Integers:
    """Returns, per level and pair, in how many buckets it carries anything; buckets of equal patterns are alike."""
    alike = Counter(
        frozenset(plan.tensors[at].pattern for at in bucket if plan.tensors[at].elements_per_unit)
        for bucket in plan.buckets
    )
    counts = numpy.zeros(num_codes, dtype=numpy.int64)
    for kinds, num_buckets in alike.items():
        is_carried = numpy.zeros(len(plan.bundles), dtype=bool)
        is_carried[[bundle for kind in kinds for bundle in plan.patterns[kind].bundles]] = True
        used = numpy.zeros(num_codes, dtype=bool)
        used[code[is_carried[plan.routes.bundle]]] = True
        counts[used] += num_buckets
    return counts


def _peak_elements(plan: BridgePlan) -> Integers:
    """Returns, per rank, the elements of both buffers that the buckets in which it sends or receives take in turn.

    Each buffer is as large as the largest of its buckets (`BridgePlan.buffer_elements`); one bucket takes one buffer.
    """
    per_pattern = _pattern_elements(plan)
    units = numpy.zeros((len(plan.buckets), len(plan.patterns)))
    is_used = numpy.zeros(units.shape)  # by tensors without elements too: their empty messages take a turn
    for row, bucket in enumerate(plan.buckets):
        for at in bucket:
            units[row, plan.tensors[at].pattern] += plan.tensors[at].elements_per_unit
            is_used[row, plan.tensors[at].pattern] = 1
    filled = units @ per_pattern
    takes_part = is_used @ (per_pattern > 0) > 0
    turn = (numpy.cumsum(takes_part, axis=0) - 1) % 2
    slots = [numpy.where(takes_part & (turn == own), filled, 0.0).max(axis=0, initial=0.0) for own in (0, 1)]
    return (slots[0] + slots[1]).astype(numpy.int64)


def _pattern_elements(plan: BridgePlan) -> Integers:
    """Returns the elements of messages and sums that one unit of each pattern (row) brings each rank (column)."""
    routes, size = plan.routes, plan.topology.num_ranks
    num_codes = len(plan.bundles) * size
    times = numpy.bincount(routes.bundle * size + routes.sender, minlength=num_codes)
    times += numpy.bincount(routes.bundle * size + routes.receiver, minlength=num_codes)
    times += numpy.bincount((routes.bundle * size + routes.receiver)[routes.into_scratch], minlength=num_codes) > 0
    per_bundle = times.reshape(len(plan.bundles), size).astype(float)
    per_pattern = numpy.zeros((len(plan.patterns), size))
    for number, pattern in enumerate(plan.patterns):
        sizes = numpy.array([need.numel for need in pattern.needs], dtype=float)
        per_pattern[number] = sizes @ per_bundle[list(pattern.bundles)]
    return per_pattern


def _tensor_traffic(plan: ReshardPlan, element_bytes: int, topology: Topology) -> Traffic:
    size = topology.num_ranks
    entries: dict[tuple[int, int, int], int] = {}
    scratch = numpy.zeros(size, dtype=numpy.int64)
    peak = numpy.zeros(size, dtype=numpy.int64)
    for level, phase in enumerate(plan.phases):
        busy = numpy.zeros(size, dtype=numpy.int64)
        for operation in phase:
            if isinstance(operation, Move) and operation.destination == "scratch" and operation.combine == "copy":
                scratch[operation.receiver] += box_numel(operation.box)
            for sender, receiver, count in _pairs(operation):
                entries[level, sender, receiver] = entries.get((level, sender, receiver), 0) + count
                busy[[sender, receiver]] += count
        peak = numpy.maximum(peak, busy + scratch)
    table = numpy.array([(*key, count) for key, count in sorted(entries.items())], dtype=numpy.int64).reshape(-1, 4)
    return Traffic(
        topology=topology,
        element_bytes=element_bytes,
        sender=table[:, 1],
        receiver=table[:, 2],
        level=table[:, 0],
        num_bytes=table[:, 3] * element_bytes,
        messages=numpy.ones(len(table), dtype=numpy.int64),
        num_buckets=1,
        peak_extra_bytes=peak * element_bytes,
    )


def _pairs(operation: Move | Collective) -> list[tuple[int, int, int]]:
    """Returns (sender, receiver, elements) of what an operation moves between ranks."""
    if isinstance(operation, Move):
        triples = [(operation.sender, operation.receiver, box_numel(operation.box))]
    else:
        triples = [
            (sender, receiver, count)
            for i, sender in enumerate(operation.ranks)
            for j, receiver in enumerate(operation.ranks)
            if (count := _exchanged(operation, i, j))
        ]
    return [(sender, receiver, count) for sender, receiver, count in triples if sender != receiver and count]


def _exchanged(operation: Collective, sender: int, receiver: int) -> int:
    if operation.kind == "all_reduce":
        parts = balanced_sizes(box_numel(operation.received[0]), len(operation.ranks))
        return parts[sender] + parts[receiver]
    common = intersect(operation.contributed[sender], operation.received[receiver])
    return box_numel(common) if common else 0


@dataclass(frozen=True, slots=True)
class ReshardCost:
    """What a single tensor's plan costs: bytes by link class, the least that any plan moves, and predicted ms.

    `least_network_bytes` is for plans that send as little as can be over the network, `least_bytes` for all links
    together (`hgraph/lower_bound.py`).
    """

    local_bytes: int
    network_bytes: int
    least_bytes: int
    least_network_bytes: int
    ms: float


def reshard_cost(plan: ReshardPlan, topology: Topology, element_bytes: int) -> ReshardCost:
    """Returns what `plan` costs on `topology`; raises `InvalidInput` where that has not the plan's ranks."""
    found = traffic(plan, element_bytes, topology)
    _, _, bundles = gather_bundles([TensorReshard("tensor", plan.source, plan.target, plan.shape)])
    least = lower_bound(bundles, topology)
    return ReshardCost(
        found.class_bytes("local"),
        found.class_bytes("network"),
        least.total_elements * element_bytes,
        least.network_elements * element_bytes,
        found.ms,
    )
