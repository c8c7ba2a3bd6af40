"""A simulated step as a Chrome trace, for chrome://tracing and ui.perfetto.dev (the JSON Trace Event Format).

A process per replica with a row per stage, or per rank, and one process for the bridges. Messages between stages are
asynchronous events of their replica. Parts of a step that run one after another have processes of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hgraph.step_graph import Task, TimedTask
from hgraph.strategy import Strategy

__all__ = ["TracedPart", "chrome_trace"]

Event: TypeAlias = dict[str, Any]
US_PER_MS = 1000.0


@dataclass(frozen=True, slots=True)
class TracedPart:
    """A strategy's tasks, the tokens of each replica's micro-batches, and when it begins in the step.

    `switch_ms` is how long the change to this strategy took before it began.
    """

    strategy: Strategy
    tasks: Sequence[TimedTask]
    tokens: Sequence[Sequence[int]]
    offset_ms: float = 0.0
    switch_ms: float = 0.0


def chrome_trace(parts: Sequence[TracedPart], *, per_rank: bool = False) -> dict[str, Any]:
    """Returns the trace of a step as data for `json.dump`; with `per_rank` a row per rank in place of one per stage."""
    events: list[Event] = []
    first_process = 0
    for part in parts:
        events += _part_events(part, first_process, per_rank)
        first_process += len(part.strategy.replicas) + 1
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _part_events(part: TracedPart, bridges: int, per_rank: bool) -> list[Event]:
    events = [_process(bridges, f"bridges of {part.strategy.name}")]
    events += [_row(bridges, row, name) for row, name in enumerate(("switch", "parameters", "gradients"))]
    for number, replica in enumerate(part.strategy.replicas):
        process = bridges + 1 + number
        events.append(_process(process, f"{part.strategy.name}, replica {number}: {replica.scheme}"))
        for stage in range(replica.scheme.pp):
            ranks = replica.stage_ranks(stage)
            if per_rank:
                events += [_row(process, rank, f"rank {rank}, stage {stage}") for rank in ranks]
            else:
                events.append(_row(process, ranks[0], f"stage {stage}, {_ranks_text(ranks)}"))
    if part.switch_ms:
        events.append(_slice(bridges, 0, "switch", part.offset_ms - part.switch_ms, part.switch_ms, {}))
    for one in part.tasks:
        events += _task_events(part, one, bridges, per_rank)
    return events


def _task_events(part: TracedPart, one: TimedTask, bridges: int, per_rank: bool) -> list[Event]:
    task, start_ms, duration_ms = one.task, part.offset_ms + one.start_ms, one.end_ms - one.start_ms
    if task.kind in ("parameters", "gradients"):
        row = 1 if task.kind == "parameters" else 2
        return [_slice(bridges, row, f"{task.kind} {task.part}", start_ms, duration_ms, {})] if duration_ms else []
    process = bridges + 1 + task.replica
    if task.kind == "send":
        return _message(task, process, start_ms, duration_ms) if duration_ms else []
    assert task.action is not None
    micro_batch = task.action.micro_batch
    facts = {"micro_batch": micro_batch, "tokens": part.tokens[task.replica][micro_batch]}
    ranks = part.strategy.replicas[task.replica].stage_ranks(task.stage)
    name = f"{task.action.kind}{micro_batch}"
    rows = ranks if per_rank else ranks[:1]
    return [_slice(process, row, name, start_ms, duration_ms, facts, task.kind) for row in rows]


def _message(task: Task, process: int, start_ms: float, duration_ms: float) -> list[Event]:
    common = {"cat": "message", "name": str(task.action), "id": f"{process}/{task.action}", "pid": process, "tid": 0}
    ends = (("b", start_ms), ("e", start_ms + duration_ms))
    return [{**common, "ph": phase, "ts": round(time_ms * US_PER_MS, 3)} for phase, time_ms in ends]


def _slice(
    process: int, row: int, name: str, start_ms: float, duration_ms: float, facts: dict[str, int], kind: str = "bridge"
) -> Event:
    times = {"ts": round(start_ms * US_PER_MS, 3), "dur": round(duration_ms * US_PER_MS, 3)}
    return {"ph": "X", "cat": kind, "name": name, "pid": process, "tid": row, **times, "args": facts}


def _process(process: int, name: str) -> Event:
    return {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}


def _row(process: int, row: int, name: str) -> Event:
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": {"name": name}}


def _ranks_text(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    is_range = list(ranks) == list(range(ranks[0], ranks[0] + len(ranks)))
    return f"ranks {ranks[0]}-{ranks[-1]}" if is_range else f"ranks {', '.join(map(str, ranks))}"
