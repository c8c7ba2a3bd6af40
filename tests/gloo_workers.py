"""A pool of real processes for tests: started once, given functions to run on all or the first ranks.

Every run has a job of its own (store, default process group), so a run that fails leaves nothing behind for the next;
a worker that died or did not answer in time makes the pool start anew.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from tests.captures import share_captures

__all__ = ["GlooPool", "WorkersFailed", "process_context"]

DEAD = "the worker died"
LATE = "the rank had not ended in time"
NOT_JOINED = "the worker could not join the others"


def process_context() -> multiprocessing.context.ForkServerContext:
    """Returns what starts processes that have imported already what takes seconds; they share nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.gloo_workers", "runtime.program"])
    return context


class WorkersFailed(Exception):
    """A function failed on some ranks; `texts` holds each one's traceback, the text shows them all."""

    def __init__(self, texts: dict[int, str]) -> None:
        self.texts = texts
        super().__init__("\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(texts.items())))


class GlooPool:
    """Up to `num_workers` processes with one thread each, started when first used."""

    def __init__(self, num_workers: int = 4) -> None:
        self.num_workers = num_workers
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []

    def run(
        self, function: Callable[..., Any], *args: Any, num_ranks: int | None = None, timeout_s: float = 60.0
    ) -> list[Any]:
        """Returns what `function(*args)` returned on each rank.

        `function` is importable; inside, the default process group is that of the `num_ranks` ranks of the run. Raises
        `WorkersFailed` with the tracebacks; ranks that had not ended by then are named.
        """
        count = self.num_workers if num_ranks is None else num_ranks
        assert 1 <= count <= self.num_workers, f"the pool has {self.num_workers} workers, not {count}"
        self._start()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        job = pickle.dumps((function, args))
        for rank, pipe in enumerate(self._pipes[:count]):
            pipe.send((store.port, rank, count, timeout_s, job))
        results, texts = self._collect(count, timeout_s)
        if texts:
            raise WorkersFailed(texts)
        return [results[rank] for rank in range(count)]

    def _collect(self, count: int, timeout_s: float) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        texts: dict[int, str] = {}
        pending = {self._pipes[rank]: rank for rank in range(count)}
        deadline_s = time.monotonic() + timeout_s
        while pending and time.monotonic() < deadline_s:
            for pipe in wait(list(pending), timeout=max(0.0, deadline_s - time.monotonic())):
                rank = pending.pop(pipe)  # type: ignore[index]
                succeeded, value = _receive(pipe)  # type: ignore[arg-type]
                (results if succeeded else texts)[rank] = value
                if not succeeded:
                    deadline_s = min(deadline_s, time.monotonic() + 20.0)
        texts |= dict.fromkeys(pending.values(), LATE)
        # torch counts process groups: a worker that missed one would name its next ones otherwise than the rest do.
        if {LATE, DEAD} & set(texts.values()) or any(NOT_JOINED in text for text in texts.values()):
            self.close()
        return results, texts

    def _start(self) -> None:
        if self._processes:
            return
        context = process_context()
        for _ in range(self.num_workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def close(self) -> None:
        """Ends all workers."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def _receive(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return False, DEAD


def _work(pipe: Connection) -> None:
    torch.set_num_threads(1)
    share_captures()
    while True:
        try:
            port, rank, num_ranks, timeout_s, job = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, _run_job(port, rank, num_ranks, timeout_s, job))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(_pickle(answer))


def _pickle(answer: tuple[bool, Any]) -> bytes:
    """Returns the answer as plain bytes (a pipe would pass tensors through shared memory, which can vanish)."""
    try:
        return pickle.dumps(answer)
    except Exception:
        return pickle.dumps((False, traceback.format_exc()))


def _run_job(port: int, rank: int, num_ranks: int, timeout_s: float, job: bytes) -> Any:
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
        # A rank that ended at once would cut off those still connecting.
        if store.add("joined", 1) == num_ranks:
            store.set("all joined", b"")
        store.wait(["all joined"])
    except BaseException as error:
        raise RuntimeError(NOT_JOINED) from error
    try:
        function, args = pickle.loads(job)
        return function(*args)
    finally:
        dist.destroy_process_group()
