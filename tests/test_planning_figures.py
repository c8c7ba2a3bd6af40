"""What the summary says of plans, from steps whose figures can be worked out by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hgraph.plan import ReplicaPlan, SolverRuns, StepPlan
from runtime.planning_figures import measured_over_predicted, percentile, planning_figures
from runtime.recorder import metrics_of, step_line
from runtime.step_output import StepOutput
from runtime.summary import Summary, write_summary
from strategies.ahead import PlanTimes


def step(number: int, predicted_ms: float, measured_ms: float, times: PlanTimes | None, gap: float = 0.0) -> StepOutput:
    plan = StepPlan(number, "one", (ReplicaPlan(((0,),), predicted_ms),), predicted_ms, predicted_ms, gap, "heuristic")
    return StepOutput(
        step=number,
        loss=1.0,
        grad_norm=1.0,
        tokens=10,
        labelled_tokens=9,
        strategy="one",
        plan=plan,
        learning_rate=0.1,
        measured_ms=measured_ms,
        replica_ms=(measured_ms,),
        plan_times=times,
        bridge_bytes=0,
        compiled_graphs=1,
        peak_live_micro_batches=1,
    )


STEPS = [
    step(1, 100.0, 150.0, PlanTimes(80.0, 4.0, 4.0, 100.0), 0.00),
    step(2, 100.0, 110.0, PlanTimes(0.2, 2.0, 30.0, 125.0, SolverRuns(2, 1, 5.0, 25.0)), 0.01),
    step(3, 200.0, 180.0, PlanTimes(7.0, 6.0, 50.0, 200.0, SolverRuns(bound=3)), 0.05),
]


def test_figures_of_planned_steps() -> None:
    figures = dict(planning_figures(STEPS))
    assert figures == {
        "measured / predicted time of a step": "1.10 median, 0.92 to 1.46 in nine of ten steps",
        "error of predicted time, median": "10%, half of them 10% to 30%",
        "gap to the bound, median": "1.0%, 95th percentile 4.6%",
        "first checked plan after": "4 ms median, 95th percentile 6 ms",
        "solver": "ran in 2 of 3 steps, 40 ms median",
        "program of the bound": "5 runs in 2 steps; raised the bound in 1, by 5.00% median there",
        "integer program of the plan": "1 run in 1 step; found a better plan in 1, which saves 20.00% median there, "
        "5.88% of all predicted time",
        "waited for plans": "87 ms in all; above 1 ms in 2 of 3 steps, longest 80 ms (step 1)",
    }


def test_figures_without_solver_or_waits() -> None:
    figures = dict(planning_figures([step(1, 100.0, 100.0, PlanTimes(0.0, 1.0, 1.0, 100.0))]))
    assert figures["solver"] == "ran in none of 1 steps" and "program of the bound" not in figures
    assert figures["waited for plans"] == "0 ms in all; above 1 ms in 0 of 1 steps"


def test_figures_where_only_the_bound_was_sharpened() -> None:
    figures = dict(planning_figures(STEPS[2:]))
    assert figures["program of the bound"] == "3 runs in 1 step; raised the bound in 0, by 0.00% median there"
    assert figures["integer program of the plan"] == "never ran"


def test_figures_of_replayed_steps() -> None:
    figures = dict(planning_figures([step(1, 100.0, 100.0, None)]))
    assert figures["plans"] == "1 replayed, none made" and "solver" not in figures


def test_nothing_predicted_is_no_error() -> None:
    assert measured_over_predicted(step(1, 0.0, 5.0, None)) == 1.0


def test_idle_ranks_are_named_in_line_and_summary(tmp_path: Path) -> None:
    steps = [replace(STEPS[0], idle_ranks=(3,)), *STEPS[1:], replace(STEPS[0], idle_ranks=(0, 2, 3))]
    lines = [step_line(metrics_of(one), 2) for one in steps]
    assert "1/2 replicas (idle: rank 3)  loss" in lines[0] and "1/2 replicas  loss" in lines[1]
    assert "1/2 replicas (idle: ranks 0,2-3)  loss" in lines[3]
    text = write_summary(Summary(tuple(steps), 1.0, 1.0, 1.0, None, tmp_path)).read_text()
    assert re.search(r"idle ranks +│ in 2 of 4 steps: 3 in 1, 0,2-3 in 1 ", text)
    text = write_summary(Summary(tuple(STEPS), 1.0, 1.0, 1.0, None, tmp_path)).read_text()
    assert "idle ranks" not in text


def test_percentiles() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0, 2.0], 25) == pytest.approx(1.25)
    assert percentile([7.0], 95) == 7.0
