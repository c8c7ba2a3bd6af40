"""Values of planning ahead: how far and by how many processes, and how a plan came about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from hgraph.errors import InvalidInput
from hgraph.plan import SolverRuns, StepPlan

__all__ = ["PlanAhead", "PlanTimes", "PlannedStep", "Wait"]

Wait: TypeAlias = Literal["best", "first"]


@dataclass(frozen=True, slots=True)
class PlanAhead:
    """How steps are planned before they are needed.

    `depth`: how many steps ahead; 0 plans in the step.
    `workers`: planner processes at most; the second and later ones start when a step had to wait for its plan.
    `wait`: what a step waits for. With `best`, its final plan: plans depend on lengths, profile and pool alone. With
    `first`, whatever is there when the step asks, at worst the first checked plan: no step waits for a solver, and two
    runs may differ (the ranks of one never do).
    """

    depth: int = 2
    workers: int = 2
    wait: Wait = "best"

    def __post_init__(self) -> None:
        if self.depth < 0:
            raise InvalidInput(f"planning ahead: expected a depth of 0 or more, got {self.depth}")
        if self.workers < 1:
            raise InvalidInput(f"planning ahead: expected workers of 1 or more, got {self.workers}")
        if self.wait not in ("best", "first"):
            raise InvalidInput(f"planning ahead: expected wait of 'best' or 'first', got {self.wait!r}")


@dataclass(frozen=True, slots=True)
class PlanTimes:
    """How a plan came about.

    `waited_ms`: how long its step waited for it. `latency_ms`: work until there was a first checked plan, and
    `total_ms` until there was the one that is used. `first_predicted_ms`: what the first one predicts. `runs`: what
    solvers did for it.
    """

    waited_ms: float = 0.0
    latency_ms: float = 0.0
    total_ms: float = 0.0
    first_predicted_ms: float = 0.0
    runs: SolverRuns = SolverRuns()


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan and how it came about."""

    plan: StepPlan
    times: PlanTimes

    @property
    def gain(self) -> float:
        """What is saved over the first plan, as part of its predicted time."""
        first_ms = self.times.first_predicted_ms
        return 1.0 - self.plan.predicted_ms / first_ms if first_ms > 0 else 0.0
