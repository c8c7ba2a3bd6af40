"""Step plans as values: which strategy, and which replica runs which sequences in which micro-batches.

Invariants (proved by `hgraph/check_plan.py`, which knows no solver)
----------
- Every sequence of the batch appears in exactly one micro-batch; no micro-batch is empty.
- A micro-batch holds at most the token limit of its replica's scheme.
- One `ReplicaPlan` per replica of the strategy, in its order; a replica may be empty.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = ["Candidate", "ReplicaPlan", "StepPlan"]


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """The micro-batches of one replica, in the order they run; each is a tuple of indices into the batch."""

    micro_batches: tuple[tuple[int, ...], ...]
    predicted_ms: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """Why a strategy was or was not taken: its time (None where nothing was planned), its bound and one sentence."""

    strategy: str
    predicted_ms: float | None
    bound_ms: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one step.

    `predicted_ms` is the time of the slowest replica (simulated schedule) plus the bridges of the strategy; `bound_ms`
    the smallest lower bound among the pool's strategies; `gap` = predicted_ms / bound_ms - 1.
    """

    step: int
    strategy: str
    replicas: tuple[ReplicaPlan, ...]
    predicted_ms: float
    bound_ms: float
    gap: float
    solver: str
    candidates: tuple[Candidate, ...] = ()
    plan_ms: float = 0.0

    def to_json(self) -> str:
        """Returns one line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> StepPlan:
        """Returns the plan that `to_json` wrote."""
        data = json.loads(text)
        data["replicas"] = tuple(
            ReplicaPlan(tuple(tuple(mb) for mb in replica["micro_batches"]), replica["predicted_ms"])
            for replica in data["replicas"]
        )
        data["candidates"] = tuple(Candidate(**candidate) for candidate in data["candidates"])
        return StepPlan(**data)
