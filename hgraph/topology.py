"""Topology: the nodes of a cluster, their ranks, and the links between them.

Each rank has a port to the other ranks of its node (`local`) and one to the other nodes (`network`). A network port may
be shared by neighbouring ranks (two GPUs on one adapter): `network` describes the port, and those ranks share its
bandwidth. Both directions of a link work at once, each at the stated bandwidth.

Invariants
----------
- The ranks of all nodes together are 0 to n - 1, each once.
- Bandwidths are above 0, latencies 0 or more; ranks per port divide the ranks of a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import networkx
import numpy

from hgraph.errors import InvalidInput

__all__ = ["Link", "LinkClass", "Node", "Topology", "ranks_by_node", "single_node", "uniform"]

LinkClass: TypeAlias = Literal["local", "network"]


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a link: `bandwidth_gb_s` in 10^9 bytes a second, `latency_us` in microseconds."""

    bandwidth_gb_s: float
    latency_us: float

    def __post_init__(self) -> None:
        if not self.bandwidth_gb_s > 0 or not self.latency_us >= 0:
            raise InvalidInput(
                f"link: expected a bandwidth above 0 GB/s and a latency of 0 us or more, got {self.bandwidth_gb_s} "
                f"GB/s and {self.latency_us} us"
            )

    def ms(self, num_bytes: float, num_messages: int = 1) -> float:
        """Returns the milliseconds that `num_bytes` in `num_messages` take one after another."""
        return num_bytes / self.bandwidth_gb_s / 1e6 + num_messages * self.latency_us / 1e3


@dataclass(frozen=True, slots=True)
class Node:
    """One machine. `memory_gib` is that of one rank; `ranks_per_port` ranks share one network port."""

    name: str
    ranks: tuple[int, ...]
    local: Link
    network: Link
    memory_gib: float = 0.0
    ranks_per_port: int = 1

    def __post_init__(self) -> None:
        if not self.ranks or self.ranks_per_port < 1 or len(self.ranks) % self.ranks_per_port:
            raise InvalidInput(
                f"node {self.name}: expected ranks, a whole number of them per network port; got ranks "
                f"{list(self.ranks)} and {self.ranks_per_port} per port"
            )


@dataclass(frozen=True, slots=True)
class Topology:
    """The nodes of a cluster; `source` says where the figures are from."""

    name: str
    nodes: tuple[Node, ...]
    source: str = ""
    _node_of: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        where = {rank: index for index, node in enumerate(self.nodes) for rank in node.ranks}
        ranks = sorted(rank for node in self.nodes for rank in node.ranks)
        if not ranks or ranks != list(range(len(ranks))):
            raise InvalidInput(f"topology {self.name}: expected the ranks 0 to n - 1, each in one node; got {ranks}")
        object.__setattr__(self, "_node_of", tuple(where[rank] for rank in ranks))

    @property
    def num_ranks(self) -> int:
        return len(self._node_of)

    @property
    def node_of(self) -> tuple[int, ...]:
        """The index of the node of each rank."""
        return self._node_of

    @property
    def is_one_node(self) -> bool:
        return len(self.nodes) == 1

    def link_class(self, sender: int, receiver: int) -> LinkClass:
        """Returns which kind of link two ranks have between them."""
        return "local" if self._node_of[sender] == self._node_of[receiver] else "network"

    def link(self, sender: int, receiver: int) -> Link:
        """Returns the slower of the links that a message from `sender` to `receiver` passes."""
        first, second = self.nodes[self._node_of[sender]], self.nodes[self._node_of[receiver]]
        if first is second:
            return first.local
        slower = min(first.network.bandwidth_gb_s, second.network.bandwidth_gb_s)
        return Link(slower, max(first.network.latency_us, second.network.latency_us))

    def port_of(self) -> numpy.ndarray:
        """Returns the number of the network port of each rank; ports are numbered through the cluster."""
        ports = numpy.zeros(self.num_ranks, dtype=numpy.int64)
        first = 0
        for node in self.nodes:
            for position, rank in enumerate(sorted(node.ranks)):
                ports[rank] = first + position // node.ranks_per_port
            first += len(node.ranks) // node.ranks_per_port
        return ports

    def graph(self) -> networkx.DiGraph:
        """Returns ranks (ints), the switch of each node (its name), ports (`name/port k`) and the network (`network`).

        Edges carry `bandwidth_gb_s`, `latency_us` and `link_class`.
        """
        graph = networkx.DiGraph(name=self.name)
        for node in self.nodes:
            for position, rank in enumerate(sorted(node.ranks)):
                port = f"{node.name}/port {position // node.ranks_per_port}"
                _connect(graph, rank, node.name, node.local, "local")
                _connect(graph, rank, port, node.network, "network")
                _connect(graph, port, "network", node.network, "network")
        return graph


def _connect(graph: networkx.DiGraph, first: object, second: object, link: Link, link_class: LinkClass) -> None:
    for ends in ((first, second), (second, first)):
        graph.add_edge(*ends, bandwidth_gb_s=link.bandwidth_gb_s, latency_us=link.latency_us, link_class=link_class)


def uniform(
    name: str,
    num_nodes: int,
    ranks_per_node: int,
    local: Link,
    network: Link,
    *,
    memory_gib: float = 0.0,
    ranks_per_port: int = 1,
) -> Topology:
    """Returns `num_nodes` equal nodes, ranks in order."""
    nodes = [
        Node(
            f"node{index}",
            tuple(range(index * ranks_per_node, (index + 1) * ranks_per_node)),
            local,
            network,
            memory_gib,
            ranks_per_port,
        )
        for index in range(num_nodes)
    ]
    return Topology(name, tuple(nodes))


def single_node(num_ranks: int) -> Topology:
    """Returns one node of `num_ranks` ranks, for where nothing is known: no link is slower than another."""
    link = Link(1.0, 0.0)
    return Topology("single node", (Node("node0", tuple(range(num_ranks)), link, link),))


def ranks_by_node(topology: Topology, ranks: Sequence[int]) -> dict[int, list[int]]:
    """Returns the ranks, in the order given, by the index of their node."""
    result: dict[int, list[int]] = {}
    for rank in ranks:
        result.setdefault(topology.node_of[rank], []).append(rank)
    return result
