"""Draws simulated schedules as SVG: a row per stage, boxes of forward and backward passes along the time axis."""

from __future__ import annotations

from collections.abc import Sequence

from hgraph.pictures.svg import MONOSPACE, Canvas, number, text_width
from hgraph.pictures.time_axis import draw_time_axis
from hgraph.simulate import SimulatedStep, Span

__all__ = ["grid_svg", "grids_svg"]

_MARGIN, _ROW, _BOX, _PART_GAP = 20.0, 34.0, 26.0, 14.0
_CHART_WIDTH, _TEXT_SIZE, _NUMBER_SIZE = 980.0, 11.0, 10.5
_SHOWN_MESSAGES = 400

_STYLES = {
    "text": f"font-family:{MONOSPACE};font-size:{_TEXT_SIZE}px;fill:#1f2933",
    ".title": "font-size:17px;font-weight:bold",
    ".part": "font-size:13px;font-weight:bold;fill:#3e4c59",
    ".right": "text-anchor:end",
    ".tick": "font-size:10px;fill:#616e7c;text-anchor:middle",
    ".number": f"font-size:{_NUMBER_SIZE}px;text-anchor:middle",
    ".idle": "fill:url(#hatch);stroke:#cbd2d9;stroke-width:0.8",
    ".F": "fill:#a9ccf5;stroke:#2f66ad;stroke-width:1",
    ".B": "fill:#bfe3b4;stroke:#4b8f3a;stroke-width:1",
    ".critical": "stroke:#1f2933;stroke-width:2.2",
    ".message": "stroke:#b3261e;stroke-width:0.9;opacity:0.55",
    ".wait": "stroke:#9aa5b1;stroke-width:1.6;stroke-dasharray:1.6 5;stroke-linecap:round",
    ".grid": "stroke:#e4e7eb;stroke-width:1",
    ".end": "stroke:#b3261e;stroke-width:1.4;stroke-dasharray:4 3",
}
_HATCH = (
    '<pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="7" height="7" fill="#f5f7fa"/><rect width="1.4" height="7" fill="#d5dbe1"/></pattern>'
)


def grid_svg(step: SimulatedStep, title: str | None = None) -> str:
    """Returns the picture of one simulated schedule as an SVG document."""
    schedule = step.schedule
    text = f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_micro_batches} micro-batches"
    return grids_svg([("", step)], text if title is None else title)


def grids_svg(parts: Sequence[tuple[str, SimulatedStep]], title: str) -> str:
    """Returns the schedules of several replicas, one below the other on one time axis, as an SVG document.

    Boxes carry the micro-batch's number and are as long as the pass takes; what is hatched is idle; a dark border marks
    the critical path, thin red lines the messages between stages; a dashed red line marks the end of each replica, and
    dots what it then waits for the slowest.
    """
    end_ms = max((step.total_ms for _, step in parts), default=0.0)
    scale = _CHART_WIDTH / end_ms if end_ms else 0.0
    rows = [f"stage {stage}" for _, step in parts for stage in range(step.schedule.num_stages)]
    left = _MARGIN + max((text_width(row, _TEXT_SIZE) for row in rows), default=0.0) + 10
    canvas = Canvas()
    canvas.text(_MARGIN, _MARGIN + 16, title, "title")
    _draw_legend(canvas, _MARGIN + 32)
    y = _MARGIN + 66
    notes = [0.0]
    for name, step in parts:
        if name:
            time = f"{step.total_ms:.4g} ms, {step.bubble:.0%} idle" if step.total_ms else "nothing to do"
            canvas.text(_MARGIN, y + 12, f"{name}: {time}", "part")
            y += 22
        y = _draw_part(canvas, step, left, y, scale, notes) + _PART_GAP
    y = draw_time_axis(canvas, left, y - _PART_GAP + 6, _CHART_WIDTH, end_ms, scale)
    width = max(left + _CHART_WIDTH + 12 + max(notes), text_width(title, 17)) + _MARGIN
    return canvas.render(width, y + _MARGIN, title, _STYLES, _HATCH)


def _draw_part(canvas: Canvas, step: SimulatedStep, left: float, y: float, scale: float, notes: list[float]) -> float:
    """Draws the rows of one schedule; returns their bottom and adds the widths of the notes at the right."""
    critical = {action for action in step.critical_path if action.is_compute}
    bottom = y + _ROW * step.schedule.num_stages
    for stage, spans in enumerate(step.spans):
        top = y + stage * _ROW
        canvas.text(left - 10, top + 17, f"stage {stage}", "right")
        end = step.total_ms * scale
        canvas.rect(left, top, end, _BOX, "idle")
        canvas.line((left + end, top + _BOX / 2), (left + _CHART_WIDTH, top + _BOX / 2), "wait")
        ordered = sorted(spans, key=lambda span: span.action in critical)
        for span in ordered:
            _draw_box(canvas, span, left, top, scale, span.action in critical)
        note = _note(step, stage)
        canvas.text(left + _CHART_WIDTH + 12, top + 17, note, "note")
        notes.append(text_width(note, _TEXT_SIZE))
    _draw_messages(canvas, step, left, y, scale)
    if scale:
        end = left + step.total_ms * scale
        canvas.line((end, y - 4), (end, bottom), "end")
    return bottom


def _note(step: SimulatedStep, stage: int) -> str:
    idle = step.idle_ms[stage] / step.total_ms if step.total_ms else 0.0
    count = step.peak_micro_batches[stage]
    alive = f"{count} micro-batch{'' if count == 1 else 'es'}"
    if step.peak_tokens is not None:
        alive += f", {step.peak_tokens[stage]:,} tokens"
    return f"{idle:.0%} idle, holds {alive}"


def _draw_box(canvas: Canvas, span: Span, left: float, top: float, scale: float, critical: bool) -> None:
    action = span.action
    if not action.is_compute:
        return
    x, width = left + span.start_ms * scale, (span.end_ms - span.start_ms) * scale
    duration = span.end_ms - span.start_ms
    tooltip = f"{action}: {span.start_ms:.4g} to {span.end_ms:.4g} ms, {duration:.4g} ms"
    canvas.rect(x, top, width, _BOX, f"{action.kind} critical" if critical else action.kind, 2, tooltip)
    text = str(action.micro_batch)
    if text_width(text, _NUMBER_SIZE) + 3 <= width:
        canvas.text(x + width / 2, top + 17, text, "number")


def _draw_messages(canvas: Canvas, step: SimulatedStep, left: float, y: float, scale: float) -> None:
    """Draws a line from each send to its receive, unless there are so many that they would hide the boxes."""
    spans = {span.action: span for row in step.spans for span in row}
    sends = [action for action in spans if action.is_send and action.other_end in spans]
    if len(sends) > _SHOWN_MESSAGES:
        return
    for send in sends:
        receive = send.other_end
        down = receive.stage > send.stage
        start_y = y + send.stage * _ROW + (_BOX if down else 0.0)
        end_y = y + receive.stage * _ROW + (0.0 if down else _BOX)
        start, end = left + spans[send].end_ms * scale, left + spans[receive].end_ms * scale
        canvas.line((start, start_y), (end, end_y), "message")


def _draw_legend(canvas: Canvas, y: float) -> None:
    x = _MARGIN
    for classes, text in (
        ("F", "forward of micro-batch"),
        ("B", "backward of micro-batch"),
        ("idle", "idle"),
        ("F critical", "on the critical path"),
    ):
        canvas.rect(x, y, 22, 14, classes, 2)
        canvas.text(x + 28, y + 11, text, "legend")
        x += 28 + text_width(text, _TEXT_SIZE) + 20
    canvas.line((x, y + 12), (x + 22, y + 2), "message")
    canvas.text(x + 28, y + 11, "message", f"legend size{number(_TEXT_SIZE)}")
