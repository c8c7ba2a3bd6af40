"""The planner's time model of one replica: the simulated time of its schedule.

A micro-batch M takes `t_M = sum over s in M of (a s^2 + b s) + c` ms in every stage (Hydraulis, arXiv 2412.07894,
section 4), a third of it forward. The replica's time is that of its schedule over the micro-batches in their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hgraph.profile import Profile, SchemeCost
from hgraph.simulate import flow_ms, schedule_ms
from hgraph.strategy import Strategy

__all__ = ["ReplicaKind", "replica_kinds"]


@dataclass(frozen=True, slots=True)
class ReplicaKind:
    """What decides a replica's time; equal kinds are interchangeable."""

    pp: int
    schedule: str
    cost: SchemeCost

    @property
    def max_tokens(self) -> int:
        return self.cost.max_tokens

    def micro_batch_ms(self, micro_batches: Iterable[Sequence[int]]) -> list[float]:
        """Returns the time in ms of each micro-batch, given as lengths, in one stage."""
        return [self.cost.micro_batch_ms(lengths) for lengths in micro_batches]

    def schedule_ms(self, times_ms: Sequence[float]) -> float:
        """Returns the simulated time in ms of micro-batches of `times_ms`, in that order; 0.0 for none."""
        return schedule_ms(self.schedule, self.pp, times_ms)

    def replica_ms(self, micro_batches: Iterable[Sequence[int]]) -> float:
        """Returns the simulated time in ms of micro-batches given as lengths, in their order."""
        return self.schedule_ms(self.micro_batch_ms(micro_batches))

    def flow_ms(self, times_ms: Sequence[float]) -> float:
        """Returns sum t + (pp-1) max t: exact for GPipe on equal stages, an upper model of 1F1B."""
        return flow_ms(self.pp, times_ms)


def replica_kinds(strategy: Strategy, profile: Profile) -> tuple[ReplicaKind, ...]:
    """Returns the kind of each replica of `strategy`, in its order; a scheme without a cost is an error."""
    return tuple(
        ReplicaKind(replica.scheme.pp, replica.scheme.schedule, profile.cost(replica.scheme))
        for replica in strategy.replicas
    )
