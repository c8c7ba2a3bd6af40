"""Why a plan is what it is: the rows of the tables that `hgraph plan` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hgraph.plan import StepPlan
from hgraph.profile import Profile
from hgraph.strategy import Pool

__all__ = ["CandidateRow", "Explanation", "ReplicaRow", "explain"]


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """One strategy: times in ms with bridges (None where not planned), `gap` over its own bound, and the reason."""

    strategy: str
    is_taken: bool
    predicted_ms: float | None
    bound_ms: float | None
    gap: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """One replica of the plan; the deciding sequence is the one that takes most of its time (None when idle)."""

    replica: int
    scheme: str
    ranks: tuple[int, ...]
    num_micro_batches: int
    num_sequences: int
    tokens: int
    predicted_ms: float
    is_slowest: bool
    deciding_sequence: int | None
    deciding_length: int | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """`candidates` in the pool's order, `replicas` in the strategy's; `imbalance` is max over mean replica time."""

    candidates: tuple[CandidateRow, ...]
    replicas: tuple[ReplicaRow, ...]
    imbalance: float


def explain(plan: StepPlan, pool: Pool, profile: Profile, lengths: Sequence[int]) -> Explanation:
    """Returns the rows for a plan of a batch of `lengths`."""
    strategy = pool[plan.strategy]
    slowest_ms = max(replica.predicted_ms for replica in plan.replicas)
    rows = []
    for index, (replica, planned) in enumerate(zip(strategy.replicas, plan.replicas, strict=True)):
        own = [sequence for micro_batch in planned.micro_batches for sequence in micro_batch]
        cost = profile.cost(replica.scheme)
        deciding = max(own, key=lambda sequence: (cost.sequence_ms(lengths[sequence]), -sequence), default=None)
        rows.append(
            ReplicaRow(
                replica=index,
                scheme=str(replica.scheme),
                ranks=replica.ranks,
                num_micro_batches=len(planned.micro_batches),
                num_sequences=len(own),
                tokens=sum(lengths[sequence] for sequence in own),
                predicted_ms=planned.predicted_ms,
                is_slowest=planned.predicted_ms == slowest_ms,
                deciding_sequence=deciding,
                deciding_length=None if deciding is None else lengths[deciding],
            )
        )
    mean_ms = sum(replica.predicted_ms for replica in plan.replicas) / len(plan.replicas)
    return Explanation(_candidate_rows(plan), tuple(rows), slowest_ms / mean_ms if mean_ms > 0 else 1.0)


def _candidate_rows(plan: StepPlan) -> tuple[CandidateRow, ...]:
    rows = []
    for candidate in plan.candidates:
        predicted_ms, bound_ms = candidate.predicted_ms, candidate.bound_ms
        gap = predicted_ms / bound_ms - 1.0 if predicted_ms is not None and bound_ms else None
        is_taken = candidate.strategy == plan.strategy
        rows.append(CandidateRow(candidate.strategy, is_taken, predicted_ms, bound_ms, gap, candidate.reason))
    return tuple(rows)
