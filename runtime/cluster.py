"""Where a program runs: real processes under torchrun, or simulated ranks in this process.

A program holds the state of its `local_ranks` and gives `run` one generator for each. Under torchrun that is one rank;
otherwise the virtual cluster runs all of them, so that the same script works on a laptop.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hgraph.errors import InvalidInput, NonFiniteLoss, RankFailed
from runtime.calls import Calls
from runtime.failure_channel import FailureChannel
from runtime.gloo import ProcessTransport
from runtime.messages import Message
from runtime.process_groups import create_groups, init_process_group_from_env
from runtime.requests import RankGenerator
from runtime.virtual_cluster import VirtualCluster

__all__ = ["Cluster", "ProcessCluster", "SimulatedCluster", "choose_cluster"]


class Cluster(Protocol):
    """What a program asks of the place it runs in. `timeout_s`: how long a rank waits for another."""

    num_ranks: int
    local_ranks: tuple[int, ...]
    device: torch.device
    timeout_s: float

    def prepare(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Creates process groups, before the first step."""

    def enter(self, call: str) -> None:
        """Notes, for ranks that wait elsewhere, that this process makes a collective call."""

    def run(self, generators: Mapping[int, RankGenerator[Any]]) -> dict[int, Any]:
        """Returns what the generators of the local ranks returned."""

    def log_of(self, rank: int) -> list[Message]:
        """Returns the messages of a local rank in the last run."""

    def broadcast(self, value: Any, *, what: str = "a value", aside: bool = False) -> Any:
        """Returns rank 0's value on every rank; `aside` is for the one other thread that may communicate.

        `what` names it for the error of a rank that waits in vain.
        """

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all processes, on every rank; one value where one process runs all ranks."""

    def report(self, error: BaseException) -> None:
        """Lets the other ranks know what ends the work on this one."""

    def close(self, error: BaseException | None = None) -> None:
        """Ends what the cluster itself started; `error` is what ended the work early, for the other ranks to know."""


class SimulatedCluster:
    """All ranks in this process (`runtime/virtual_cluster.py`)."""

    def __init__(self, num_ranks: int, timeout_s: float = 300.0) -> None:
        self.num_ranks, self.timeout_s = num_ranks, timeout_s
        self.local_ranks = tuple(range(num_ranks))
        self.device = torch.device("cpu")
        self.virtual = VirtualCluster(num_ranks)

    def prepare(self, groups: Iterable[tuple[int, ...]]) -> None:
        del groups

    def enter(self, call: str) -> None:
        del call

    def run(self, generators: Mapping[int, RankGenerator[Any]]) -> dict[int, Any]:
        # One thread per rank, as in real processes: the small operators of small shards are slower with several.
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self.virtual.run(generators)
        finally:
            torch.set_num_threads(before)

    def log_of(self, rank: int) -> list[Message]:
        return self.virtual.log_of(rank)

    def broadcast(self, value: Any, *, what: str = "a value", aside: bool = False) -> Any:
        del what, aside
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def report(self, error: BaseException) -> None:
        del error

    def close(self, error: BaseException | None = None) -> None:
        del error


_RAISED_BY_ALL = (InvalidInput, NonFiniteLoss)
"""What every rank raises alike, so that a script may go on after it."""


class ProcessCluster:
    """One rank of a job of real processes, over the initialised default process group.

    Without a `channel` of the caller's it starts one of its own, so that no rank waits for one that has failed.
    Attributes: `calls`, which collective call each rank is in; `aside`, a gloo group of all ranks for one other thread.
    """

    def __init__(self, timeout_s: float, channel: FailureChannel | None = None) -> None:
        self.num_ranks = dist.get_world_size()
        self.rank = dist.get_rank()
        self.local_ranks: tuple[int, ...] = (self.rank,)
        cuda = dist.get_backend() == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.timeout_s = timeout_s
        self._owns_channel = channel is None
        self.channel = channel or _own_channel(self.rank)
        self.calls = Calls.on_default_store(self.channel.stale_s)
        self._end = weakref.finalize(self, _end_job, self.calls, self.channel if self._owns_channel else None)
        self.aside: dist.ProcessGroup | None = None
        self.transport: ProcessTransport | None = None

    def prepare(self, groups: Iterable[tuple[int, ...]]) -> None:
        with self.communicating():
            self.transport = ProcessTransport(create_groups(groups, self.timeout_s), self.timeout_s, self.channel)
            timeout = timedelta(seconds=self.timeout_s)
            self.aside = dist.new_group(list(range(self.num_ranks)), timeout=timeout, backend="gloo")

    def enter(self, call: str) -> None:
        with self.communicating():
            self.calls.enter(call)

    def run(self, generators: Mapping[int, RankGenerator[Any]]) -> dict[int, Any]:
        assert self.transport is not None, "prepare comes first"
        with self.communicating():
            return {self.rank: self.transport.drive(generators[self.rank])}

    def log_of(self, rank: int) -> list[Message]:
        assert rank == self.rank and self.transport is not None
        return self.transport.log

    def broadcast(self, value: Any, *, what: str = "a value", aside: bool = False) -> Any:
        values = [value]
        with nullcontext() if aside else self.communicating(), self._diagnosing(f"{what} from rank 0"):
            dist.broadcast_object_list(values, src=0, group=self.aside if aside else None)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.num_ranks
        with self.communicating(), self._diagnosing("a value from every rank"):
            dist.all_gather_object(values, value)
        return values

    @contextmanager
    def _diagnosing(self, what: str) -> Iterator[None]:
        """Turns what communication raises into `RankFailed` with what was waited for and who failed first."""
        start_s = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            waited = f"waited {time.monotonic() - start_s:.1f} s (limit {self.timeout_s:g} s)"
            head = f"rank {self.rank}: {waited} for {what} ({self.calls.last.name or 'start-up'})"
            raise RankFailed(f"{head}\n  {str(error).splitlines()[0]}\n  {self.channel.diagnose()}") from error

    def report(self, error: BaseException) -> None:
        if not isinstance(error, _RAISED_BY_ALL):
            self.channel.report(error)

    def close(self, error: BaseException | None = None) -> None:
        if not self._end.detach():
            return
        self.calls.end()
        if not self._owns_channel:
            return  # whoever made it reports, and stops it
        if error is not None:
            self.report(error)
        self.channel.stop()

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Frames what may wait for other ranks. Reports what leaves it, unless all raise it: others may be waiting."""
        if self._owns_channel:
            self.channel.is_waiting = True
        try:
            yield
        except BaseException as error:
            self.report(error)
            raise
        finally:
            if self._owns_channel:
                self.channel.is_waiting = False


def _own_channel(rank: int) -> FailureChannel:
    """A started channel under a name that is new in this job, the same on all ranks: each counts its own."""
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"failure_channels_of_{rank}", 1)
    channel = FailureChannel.on_default_store(name=f"failure_channel_{number}")
    channel.is_waiting = False
    channel.start()
    return channel


def _end_job(calls: Calls, channel: FailureChannel | None) -> None:
    """Runs when the cluster is gone or the interpreter ends; where an exception ends it, the others are told which."""
    calls.end()
    if channel is None:
        return
    error = getattr(sys, "last_value", None)
    if error is not None:
        channel.report(error)
    channel.stop()


def choose_cluster(num_ranks: int, timeout_s: float, channel: FailureChannel | None = None) -> Cluster:
    """Returns the cluster for `num_ranks`: the job's processes where there are some, else simulated ranks.

    A script under torchrun that has not joined a process group yet joins one here (gloo, or NCCL where there are GPUs).
    """
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        init_process_group_from_env(backend, timeout_s)
    if not dist.is_initialized():
        return SimulatedCluster(num_ranks, timeout_s)
    if dist.get_world_size() != num_ranks:
        raise InvalidInput(
            f"the pool is for {num_ranks} ranks, but the job has {dist.get_world_size()} processes; start it with "
            f"torchrun --nproc-per-node {num_ranks}, or change `ranks` in the strategy file"
        )
    return ProcessCluster(timeout_s, channel)
