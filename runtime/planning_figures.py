"""What the summary of a run says of its plans: predictions held against measurements, solver runs, gaps, waits."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from runtime.step_output import StepOutput

__all__ = ["measured_over_predicted", "planning_figures"]

_WAIT_MS = 1.0
"""A step that waited less for its plan counts as one that did not wait."""

Row = tuple[str, str]


def planning_figures(steps: Sequence[StepOutput]) -> list[Row]:
    """Returns rows of (figure, value) for one step or more."""
    return [
        ("measured / predicted time of a step", _ratios([measured_over_predicted(step) for step in steps])),
        ("error of predicted time, median", _errors(steps)),
        ("gap to the bound, median", _gaps([step.plan.gap for step in steps])),
        *_planned(steps),
    ]


def measured_over_predicted(step: StepOutput) -> float:
    """Returns how many times the predicted time a step took (1 where nothing was predicted)."""
    return step.measured_ms / step.plan.predicted_ms if step.plan.predicted_ms else 1.0


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the value below which `percent` of the values lie, between neighbours in proportion."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100.0
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _ratios(ratios: Sequence[float]) -> str:
    low, high = percentile(ratios, 5), percentile(ratios, 95)
    return f"{statistics.median(ratios):.2f} median, {low:.2f} to {high:.2f} in nine of ten steps"


def _errors(steps: Sequence[StepOutput]) -> str:
    errors = [abs(measured_over_predicted(step) - 1.0) for step in steps]
    return f"{statistics.median(errors):.0%}, half of them {percentile(errors, 25):.0%} to {percentile(errors, 75):.0%}"


def _gaps(gaps: Sequence[float]) -> str:
    return f"{statistics.median(gaps):.1%}, 95th percentile {percentile(gaps, 95):.1%}"


def _planned(steps: Sequence[StepOutput]) -> list[Row]:
    """Returns the rows on how plans were made; one row alone where they were given."""
    times = [step.plan_times for step in steps if step.plan_times is not None]
    if not times:
        return [("plans", f"{len(steps)} replayed, none made")]
    latencies_ms = [own.latency_ms for own in times]
    latency = f"{statistics.median(latencies_ms):.0f} ms median, 95th percentile {percentile(latencies_ms, 95):.0f} ms"
    return [
        ("first checked plan after", latency),
        *_solver(steps),
        ("waited for plans", _waits(steps)),
    ]


def _solver(steps: Sequence[StepOutput]) -> list[Row]:
    """Returns the rows on solver runs, by what they were for."""
    ran = [step for step in steps if step.solver_runs]
    if not ran:
        return [("solver", f"ran in none of {len(steps)} steps")]
    times_ms = [step.plan_times.total_ms for step in ran if step.plan_times is not None]
    return [
        ("solver", f"ran in {len(ran)} of {len(steps)} steps, {statistics.median(times_ms):.0f} ms median"),
        ("program of the bound", _bound_programs(steps)),
        ("integer program of the plan", _integer_programs(steps)),
    ]


def _bound_programs(steps: Sequence[StepOutput]) -> str:
    gains = [step.bound_gain for step in steps if step.bound_gain > 0]
    raised = f"raised the bound in {len(gains)}, by {statistics.median(gains or [0.0]):.2%} median there"
    return _if_any([step.solver_runs.bound for step in steps], raised)


def _integer_programs(steps: Sequence[StepOutput]) -> str:
    gains = [step.solver_gain for step in steps if step.solver_gain > 0]
    first_ms = sum(step.plan_times.first_predicted_ms for step in steps if step.plan_times is not None)
    saved = sum(step.solver_runs.integer_gain_ms for step in steps) / first_ms if first_ms > 0 else 0.0
    found = f"found a better plan in {len(gains)}, which saves {statistics.median(gains or [0.0]):.2%} median there"
    return _if_any([step.solver_runs.integer for step in steps], f"{found}, {saved:.2%} of all predicted time")


def _if_any(counts: Sequence[int], what: str) -> str:
    """Returns how often a program ran and what came of it, given its runs in every step."""
    if not sum(counts):
        return "never ran"
    return f"{_count(sum(counts), 'run')} in {_count(sum(map(bool, counts)), 'step')}; {what}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _waits(steps: Sequence[StepOutput]) -> str:
    waits_ms = [step.plan_wait_ms for step in steps]
    long = [step for step in steps if step.plan_wait_ms > _WAIT_MS]
    text = f"{sum(waits_ms):.0f} ms in all; above {_WAIT_MS:g} ms in {len(long)} of {len(steps)} steps"
    if not long:
        return text
    longest = max(long, key=lambda step: step.plan_wait_ms)
    return f"{text}, longest {longest.plan_wait_ms:.0f} ms (step {longest.step})"
