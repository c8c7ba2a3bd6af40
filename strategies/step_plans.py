"""A search as a step plan: replicas by the batch's own indices, and why each strategy was or was not taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hgraph.plan import Candidate, ReplicaPlan, StepPlan
from hgraph.profile import Profile
from hgraph.strategy import Strategy
from strategies.cost import ReplicaKind
from strategies.heuristic import Assignment
from strategies.packing import evened
from strategies.search import EQUAL, Planned, Search, replica_plans

__all__ = ["empty_plan", "step_plan"]


def step_plan(
    search: Search,
    step: int,
    order: Sequence[int],
    strategies: Sequence[Strategy],
    kinds: Mapping[str, Sequence[ReplicaKind]],
) -> StepPlan:
    """Returns the plan of the search's best strategy; `order[p]` is the batch's index of the search's sequence p."""
    best = search.best
    assert best.assignment is not None
    return StepPlan(
        step=step,
        strategy=best.strategy.name,
        replicas=_renumbered(_evened(best.assignment, best.kinds, search.lengths), order),
        predicted_ms=best.step_ms,
        bound_ms=search.bound_ms,
        gap=search.gap,
        solver=_solver_text(best, search.planned),
        candidates=_candidates(search, order[0], strategies, kinds),
        flow_ms=best.assignment.flow_ms,
        runs=search.runs,
    )


def empty_plan(step: int, strategies: Sequence[Strategy], profile: Profile) -> StepPlan:
    """Returns the plan of no sequences: all replicas idle, under the strategy whose bridges take least."""
    bridges_ms = {one.name: profile.bridge_ms.get(one.name, 0.0) for one in strategies}
    taken = min(strategies, key=lambda one: bridges_ms[one.name])
    least_ms = bridges_ms[taken.name]
    candidates = tuple(
        Candidate(name, ms, ms, "taken: an empty batch" if name == taken.name else "an empty batch", ms)
        for name, ms in bridges_ms.items()
    )
    replicas = (ReplicaPlan((), 0.0),) * len(taken.replicas)
    return StepPlan(step, taken.name, replicas, least_ms, least_ms, 0.0, "none: an empty batch", candidates)


def _evened(assignment: Assignment, kinds: Sequence[ReplicaKind], lengths: Sequence[int]) -> Assignment:
    """Returns the assignment with micro-batches behind which bridges hide best, at the same times."""
    packings = (
        evened(kind, [lengths[index] for index in own], packing)
        for kind, own, packing in zip(kinds, assignment.indices, assignment.packings, strict=True)
    )
    return Assignment(assignment.indices, tuple(packings))


def _renumbered(assignment: Assignment, order: Sequence[int]) -> tuple[ReplicaPlan, ...]:
    return tuple(
        ReplicaPlan(
            tuple(tuple(sorted(order[position] for position in own)) for own in replica.micro_batches),
            replica.predicted_ms,
        )
        for replica in replica_plans(assignment)
    )


def _solver_text(best: Planned, planned: Sequence[Planned]) -> str:
    """Returns who made the plan, and, where a program ran without being used, why."""
    if best.solver:
        return best.solver
    reasons = [one.fell_back for one in (best, *planned) if one.fell_back]
    return f"heuristic (solver: {reasons[0]})" if reasons else "heuristic"


def _candidates(
    search: Search, longest: int, strategies: Sequence[Strategy], kinds: Mapping[str, Sequence[ReplicaKind]]
) -> tuple[Candidate, ...]:
    planned = {one.strategy.name: one for one in search.planned}
    candidates = []
    for strategy in strategies:
        if strategy.name in planned:
            candidates.append(_candidate(planned[strategy.name], search))
            continue
        limit = max(kind.max_tokens for kind in kinds[strategy.name])
        reason = f"cannot hold sequence {longest} of {search.lengths[0]:,} tokens: its largest limit is {limit:,}"
        candidates.append(Candidate(strategy.name, None, None, reason))
    return tuple(candidates)


def _taken(search: Search) -> str:
    """Returns why the best plan is taken, and where the gap is large, what was tried on either side of it."""
    if search.is_good_enough:
        return "taken: smallest predicted time"
    lowest = min(search.planned, key=lambda one: one.step_bound_ms)
    made = "from its program" if lowest.is_sharp else "in closed form"
    best = search.best
    tried = best.solver or (best.fell_back and f"integer program: {best.fell_back}") or "no integer program ran"
    return (
        f"taken: smallest predicted time; {100.0 * search.gap:.1f}% above the least bound, that of "
        f"{lowest.strategy.name}, {made}; {tried}"
    )


def _candidate(one: Planned, search: Search) -> Candidate:
    name, best = one.strategy.name, search.best
    if one.assignment is None:
        reason = f"bound {one.step_bound_ms:,.1f} ms exceeds the best plan, {best.step_ms:,.1f} ms"
        return Candidate(name, None, one.step_bound_ms, reason)
    if one is best:
        reason = _taken(search)
    elif one.step_ms < best.step_ms * (1.0 - EQUAL):
        more = 100.0 * (one.step_flow_ms / best.step_flow_ms - 1.0)
        reason = (
            f"predicted {one.step_ms:,.1f} ms is less, but its flow time, {one.step_flow_ms:,.1f} ms, is {more:.1f}% "
            f"above {best.strategy.name}'s"
        )
    elif one.step_ms <= best.step_ms * (1.0 + EQUAL):
        reason = f"predicted {one.step_ms:,.1f} ms, equal to {best.strategy.name}, which comes first in the pool"
    else:
        slower = 100.0 * (one.step_ms / best.step_ms - 1.0) if best.step_ms > 0 else float("inf")
        reason = f"predicted {one.step_ms:,.1f} ms, {slower:.1f}% slower than {best.strategy.name}"
    return Candidate(name, one.step_ms, one.step_bound_ms, reason, one.step_flow_ms)
