"""Draws a schedule as text: a row per stage, time from left to right."""

from __future__ import annotations

import math

from hgraph.action import Schedule
from hgraph.simulate import SimulatedStep, Span, simulate

__all__ = ["schedule_grid"]

_FILL = {"F": "=", "B": "-"}
_IDLE = "."


def schedule_grid(schedule: Schedule, simulated: SimulatedStep | None = None, max_columns: int = 120) -> str:
    """Returns the text picture of a schedule: `F3===` forward, `B3---` backward of micro-batch 3, `.` idle.

    Without `simulated` a forward pass takes one unit of time, a backward pass two, and messages none. The row is as
    wide as the shortest box needs for its label, but not above `max_columns`; labels that do not fit lose their number.
    """
    unit = "" if simulated is None else " ms"
    step = simulate(schedule, 1.0, 2.0) if simulated is None else simulated
    title = f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_micro_batches} micro-batches"
    if not step.total_ms:
        return f"{title}, nothing to do"
    columns = _num_columns(step, max_columns)
    labels = [f"stage {stage}" for stage in range(schedule.num_stages)]
    margin = max(map(len, labels))
    end = f"{step.total_ms:.4g}{unit}"
    scale = f"{'':{margin}} |0{end:>{columns - 1}}|"
    rows = [
        f"{label:<{margin}} |{_row(spans, step.total_ms, columns)}| {idle / step.total_ms:4.0%} idle"
        for label, spans, idle in zip(labels, step.spans, step.idle_ms, strict=True)
    ]
    return "\n".join([f"{title}, {step.bubble:.0%} idle", scale, *rows])


def _num_columns(step: SimulatedStep, max_columns: int) -> int:
    spans = [span for row in step.spans for span in row if span.end_ms > span.start_ms]
    wanted = max((len(_label(span)) + 1) * step.total_ms / (span.end_ms - span.start_ms) for span in spans)
    return max(8, min(math.ceil(wanted), max_columns))


def _label(span: Span) -> str:
    return f"{span.action.kind}{span.action.micro_batch}"


def _row(spans: tuple[Span, ...], total_ms: float, columns: int) -> str:
    cells = [_IDLE] * columns
    for span in spans:
        if not span.action.is_compute:
            continue
        first, last = (round(time / total_ms * columns) for time in (span.start_ms, span.end_ms))
        label = _label(span) if len(_label(span)) <= last - first else span.action.kind[: last - first]
        cells[first:last] = label.ljust(last - first, _FILL[span.action.kind])
    return "".join(cells)
