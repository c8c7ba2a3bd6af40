"""The failure channel: how ranks learn which rank failed first, and that none hangs.

It uses the job's key-value store, not the links that training uses. A rank that fails writes (rank, first line of the
error) under one key; the first writer wins. Each rank refreshes a heartbeat from a thread and watches that of the next
rank, so a rank that is killed is reported by the one before it, however many ranks there are. A rank whose main thread
is still inside the guard `grace_s` after a failure became known is stuck in a wait and is ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from hgraph.errors import RankFailed
from runtime.calls import waits_in

__all__ = ["Failure", "FailureChannel", "rank_guard"]

FIRST_FAILURE = "first_failure"
FINISHED = "finished"
NO_ANSWER = "the store does not answer; the process that hosts it (on rank 0's node) has ended"


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of the job."""

    rank: int
    text: str

    def __str__(self) -> str:
        return f"first failure: rank {self.rank}: {self.text}"


class FailureChannel:
    """One rank's end of the channel. `start` and `stop` frame the time in which the rank must show signs of life.

    A rank that shows none for `stale_s` counts as dead. `exit_when_stuck` lets the watching thread end the process.
    Attribute `is_waiting`: whether the main thread may be stuck in a wait; set it to False where it certainly is not.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        *,
        heartbeat_s: float = 1.0,
        stale_s: float = 8.0,
        grace_s: float = 8.0,
        exit_when_stuck: bool = True,
        name: str = "failure_channel",
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.heartbeat_s, self.stale_s, self.grace_s = heartbeat_s, stale_s, grace_s
        self._exit_when_stuck = exit_when_stuck
        # A connection of its own: the job's may be blocked for as long as some rank waits for a key.
        connection = store.clone()  # type: ignore[attr-defined]
        connection.set_timeout(timedelta(seconds=stale_s))
        self._store = PrefixStore(name, connection)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._observed = threading.get_ident()
        self._failure: Failure | None = None
        self.is_waiting = True

    @staticmethod
    def on_default_store(**options: float | bool | str) -> FailureChannel:
        """Returns the channel of this rank on the store of the initialised default process group."""
        store = dist.distributed_c10d._get_default_store()
        return FailureChannel(store, dist.get_rank(), dist.get_world_size(), **options)  # type: ignore[arg-type]

    def start(self) -> None:
        """Shows the first sign of life and starts the thread that looks after the one that calls this."""
        self._observed = threading.get_ident()
        self._store.set(f"alive_{self.rank}", "0")
        self._stopped.clear()
        self._thread = threading.Thread(target=self._beat_and_watch, name="failure channel", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Tells the watching rank that this one has finished, and ends the thread."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(self.heartbeat_s + 1.0)
        try:
            self._store.set(f"alive_{self.rank}", FINISHED)
        except RuntimeError:
            self._failure = self._failure or Failure(0, NO_ANSWER)

    def report(self, error: BaseException) -> None:
        """Writes this rank's error where all ranks find it, unless another rank failed before."""
        lines = str(error).strip().splitlines()
        self._report(Failure(self.rank, f"{type(error).__name__}: {lines[0] if lines else 'no text'}"))

    def first_failure(self) -> Failure | None:
        """Returns the first failure of the job, or None; a store that does not answer is a failure of rank 0."""
        if self._failure is not None:
            return self._failure
        try:
            if self._store.check([FIRST_FAILURE]):
                self._failure = Failure(**json.loads(self._store.get(FIRST_FAILURE)))
        except RuntimeError:
            self._failure = Failure(0, NO_ANSWER)
        return self._failure

    def diagnose(self) -> str:
        """Returns which rank failed first, after waiting as long as a dead rank can take to be noticed."""
        deadline_s = time.monotonic() + self.stale_s + 2 * self.heartbeat_s
        while self.first_failure() is None and time.monotonic() < deadline_s:
            time.sleep(min(0.1, self.heartbeat_s))
        return str(self._failure) if self._failure is not None else "no rank has reported a failure"

    def _report(self, failure: Failure) -> None:
        text = json.dumps({"rank": failure.rank, "text": failure.text})
        try:
            winner = self._store.compare_set(FIRST_FAILURE, "", text)
            self._failure = self._failure or Failure(**json.loads(winner))
        except RuntimeError:
            self._failure = self._failure or Failure(0, NO_ANSWER)

    def signs_of(self, ranks: Iterable[int]) -> list[tuple[str, str]]:
        """Returns of ranks that have all started the last sign of life and the collective that each is in, if any."""
        values = self._store.multi_get([f"alive_{rank}" for rank in ranks])
        return [(beat, place) for beat, _, place in (value.decode().partition(" ") for value in values)]

    def _beat_and_watch(self) -> None:
        watched = (self.rank + 1) % self.num_ranks
        last_value, last_change_s = b"", time.monotonic()
        beats, known_since_s = 0, None
        while not self._stopped.wait(self.heartbeat_s):
            beats += 1
            now_s = time.monotonic()
            value = self._beat(beats, watched)
            if value != last_value:
                last_value, last_change_s = value, now_s
            alive = watched == self.rank or value == FINISHED.encode() or not value
            if not alive and now_s - last_change_s > self.stale_s:
                self._report(Failure(watched, f"no sign of life for {self.stale_s:g} s (killed or frozen)"))
            failure = self.first_failure()
            if failure is not None and failure.rank != self.rank:
                known_since_s = (known_since_s or now_s) if self.is_waiting else now_s
                self._end_if_stuck(failure, now_s - known_since_s)

    def _beat(self, beats: int, watched: int) -> bytes:
        """Shows a sign of life; returns the watched rank's last one (empty before its first)."""
        key = f"alive_{watched}"
        try:
            self._store.set(f"alive_{self.rank}", f"{beats} {waits_in(self._observed)}")
            return self._store.get(key) if self._store.check([key]) else b""
        except RuntimeError:
            self._failure = self._failure or Failure(0, NO_ANSWER)
            return FINISHED.encode()

    def _end_if_stuck(self, failure: Failure, known_s: float) -> None:
        if not self._exit_when_stuck or known_s < self.grace_s or self._stopped.is_set():
            return
        sys.stderr.write(f"rank {self.rank}: ended while it waited; {failure}\n")
        sys.stderr.flush()
        os._exit(1)


@contextmanager
def rank_guard(channel: FailureChannel) -> Iterator[FailureChannel]:
    """Reports whatever leaves the block as an exception, and turns SIGTERM into `RankFailed` with the first failure.

    A launcher that loses one process terminates the others at once; with the handler each still says which rank it was.
    """
    previous = _on_terminate(channel)
    channel.start()
    try:
        yield channel
    except BaseException as error:
        channel.report(error)
        raise
    finally:
        channel.stop()
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)  # type: ignore[arg-type]


def _on_terminate(channel: FailureChannel) -> object:
    """Installs the handler where Python allows it (the main thread); returns the one before, or None."""
    if threading.current_thread() is not threading.main_thread():
        return None

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise RankFailed(f"rank {channel.rank}: told to end (SIGTERM); {channel.diagnose()}")

    return signal.signal(signal.SIGTERM, handle)
