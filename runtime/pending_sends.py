"""Sends on their way: keeps handle and tensor of each until it is complete, without ever making a rank wait for it.

A gloo handle says that it is complete only when someone waits for it, and a wait that runs out of time breaks the
connection. So one thread waits for the sends in order of issue (in C++, without the interpreter's lock) and lets go of
each tensor as soon as it is sent; otherwise a step would hold every message it sent until its end.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

__all__ = ["PendingSends", "SendFailed"]


@dataclass(frozen=True, slots=True)
class PendingSend:
    """One message on its way and what to call it."""

    work: dist.Work
    tensor: Tensor
    peer: int
    tag: int
    label: str


class SendFailed(RuntimeError):
    """A send that did not complete; names peer, tag and label."""


class PendingSends:
    """The sends of one rank that may not be complete."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._queue: deque[PendingSend] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: SendFailed | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, work: dist.Work, tensor: Tensor, peer: int, tag: int, label: str) -> None:
        """Takes over a send that was issued; raises `SendFailed` if an earlier one has failed."""
        self.check()
        with self._changed:
            self._queue.append(PendingSend(work, tensor, peer, tag, label))
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait_in_order, name="pending sends", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raises `SendFailed` if a send has failed."""
        if self._error is not None:
            raise self._error

    def wait_all(self) -> None:
        """Waits until everything is sent; raises `SendFailed` otherwise, naming the oldest send that is not."""
        with self._changed:
            done = self._changed.wait_for(lambda: not self._queue or self._error is not None, self._timeout_s)
            oldest = self._queue[0] if self._queue else None
        self.check()
        if not done and oldest is not None:
            raise SendFailed(f"{_text(oldest)} did not complete")

    def close(self) -> None:
        """Lets the thread end once it has nothing to wait for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wait_in_order(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._closed)
                if not self._queue:
                    return
                send = self._queue[0]
            error = self._wait_for(send)
            with self._changed:
                self._error = self._error or error
                self._queue.popleft()
                self._changed.notify_all()

    def _wait_for(self, send: PendingSend) -> SendFailed | None:
        try:
            send.work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            return SendFailed(f"{_text(send)}: {error}")
        return None


def _text(send: PendingSend) -> str:
    return f"the message to rank {send.peer} (tag {send.tag}) of {send.label!r}"
