"""The summary at the end of a run, as tables."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hgraph.annotation import ranks_text
from runtime.planning_figures import measured_over_predicted, planning_figures
from runtime.step_output import StepOutput

__all__ = ["SUMMARY_FILE", "StaticComparison", "Summary", "print_summary", "write_summary"]

SUMMARY_FILE = "summary.txt"
_WIDTH = 120
"""Columns of the file, whatever the terminal."""

_IDLE_SHOWN = 4
"""Sets of idle ranks that are named."""

_ENDS = 3
"""Steps that are averaged at either end of the loss curve."""


@dataclass(frozen=True, slots=True)
class StaticComparison:
    """Milliseconds of a few batches under their own plans, and under the best one strategy that could run all."""

    batches: tuple[int, ...]
    own_ms: tuple[float, ...]
    strategy: str
    static_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """What the tables show. `unigram_entropy` in nats per token; memory of the largest process, at its peak and
    before the model was built (Python, torch, data)."""

    steps: tuple[StepOutput, ...]
    unigram_entropy: float
    peak_memory_mib: float
    base_memory_mib: float
    comparison: StaticComparison | None
    folder: Path


def print_summary(summary: Summary, console: Console | None = None) -> None:
    """Prints the summary."""
    console = console or Console()
    console.print(_strategies(summary.steps))
    console.print(_figures(summary))
    console.print(f"metrics, plans, configuration and this summary: {summary.folder}")


def write_summary(summary: Summary) -> Path:
    """Writes the same tables to `summary.txt` in the folder of the run and returns the path."""
    path = summary.folder / SUMMARY_FILE
    with path.open("w", encoding="utf-8") as file:
        print_summary(summary, Console(file=file, width=_WIDTH, color_system=None))
    return path


def _strategies(steps: Sequence[StepOutput]) -> Table:
    table = Table(title="steps per strategy (means; the ratio is the median of steps)")
    for name in ("strategy", "steps", "predicted ms", "measured ms", "measured / predicted", "imbalance"):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for name, count in Counter(step.strategy for step in steps).most_common():
        own = [step for step in steps if step.strategy == name]
        table.add_row(
            name,
            str(count),
            f"{_mean(step.plan.predicted_ms for step in own):.0f}",
            f"{_mean(step.measured_ms for step in own):.0f}",
            f"{statistics.median(measured_over_predicted(step) for step in own):.2f}",
            f"{_mean(step.imbalance for step in own):.2f}",
        )
    return table


def _figures(summary: Summary) -> Table:
    steps = summary.steps
    first, last = _mean(s.loss for s in steps[:_ENDS]), _mean(s.loss for s in steps[-_ENDS:])
    table = Table(show_header=False)
    table.add_column("figure")
    table.add_column("value")
    rows = [
        (
            f"loss, first {_ENDS} -> last {_ENDS} steps",
            f"{first:.3f} -> {last:.3f} nats per token ({last / first - 1:+.0%})",
        ),
        ("unigram entropy of the corpus", f"{summary.unigram_entropy:.3f} nats per token"),
        ("tokens per second", f"{1e3 * sum(s.tokens for s in steps) / sum(s.measured_ms for s in steps):.0f}"),
        ("imbalance, slowest / mean replica", f"{_mean(step.imbalance for step in steps):.3f}"),
        *planning_figures(steps),
        *_idle(steps),
        ("graphs compiled", f"{steps[0].compiled_graphs} before the first step, {_later(steps)} after it"),
        (
            "peak memory of a process",
            f"{summary.peak_memory_mib:.0f} MiB, {summary.base_memory_mib:.0f} of it before the model was built",
        ),
    ]
    if summary.comparison is not None:
        rows += _comparison(summary.comparison)
    for name, value in rows:
        table.add_row(name, value)
    return table


def _idle(steps: Sequence[StepOutput]) -> list[tuple[str, str]]:
    """Returns the row on ranks that ran nothing; none where all ranks ran in every step."""
    counts = Counter(step.idle_ranks for step in steps if step.idle_ranks)
    if not counts:
        return []
    texts = [f"{ranks_text(ranks)} in {count}" for ranks, count in counts.most_common(_IDLE_SHOWN)]
    more = ["others in more"] if len(counts) > _IDLE_SHOWN else []
    return [("idle ranks", f"in {counts.total()} of {len(steps)} steps: {', '.join([*texts, *more])}")]


def _comparison(comparison: StaticComparison) -> list[tuple[str, str]]:
    own, static = _mean(comparison.own_ms), _mean(comparison.static_ms)
    steps = ", ".join(str(index + 1) for index in comparison.batches)
    return [
        (f"batches of steps {steps} again, own plans", f"{own:.0f} ms a step"),
        (
            f"the same under the best one strategy that can run all ({comparison.strategy})",
            f"{static:.0f} ms a step, {static / own:.2f} times as long",
        ),
    ]


def _later(steps: Sequence[StepOutput]) -> int:
    return steps[-1].compiled_graphs - steps[0].compiled_graphs


def _mean(values: object) -> float:
    return statistics.fmean(values)  # type: ignore[arg-type]
