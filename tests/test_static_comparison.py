"""What the summary of a run compares its own plans with: the best one strategy that can run all batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hgraph.plan import ReplicaPlan, StepPlan
from runtime.train import _compare

TIMES = {"small": 10.0, "large": 30.0, "largest": 20.0}


def plan_under(step: int, name: str, lengths: tuple[int, ...]) -> SimpleNamespace:
    whole = ReplicaPlan((tuple(range(len(lengths))),), TIMES[name])
    return SimpleNamespace(plan=StepPlan(step, name, (whole,), TIMES[name], 1.0, 0.0, f"made for step {step}"))


@dataclass
class Run:
    """Stands for a program whose strategies take `TIMES`; `large` and `largest` can run any batch."""

    measured: list[str] = field(default_factory=list)

    planning = SimpleNamespace(plan_under=plan_under)

    def strategies_for(self, length: int) -> list[str]:
        return ["large", "largest"] if length > 100 else list(TIMES)

    def measure(self, batch: Any, plan: StepPlan) -> float:
        self.measured.append(plan.strategy)
        return TIMES[plan.strategy]


def batch(*lengths: int) -> Any:
    return SimpleNamespace(lengths=lengths, num_targets=sum(lengths) - len(lengths))


def steps_under(names: list[str], batches: list[Any]) -> list[Any]:
    plans = [plan_under(1, name, batch.lengths).plan for name, batch in zip(names, batches, strict=True)]
    return [SimpleNamespace(step=index + 1, plan=plan) for index, plan in enumerate(plans)]


def test_the_best_strategy_is_that_of_the_least_time_and_a_plan_that_is_both_is_timed_once() -> None:
    run, said, batches = Run(), list[str](), [batch(5, 8), batch(5, 300)]
    found = _compare(run, batches, steps_under(["small", "largest"], batches), said.append)  # type: ignore[arg-type]
    assert found is not None and found.strategy == "largest"
    assert (found.batches, found.own_ms, found.static_ms) == ((0, 1), (10.0, 20.0), (20.0, 20.0))
    assert run.measured == ["small", "large", "largest", "largest", "large"]
    assert said == ["timing 2 batches again under their own plans and under large, largest"]


def test_without_labels_there_is_nothing_to_time() -> None:
    batches = [batch(1)]
    assert _compare(Run(), batches, steps_under(["small"], batches), print) is None  # type: ignore[arg-type]
