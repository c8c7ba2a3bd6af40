"""Plans the bridges of a program's strategies and the direct switches between them, each once for all local ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hgraph.bridge_plan import BridgePlan, plan_bridge
from hgraph.capture import Captured
from hgraph.strategy import Strategy
from hgraph.topology import Topology, single_node
from passes.pipelines import CompiledScheme
from runtime.buffer_pool import BufferPool
from runtime.layouts import StrategyBridges, bridge_plans, bucket_elements
from runtime.switch_reshards import SwitchedKind, switch_reshards

__all__ = ["BridgePlanner"]

_KINDS: tuple[SwitchedKind, SwitchedKind] = ("parameters", "gradients")


class BridgePlanner:
    """Plans the bridges of strategies (`bridge_plans`), each once for all ranks of the process."""

    def __init__(
        self,
        compiled: Mapping[str, CompiledScheme],
        captured: Captured,
        num_ranks: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        bucket_mb: float,
        topology: Topology | None,
    ) -> None:
        self.compiled, self.captured, self.num_ranks = compiled, captured, num_ranks
        self.dtypes, self.bucket_mb, self.topology = dtypes, bucket_mb, topology
        self._known: dict[str, tuple[BridgePlan, BridgePlan]] = {}

    def plans(self, strategy: Strategy) -> tuple[BridgePlan, BridgePlan]:
        """Returns the plan of the parameter bridge and of the gradient bridge of a strategy."""
        if strategy.name not in self._known:
            self._known[strategy.name] = bridge_plans(
                strategy,
                self.compiled,
                self.captured,
                self.num_ranks,
                self.dtypes,
                bucket_mb=self.bucket_mb,
                topology=self.topology,
            )
        return self._known[strategy.name]

    def switch_plans(self, start: Strategy, end: Strategy) -> tuple[BridgePlan, BridgePlan]:
        """Returns the plans that take parameters and gradients from one strategy's layout to another's."""
        sizes = [bucket_elements(self.bucket_mb, dtype) for dtype in self.dtypes]
        plans = [
            plan_bridge(
                switch_reshards(start, end, kind, self.compiled, self.captured, self.num_ranks),
                self.topology or single_node(self.num_ranks),
                bucket_elements=size,
            )
            for kind, size in zip(_KINDS, sizes, strict=True)
        ]
        return plans[0], plans[1]

    def bridges(self, strategy: Strategy, rank: int, device: torch.device, pool: BufferPool) -> StrategyBridges:
        """Returns the bridges of a strategy on one rank."""
        return StrategyBridges(self.plans(strategy), rank, self.dtypes, device, pool)
