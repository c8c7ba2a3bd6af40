"""Any-time planning: a first plan at once, better ones as they are found, each proved by the checker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

from hgraph.errors import HydraulisError, PlanError
from hgraph.plan import StepPlan
from hgraph.profile import Profile
from hgraph.strategy import Pool
from strategies.ahead import PlannedStep, PlanTimes
from strategies.options import PlannerOptions
from strategies.solver import warm_up

if TYPE_CHECKING:
    from strategies.planner import Planner

__all__ = ["Answer", "AnytimePlanner", "planned_step", "settled", "within"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A checked plan of `step`, or the error that planning raised, after `ms` of work; a step's last one is final."""

    step: int
    plan: StepPlan | None
    error: HydraulisError | None
    ms: float
    is_last: bool


class AnytimePlanner:
    """A planner whose every fault is an answer. For one thread."""

    def __init__(self, pool: Pool, profile: Profile, options: PlannerOptions | None = None) -> None:
        from strategies.planner import Planner  # brings numpy along

        self.options = options or PlannerOptions()
        self._planner: Planner | HydraulisError
        try:
            self._planner = Planner(pool, profile, self.options)
        except HydraulisError as error:
            self._planner = error

    def warm_up(self) -> None:
        """Loads the solver, if the settings allow a program; a fault of it is left to the step that needs it."""
        if self.options.program and not isinstance(self._planner, HydraulisError):
            with contextlib.suppress(Exception):
                warm_up()

    def answers(self, lengths: Sequence[int], step: int) -> Iterator[Answer]:
        """Yields the first checked plan of a batch, better ones where the solver finds them, and the final one last.

        An error is an answer, and the only one. A solver that fails, or whose plan does not pass the checker, leaves
        the best plan before it, which then says why.
        """
        start_s = perf_counter()
        try:
            if isinstance(self._planner, HydraulisError):
                raise self._planner
            plans = self._planner.plans(lengths, step)
            best = next(plans)
        except Exception as error:
            yield Answer(step, None, _as_ours(error, step), _ms_since(start_s), is_last=True)
            return
        is_last = not self.options.program or best.gap <= self.options.gap
        yield _answer(best, start_s, is_last=is_last)
        if is_last:
            return
        try:
            for best in plans:
                yield _answer(best, start_s, is_last=False)
        except Exception as error:
            best = replace(best, solver=f"{best.solver} (solver: {type(error).__name__}: {error})")
        yield _answer(best, start_s, is_last=True)


def planned_step(first: Answer, used: Answer, waited_ms: float = 0.0) -> PlannedStep:
    """Returns what was planned, given the first answer of a step and the one that is used; raises its error."""
    if used.error is not None:
        raise used.error
    assert used.plan is not None and first.plan is not None
    times = PlanTimes(waited_ms, first.ms, used.ms, first.plan.predicted_ms, used.plan.runs)
    return PlannedStep(used.plan, times)


def within(answers: Iterator[Answer], limit_s: float) -> Iterator[Answer]:
    """Yields answers to the last one, or to the first after `limit_s`, which is then the last and says so."""
    start_s = perf_counter()
    for answer in answers:
        if answer.is_last or perf_counter() - start_s < limit_s:
            yield answer
            continue
        yield settled(answer, f"no better plan within {limit_s:g} s")
        return


def settled(best: Answer, why: str) -> Answer:
    """Returns an answer as the final one; its plan says why."""
    assert best.plan is not None
    return replace(best, plan=replace(best.plan, solver=f"{best.plan.solver} ({why})"), is_last=True)


def _answer(plan: StepPlan, start_s: float, *, is_last: bool) -> Answer:
    ms = _ms_since(start_s)
    return Answer(plan.step, replace(plan, plan_ms=ms), None, ms, is_last)


def _as_ours(error: Exception, step: int) -> HydraulisError:
    if isinstance(error, HydraulisError):
        return error
    return PlanError(f"planning step {step} failed: {type(error).__name__}: {error}")


def _ms_since(start_s: float) -> float:
    return 1e3 * (perf_counter() - start_s)
