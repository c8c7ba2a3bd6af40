"""The tasks of a whole step as a graph, and when each runs: what `hgraph/step_times.py` sums up, kept.

Computations and messages are those of the real schedules (`hgraph/schedule.py`); how bridges and computation interlock
is written in `hgraph/step_times.py`. Nodes are `Task`s with `ms`; an edge's `delay_ms` passes between end and start.
Networkx orders them; each starts as soon as all that it waits for has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import networkx as nx

from hgraph.action import Action
from hgraph.schedule import build_schedule, lower
from hgraph.step_times import NUM_BUCKETS, Bridging, ReplicaWork, stage_buckets

__all__ = ["Task", "TaskKind", "TimedTask", "simulate_step", "step_graph"]

TaskKind: TypeAlias = Literal["forward", "backward", "send", "receive", "parameters", "gradients"]

_KINDS: dict[str, TaskKind] = {"F": "forward", "B": "backward", "SF": "send", "SB": "send"}


@dataclass(frozen=True, slots=True)
class Task:
    """One task: of a replica's stage (`part` counts the cuts at a bridge's buckets), or a bucket of a bridge (-1)."""

    kind: TaskKind
    replica: int
    stage: int
    action: Action | None
    part: int = 0

    @property
    def is_compute(self) -> bool:
        return self.kind in ("forward", "backward")


@dataclass(frozen=True, slots=True)
class TimedTask:
    """A task with its start and end in ms. Of a message, from its send until it has arrived."""

    task: Task
    start_ms: float
    end_ms: float


def simulate_step(replicas: Sequence[ReplicaWork], bridging: Bridging | None = None) -> list[TimedTask]:
    """Returns every task of a step with its times, in order of start; receives, which take no time, are left out."""
    graph = step_graph(replicas, bridging or Bridging())
    end_ms: dict[Task, float] = {}
    timed = []
    for task in nx.topological_sort(graph):
        waits = (end_ms[before] + data["delay_ms"] for before, _, data in graph.in_edges(task, data=True))
        start_ms = max(waits, default=0.0)
        end_ms[task] = start_ms + graph.nodes[task]["ms"]
        if task.kind != "receive":
            timed.append(TimedTask(task, start_ms, end_ms[task] + graph.nodes[task].get("flight_ms", 0.0)))
    return sorted(timed, key=lambda one: (one.start_ms, one.task.replica, one.task.stage, one.task.part))


def step_graph(replicas: Sequence[ReplicaWork], bridging: Bridging) -> nx.DiGraph:
    """Returns the task graph of a step."""
    graph: nx.DiGraph = nx.DiGraph()
    incoming = [_bucket(graph, "parameters", k, bridging.parameters_ms) for k in range(NUM_BUCKETS)]
    outgoing = [_bucket(graph, "gradients", k, bridging.gradients_ms) for k in reversed(range(NUM_BUCKETS))][::-1]
    for buckets in (incoming, outgoing[::-1]):
        for before, after in pairwise(buckets):
            graph.add_edge(before, after, delay_ms=0.0)
    graph.add_edge(incoming[-1], outgoing[-1], delay_ms=0.0)
    is_serial = bridging.overlap == "serial"
    for number, work in enumerate(replicas):
        _Rows(graph, number, work, incoming, outgoing, is_serial).add()
    return graph


def _bucket(graph: nx.DiGraph, kind: TaskKind, bucket: int, bridge_ms: float) -> Task:
    task = Task(kind, -1, -1, None, bucket)
    graph.add_node(task, ms=bridge_ms / NUM_BUCKETS)
    return task


class _Rows:
    """Adds the tasks of one replica."""

    def __init__(
        self,
        graph: nx.DiGraph,
        number: int,
        work: ReplicaWork,
        incoming: Sequence[Task],
        outgoing: Sequence[Task],
        is_serial: bool,
    ) -> None:
        self.graph, self.number, self.work = graph, number, work
        self.incoming, self.outgoing, self.is_serial = incoming, outgoing, is_serial
        self.placed: dict[Action, Task] = {}

    def add(self) -> None:
        """Adds every action of every stage, then the messages between them."""
        schedule = build_schedule(self.work.schedule, self.work.num_stages, len(self.work.micro_batch_ms))
        for stage, actions in enumerate(lower(schedule).stages):
            previous: Task | None = None
            for action in actions:
                for task in self._tasks(stage, action):
                    self._follow(previous, task)
                    previous = task
                self.placed[action] = task
            if previous is not None and self.is_serial:
                self.graph.add_edge(previous, self.outgoing[-1], delay_ms=0.0)
        for action, task in self.placed.items():
            if action.is_receive:
                delay_ms = self._message_ms(action)
                self.graph.add_edge(self.placed[action.other_end], task, delay_ms=delay_ms)

    def _follow(self, previous: Task | None, task: Task) -> None:
        if previous is not None:
            self.graph.add_edge(previous, task, delay_ms=0.0)
        elif self.is_serial:
            self.graph.add_edge(self.incoming[-1], task, delay_ms=0.0)

    def _tasks(self, stage: int, action: Action) -> list[Task]:
        """Returns the tasks of an action, cut at the buckets where it is the first forward or the last backward."""
        kind = _KINDS.get(action.kind, "receive")
        if not action.is_compute:
            task = Task(kind, self.number, stage, action)
            self.graph.add_node(task, ms=0.0, flight_ms=self._message_ms(action) if action.is_send else 0.0)
            return [task]
        own = list(stage_buckets(stage, self.work.num_stages))
        is_first = action.kind == "F" and action.micro_batch == 0
        is_last = action.kind == "B" and action.micro_batch == len(self.work.micro_batch_ms) - 1
        count = len(own) if (is_first or is_last) and not self.is_serial else 1
        tasks = [Task(kind, self.number, stage, action, part) for part in range(count)]
        for task in tasks:
            self.graph.add_node(task, ms=self._compute_ms(action) / count)
        if count == 1 and self.is_serial:
            return tasks
        for task, bucket in zip(tasks, own, strict=False) if is_first else ():
            self.graph.add_edge(self.incoming[bucket], task, delay_ms=0.0)
        for task, bucket in zip(tasks, own[::-1], strict=False) if is_last else ():
            self.graph.add_edge(task, self.outgoing[bucket], delay_ms=0.0)
        return tasks

    def _compute_ms(self, action: Action) -> float:
        time_ms = self.work.micro_batch_ms[action.micro_batch]
        forward_ms = time_ms * self.work.forward_share
        return forward_ms if action.kind == "F" else time_ms - forward_ms

    def _message_ms(self, action: Action) -> float:
        assert action.peer is not None
        return self.work.message_ms(min(action.stage, action.peer), action.micro_batch)
