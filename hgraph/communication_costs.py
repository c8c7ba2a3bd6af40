"""What communication of a step costs in ms on a described cluster, for a model known by its sizes.

- Bridges and switches: up to `PLANNED_RANKS` ranks those that `plan_bridge` plans, timed by `hgraph/traffic.py`. Above
  that, where planning takes a minute, by bytes: a node gets what its ranks use, once, over all its ports at once.
- Messages between stages: the plan of one activation from a stage's ranks to the next one's, at two sizes; time is a
  straight line in tokens.

Every answer is kept, so that a strategy is planned once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hgraph.annotation import replicated
from hgraph.bridge_plan import plan_bridge
from hgraph.bundles import TensorReshard
from hgraph.errors import InvalidInput
from hgraph.memory_model import ModelSizes
from hgraph.model_tensors import BridgeKind, bridge_reshards, num_parameters
from hgraph.reshard import plan_reshard
from hgraph.step_times import NUM_BUCKETS
from hgraph.strategy import Replica, Strategy
from hgraph.topology import Topology, uniform
from hgraph.traffic import reshard_cost, traffic

__all__ = ["PLANNED_RANKS", "CommunicationCosts", "resized"]

PLANNED_RANKS = 128
ELEMENT_BYTES: dict[BridgeKind, int] = {"parameters": 2, "gradients": 4}
"""bfloat16 parameters and activations, float32 gradients."""
CELLS = 240
"""Cuts along tensor parallelism by which bytes are counted; divides by every degree up to 6, 8, 10, 12, 15, 16, ..."""
TOKENS = (1024, 8192)


def resized(topology: Topology, num_ranks: int) -> Topology:
    """Returns the cluster with as many nodes as `num_ranks` take; its own nodes must be alike.

    Fewer ranks than a node has stay in one node.
    """
    first = topology.nodes[0]
    if any(replace(node, name="", ranks=first.ranks) != replace(first, name="") for node in topology.nodes):
        raise InvalidInput(
            f"cluster {topology.name}: expected nodes that are alike, to make one of {num_ranks} ranks from it; write "
            f"a cluster file for {num_ranks} ranks"
        )
    per_node = min(len(first.ranks), num_ranks)
    if num_ranks % per_node:
        raise InvalidInput(
            f"cluster {topology.name}: expected a multiple of its {per_node} ranks per node, got {num_ranks} ranks"
        )
    per_port = first.ranks_per_port if per_node % first.ranks_per_port == 0 else 1
    return uniform(
        topology.name,
        num_ranks // per_node,
        per_node,
        first.local,
        first.network,
        memory_gib=first.memory_gib,
        ranks_per_port=per_port,
    )


@dataclass(frozen=True)
class CommunicationCosts:
    """Costs for `model` on `topology`, all of whose ranks take part.

    Above `planned_ranks` ranks, bridges are counted by bytes; 0 counts them always.
    """

    model: ModelSizes
    topology: Topology
    planned_ranks: int = PLANNED_RANKS

    @cached_property
    def _known(self) -> dict[object, float]:
        return {}

    @cached_property
    def _lines(self) -> dict[object, tuple[float, float]]:
        return {}

    @cached_property
    def _num_parameters(self) -> int:
        return num_parameters(self.model)

    @property
    def is_planned(self) -> bool:
        """Whether bridges are planned, not counted by bytes."""
        return self.topology.num_ranks <= self.planned_ranks

    def bridge_ms(self, strategy: Strategy, kind: BridgeKind) -> float:
        """Returns the time of a strategy's bridge: parameters in, or gradients out."""
        key = (strategy.replicas, kind)
        if key not in self._known:
            if self.is_planned:
                reshards = bridge_reshards(self.model, strategy, kind, self.topology.num_ranks)
                self._known[key] = self._planned_ms(reshards, kind)
            else:
                self._known[key] = self._bytes_ms(strategy, kind)
        return self._known[key]

    def switch_ms(self, start: Strategy, end: Strategy) -> float:
        """Returns the time of a switch in the middle of a step.

        Gradients gathered so far go to their owners in the optimizer layout, parameters come from theirs. Where both
        layouts have several replicas, that is less than to bring the sums to one replica of `end`.
        """
        return self.bridge_ms(start, "gradients") + self.bridge_ms(end, "parameters")

    def transfers_ms(self, replica: Replica, tokens: Iterable[int]) -> tuple[tuple[float, ...], ...]:
        """Returns, per boundary between stages, the time of each micro-batch's message; none where one stage is all."""
        counts = tuple(tokens)
        rows = []
        for stage in range(replica.scheme.pp - 1):  # a rank has the tokens of its part of the context alone
            offset_ms, slope_ms = self._line(replica.stage_ranks(stage), replica.stage_ranks(stage + 1))
            cp = replica.scheme.stages[stage].cp
            rows.append(tuple(offset_ms + slope_ms * count / cp for count in counts))
        return tuple(rows)

    def _line(self, senders: tuple[int, ...], receivers: tuple[int, ...]) -> tuple[float, float]:
        """Returns the ms of a message of no tokens, and of each token."""
        key = (senders, receivers)
        if key not in self._lines:
            times_ms = []
            for tokens in TOKENS:
                plan = plan_reshard(replicated(senders), replicated(receivers), (tokens, self.model.hidden))
                times_ms.append(reshard_cost(plan, self.topology, ELEMENT_BYTES["parameters"]).ms)
            slope_ms = (times_ms[1] - times_ms[0]) / (TOKENS[1] - TOKENS[0])
            self._lines[key] = (max(0.0, times_ms[0] - slope_ms * TOKENS[0]), slope_ms)
        return self._lines[key]

    def _planned_ms(self, reshards: list[TensorReshard], kind: BridgeKind) -> float:
        size = ELEMENT_BYTES[kind]
        bucket_elements = -(-self._num_parameters // NUM_BUCKETS)
        return traffic(plan_bridge(reshards, self.topology, bucket_elements=bucket_elements), size).ms

    def _bytes_ms(self, strategy: Strategy, kind: BridgeKind) -> float:
        """Returns the time of the busiest node's ports, or of the busiest rank's local link."""
        topology, total_bytes = self.topology, self._num_parameters * ELEMENT_BYTES[kind]
        used = np.zeros((len(topology.nodes), self.model.layers, CELLS), dtype=bool)
        largest_share = 0.0
        for replica in strategy.replicas:
            split = replica.scheme.layer_split(self.model.layers)
            first = 0
            for stage, count in enumerate(split):
                ranks = replica.stage_ranks(stage)
                tp = replica.scheme.stages[stage].tp
                largest_share = max(largest_share, count / self.model.layers / tp)
                for position, rank in enumerate(ranks):
                    cells = slice(position % tp * CELLS // tp, (position % tp + 1) * CELLS // tp)
                    used[topology.node_of[rank], first : first + count, cells] = True
                first += count
        others = 1.0 - 1.0 / len(topology.nodes)
        fractions = used.mean(axis=(1, 2))
        network_ms = 0.0
        for fraction, node in zip(fractions, topology.nodes, strict=True):
            ports_gb_s = node.network.bandwidth_gb_s * (len(node.ranks) // node.ranks_per_port)
            network_ms = max(network_ms, fraction * others * total_bytes / ports_gb_s / 1e6)
        slowest_gb_s = min(node.local.bandwidth_gb_s for node in topology.nodes)
        return max(network_ms, largest_share * total_bytes / slowest_gb_s / 1e6)
