"""Any-time planning: a first plan at once, then the final one, each proved by the checker before it is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from hgraph.check_plan import check_plan
from hgraph.errors import HydraulisError, PlanError
from hgraph.plan import StepPlan
from hgraph.profile import Profile
from hgraph.strategy import Pool
from strategies.ahead import PlannedStep, PlanTimes
from strategies.options import PlannerOptions

__all__ = ["Answer", "answers", "planned_step"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A checked plan of `step`, or the error that planning raised, after `ms` of work; the last one of a step is final.

    `ran_solver` says whether a solver looked for a better plan than the first.
    """

    step: int
    plan: StepPlan | None
    error: HydraulisError | None
    ms: float
    is_last: bool
    ran_solver: bool = False


def answers(
    pool: Pool, profile: Profile, lengths: Sequence[int], *, step: int, options: PlannerOptions
) -> Iterator[Answer]:
    """Yields the first checked plan of a batch, and then, where the solver may better it, the final one.

    An error is an answer, and the only one. A solver that fails or whose plan does not pass the checker leaves the
    first plan, which then says why.
    """
    from strategies.select import plan_step  # brings the solver along, which takes a second to import

    start_s = perf_counter()
    try:
        first = plan_step(pool, profile, lengths, step=step, options=replace(options, program=False))
        check_plan(first, pool, profile, lengths)
    except Exception as error:
        yield Answer(step, None, _as_ours(error, step), _ms_since(start_s), is_last=True)
        return
    is_last = not options.program or first.gap <= options.gap
    ms = _ms_since(start_s)
    yield Answer(step, replace(first, plan_ms=ms), None, ms, is_last)
    if is_last:
        return
    try:
        final = plan_step(pool, profile, lengths, step=step, options=options)
        check_plan(final, pool, profile, lengths)
    except Exception as error:
        final = replace(first, solver=f"{first.solver} (solver: {type(error).__name__}: {error})")
    ms = _ms_since(start_s)
    yield Answer(step, replace(final, plan_ms=ms), None, ms, is_last=True, ran_solver=True)


def planned_step(first: Answer, used: Answer, waited_ms: float = 0.0) -> PlannedStep:
    """Returns what was planned, given the first answer of a step and the one that is used; raises its error."""
    if used.error is not None:
        raise used.error
    assert used.plan is not None and first.plan is not None
    times = PlanTimes(waited_ms, first.ms, used.ms, first.plan.predicted_ms, used.ran_solver)
    return PlannedStep(used.plan, times)


def _as_ours(error: Exception, step: int) -> HydraulisError:
    if isinstance(error, HydraulisError):
        return error
    return PlanError(f"planning step {step} failed: {type(error).__name__}: {error}")


def _ms_since(start_s: float) -> float:
    return 1e3 * (perf_counter() - start_s)
