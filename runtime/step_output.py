"""What a step of training leaves for its caller."""

from __future__ import annotations

from dataclasses import dataclass

from hgraph.plan import SequencedPlan, SolverRuns, StepPlan
from strategies.ahead import PlanTimes

__all__ = ["StepOutput"]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step did; `step` counts from 1.

    Times are of the slowest rank; bytes are those that the bridges moved between all ranks. `plan_times` says how the
    plan came about; None for a plan that was given. `idle_ranks` ran nothing.
    """

    step: int
    loss: float
    grad_norm: float
    tokens: int
    labelled_tokens: int
    strategy: str
    plan: StepPlan | SequencedPlan
    learning_rate: float
    measured_ms: float
    replica_ms: tuple[float, ...]
    plan_times: PlanTimes | None
    bridge_bytes: int
    compiled_graphs: int
    peak_live_micro_batches: int
    idle_ranks: tuple[int, ...] = ()

    @property
    def plan_wait_ms(self) -> float:
        """How long the step waited for its plan."""
        return self.plan_times.waited_ms if self.plan_times is not None else 0.0

    @property
    def solver_runs(self) -> SolverRuns:
        """What solvers did for the plan; nothing for a plan that was given."""
        return self.plan_times.runs if self.plan_times is not None else SolverRuns()

    @property
    def bound_gain(self) -> float:
        """By how much programs of the bound raised it, as part of the bound."""
        return self.solver_runs.bound_gain_ms / self.plan.bound_ms if self.plan.bound_ms > 0 else 0.0

    @property
    def solver_gain(self) -> float:
        """What integer programs saved of this step, as part of what the first plan predicts."""
        first_ms = self.plan_times.first_predicted_ms if self.plan_times is not None else 0.0
        return self.solver_runs.integer_gain_ms / first_ms if first_ms > 0 else 0.0

    @property
    def replicas_used(self) -> int:
        return sum(1 for replica in self.plan.replicas if replica.micro_batches)

    @property
    def imbalance(self) -> float:
        """Slowest replica over the mean of those used (1 where none ran)."""
        used = [ms for ms, replica in zip(self.replica_ms, self.plan.replicas, strict=True) if replica.micro_batches]
        return max(used) / (sum(used) / len(used)) if used and sum(used) > 0 else 1.0
