"""Planning ahead in processes of its own: several steps deep, in any number of processes, with the same plans.

One thread for each process hands it one step after another and takes its answers, so nothing blocks training and
nobody polls. A plan depends on the lengths, profile and pool alone, never on who made it or what came before:
processes may be added while training runs, replaced when they end, and started anew at any step of a resumed run.

    PlanService.submit -> queue of steps (at most depth) -> thread -> PlannerProcess
    PlanService.result <- answers of the step, first plan and final one <-'
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from types import TracebackType

from hgraph.errors import InvalidInput, PlanError
from hgraph.profile import Profile
from hgraph.strategy import Pool
from strategies.ahead import PlanAhead, PlannedStep
from strategies.anytime import Answer, AnytimePlanner, planned_step, settled, within
from strategies.options import PlannerOptions
from strategies.planner_process import PlannerProcess, ProcessEnded

__all__ = ["PlanService"]

BEHIND_S = 1e-3
"""A step that waits longer than this, with another one untouched behind it, calls for one more process."""

ATTEMPTS = 2
"""Processes that try to plan one step before it is planned here."""

MAX_FAILURES = 4
"""Processes of a thread that end in a row, without a plan in between, before no more are started."""

JOIN_TIMEOUT_S = 10.0


@dataclass(slots=True, eq=False)
class _Task:
    """A submitted step: its answers as they come (the first, the best so far, the last), and the process at work.

    `is_wanted`: it has not been taken or dropped; nobody works on one that has.
    """

    step: int
    lengths: tuple[int, ...]
    first: Answer | None = None
    best: Answer | None = None
    last: Answer | None = None
    process: PlannerProcess | None = None
    is_wanted: bool = True


class PlanService:
    """Plans steps ahead; at most `ahead.depth` (1 or more) may be submitted and not yet taken.

    Until the first process is ready, steps are planned here, in `result`. A process that ends is replaced, and plans
    the step again; if that fails too, the step is planned here by the heuristic, and the plan's `solver` says so: what
    ended a process might end the job. Use as a context manager, or call `close`.
    """

    def __init__(
        self, pool: Pool, profile: Profile, options: PlannerOptions | None = None, ahead: PlanAhead | None = None
    ) -> None:
        self._ahead = ahead or PlanAhead()
        if self._ahead.depth < 1:
            raise InvalidInput(f"plan service: expected a depth of 1 or more, got {self._ahead.depth}")
        plain = replace(
            profile, schemes=dict(profile.schemes), bridge_ms=dict(profile.bridge_ms), absent=dict(profile.absent)
        )
        self._setup = (pool, plain, options or PlannerOptions())
        self._pickled = pickle.dumps(self._setup)
        self._changed = threading.Condition()
        self._queue: deque[_Task] = deque()
        self._pending: dict[int, _Task] = {}
        self._processes: dict[int, PlannerProcess] = {}
        self._threads: list[threading.Thread] = []
        self._notes: list[str] = []
        self._num_ready, self._num_ended = 0, 0
        self._is_closed = False
        self._add_worker()

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The planner processes that have been started and not replaced."""
        with self._changed:
            return tuple(process.process_id for process in self._processes.values())

    @property
    def num_ahead(self) -> int:
        """Steps submitted and not yet taken."""
        return len(self._pending)

    def take_notes(self) -> list[str]:
        """Returns what happened to planner processes since this was last asked, a sentence each."""
        with self._changed:
            notes, self._notes = self._notes, []
        return notes

    def submit(self, step: int, lengths: Sequence[int]) -> None:
        """Asks for the plan of `step` and returns at once; one more than `depth` ahead is InvalidInput."""
        if step in self._pending:
            raise InvalidInput(f"plan service: step {step} has been submitted already")
        if len(self._pending) >= self._ahead.depth:
            raise InvalidInput(
                f"plan service: {len(self._pending)} steps are ahead already (depth {self._ahead.depth}); take the "
                f"result of step {min(self._pending)} first"
            )
        task = _Task(step, tuple(lengths))
        with self._changed:
            self._pending[step] = task
            self._queue.append(task)
            self._changed.notify_all()

    def drop(self, step: int) -> None:
        """Forgets a submitted step without waiting for its plan; a process at work on it stops at its next answer."""
        with self._changed:
            task = self._pending.pop(step)
            task.is_wanted = False
            if task in self._queue:
                self._queue.remove(task)
            if task.process is not None and task.last is None:
                task.process.leave()

    def result(self, step: int, timeout_s: float = 300.0) -> PlannedStep:
        """Returns the plan of a submitted step, waiting for it as `ahead.wait` says; raises what planning raised.

        After `timeout_s` the best plan so far is used, where there is one, and says so; where there is none,
        PlanError names the step, which stays submitted.
        """
        if step not in self._pending:
            raise InvalidInput(f"plan service: step {step} was not submitted; waiting are {sorted(self._pending)}")
        task = self._pending[step]
        start_s = perf_counter()
        if self._ahead.wait == "best" and self._is_left_to_us(task):
            for answer in within(AnytimePlanner(*self._setup).answers(task.lengths, step), timeout_s):
                self._answer(task, answer)
        wait_s = timeout_s if self._ahead.wait == "best" else 0.0
        if not self._wait_for(task, wait_s) and self._ahead.wait == "best":
            self._give_up(task, timeout_s)
        used = task.last or self._early(task)
        self.drop(step)
        return planned_step(task.first or used, used, 1e3 * (perf_counter() - start_s))

    def close(self) -> None:
        """Ends the processes; what is still submitted is forgotten."""
        with self._changed:
            self._is_closed = True
            self._pending.clear()
            self._queue.clear()
            for process in self._processes.values():
                process.kill()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)

    def __enter__(self) -> PlanService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_left_to_us(self, task: _Task) -> bool:
        """Returns whether no process has begun with a step, nor will soon; takes it out of the queue then."""
        with self._changed:
            if task not in self._queue or self._num_ready or self._num_ended:
                return False
            self._queue.remove(task)
            return True

    def _wait_for(self, task: _Task, timeout_s: float) -> bool:
        """Returns whether the final plan came in time; adds a process where the first ones cannot keep up."""
        with self._changed:
            if self._changed.wait_for(lambda: task.last is not None, min(BEHIND_S, timeout_s)):
                return True
            # While a process starts, waiting says nothing of how long planning takes.
            is_starting = self._num_ready < len(self._threads)
            if self._queue and not is_starting and len(self._threads) < self._ahead.workers:
                self._add_worker()
            return self._changed.wait_for(lambda: task.last is not None, max(0.0, timeout_s - BEHIND_S))

    def _give_up(self, task: _Task, timeout_s: float) -> None:
        """Settles for the best plan of a step that took too long, and ends the process that is at work on it."""
        with self._changed:
            if task.last is not None:
                return
            if task.best is None:
                raise PlanError(
                    f"plan service: no plan of step {task.step} after {timeout_s:g} s; the planner is still at work"
                )
            task.last = settled(task.best, f"planner process: no better plan after {timeout_s:g} s")
            if task.process is not None:
                task.process.kill()

    def _early(self, task: _Task) -> Answer:
        """Returns the best plan of a step whose final one is not there yet; where there is none, one is made here."""
        if task.best is None:
            self._answer(task, self._plan_here(task))
        assert task.best is not None
        return task.best if task.best.is_last else settled(task.best, "not waited for a better plan")

    def _add_worker(self) -> None:
        number = len(self._threads)
        thread = threading.Thread(target=self._work, args=(number,), name=f"planner-{number}", daemon=True)
        self._threads.append(thread)
        if number:
            self._notes.append(f"a step waited for its plan: {number + 1} planner processes from now on")
        thread.start()

    def _work(self, number: int) -> None:
        """Plans one step after another, until the service is closed. The body of a thread."""
        failures = self._start_process(number, 0)
        while (task := self._next_task()) is not None:
            failures = self._plan(number, task, failures)
        with self._changed:
            process = self._processes.pop(number, None)
        if process is not None:
            process.close()

    def _next_task(self) -> _Task | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or bool(self._queue))
            return None if self._is_closed else self._queue.popleft()

    def _start_process(self, number: int, failures: int) -> int:
        """Starts the process of a thread, in place of the one before, until one is ready or too many have ended.

        Returns how many have ended in a row.
        """
        while not self._is_closed and failures < MAX_FAILURES:
            try:
                self._put_in_place(number, PlannerProcess(self._pickled))
                self._processes[number].wait_until_ready()
                break
            except (ProcessEnded, OSError) as ended:
                failures += 1
                self._note_end(f"while it started ({ended})", failures)
        with self._changed:
            self._num_ready += 1
            self._changed.notify_all()
        return failures

    def _put_in_place(self, number: int, process: PlannerProcess) -> None:
        """Makes a process that of its thread, and closes the one before."""
        with self._changed:
            before = self._processes.pop(number, None)
            self._processes[number] = process
            if self._is_closed:
                process.kill()
        if before is not None:
            before.close()

    def _plan(self, number: int, task: _Task, failures: int) -> int:
        """Has a step planned; returns how many processes have ended in a row without a plan."""
        how = "too many have ended before"
        for _ in range(ATTEMPTS):
            if self._is_closed or self._is_done(task) or failures >= MAX_FAILURES:
                break
            try:
                self._ask(self._processes[number], task)
                return 0
            except ProcessEnded as ended:
                how, failures = str(ended), failures + 1
            self._note_end(f"while it planned step {task.step} ({how})", failures)
            with self._changed:
                self._num_ready -= 1
            failures = self._start_process(number, failures)
        if not self._is_closed and not self._is_done(task):
            best = task.best or self._plan_here(task)
            self._answer(task, best if best.error is not None else settled(best, f"planner process: {how}"))
        return failures

    def _ask(self, process: PlannerProcess, task: _Task) -> None:
        with self._changed:  # so that `drop` leaves what was asked, not what is about to be
            if self._is_done(task):
                return
            process.ask(task.step, task.lengths)
            task.process = process
        try:
            for answer in process.answers():
                self._answer(task, answer)
        finally:
            with self._changed:
                task.process = None

    @staticmethod
    def _is_done(task: _Task) -> bool:
        return task.last is not None or not task.is_wanted

    def _answer(self, task: _Task, answer: Answer) -> None:
        with self._changed:
            task.first = task.first or answer
            if task.best is None or _predicted_ms(answer) <= _predicted_ms(task.best):
                task.best = answer
            if answer.is_last and task.last is None:
                task.last = answer
            self._changed.notify_all()

    def _note_end(self, when: str, failures: int) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._num_ended += 1
            what = "replaced" if failures < MAX_FAILURES else "not replaced: the heuristic plans from now on"
            self._notes.append(f"a planner process has ended {when}; {what}")

    def _plan_here(self, task: _Task) -> Answer:
        """Returns the first plan; what comes after it is not asked for."""
        return next(AnytimePlanner(*self._setup).answers(task.lengths, task.step))


def _predicted_ms(answer: Answer) -> float:
    return answer.plan.predicted_ms if answer.plan is not None else float("inf")
