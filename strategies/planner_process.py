"""A planner process: a fresh interpreter that imports the planner and nothing of torch.

It does not run the user's script again (as `multiprocessing` would), so a script without a main guard works. Requests
and answers go through one pair of connected sockets. The process ends when its parent does: the socket closes, and on
Linux the parent's death is watched as well, in case a child of the parent holds the socket open.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from queue import SimpleQueue
from typing import Any, TypeAlias

from hgraph.profile import Profile
from hgraph.strategy import Pool
from strategies.anytime import Answer, AnytimePlanner
from strategies.options import PlannerOptions

__all__ = ["PlannerProcess", "ProcessEnded", "serve"]

Setup: TypeAlias = tuple[Pool, Profile, PlannerOptions]
Request: TypeAlias = tuple[int, tuple[int, ...]]
UNWANTED = "unwanted"
"""Sent instead of a request: nobody waits for the step at work any more."""
START_CODE = "import sys; from strategies.planner_process import serve; serve(int(sys.argv[1]))"
READY = "ready"
EXIT_TIMEOUT_S = 5.0


class ProcessEnded(Exception):
    """The process is gone; the text says how: `it ended by SIGKILL`."""


class PlannerProcess:
    """Plans steps in a process of its own, one at a time. `kill` may be called by any thread.

    Of the rest, `ask` and `leave` are never called at the same time, and everything else is for one thread.

    `setup` is a pickled `Setup`. Raises OSError where the system starts no process.
    """

    def __init__(self, setup: bytes) -> None:
        self._connection, theirs = Pipe()
        self._process = _start(theirs)
        with contextlib.suppress(OSError):  # it has ended already: who waits for it is told
            self._connection.send_bytes(setup)

    def wait_until_ready(self) -> None:
        """Returns once the process has imported the planner; raises `ProcessEnded`."""
        self._receive()

    @property
    def process_id(self) -> int:
        return self._process.pid

    def ask(self, step: int, lengths: tuple[int, ...]) -> None:
        """Asks for the plan of a batch; what was asked before has been answered to the end. Raises `ProcessEnded`."""
        try:
            self._connection.send((step, lengths))
        except OSError:
            raise ProcessEnded(self._how_it_ended()) from None

    def leave(self) -> None:
        """Lets the process stop work on what it was asked: the answer it is at becomes the last one."""
        with contextlib.suppress(OSError):  # it has ended, which whoever reads its answers is told
            self._connection.send(UNWANTED)

    def answers(self) -> Iterator[Answer]:
        """Yields the answers to what was asked as they come, to the last one; raises `ProcessEnded`."""
        is_last = False
        while not is_last:
            answer: Answer = self._receive()
            is_last = answer.is_last
            yield answer

    def kill(self) -> None:
        """Ends the process at once: it keeps nothing that could be lost. Who waits for answers gets `ProcessEnded`."""
        self._process.kill()

    def close(self) -> None:
        """Ends the process, and frees what it took here."""
        self.kill()
        self._process.wait()
        self._connection.close()

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            raise ProcessEnded(self._how_it_ended()) from None
        except Exception as error:
            self.kill()
            raise ProcessEnded(f"its answer cannot be read: {type(error).__name__}: {error}") from error

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return f"it ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"


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
    requests: SimpleQueue[Request] = SimpleQueue()
    wanted = threading.Event()
    try:
        pool, profile, options = connection.recv()
    except (EOFError, OSError):
        return
    threading.Thread(target=_read_requests, args=(connection, requests, wanted), daemon=True).start()
    planner = AnytimePlanner(pool, profile, options)
    try:
        connection.send(READY)
        while True:
            if requests.empty():
                planner.warm_up()  # while there is nothing to plan; a step that comes first gets its first plan first
            step, lengths = requests.get()
            for answer in while_wanted(planner.answers(lengths, step), wanted.is_set):
                connection.send(answer)
    except OSError:  # the other end has closed: nobody waits for the answer
        return


def while_wanted(answers: Iterator[Answer], is_wanted: Callable[[], bool]) -> Iterator[Answer]:
    """Yields answers to the last one, or to the first that nobody waits for any more, which is then the last."""
    for answer in answers:
        if is_wanted() or answer.is_last:
            yield answer
            continue
        yield replace(answer, is_last=True)
        return


def _read_requests(connection: Connection, requests: SimpleQueue[Request], wanted: threading.Event) -> None:
    """Queues requests as they come, also while the solver is at work; ends the process with its parent."""
    watched: list[Connection | int] = [connection, *_parent_handle()]
    while True:
        if connection not in wait(watched):
            os._exit(0)
        try:
            message = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        if message == UNWANTED:
            wanted.clear()
        else:
            wanted.set()  # of one step at a time: whatever was not wanted before has been answered
            requests.put(message)


def _parent_handle() -> list[int]:
    """Returns a handle that becomes ready when the parent process ends, where the system has one."""
    try:
        return [os.pidfd_open(os.getppid())]
    except (AttributeError, OSError):
        return []
