"""The plan of one step: which strategy, who gets which sequence, in which micro-batches.

Per strategy a lower bound and a fast heuristic; strategies whose bound exceeds the best plan are dropped. When the best
plan is further than a set gap from the pool's bound, the bounds are sharpened by their linear program and the integer
program runs for strategies still alive. What a solver returns is used only if the checker accepts it and it is faster.
The plan depends on the lengths and their order alone: no randomness, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hgraph.errors import InvalidInput
from hgraph.plan import Candidate, StepPlan
from hgraph.profile import Profile
from hgraph.strategy import Pool, Strategy
from strategies.cost import ReplicaKind, replica_kinds
from strategies.integer_program import SolveFunction, highs
from strategies.options import PlannerOptions
from strategies.search import EQUAL, Planned, Search, plan_strategy, replica_plans

__all__ = ["plan_step"]


def plan_step(
    pool: Pool,
    profile: Profile,
    lengths: Sequence[int],
    *,
    step: int = 0,
    options: PlannerOptions | None = None,
    solve_with: SolveFunction = highs,
) -> StepPlan:
    """Returns the plan of `step` for a batch of `lengths` [tokens]; `plan_ms` is left at 0 for the caller to fill in.

    `options.only` restricts the pool to one strategy; `solve_with` solves integer programs. Raises InvalidInput for an
    empty batch, for a length below 1 and for a sequence that no strategy can hold.
    """
    options = options or PlannerOptions()
    own_lengths = _checked(lengths)
    strategies = pool.strategies if options.only is None else (pool[options.only],)
    kinds = {strategy.name: replica_kinds(strategy, profile) for strategy in strategies}
    able = [strategy for strategy in strategies if _limit(kinds[strategy.name]) >= max(own_lengths)]
    if not able:
        raise InvalidInput(_no_strategy(kinds, own_lengths, options))
    planned = [plan_strategy(strategy, kinds[strategy.name], profile, own_lengths) for strategy in able]
    search = Search(own_lengths, profile, options, planned)
    search.run_heuristics()
    search.sharpen_bounds()
    if options.program and not search.is_good_enough:
        search.run_programs(solve_with)
    return _step_plan(search, step, strategies, kinds)


def _checked(lengths: Sequence[int]) -> tuple[int, ...]:
    if not len(lengths):
        raise InvalidInput("plan: expected at least one sequence, got an empty batch; skip the step or give it data")
    for index, length in enumerate(lengths):
        if length < 1 or int(length) != length:
            raise InvalidInput(
                f"plan: sequence {index}: expected a length of 1 token or more, got {length}; drop empty ones first"
            )
    return tuple(int(length) for length in lengths)


def _limit(kinds: Sequence[ReplicaKind]) -> int:
    return max(kind.max_tokens for kind in kinds)


def _longest(lengths: Sequence[int]) -> int:
    return max(range(len(lengths)), key=lambda index: (lengths[index], -index))


def _no_strategy(kinds: Mapping[str, Sequence[ReplicaKind]], lengths: Sequence[int], options: PlannerOptions) -> str:
    index = _longest(lengths)
    limit = max(map(_limit, kinds.values()))
    holder = next(name for name, own in kinds.items() if _limit(own) == limit)
    where = "the pool" if options.only is None else f"strategy {options.only}"
    by = f" (strategy {holder})" if options.only is None else ""
    return (
        f"plan: sequence {index} has {lengths[index]:,} tokens; the largest limit of {where} is {limit:,} tokens per "
        f"micro-batch{by}. Cut long sequences (policy 'cut') or add a strategy with a larger limit"
    )


def _step_plan(
    search: Search, step: int, strategies: Sequence[Strategy], kinds: Mapping[str, Sequence[ReplicaKind]]
) -> StepPlan:
    best = search.best
    assert best.assignment is not None
    return StepPlan(
        step=step,
        strategy=best.strategy.name,
        replicas=replica_plans(best.assignment),
        predicted_ms=best.step_ms,
        bound_ms=search.bound_ms,
        gap=search.gap,
        solver=_solver_text(best, search.planned),
        candidates=_candidates(search, strategies, kinds),
    )


def _solver_text(best: Planned, planned: Sequence[Planned]) -> str:
    """Returns who made the plan, and, where a program ran without being used, why."""
    if best.solver:
        return best.solver
    reasons = [one.fell_back for one in (best, *planned) if one.fell_back]
    return f"heuristic (solver: {reasons[0]})" if reasons else "heuristic"


def _candidates(
    search: Search, strategies: Sequence[Strategy], kinds: Mapping[str, Sequence[ReplicaKind]]
) -> tuple[Candidate, ...]:
    planned = {one.strategy.name: one for one in search.planned}
    candidates = []
    for strategy in strategies:
        if strategy.name in planned:
            candidates.append(_candidate(planned[strategy.name], search.best))
            continue
        reason = _cannot_hold(kinds[strategy.name], search.lengths)
        candidates.append(Candidate(strategy.name, None, None, reason))
    return tuple(candidates)


def _cannot_hold(kinds: Sequence[ReplicaKind], lengths: Sequence[int]) -> str:
    index = _longest(lengths)
    return f"cannot hold sequence {index} of {lengths[index]:,} tokens: its largest limit is {_limit(kinds):,}"


def _candidate(one: Planned, best: Planned) -> Candidate:
    name = one.strategy.name
    if one.assignment is None:
        reason = f"bound {one.step_bound_ms:,.1f} ms exceeds the best plan, {best.step_ms:,.1f} ms"
        return Candidate(name, None, one.step_bound_ms, reason)
    if one is best:
        reason = "taken: smallest predicted time"
    elif one.step_ms <= best.step_ms * (1.0 + EQUAL):
        reason = f"predicted {one.step_ms:,.1f} ms, equal to {best.strategy.name}, which comes first in the pool"
    else:
        slower = 100.0 * (one.step_ms / best.step_ms - 1.0) if best.step_ms > 0 else float("inf")
        reason = f"predicted {one.step_ms:,.1f} ms, {slower:.1f}% slower than {best.strategy.name}"
    return Candidate(name, one.step_ms, one.step_bound_ms, reason)
