"""Times of pipeline schedules: a fast recurrence for planners and a simulator that keeps everything.

`schedule_ms` answers one number for equal stages and is called thousands of times per step by planners.
`simulate` takes any schedule, any times per stage and micro-batch and a transfer time, and returns when every action
runs. Both take the longest path through the same dependences (Hydraulis, arXiv 2412.07894, section 4): they agree, and
a test holds them to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from hgraph.action import Action, Edge, Schedule
from hgraph.errors import InvalidInput, PlanError
from hgraph.schedule import lower

__all__ = ["SimulatedStep", "Span", "flow_ms", "schedule_bound_ms", "schedule_ms", "schedules_ms", "simulate"]

FORWARD_SHARE = 1.0 / 3.0

Times: TypeAlias = float | Sequence[float] | Sequence[Sequence[float]]
Task: TypeAlias = tuple[int, int]


def schedule_ms(
    name: str, num_stages: int, micro_batch_ms: Sequence[float], forward_share: float = FORWARD_SHARE
) -> float:
    """Returns the time in ms of schedule `name` on `num_stages` equal stages, without communication.

    `micro_batch_ms[m]` is the time of micro-batch m in one stage, forward and backward together, in the order they run;
    `forward_share` of it is the forward pass. No micro-batch: 0.0.
    """
    if num_stages < 1:
        raise InvalidInput(f"schedule_ms: expected num_stages of 1 or more, got {num_stages}")
    if name not in ("gpipe", "1f1b"):
        raise InvalidInput(f"schedule_ms: expected schedule 'gpipe' or '1f1b', got {name!r}")
    if not micro_batch_ms:
        return 0.0
    if name == "gpipe" or num_stages == 1:
        return sum(micro_batch_ms) + (num_stages - 1) * max(micro_batch_ms)
    forward_ms = [time * forward_share for time in micro_batch_ms]
    backward_ms = [time - forward for time, forward in zip(micro_batch_ms, forward_ms, strict=True)]
    return _one_forward_one_backward_ms(num_stages, forward_ms, backward_ms)


def _one_forward_one_backward_ms(num_stages: int, forward_ms: list[float], backward_ms: list[float]) -> float:
    """Returns the time of 1F1B on equal stages.

    On stage s, B of micro-batch j comes right before F of m = j + num_stages - s. Going through m, and for each m
    through the stages in order, every dependence has been seen: F_m of stage s-1 in this round, B_j of stage s+1 in
    the round before.
    """
    num_micro_batches = len(forward_ms)
    free = [0.0] * num_stages
    backward_end = [0.0] * (num_stages + 1)
    for m in range(num_micro_batches + num_stages):
        arrival = 0.0
        for stage in range(num_stages):
            now = free[stage]
            j = m - num_stages + stage
            if 0 <= j < num_micro_batches:
                gradient = backward_end[stage + 1]
                now = (gradient if gradient > now else now) + backward_ms[j]
                backward_end[stage] = now
            if m < num_micro_batches:
                now = (arrival if arrival > now else now) + forward_ms[m]
                arrival = now
            free[stage] = now
    return max(free)


def schedules_ms(
    name: str, num_stages: int, micro_batch_ms: NDArray[np.float64], forward_share: float = FORWARD_SHARE
) -> NDArray[np.float64]:
    """Returns `schedule_ms` of every row of `micro_batch_ms` [rows, micro-batches] at once, in ms."""
    num_rows, num = micro_batch_ms.shape
    if num == 0:
        return np.zeros(num_rows)
    if name == "gpipe" or num_stages == 1:
        return np.asarray(micro_batch_ms.sum(axis=1) + (num_stages - 1) * micro_batch_ms.max(axis=1))
    forward_ms = np.ascontiguousarray(micro_batch_ms.T) * forward_share
    backward_ms = np.ascontiguousarray(micro_batch_ms.T) - forward_ms
    free = np.zeros((num_stages, num_rows))
    backward_end = np.zeros((num_stages + 1, num_rows))
    for m in range(num + num_stages):
        for stage in range(num_stages):
            behind = m - num_stages + stage
            if 0 <= behind < num:
                backward_end[stage] = np.maximum(backward_end[stage + 1], free[stage]) + backward_ms[behind]
                free[stage] = backward_end[stage]
            if m < num:
                arrival = free[stage - 1] if stage else 0.0
                free[stage] = np.maximum(arrival, free[stage]) + forward_ms[m]
    return np.asarray(free.max(axis=0))


def flow_ms(num_stages: int, micro_batch_ms: Sequence[float]) -> float:
    """Returns sum t + (num_stages - 1) max t in ms, 0.0 for none: exact for GPipe, an upper model of 1F1B."""
    return sum(micro_batch_ms) + (num_stages - 1) * max(micro_batch_ms) if micro_batch_ms else 0.0


def schedule_bound_ms(num_stages: int, micro_batch_ms: Sequence[float]) -> float:
    """Returns a lower bound in ms that holds for every schedule and order on equal stages.

    The last stage works for the sum of all and waits for at least one micro-batch to come and to go back; the longest
    micro-batch passes every stage twice: `max(sum t + (pp-1) min t, pp max t)`.
    """
    if not micro_batch_ms:
        return 0.0
    return max(sum(micro_batch_ms) + (num_stages - 1) * min(micro_batch_ms), num_stages * max(micro_batch_ms))


@dataclass(frozen=True, slots=True)
class Span:
    """When an action runs, in ms from the start of the step. Messages take no time of their stage."""

    action: Action
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """What `simulate` returns.

    `spans[s]` are the actions of stage s in order. `busy_ms[s]` and `idle_ms[s]` sum to `total_ms`.
    `peak_micro_batches[s]` is the largest number of micro-batches whose forward pass has started and whose backward
    pass has not ended; `peak_tokens[s]` the largest sum of their tokens, None where no tokens were given.
    `critical_path` is a chain of actions, each waiting for the one before, that lasts the whole step.
    """

    schedule: Schedule
    total_ms: float
    spans: tuple[tuple[Span, ...], ...]
    busy_ms: tuple[float, ...]
    idle_ms: tuple[float, ...]
    peak_micro_batches: tuple[int, ...]
    peak_tokens: tuple[int, ...] | None
    critical_path: tuple[Action, ...]

    @property
    def bubble(self) -> float:
        """The idle part of all stages' time, from 0 to 1; 0 for an empty step."""
        whole = self.total_ms * self.schedule.num_stages
        return sum(self.idle_ms) / whole if whole else 0.0


def simulate(
    schedule: Schedule,
    forward_ms: Times,
    backward_ms: Times,
    transfer_ms: float = 0.0,
    edges: Iterable[Edge] | None = None,
    tokens: Sequence[int] | None = None,
) -> SimulatedStep:
    """Returns when every action of the schedule runs.

    `forward_ms` and `backward_ms` are one number, one per micro-batch, or `[stage][micro_batch]`. A message arrives
    `transfer_ms` after its send; sends do not block, receives do. A schedule of computations alone is lowered first,
    with `edges`. `tokens[m]` are the tokens of micro-batch m. Fails with `PlanError` where actions wait in a circle.
    """
    if not schedule.has_messages:
        schedule = lower(schedule, edges)
    durations = {"F": _table(schedule, forward_ms, "forward_ms"), "B": _table(schedule, backward_ms, "backward_ms")}
    if transfer_ms < 0:
        raise InvalidInput(f"simulate: expected transfer_ms of 0 or more, got {transfer_ms}")
    if tokens is not None and len(tokens) != schedule.num_micro_batches:
        raise InvalidInput(
            f"simulate: expected tokens of {schedule.num_micro_batches} micro-batches, got {len(tokens)} numbers"
        )
    graph = _task_graph(schedule, transfer_ms)
    starts, ends, causes = _earliest(graph, schedule, durations)
    spans = tuple(
        tuple(Span(action, starts[stage, index], ends[stage, index]) for index, action in enumerate(actions))
        for stage, actions in enumerate(schedule.stages)
    )
    total_ms = max(ends.values(), default=0.0)
    busy = tuple(sum(span.end_ms - span.start_ms for span in row) for row in spans)
    return SimulatedStep(
        schedule=schedule,
        total_ms=total_ms,
        spans=spans,
        busy_ms=busy,
        idle_ms=tuple(max(0.0, total_ms - time) for time in busy),
        peak_micro_batches=tuple(_peak(actions, [1] * schedule.num_micro_batches) for actions in schedule.stages),
        peak_tokens=None if tokens is None else tuple(_peak(actions, tokens) for actions in schedule.stages),
        critical_path=_critical_path(schedule, ends, causes),
    )


def _table(schedule: Schedule, times: Times, name: str) -> list[list[float]]:
    """Returns times as `[stage][micro_batch]`."""
    num_stages, num_micro_batches = schedule.num_stages, schedule.num_micro_batches
    if isinstance(times, (int, float)):
        rows: list[list[float]] = [[float(times)] * num_micro_batches] * num_stages
    elif all(isinstance(time, (int, float)) for time in times):
        rows = [[float(time) for time in times]] * num_stages  # type: ignore[arg-type]
    else:
        rows = [[float(time) for time in row] for row in times]  # type: ignore[union-attr]
    if len(rows) != num_stages or any(len(row) != num_micro_batches for row in rows):
        raise InvalidInput(
            f"simulate: {name}: expected one number, {num_micro_batches} numbers (one per micro-batch) or "
            f"{num_stages} rows of {num_micro_batches}, got {len(rows)} rows of {sorted({len(row) for row in rows})}"
        )
    if any(not 0 <= time < float("inf") for row in rows for time in row):
        raise InvalidInput(f"simulate: {name}: expected finite times of 0 or more, got {times}")
    return rows


def _task_graph(schedule: Schedule, transfer_ms: float) -> nx.DiGraph:
    """Returns the graph of tasks (stage, index in its list); an edge's `delay_ms` passes between end and start."""
    graph: nx.DiGraph = nx.DiGraph()
    tasks = {action: (stage, index) for stage, row in enumerate(schedule.stages) for index, action in enumerate(row)}
    graph.add_nodes_from(tasks.values())
    for action, (stage, index) in tasks.items():
        if index:
            graph.add_edge((stage, index - 1), (stage, index), delay_ms=0.0)
        if not action.is_receive:
            continue
        if action.other_end not in tasks:
            raise PlanError(f"schedule {schedule.name}: {action} waits for {action.other_end}, which nobody sends")
        graph.add_edge(tasks[action.other_end], (stage, index), delay_ms=transfer_ms)
    if not nx.is_directed_acyclic_graph(graph):
        circle = " -> ".join(str(schedule.stages[stage][index]) for (stage, index), _ in nx.find_cycle(graph))
        raise PlanError(f"schedule {schedule.name}: actions wait for each other in a circle: {circle}")
    return graph


def _earliest(
    graph: nx.DiGraph, schedule: Schedule, durations: dict[str, list[list[float]]]
) -> tuple[dict[Task, float], dict[Task, float], dict[Task, Task | None]]:
    """Returns start, end and the task that each task waited for, going through the graph in order of dependence."""
    starts: dict[Task, float] = {}
    ends: dict[Task, float] = {}
    causes: dict[Task, Task | None] = {}
    for task in nx.topological_sort(graph):
        stage, index = task
        action = schedule.stages[stage][index]
        ready = [
            (ends[task_before] + data["delay_ms"], task_before)
            for task_before, _, data in graph.in_edges(task, data=True)
        ]
        # Of several that end together: the one on the same stage, then the lower stage. One answer on every rank.
        start, cause = max(ready, key=lambda item: (item[0], item[1][0] == stage, -item[1][0]), default=(0.0, None))
        starts[task] = start
        ends[task] = start + (durations[action.kind][stage][action.micro_batch] if action.is_compute else 0.0)
        causes[task] = cause
    return starts, ends, causes


def _peak(actions: Sequence[Action], weights: Sequence[int]) -> int:
    """Returns the largest sum of weights of the micro-batches alive between forward and backward."""
    alive = peak = 0
    for action in actions:
        if action.kind == "F":
            alive += weights[action.micro_batch]
            peak = max(peak, alive)
        if action.kind == "B":
            alive -= weights[action.micro_batch]
    return peak


def _critical_path(schedule: Schedule, ends: dict[Task, float], causes: dict[Task, Task | None]) -> tuple[Action, ...]:
    task = max(ends, key=lambda task: (ends[task], -task[0], task[1]), default=None)
    path: list[Action] = []
    while task is not None:
        path.append(schedule.stages[task[0]][task[1]])
        task = causes[task]
    return tuple(reversed(path))
