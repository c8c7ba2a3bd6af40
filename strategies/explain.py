"""Why a plan is what it is: the rows of the tables that `hgraph plan` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hgraph.plan import StepPlan
from hgraph.profile import Profile
from hgraph.strategy import Pool
from strategies.options import PlannerOptions

__all__ = ["CandidateRow", "Deciding", "Explanation", "MicroBatchRow", "ReplicaRow", "deciding", "explain"]


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
class MicroBatchRow:
    """One micro-batch: indices into the batch, their lengths and what each adds, and its time in one stage, with c."""

    sequences: tuple[int, ...]
    lengths: tuple[int, ...]
    sequence_ms: tuple[float, ...]
    tokens: int
    ms: float


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """One replica of the plan; the deciding sequence is the one that takes most of its time (None when idle).

    `stage_ms`: what one of its stages works; the rest of `predicted_ms` it waits for the other stages.
    """

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
    stage_ms: float
    micro_batches: tuple[MicroBatchRow, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """`candidates` in the pool's order, `replicas` in the strategy's; `imbalance` is max over mean replica time."""

    candidates: tuple[CandidateRow, ...]
    replicas: tuple[ReplicaRow, ...]
    imbalance: float

    @property
    def slowest(self) -> ReplicaRow:
        """The replica that the step waits for."""
        return max(self.replicas, key=lambda row: row.predicted_ms)


@dataclass(frozen=True, slots=True)
class Deciding:
    """The sequence that takes most of the slowest replica's time.

    `own_ms`: the least time that its micro-batch takes to pass all stages, if it were alone in it. `without_ms`: the
    step as planned again without the sequence; None where it is the only one.
    """

    replica: int
    sequence: int
    length: int
    own_ms: float
    without_ms: float | None


def explain(plan: StepPlan, pool: Pool, profile: Profile, lengths: Sequence[int]) -> Explanation:
    """Returns the rows for a plan of a batch of `lengths`."""
    strategy = pool[plan.strategy]
    slowest_ms = max(replica.predicted_ms for replica in plan.replicas)
    rows = []
    for index, (replica, planned) in enumerate(zip(strategy.replicas, plan.replicas, strict=True)):
        own = [sequence for micro_batch in planned.micro_batches for sequence in micro_batch]
        cost = profile.cost(replica.scheme)
        most = max(own, key=lambda sequence: (cost.sequence_ms(lengths[sequence]), -sequence), default=None)
        micro_batches = [_micro_batch(profile, replica.scheme, members, lengths) for members in planned.micro_batches]
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
                deciding_sequence=most,
                deciding_length=None if most is None else lengths[most],
                stage_ms=sum(row.ms for row in micro_batches),
                micro_batches=tuple(micro_batches),
            )
        )
    mean_ms = sum(replica.predicted_ms for replica in plan.replicas) / len(plan.replicas)
    return Explanation(_candidate_rows(plan), tuple(rows), slowest_ms / mean_ms if mean_ms > 0 else 1.0)


def deciding(
    plan: StepPlan,
    explanation: Explanation,
    pool: Pool,
    profile: Profile,
    lengths: Sequence[int],
    options: PlannerOptions | None = None,
) -> Deciding:
    """Returns the sequence that decides how long the step takes, and what the step would take without it."""
    from strategies.select import plan_step

    slowest = explanation.slowest
    sequence = slowest.deciding_sequence
    assert sequence is not None, "the slowest replica of a batch is not idle"
    scheme = pool[plan.strategy].replicas[slowest.replica].scheme
    own_ms = scheme.pp * profile.cost(scheme).micro_batch_ms([lengths[sequence]])
    rest = [length for index, length in enumerate(lengths) if index != sequence]
    without_ms = None
    if rest:
        quick = replace(options or PlannerOptions(), program=False)
        without_ms = plan_step(pool, profile, rest, options=quick).predicted_ms
    return Deciding(slowest.replica, sequence, lengths[sequence], own_ms, without_ms)


def _micro_batch(profile: Profile, scheme: object, members: Sequence[int], lengths: Sequence[int]) -> MicroBatchRow:
    own = tuple(lengths[index] for index in members)
    cost = profile.cost(scheme)
    return MicroBatchRow(tuple(members), own, tuple(map(cost.sequence_ms, own)), sum(own), cost.micro_batch_ms(own))


def _candidate_rows(plan: StepPlan) -> tuple[CandidateRow, ...]:
    rows = []
    for candidate in plan.candidates:
        predicted_ms, bound_ms = candidate.predicted_ms, candidate.bound_ms
        gap = predicted_ms / bound_ms - 1.0 if predicted_ms is not None and bound_ms else None
        is_taken = candidate.strategy == plan.strategy
        rows.append(CandidateRow(candidate.strategy, is_taken, predicted_ms, bound_ms, gap, candidate.reason))
    return tuple(rows)
