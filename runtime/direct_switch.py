"""Direct switches: from the compute layout of one strategy to that of another in the middle of a step.

Parameters go from the nearest copy; what a rank has accumulated of gradients becomes a term of the next strategy's
gradients, so that the owners still get everything in one hop at the end (HotSPa, SOSP 2024, switches strategies within
an iteration; Hydraulis, arXiv 2412.07894, section 2).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from runtime.bridge import Bridge
from runtime.bridge_planner import StrategyBridges
from runtime.layouts import parameter_of
from runtime.requests import RankGenerator

__all__ = ["DirectSwitch"]


class DirectSwitch:
    """One rank's part in the switch from one strategy to another. Bridges name tensors as `runtime/layouts.py` does."""

    def __init__(self, bridges: StrategyBridges) -> None:
        self._bridges = bridges

    @property
    def total_bytes(self) -> int:
        """Bytes that one switch moves between all ranks."""
        return self._bridges.total_bytes

    def parameters(self, held: Mapping[str, Tensor]) -> RankGenerator[dict[str, Tensor]]:
        """Returns the parameters that this rank uses under the next strategy, from those it used, both by name."""
        found = yield from self._run(self._bridges.parameters, held, "switch parameters")
        return {parameter_of(key): tensor for key, tensor in found.items()}

    def gradients(self, accumulated: Mapping[str, Tensor]) -> RankGenerator[dict[str, Tensor]]:
        """Returns what this rank's gradients under the next strategy begin with, from what it has accumulated."""
        found = yield from self._run(self._bridges.gradients, accumulated, "switch gradients")
        totals: dict[str, Tensor] = {}
        for key, tensor in found.items():
            name = parameter_of(key)
            totals[name] = totals[name] + tensor if name in totals else tensor
        return totals

    @staticmethod
    def _run(bridge: Bridge, held: Mapping[str, Tensor], label: str) -> RankGenerator[dict[str, Tensor]]:
        sources = {key: held[parameter_of(key)] for key in bridge.names if bridge.holds_source(key)}
        return (yield from bridge.run(sources, label))
