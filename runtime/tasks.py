"""Tasks of one rank on real processes: threads beside the main one, and the events by which they wait for each other.

A task waits for messages in C++, without the interpreter's lock, so it passes them on while the rank computes. Where
threads may not communicate (`threads=False`), tasks run in the main thread instead, as far as they can go, whenever it
waits for one of them: the same results, with nothing overlapped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch

from hgraph.errors import PlanError
from runtime.messages import Message, check_task_request
from runtime.requests import Await, Request, Signal, Task

__all__ = ["Tasks"]


@dataclass(eq=False, slots=True)
class _State:
    """Where a task stands; `awaits` is the event that it waits for."""

    generator: Generator[Any, Any, Any]
    thread: threading.Thread | None = None
    awaits: str | None = None
    finished: bool = False
    result: Any = None
    log: list[Message] = field(default_factory=list)


class _Abandoned(BaseException):
    """Ends a task's thread after the rank itself has failed."""


class Tasks:
    """The tasks and events of one run on this rank.

    `perform(request, log)` carries out a request that communicates and writes the task's log; `trace(event)` is told
    every event; `failed(error)` is told at once what a thread has raised, since the rank itself may be waiting.
    """

    def __init__(
        self,
        perform: Callable[[Request, list[Message]], Any],
        trace: Callable[[str], None],
        failed: Callable[[BaseException], None],
        threads: bool,
    ) -> None:
        self._perform, self._trace, self._failed, self._threads = perform, trace, failed, threads
        self._changed = threading.Condition()
        self._events: set[str] = set()
        self._tasks: list[Task] = []
        self._error: BaseException | None = None
        self._abandoned = False

    def check(self) -> None:
        """Raises what a task has raised."""
        if self._error is not None:
            raise self._error

    def start(self, generator: Generator[Any, Any, Any], label: str) -> Task:
        """Begins a task."""
        state = _State(generator)
        task = Task(label, state)
        self._tasks.append(task)
        if self._threads:
            state.thread = threading.Thread(target=self._run_thread, args=(task,), name=f"task {label}", daemon=True)
            state.thread.start()
        return task

    def signal(self, event: str) -> None:
        """Says that `event` has happened."""
        self._trace(event)
        with self._changed:
            self._events.add(event)
            self._changed.notify_all()

    def wait_for(self, event: str) -> None:
        """Waits, in the main thread, until `event` has been signalled; raises what a task has raised.

        There is no limit of its own: whatever a task waits for has one.
        """
        self._wait_here(lambda: event in self._events, f"the event {event!r}")

    def join(self, task: Task) -> tuple[Any, list[Message]]:
        """Waits for the end of a task; returns its result and its messages."""
        self._wait_here(lambda: task.state.finished, f"the end of task {task.label!r}")
        self._tasks.remove(task)
        return task.state.result, task.state.log

    def _wait_here(self, happened: Callable[[], bool], what: str) -> None:
        self._run_here()
        with self._changed:
            self._changed.wait_for(lambda: happened() or self._error is not None or self._is_stuck())
        self.check()
        if not happened():
            waits = [
                f"task {task.label!r} waits for {task.state.awaits!r}" for task in self._tasks if task.state.awaits
            ]
            raise PlanError(f"{what} will never come: {', '.join(waits) or 'no task is left'}")

    def _is_stuck(self) -> bool:
        """Whether no task can go on while the rank itself waits."""
        return all(task.state.finished or task.state.awaits not in (None, *self._events) for task in self._tasks)

    def end(self) -> None:
        """Checks at the end of a run that every task was joined."""
        self.check()
        if self._tasks:
            raise PlanError(f"started and never joined: {', '.join(repr(task.label) for task in self._tasks)}")

    def abandon(self) -> None:
        """Lets tasks end at their next request, after the rank itself has failed."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()
        for task in self._tasks:
            if task.state.thread is None:
                task.state.generator.close()

    def _run_thread(self, task: Task) -> None:
        try:
            with torch.no_grad():
                self._advance(task, lambda event: self._wait_in_thread(task, event))
        except _Abandoned:
            pass
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
            if not self._abandoned:
                self._failed(error)

    def _wait_in_thread(self, task: Task, event: str) -> bool:
        with self._changed:
            task.state.awaits = event
            self._changed.notify_all()
            self._changed.wait_for(lambda: event in self._events or self._abandoned)
            task.state.awaits = None
        return True

    def _run_here(self) -> None:
        """Runs tasks in the main thread as long as any of them can go on."""
        if self._threads:
            return
        going = True
        while going:
            going = False
            for task in self._tasks:
                if not task.state.finished and (task.state.awaits is None or task.state.awaits in self._events):
                    self._advance(task, lambda event: event in self._events)
                    going = True

    def _advance(self, task: Task, wait: Callable[[str], bool]) -> None:
        """Runs a task to its end, or to an event for which `wait` says that it has not happened."""
        state, answer = task.state, None
        state.awaits = None
        while True:
            if self._abandoned:
                state.generator.close()
                raise _Abandoned
            try:
                request = state.generator.send(answer)
            except StopIteration as stop:
                with self._changed:
                    state.finished, state.result = True, stop.value
                    self._changed.notify_all()
                return
            check_task_request(task.label, request)
            answer = None
            if isinstance(request, Signal):
                self.signal(request.event)
            elif isinstance(request, Await):
                if not wait(request.event):
                    state.awaits = request.event
                    return
            else:
                answer = self._perform(request, state.log)
