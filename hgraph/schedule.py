"""Builds schedules: computations first, then messages added by lowering.

`build_schedule` says in which order each stage computes; `lower` adds sends and receives.
`hgraph/check_schedule.py` proves the result without knowing how it was made; `hgraph/simulate.py` times it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from hgraph.action import Action, Edge, Kind, Schedule, forward_edges
from hgraph.errors import InvalidInput, PlanError

__all__ = ["Action", "Schedule", "build_schedule", "lower"]


def build_schedule(name: str, num_stages: int, num_micro_batches: int) -> Schedule:
    """Returns the computations of schedule `name` ('gpipe' or '1f1b'), without messages.

    - `gpipe`: all forward passes, then all backward passes (arXiv 1811.06965).
    - `1f1b`: stage s runs `num_stages - s` forward passes ahead, then backward and forward in turn (arXiv 1806.03377).

    Any number of micro-batches will do: with none, every list is empty.
    """
    builders = {"gpipe": _gpipe_stage, "1f1b": _one_forward_one_backward_stage}
    if name not in builders:
        raise InvalidInput(f"schedule: expected a name among {', '.join(builders)}, got {name!r}")
    stages = tuple(builders[name](stage, num_stages, num_micro_batches) for stage in range(num_stages))
    return Schedule(name, num_stages, num_micro_batches, stages)


def _gpipe_stage(stage: int, num_stages: int, num_micro_batches: int) -> tuple[Action, ...]:
    forwards = [Action("F", stage, m) for m in range(num_micro_batches)]
    return (*forwards, *(Action("B", stage, m) for m in range(num_micro_batches)))


def _one_forward_one_backward_stage(stage: int, num_stages: int, num_micro_batches: int) -> tuple[Action, ...]:
    ahead = min(num_stages - stage, num_micro_batches)
    actions = [Action("F", stage, m) for m in range(ahead)]
    for m in range(num_micro_batches):
        actions.append(Action("B", stage, m))
        if m + ahead < num_micro_batches:
            actions.append(Action("F", stage, m + ahead))
    return tuple(actions)


def lower(schedule: Schedule, edges: Iterable[Edge] | None = None) -> Schedule:
    """Returns the schedule with sends and receives added.

    `edges` are the pairs of stages (from, to), from < to, between which forward values pass; gradients take the
    reverse. Default: each stage to the next. A send stands right after the computation that produces the value and
    does not block. A receive stands right before the computation that needs it; receives of one pair of stages are
    placed in the order of the sends, so that the order of messages cannot deadlock. Fails with `PlanError` where the
    computations themselves wait for each other in a circle.
    """
    if schedule.has_messages:
        raise InvalidInput(f"schedule {schedule.name}: expected computations only, got sends and receives as well")
    return _Lowering(schedule, forward_edges(edges, schedule.num_stages)).run()


class _Lowering:
    """Walks all stages at once; a computation is placed as soon as its inputs have been sent."""

    def __init__(self, schedule: Schedule, edges: tuple[Edge, ...]) -> None:
        self.schedule = schedule
        self.edges = edges
        self.waiting = [deque(actions) for actions in schedule.stages]
        self.placed: list[list[Action]] = [[] for _ in schedule.stages]
        self.received: set[Action] = set()
        # What was sent and not yet received, per receiving stage and sending stage, in the order of the sends.
        self.in_flight: dict[Edge, deque[Action]] = {}

    def run(self) -> Schedule:
        """Returns the lowered schedule."""
        while any(self.waiting):
            progress = [self._advance(stage) for stage in range(self.schedule.num_stages)]
            if not any(progress):
                stuck = ", ".join(str(queue[0]) for queue in self.waiting if queue)
                raise PlanError(
                    f"schedule {self.schedule.name}: the computations {stuck} wait for each other; "
                    f"expected an order in which one of them has its inputs\n{self.schedule}"
                )
        return replace(self.schedule, stages=tuple(map(tuple, self.placed)))

    def _advance(self, stage: int) -> bool:
        """Places the next computations of a stage while their inputs are there; returns whether any was placed."""
        queue = self.waiting[stage]
        before = len(queue)
        while queue and all(message in self._queue(message) for message in self._receives(queue[0])):
            action = queue.popleft()
            for message in self._receives(action):
                self._receive(message)
            self.placed[stage].append(action)
            for message in self._sends(action):
                self.placed[stage].append(message)
                self._queue(message.other_end).append(message.other_end)
        return len(queue) < before

    def _queue(self, receive: Action) -> deque[Action]:
        assert receive.peer is not None
        return self.in_flight.setdefault((receive.stage, receive.peer), deque())

    def _receive(self, message: Action) -> None:
        """Places `message` and what its sender sent before it."""
        queue = self._queue(message)
        while message in queue:
            self.placed[message.stage].append(queue[0])
            self.received.add(queue.popleft())

    def _receives(self, action: Action) -> list[Action]:
        kind: Kind = "RF" if action.kind == "F" else "RB"
        peers = self._before(action.stage) if action.kind == "F" else self._after(action.stage)
        messages = (Action(kind, action.stage, action.micro_batch, peer) for peer in peers)
        return [message for message in messages if message not in self.received]

    def _sends(self, action: Action) -> list[Action]:
        kind: Kind = "SF" if action.kind == "F" else "SB"
        peers = self._after(action.stage) if action.kind == "F" else self._before(action.stage)
        return [Action(kind, action.stage, action.micro_batch, peer) for peer in peers]

    def _before(self, stage: int) -> list[int]:
        return [source for source, target in self.edges if target == stage]

    def _after(self, stage: int) -> list[int]:
        return [target for source, target in self.edges if source == stage]
