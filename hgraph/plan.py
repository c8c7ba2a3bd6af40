"""Step plans as values: which strategy, and which replica runs which sequences in which micro-batches.

Invariants (proved by `hgraph/check_plan.py`, which knows no solver)
----------
- Every sequence of the batch appears in exactly one micro-batch; no micro-batch is empty.
- A micro-batch holds at most the token limit of its replica's scheme.
- One `ReplicaPlan` per replica of the strategy, in its order; a replica may be empty.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from hgraph.strategy import Pool

__all__ = ["Candidate", "ReplicaPlan", "SequencedPlan", "SolverRuns", "StepPlan"]


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """The micro-batches of one replica, in the order they run; each is a tuple of indices into the batch."""

    micro_batches: tuple[tuple[int, ...], ...]
    predicted_ms: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """Why a strategy was or was not taken: its time (None where nothing was planned), its bound and one sentence.

    All times in ms, bridges included; `flow_ms` is None where nothing was planned.
    """

    strategy: str
    predicted_ms: float | None
    bound_ms: float | None
    reason: str
    flow_ms: float | None = None


@dataclass(frozen=True, slots=True)
class SolverRuns:
    """How often a solver ran for a plan, and what for: `bound` programs of the bound, `integer` programs of the plan.

    `bound_gain_ms`: by how much the former raised the pool's bound. `integer_gain_ms`: how much faster the plan is for
    the latter.
    """

    bound: int = 0
    integer: int = 0
    bound_gain_ms: float = 0.0
    integer_gain_ms: float = 0.0

    def __bool__(self) -> bool:
        """Whether a solver ran at all."""
        return self.bound + self.integer > 0

    def __add__(self, other: SolverRuns) -> SolverRuns:
        return SolverRuns(
            self.bound + other.bound,
            self.integer + other.integer,
            self.bound_gain_ms + other.bound_gain_ms,
            self.integer_gain_ms + other.integer_gain_ms,
        )


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one step.

    `predicted_ms` is the time of the slowest replica (simulated schedule) plus the bridges of the strategy; `bound_ms`
    the smallest lower bound among the pool's strategies; `gap` = predicted_ms / bound_ms - 1. `flow_ms` is another
    time of the same plan: of each replica the sum over its micro-batches plus (pp - 1) times its largest, the slowest
    replica, without the bridges. `runs`: what solvers did for it.
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
    flow_ms: float = 0.0
    runs: SolverRuns = SolverRuns()

    @property
    def parts(self) -> tuple[StepPlan, ...]:
        """The plans that run one after another: this one alone."""
        return (self,)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The indices of all sequences, in order of replica and micro-batch."""
        return tuple(index for replica in self.replicas for own in replica.micro_batches for index in own)

    def idle_ranks(self, pool: Pool) -> tuple[int, ...]:
        """Returns the pool's ranks that run nothing: in no replica of the strategy, or in one without sequences."""
        replicas = zip(pool[self.strategy].replicas, self.replicas, strict=True)
        busy = {rank for replica, own in replicas if own.micro_batches for rank in replica.ranks}
        return tuple(rank for rank in range(pool.num_ranks) if rank not in busy)

    def renumbered(self, numbers: Sequence[int]) -> StepPlan:
        """Returns the same plan with `numbers[i]` for every index i."""
        return replace(
            self,
            replicas=tuple(
                replace(
                    replica,
                    micro_batches=tuple(tuple(numbers[index] for index in own) for own in replica.micro_batches),
                )
                for replica in self.replicas
            ),
        )

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
        data["runs"] = SolverRuns(**data.get("runs", {}))
        return StepPlan(**data)


@dataclass(frozen=True, slots=True)
class SequencedPlan:
    """Several strategies one after another in one step, each with sequences of its own (`check_sequenced_plan`).

    What several plans have in common is named as in `StepPlan`; times are sums, without the switches between parts.
    """

    parts: tuple[StepPlan, ...]

    @property
    def step(self) -> int:
        return self.parts[0].step

    @property
    def strategy(self) -> str:
        return ", then ".join(part.strategy for part in self.parts)

    @property
    def replicas(self) -> tuple[ReplicaPlan, ...]:
        """Those of every part, in turn."""
        return tuple(replica for part in self.parts for replica in part.replicas)

    def idle_ranks(self, pool: Pool) -> tuple[int, ...]:
        """Returns the pool's ranks that run nothing in any part."""
        return tuple(sorted(set.intersection(*(set(part.idle_ranks(pool)) for part in self.parts))))

    @property
    def predicted_ms(self) -> float:
        return sum(part.predicted_ms for part in self.parts)

    @property
    def plan_ms(self) -> float:
        return sum(part.plan_ms for part in self.parts)

    @property
    def flow_ms(self) -> float:
        return sum(part.flow_ms for part in self.parts)

    @property
    def bound_ms(self) -> float:
        return sum(part.bound_ms for part in self.parts)

    @property
    def gap(self) -> float:
        return self.predicted_ms / self.bound_ms - 1.0 if self.bound_ms > 0 else 0.0

    @property
    def solver(self) -> str:
        return ", then ".join(part.solver for part in self.parts)

    def to_json(self) -> str:
        """Returns one line of JSON: the plans of the parts under `parts`."""
        return json.dumps({"parts": [asdict(part) for part in self.parts]})
