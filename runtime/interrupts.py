"""How a rank ends when it is interrupted: in order where it can, and soon in any case.

A Python signal handler runs between two instructions of the main thread. A main thread that waits in a collective, in a
join or in a lock comes to none, and what it waits for may be a rank that has ended. So a thread of its own hears of the
signal, too (`signal.set_wakeup_fd`), gives the main thread a moment for its clean-up, and ends the process.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

__all__ = [
    "INTERRUPTED",
    "TERMINATED",
    "Terminated",
    "ends_when_interrupted",
    "heeds_sigterm",
    "leave",
    "raise_if_interrupted",
]

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as shells have it."""
TERMINATED = 143
"""Exit status after SIGTERM: 128 + SIGTERM."""
_GRACE_S = 2.0


class Terminated(KeyboardInterrupt):
    """SIGTERM has arrived. Whatever cleans up after Ctrl-C cleans up after it."""


def raise_if_interrupted(code: int) -> None:
    """Raises KeyboardInterrupt or `Terminated` where a job's exit status says that this is how it ended."""
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code == TERMINATED:
        raise Terminated


@contextmanager
def heeds_sigterm() -> Iterator[None]:
    """Frames what one process does by itself: SIGTERM raises `Terminated` in the block; a second one does not wait.

    In another thread than the main one, which hears of no signal, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def ends_when_interrupted(say: Callable[[], None], grace_s: float = _GRACE_S) -> Iterator[None]:
    """Frames the work of a rank, in the main thread. SIGINT raises KeyboardInterrupt in the block, for its clean-up.

    Once interrupted, the process calls `say` and ends with status 130: at the end of the block, however it ends, and
    `grace_s` after the signal in any case. A SIGINT that was blocked until now, so that it would not hit an interpreter
    that is starting, arrives at the beginning of the block.
    """
    interrupt = _Interrupt()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.signal(signal.SIGINT, interrupt.handle)
    wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(ours, say, grace_s), name="interrupts", daemon=True).start()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        yield
    finally:
        if interrupt.came:
            # Whatever left the block is a consequence: of what was cut short, or of other ranks that ended.
            say()
            leave(INTERRUPTED)
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGINT, before)
        theirs.close()


def leave(code: int) -> NoReturn:
    """Ends the process at once; what the interpreter does at its end can wait for messages that never come."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


class _Interrupt:
    """Attribute `came`: whether this process was interrupted."""

    def __init__(self) -> None:
        self.came = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raises KeyboardInterrupt, once: clean-up is not to be interrupted again."""
        if self.came:
            return
        self.came = True
        # Other threads, and objects that are being destroyed, now fail for want of the ranks that have ended.
        threading.excepthook = _ignore
        sys.unraisablehook = _ignore
        raise KeyboardInterrupt


def _watch(signals: socket.socket, say: Callable[[], None], grace_s: float) -> None:
    """Reads the numbers of the signals that arrive; ends when the other end closes."""
    while received := signals.recv(64):
        if signal.SIGINT in received:
            threading.Event().wait(grace_s)
            say()
            leave(INTERRUPTED)


def _ignore(_: object) -> None:
    return
