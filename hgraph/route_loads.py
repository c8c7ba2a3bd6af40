"""What ranks and links carry while bundles are routed, and who is chosen by it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy

from hgraph.route_plan import Integers
from hgraph.topology import Topology

__all__ = ["Loads"]


class Loads:
    """What ranks and network ports send and receive so far.

    Inside nodes that is counted in elements, over the network by how long it takes: `_slowness` is 1 on the fastest
    ports and more on others. The last entry of an array stands for no rank (or its port) and is infinite.
    """

    def __init__(self, topology: Topology) -> None:
        bandwidth = numpy.zeros(topology.num_ranks)
        for node in topology.nodes:
            bandwidth[list(node.ranks)] = node.network.bandwidth_gb_s
        ports = topology.port_of()
        self._slowness = bandwidth.max() / bandwidth
        self._port = numpy.append(ports, ports.max() + 1)
        self._are_shared = len(set(ports.tolist())) < topology.num_ranks
        self.local_out, self.local_in, self._network_out, self._network_in = (_zeros(len(ports)) for _ in range(4))
        self._port_out, self._port_in = _zeros(int(ports.max()) + 1), _zeros(int(ports.max()) + 1)

    def entries(self, candidates: Integers) -> Integers:
        """Returns, per row of `candidates`, who has received least over the network, on its port and by itself."""
        return self._least(candidates, self._at_port(self._port_in, candidates), self._network_in, self.local_out)

    def summing(self, candidates: Integers) -> Integers:
        """Returns, per row of `candidates`, who has sent least over the network, on its port and by itself."""
        return self._least(candidates, self._at_port(self._port_out, candidates), self._network_out, self.local_in)

    def local_senders(self, candidates: Integers) -> Integers:
        """Returns, per row of `candidates`, who has sent least inside its node."""
        return self._least(candidates, None, self.local_out)

    def network_load(self, rank: int) -> float:
        """Returns what a rank and its port send and receive."""
        port = self._port[rank]
        return self._network_in[rank] + self._network_out[rank] + self._port_in[port] + self._port_out[port]

    def add_network(self, senders: Integers | Sequence[int], receivers: Integers | Sequence[int], size: int) -> None:
        """Adds `size` elements to each of `senders`, and to each of `receivers`; a rank may be there several times."""
        for ranks, loads, ports in (
            (senders, self._network_out, self._port_out),
            (receivers, self._network_in, self._port_in),
        ):
            amounts = size * self._slowness[ranks]
            numpy.add.at(loads, ranks, amounts)
            if self._are_shared:
                numpy.add.at(ports, self._port[ranks], amounts)

    def take_turns_sending(self, ranks: Sequence[int], count: int, size: int) -> list[int]:
        """Returns, `count` times, who of `ranks` would be done soonest with `size` elements more over the network."""
        if len(ranks) == 1:
            return [ranks[0]] * count
        own = {rank: float(self._network_out[rank]) for rank in ranks}
        ports = {int(self._port[rank]): float(self._port_out[self._port[rank]]) for rank in ranks}
        taken = []
        for _ in range(count):
            rank = min(
                ranks,
                key=lambda rank: (
                    (ports[int(self._port[rank])] if self._are_shared else own[rank]) + size * self._slowness[rank],
                    own[rank],
                ),
            )
            own[rank] += size * self._slowness[rank]
            ports[int(self._port[rank])] += size * self._slowness[rank]
            taken.append(rank)
        return taken

    @staticmethod
    def take_turns(loads: numpy.ndarray, ranks: Sequence[int], count: int, size: int) -> list[int]:
        """Returns `count` times the least loaded of `ranks`, the first of several, and loads it with `size`."""
        if len(ranks) == 1:
            loads[ranks[0]] += size * count
            return [ranks[0]] * count
        waiting = [(loads[rank], place, rank) for place, rank in enumerate(ranks)]
        heapq.heapify(waiting)
        taken = []
        for _ in range(count):
            load, place, rank = waiting[0]
            heapq.heapreplace(waiting, (load + size, place, rank))
            loads[rank] += size
            taken.append(rank)
        return taken

    def _at_port(self, loads: numpy.ndarray, candidates: Integers) -> numpy.ndarray | None:
        """Returns what the port of each candidate has, None where every rank has a port of its own."""
        return loads[self._port[candidates]] if self._are_shared else None

    @staticmethod
    def _least(candidates: Integers, first: numpy.ndarray | None, *loads: numpy.ndarray) -> Integers:
        """Returns, per row, the candidate with the least `first`, of equals that with the least load, and so on."""
        if candidates.shape[-1] == 1:
            return candidates[..., 0]
        is_best = candidates >= 0
        for values in ([] if first is None else [first]) + [load[candidates] for load in loads]:
            values = numpy.where(is_best, values, numpy.inf)
            is_best &= values == values.min(axis=-1, keepdims=True)
        return numpy.take_along_axis(candidates, is_best.argmax(axis=-1)[..., None], axis=-1)[..., 0]


def _zeros(count: int) -> numpy.ndarray:
    return numpy.append(numpy.zeros(count), numpy.inf)
