"""Planning ahead in a process of its own.

The process is a fresh interpreter that imports the planner and nothing of torch; it does not run the user's script
again (as `multiprocessing` would), so a script without a main guard works. Requests and answers go through one pair of
connected sockets. The process ends when its parent does: the socket closes, and on Linux the parent's death is watched
as well, in case a child of the parent holds the socket open.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from queue import SimpleQueue
from time import perf_counter
from types import TracebackType
from typing import TypeAlias

from hgraph.errors import HydraulisError, InvalidInput, PlanError
from hgraph.plan import StepPlan
from hgraph.profile import Profile
from hgraph.strategy import Pool
from strategies.options import PlannerOptions

__all__ = ["PlanService", "serve"]

Answer: TypeAlias = StepPlan | Exception
START_CODE = "import sys; from strategies.service import serve; serve(int(sys.argv[1]))"
EXIT_TIMEOUT_S = 5.0


class PlanService:
    """Plans steps ahead in a process of its own; at most `depth` steps may be submitted and not yet taken.

    `last_wait_ms` is how long the last `result` waited. If the process dies, steps are planned in this process by the
    heuristic, and the plan's `solver` says so. Use as a context manager, or call `close`.
    """

    def __init__(self, pool: Pool, profile: Profile, options: PlannerOptions | None = None, depth: int = 4) -> None:
        if depth < 1:
            raise InvalidInput(f"plan service: expected a depth of 1 or more, got {depth}")
        self._pool, self._profile, self._options = pool, profile, options or PlannerOptions()
        self._depth = depth
        self._pending: dict[int, tuple[int, ...]] = {}
        self._answers: dict[int, Answer] = {}
        self._ended = ""
        self.last_wait_ms = 0.0
        self._connection, theirs = Pipe()
        self._process = _start(theirs)
        self._send(
            (pool, replace(profile, schemes=dict(profile.schemes), bridge_ms=dict(profile.bridge_ms)), self._options)
        )

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def num_ahead(self) -> int:
        """Steps submitted and not yet taken."""
        return len(self._pending)

    def submit(self, step: int, lengths: Sequence[int]) -> None:
        """Asks for the plan of `step` and returns at once; one more than `depth` ahead is InvalidInput."""
        if step in self._pending:
            raise InvalidInput(f"plan service: step {step} has been submitted already")
        if len(self._pending) >= self._depth:
            raise InvalidInput(
                f"plan service: {len(self._pending)} steps are ahead already (depth {self._depth}); take the result of "
                f"step {min(self._pending)} first"
            )
        self._pending[step] = tuple(lengths)
        self._send((step, tuple(lengths)))

    def result(self, step: int, timeout_s: float = 300.0) -> StepPlan:
        """Returns the plan of a submitted step, waiting for it; raises what planning raised.

        After `timeout_s` PlanError names the step; it stays submitted.
        """
        if step not in self._pending:
            raise InvalidInput(f"plan service: step {step} was not submitted; waiting are {sorted(self._pending)}")
        start = perf_counter()
        self._receive_until(step, start + timeout_s)
        answer = self._answers.pop(step, None)
        if answer is None and self._ended:
            answer = self._plan_here(step)
        self.last_wait_ms = 1e3 * (perf_counter() - start)
        if answer is None:
            raise PlanError(f"plan service: no plan of step {step} after {timeout_s:g} s; the planner is still at work")
        del self._pending[step]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Ends the process; what is still submitted is forgotten."""
        self._pending.clear()
        self._answers.clear()
        self._ended = self._ended or "it was closed"
        self._connection.close()
        try:
            self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> PlanService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, message: object) -> None:
        if self._ended:
            return
        try:
            self._connection.send(message)
        except OSError:
            self._note_end()

    def _receive_until(self, step: int, deadline: float) -> None:
        while step not in self._answers and not self._ended:
            remaining_s = deadline - perf_counter()
            try:
                if not self._connection.poll(max(0.0, remaining_s)):
                    return
                answered, answer = self._connection.recv()
            except (EOFError, OSError):
                self._note_end()
                return
            self._answers[answered] = answer

    def _note_end(self) -> None:
        try:
            code = self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._ended = f"it ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"

    def _plan_here(self, step: int) -> Answer:
        from strategies.select import plan_step

        start = perf_counter()
        try:
            options = replace(self._options, program=False)
            plan = plan_step(self._pool, self._profile, self._pending[step], step=step, options=options)
        except HydraulisError as error:
            return error
        text = f"heuristic (planner process: {self._ended})"
        return replace(plan, solver=text, plan_ms=1e3 * (perf_counter() - start))


def _start(theirs: Connection) -> subprocess.Popen[bytes]:
    """Returns the started planner process, which owns `theirs`; it has its own session, so Ctrl-C does not reach it."""
    with theirs:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", START_CODE, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )


def serve(handle: int) -> None:
    """Plans what comes through the socket `handle`, in order, until its other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(handle)
    requests: SimpleQueue[tuple[int, tuple[int, ...]]] = SimpleQueue()
    try:
        pool, profile, options = connection.recv()
    except (EOFError, OSError):
        return
    threading.Thread(target=_read_requests, args=(connection, requests), daemon=True).start()
    from strategies.select import plan_step

    while True:
        step, lengths = requests.get()
        start = perf_counter()
        answer: Answer
        try:
            plan = plan_step(pool, profile, lengths, step=step, options=options)
            answer = replace(plan, plan_ms=1e3 * (perf_counter() - start))
        except HydraulisError as error:
            answer = error
        except Exception as error:
            answer = PlanError(f"planning step {step} failed: {type(error).__name__}: {error}")
        try:
            connection.send((step, answer))
        except OSError:  # the other end has closed: nobody waits for the answer
            return


def _read_requests(connection: Connection, requests: SimpleQueue[tuple[int, tuple[int, ...]]]) -> None:
    """Queues requests as they come, so that the parent never blocks on sending; ends the process with its parent."""
    watched: list[Connection | int] = [connection, *_parent_handle()]
    while True:
        if connection not in wait(watched):
            os._exit(0)
        try:
            requests.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)


def _parent_handle() -> list[int]:
    """Returns a handle that becomes ready when the parent process ends, where the system has one."""
    try:
        return [os.pidfd_open(os.getppid())]
    except (AttributeError, OSError):
        return []
