"""Plans the bridges of a program's strategies and the direct switches between them, and makes a rank's part of each."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real

import torch

from hgraph.bridge_plan import BridgePlan, plan_bridge
from hgraph.capture import Captured
from hgraph.errors import InvalidInput
from hgraph.strategy import Strategy
from hgraph.topology import Topology, single_node
from passes.pipelines import CompiledScheme
from runtime.bridge import Bridge
from runtime.buffer_pool import BufferPool
from runtime.layouts import SwitchedKind, switch_reshards

__all__ = ["BridgePlanner", "StrategyBridges", "bucket_elements"]

_KINDS: tuple[SwitchedKind, SwitchedKind] = ("parameters", "gradients")
_MOST_BUCKET_MB = 1e12
"""10^18 bytes: more than any machine has, and the count of elements still fits in 64 bits."""


class StrategyBridges:
    """The bridges of parameters and of gradients on one rank: of a strategy, or of a switch between two.

    Plans are of tensors named `name` or `name..k`: k counts the parts of a layout that is not one union of single
    subgroups. `dtypes` are those that parameters and gradients travel in; both bridges take their buffers from `pool`.
    """

    def __init__(
        self,
        plans: tuple[BridgePlan, BridgePlan],
        rank: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
        pool: BufferPool | None = None,
    ) -> None:
        pool = pool or BufferPool(device)
        self.parameters = Bridge(plans[0], rank, dtypes[0], device, pool=pool)
        self.gradients = Bridge(plans[1], rank, dtypes[1], device, pool=pool, lane=1)

    @property
    def total_bytes(self) -> int:
        """Bytes that both bridges move between all ranks in one step."""
        return self.parameters.total_bytes + self.gradients.total_bytes


class BridgePlanner:
    """Plans the bridges of strategies and the switches between them, each once for all ranks of the process.

    `dtypes` are those that parameters and gradients travel in. A bucket takes up to `bucket_mb` megabytes (10^6 bytes)
    on the rank that has most to send, receive and sum in it. Without `topology` all links are taken to be equal.

    Raises `InvalidInput` for a size that is not above 0 or not finite, or a topology of another number of ranks.
    """

    def __init__(
        self,
        compiled: Mapping[str, CompiledScheme],
        captured: Captured,
        num_ranks: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        bucket_mb: float,
        topology: Topology | None,
    ) -> None:
        self.compiled, self.captured, self.num_ranks, self.dtypes = compiled, captured, num_ranks, dtypes
        self.topology = topology or single_node(num_ranks)
        self._bucket_elements = {
            kind: bucket_elements(bucket_mb, dtype) for kind, dtype in zip(_KINDS, dtypes, strict=True)
        }
        self._known: dict[tuple[str | None, str], tuple[BridgePlan, BridgePlan]] = {}
        if self.topology.num_ranks != num_ranks:
            raise InvalidInput(
                f"topology {self.topology.name}: expected the {num_ranks} ranks of the pool, got "
                f"{self.topology.num_ranks}"
            )

    def plans(self, strategy: Strategy) -> tuple[BridgePlan, BridgePlan]:
        """Returns the plans that bring parameters to a strategy's layout, and its gradients to their owners."""
        if (None, strategy.name) not in self._known:
            inward = self._plan(None, strategy, "parameters")
            self._known[None, strategy.name] = inward, self._plan(strategy, None, "gradients")
        return self._known[None, strategy.name]

    def switch(self, start: Strategy, end: Strategy) -> tuple[BridgePlan, BridgePlan]:
        """Returns the plans that take parameters and gradients from one strategy's layout to another's."""
        key = start.name, end.name
        if key not in self._known:
            self._known[key] = self._plan(start, end, "parameters"), self._plan(start, end, "gradients")
        return self._known[key]

    def on_rank(
        self, plans: tuple[BridgePlan, BridgePlan], rank: int, device: torch.device, pool: BufferPool
    ) -> StrategyBridges:
        """Returns one rank's part of both plans."""
        return StrategyBridges(plans, rank, self.dtypes, device, pool)

    def _plan(self, start: Strategy | None, end: Strategy | None, kind: SwitchedKind) -> BridgePlan:
        reshards = switch_reshards(start, end, kind, self.compiled, self.captured, self.num_ranks)
        return plan_bridge(reshards, self.topology, bucket_elements=self._bucket_elements[kind])


def bucket_elements(bucket_mb: float, dtype: torch.dtype) -> int:
    """Returns how many elements of `dtype` a bucket of `bucket_mb` megabytes (10^6 bytes) holds, at least one.

    Raises `InvalidInput` for what is no number, not above 0 or not finite.
    """
    if not isinstance(bucket_mb, Real) or isinstance(bucket_mb, bool):
        hint = "; write it without quotes" if isinstance(bucket_mb, str) else ""
        raise InvalidInput(f"bucket_mb: expected a number of MB, got {type(bucket_mb).__name__} {bucket_mb!r}{hint}")
    if not bucket_mb > 0:
        raise InvalidInput(f"bucket_mb: expected a size above 0 MB, got {bucket_mb}")
    if bucket_mb > _MOST_BUCKET_MB:
        raise InvalidInput(
            f"bucket_mb: expected a size of at most {_MOST_BUCKET_MB:g} MB, got {bucket_mb}; for one bucket, any size "
            "above that of all tensors together will do"
        )
    return max(1, int(bucket_mb * 1e6) // dtype.itemsize)
