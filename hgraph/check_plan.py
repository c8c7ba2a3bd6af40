"""Proof that a step plan is sound, from the plan, the pool, the profile and the lengths alone; knows no solver.

Properties
----------
- The strategy is in the pool, and there is one `ReplicaPlan` per replica of it.
- Every sequence of the batch is in exactly one micro-batch; indices lie in the batch; no micro-batch is empty.
- No micro-batch holds more tokens than the limit of its replica's scheme.
- Predicted times are those of the schedule in use, recomputed; the step's is the slowest replica's plus the bridges.
- The flow time is recomputed too: the slowest replica's, without the bridges.
- The bound is positive and not above the predicted time; gap = predicted / bound - 1.
- The bound is the least of the candidates' bounds, or the predicted time where that is less; no candidate's bound is
  above its own time.
- Candidates are the pool's strategies, each at most once; none that was planned is faster than the plan, unless its
  flow time is known and greater.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import isclose, isfinite

from hgraph.errors import PlanError
from hgraph.plan import ReplicaPlan, SequencedPlan, StepPlan
from hgraph.profile import Profile
from hgraph.simulate import flow_ms as flow_of
from hgraph.simulate import schedule_ms
from hgraph.strategy import Pool, Strategy

__all__ = ["check_plan", "check_replica_plans", "check_sequenced_plan"]

RELATIVE_TOLERANCE = 1e-9


def check_plan(plan: StepPlan, pool: Pool, profile: Profile, lengths: Sequence[int]) -> None:
    """Raises PlanError naming the first broken property of `plan` for a batch of `lengths`."""
    where = f"plan of step {plan.step}"
    names = [strategy.name for strategy in pool.strategies]
    if plan.strategy not in names:
        raise PlanError(f"{where}: strategy {plan.strategy!r} is not in the pool; there are {names}")
    strategy = pool[plan.strategy]
    where = f"{where}, strategy {strategy.name}"
    check_replica_plans(plan.replicas, strategy, profile, lengths, where)
    slowest_ms = max(replica.predicted_ms for replica in plan.replicas)
    expected_ms = slowest_ms + profile.bridge_ms.get(strategy.name, 0.0)
    _check_equal(f"{where}: predicted_ms (slowest replica plus bridges)", expected_ms, plan.predicted_ms)
    flow_ms = _flow_ms(plan, strategy, profile, lengths)
    _check_equal(f"{where}: flow_ms (slowest replica)", flow_ms, plan.flow_ms)
    _check_bound(plan, where)
    _check_candidates(plan, names, flow_ms + profile.bridge_ms.get(strategy.name, 0.0), where)
    _check_candidate_bounds(plan, where)


def check_sequenced_plan(plan: SequencedPlan, pool: Pool, profile: Profile, lengths: Sequence[int]) -> None:
    """Raises PlanError unless each part is a sound plan of its own sequences, and each sequence is in one part."""
    if not plan.parts:
        raise PlanError("plan in parts: expected at least one part, got none")
    where = f"plan of step {plan.step} in {len(plan.parts)} parts"
    seen = Counter(index for part in plan.parts for index in part.sequences)
    for index in sorted({*seen, *range(len(lengths))}):
        if not 0 <= index < len(lengths):
            raise PlanError(f"{where}: sequence {index} is not in the batch of {len(lengths)}")
        if seen[index] != 1:
            raise PlanError(f"{where}: sequence {index} appears {seen[index]} times; expected exactly once")
    for part in plan.parts:
        own = sorted(part.sequences)
        numbers = [0] * len(lengths)
        for number, index in enumerate(own):
            numbers[index] = number
        check_plan(part.renumbered(numbers), pool, profile, [lengths[index] for index in own])


def check_replica_plans(
    replicas: Sequence[ReplicaPlan], strategy: Strategy, profile: Profile, lengths: Sequence[int], where: str
) -> None:
    """Raises PlanError naming the first broken property of the micro-batches; `where` begins the message."""
    if len(replicas) != len(strategy.replicas):
        raise PlanError(f"{where}: expected {len(strategy.replicas)} replicas, got {len(replicas)}")
    _check_cover(replicas, len(lengths), where)
    for index, (replica, planned) in enumerate(zip(strategy.replicas, replicas, strict=True)):
        cost = profile.cost(replica.scheme)
        here = f"{where}, replica {index} ({replica.scheme})"
        for number, micro_batch in enumerate(planned.micro_batches):
            tokens = sum(lengths[sequence] for sequence in micro_batch)
            if tokens > cost.max_tokens:
                raise PlanError(
                    f"{here}, micro-batch {number}: {tokens:,} tokens exceed the limit of {cost.max_tokens:,}"
                )
        times_ms = [cost.micro_batch_ms([lengths[s] for s in micro_batch]) for micro_batch in planned.micro_batches]
        expected_ms = schedule_ms(replica.scheme.schedule, replica.scheme.pp, times_ms)
        _check_equal(f"{here}: predicted_ms", expected_ms, planned.predicted_ms)


def _flow_ms(plan: StepPlan, strategy: Strategy, profile: Profile, lengths: Sequence[int]) -> float:
    """Returns the greatest flow time of a replica in ms, of micro-batches that have been checked."""
    return max(
        flow_of(
            replica.scheme.pp,
            [profile.cost(replica.scheme).micro_batch_ms([lengths[s] for s in own]) for own in planned.micro_batches],
        )
        for replica, planned in zip(strategy.replicas, plan.replicas, strict=True)
    )


def _check_cover(replicas: Sequence[ReplicaPlan], num_sequences: int, where: str) -> None:
    seen: Counter[int] = Counter()
    for index, replica in enumerate(replicas):
        for number, micro_batch in enumerate(replica.micro_batches):
            if not micro_batch:
                raise PlanError(f"{where}, replica {index}: micro-batch {number} is empty")
            for sequence in micro_batch:
                if not 0 <= sequence < num_sequences:
                    raise PlanError(
                        f"{where}, replica {index}, micro-batch {number}: sequence {sequence} is not in the batch of "
                        f"{num_sequences}"
                    )
            seen.update(micro_batch)
    for sequence in range(num_sequences):
        if seen[sequence] != 1:
            raise PlanError(f"{where}: sequence {sequence} is in {seen[sequence]} micro-batches; expected exactly one")


def _check_bound(plan: StepPlan, where: str) -> None:
    if not (isfinite(plan.bound_ms) and plan.bound_ms >= 0.0):
        raise PlanError(f"{where}: bound_ms: expected a finite number of 0 or more, got {plan.bound_ms}")
    if plan.bound_ms > plan.predicted_ms * (1.0 + RELATIVE_TOLERANCE):
        raise PlanError(f"{where}: bound_ms {plan.bound_ms} is above the predicted time of {plan.predicted_ms} ms")
    expected_gap = plan.predicted_ms / plan.bound_ms - 1.0 if plan.bound_ms > 0 else 0.0
    if not isclose(1.0 + expected_gap, 1.0 + plan.gap, rel_tol=RELATIVE_TOLERANCE):
        raise PlanError(f"{where}: gap: expected {expected_gap}, got {plan.gap}")


def _check_candidates(plan: StepPlan, names: Sequence[str], taken_flow_ms: float, where: str) -> None:
    listed = Counter(candidate.strategy for candidate in plan.candidates)
    for name, count in listed.items():
        if name not in names or count > 1:
            raise PlanError(f"{where}: candidate {name!r} is listed {count} times; the pool has {list(names)}")
    for candidate in plan.candidates:
        if candidate.predicted_ms is None or candidate.predicted_ms >= plan.predicted_ms * (1 - RELATIVE_TOLERANCE):
            continue
        if candidate.flow_ms is None or candidate.flow_ms <= taken_flow_ms * (1 - RELATIVE_TOLERANCE):
            raise PlanError(
                f"{where}: candidate {candidate.strategy} was planned at {candidate.predicted_ms} ms, faster than the "
                f"plan's {plan.predicted_ms} ms"
            )


def _check_candidate_bounds(plan: StepPlan, where: str) -> None:
    expected_ms = plan.predicted_ms
    for candidate in plan.candidates:
        if candidate.bound_ms is None:
            continue
        expected_ms = min(expected_ms, candidate.bound_ms)
        own_ms = candidate.predicted_ms
        if own_ms is not None and candidate.bound_ms > own_ms * (1 + RELATIVE_TOLERANCE):
            raise PlanError(
                f"{where}: candidate {candidate.strategy}: bound_ms {candidate.bound_ms} is above its predicted time "
                f"of {own_ms} ms"
            )
    if any(candidate.bound_ms is not None for candidate in plan.candidates):
        _check_equal(f"{where}: bound_ms (the least of the candidates')", expected_ms, plan.bound_ms)


def _check_equal(what: str, expected_ms: float, got_ms: float) -> None:
    if not isclose(expected_ms, got_ms, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-12):
        raise PlanError(f"{what}: expected {expected_ms}, got {got_ms}")
