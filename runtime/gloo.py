"""Real processes: drives the generator of one rank through `torch.distributed`.

The same requests as on the virtual cluster (`runtime/requests.py`), the same log. A tensor that is sent is not copied:
its owner leaves it unchanged until the end of the generator. Written for gloo. Under NCCL messages have no tags: those
of one pair of ranks must be received in the order in which they were sent; tasks run in the main thread there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hgraph.errors import HydraulisError, RankFailed
from runtime.failure_channel import FailureChannel
from runtime.messages import (
    Event,
    Message,
    check_request,
    complete_alone,
    describe_request,
    messages_of,
    reduce_in_order,
)
from runtime.pending_sends import PendingSends
from runtime.process_groups import ProcessGroups
from runtime.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Await,
    Exchange,
    Join,
    Post,
    Posted,
    RankGenerator,
    Receive,
    ReduceScatter,
    Request,
    Send,
    Signal,
    Start,
    Wait,
)
from runtime.tasks import Tasks

__all__ = ["ProcessTransport"]

REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class ProcessTransport:
    """Drives generators on this rank, one after another.

    Every wait ends after `timeout_s` (by default the groups' own) in `RankFailed`, which names what was waited for and,
    with a `channel`, the rank that failed first. `overlap`: whether tasks run in threads of their own, by default where
    the backend is gloo. Attributes: `log`, the messages of the last generator, those of a task where it was joined;
    `trace`, what was signalled and when (seconds of `time.monotonic`, which processes of one machine share).
    """

    def __init__(
        self,
        groups: ProcessGroups,
        timeout_s: float | None = None,
        channel: FailureChannel | None = None,
        *,
        overlap: bool | None = None,
    ) -> None:
        self.groups = groups
        self.timeout_s = groups.timeout_s if timeout_s is None else timeout_s
        self.channel = channel
        self.log: list[Message] = []
        self.trace: list[Event] = []
        self._overlap = groups.backend == "gloo" if overlap is None else overlap
        self._pending = PendingSends(self.timeout_s)

    def drive(self, generator: RankGenerator[Any]) -> Any:
        """Returns what the generator returned, after everything it sent has been received."""
        self.log, self.trace = [], []
        tasks = Tasks(self._perform, self._note, self._report, self._overlap)
        answer: Any = None
        try:
            while True:
                tasks.check()
                try:
                    request = generator.send(answer)
                except StopIteration as stop:
                    tasks.end()
                    with self._waiting("what it sent to be received"):
                        self._pending.wait_all()
                    return stop.value
                answer = self._answer(request, tasks)
        finally:
            tasks.abandon()
            generator.close()

    def close(self) -> None:
        """Ends the thread that looks after sends; the process groups stay."""
        self._pending.close()

    def _note(self, event: str) -> None:
        self.trace.append(Event(time.monotonic(), self.groups.rank, event))

    def _report(self, error: BaseException) -> None:
        if self.channel is not None:
            self.channel.report(error)

    def _answer(self, request: Request, tasks: Tasks) -> Any:
        """The answer to a request of the rank's own generator."""
        if isinstance(request, Start):
            return tasks.start(request.generator, request.label)
        if isinstance(request, Signal):
            return tasks.signal(request.event)
        if isinstance(request, Await):
            return tasks.wait_for(request.event)
        if isinstance(request, Join):
            result, log = tasks.join(request.task)
            self.log.extend(log)
            return result
        return self._perform(request, self.log)

    @torch.no_grad()
    def _perform(self, request: Request, log: list[Message]) -> Any:
        """Carries out a request that communicates. Called from the threads of tasks, too."""
        check_request(self.groups.rank, request, self.groups.num_ranks)
        log.extend(messages_of(self.groups.rank, request))
        if isinstance(request, Exchange):
            return self._exchange(request)
        if isinstance(request, Post):
            return self._post(request.exchange)
        if isinstance(request, Wait):
            return self._wait(request.posted)
        assert isinstance(request, AllReduce | AllGather | ReduceScatter | AllToAll), "tasks take all others"
        if len(request.group) == 1:
            return complete_alone(request)
        with self._waiting(request):
            if isinstance(request, AllReduce):
                return self._all_reduce(request)
            if isinstance(request, AllGather):
                return self._all_gather(request)
            if isinstance(request, ReduceScatter):
                return self._reduce_scatter(request)
            return self._all_to_all(request.group, request.chunks, request.shapes)

    def _all_reduce(self, request: AllReduce) -> Tensor:
        tensor = request.tensor.contiguous()
        if tensor.numel() > 0:
            dist.all_reduce(tensor, REDUCE_OPS[request.op], self.groups.group(request.group))
        return tensor

    def _all_gather(self, request: AllGather) -> list[Tensor]:
        """Exchanges directly: takes uneven shapes as they are, and is faster than gloo's own ring."""
        chunks = [request.tensor] * len(request.group)
        return self._all_to_all(request.group, chunks, request.shapes)

    def _reduce_scatter(self, request: ReduceScatter) -> Tensor:
        """Exchanges the terms and reduces them here, in group order: deterministic, and faster than gloo's own."""
        own = request.chunks[request.group.index(self.groups.rank)]
        shapes = (tuple(own.shape),) * len(request.group)
        return reduce_in_order(self._all_to_all(request.group, request.chunks, shapes), request.op)

    def _all_to_all(
        self, group: tuple[int, ...], chunks: list[Tensor], shapes: tuple[tuple[int, ...], ...]
    ) -> list[Tensor]:
        order = sorted(range(len(group)), key=group.__getitem__)
        sent = torch.cat([chunks[at].reshape(-1) for at in order])
        send_sizes = [chunks[at].numel() for at in order]
        receive_sizes = [math.prod(shapes[at]) for at in order]
        received = sent.new_empty(sum(receive_sizes))
        dist.all_to_all_single(received, sent, receive_sizes, send_sizes, self.groups.group(group))
        parts: list[Tensor] = [received] * len(group)
        for at, part in zip(order, received.split(receive_sizes), strict=True):
            parts[at] = part.view(shapes[at])
        return parts

    def _exchange(self, request: Exchange) -> list[Tensor]:
        """Issues everything, then waits for the receives alone. Empty messages are not sent."""
        received = [self._buffer(receive) for receive in request.receives]
        operations, meanings = self._operations(request, received)
        if not operations:
            return received
        with self._waiting(request):
            works = dist.batch_isend_irecv(operations)
        if len(works) != len(operations):  # one coalesced handle; waiting for it blocks the stream, not the rank
            for work in works:
                work.wait()
            return received
        for work, operation, meaning in zip(works, operations, meanings, strict=True):
            if not isinstance(meaning, Receive):
                with self._waiting(request):
                    self._pending.add(work, operation.tensor, operation.peer, operation.tag, request.label)
        for work, meaning in zip(works, meanings, strict=True):
            if isinstance(meaning, Receive):
                text = f"exchange {request.label!r}, a message from rank {meaning.peer} (tag {meaning.tag})"
                with self._waiting(text):
                    work.wait(timedelta(seconds=self.timeout_s))
        return received

    def _post(self, exchange: Exchange) -> Posted:
        """Issues everything."""
        received = [self._buffer(receive) for receive in exchange.receives]
        operations, meanings = self._operations(exchange, received)
        works: list[dist.Work] = []
        if operations:
            with self._waiting(exchange):
                works = dist.batch_isend_irecv(operations)
        return Posted(exchange, (works, operations, meanings, received))

    def _wait(self, posted: Posted) -> list[Tensor]:
        """Waits for receives and sends."""
        works, operations, meanings, received = posted.state
        posted.state = None
        if len(works) != len(operations):  # one coalesced handle; waiting for it blocks the stream, not the rank
            for work in works:
                work.wait()
            return received
        for work, meaning in zip(works, meanings, strict=True):
            what = "from" if isinstance(meaning, Receive) else "to"
            text = f"exchange {posted.exchange.label!r}, a message {what} rank {meaning.peer} (tag {meaning.tag})"
            with self._waiting(text):
                work.wait(timedelta(seconds=self.timeout_s))
        return received

    def _operations(self, request: Exchange, received: list[Tensor]) -> tuple[list[dist.P2POp], list[Send | Receive]]:
        pairs = self.groups.pairs
        operations: list[dist.P2POp] = []
        meanings: list[Send | Receive] = []
        for send in request.sends:
            if send.tensor.numel() > 0:
                tensor = send.tensor.contiguous()
                operations.append(dist.P2POp(dist.isend, tensor, send.peer, pairs, send.tag))
                meanings.append(send)
        for receive, buffer in zip(request.receives, received, strict=True):
            if buffer.numel() > 0:
                operations.append(dist.P2POp(dist.irecv, buffer, receive.peer, pairs, receive.tag))
                meanings.append(receive)
        return operations, meanings

    def _buffer(self, receive: Receive) -> Tensor:
        if receive.buffer is not None:
            return receive.buffer
        device = torch.device("cuda", torch.cuda.current_device()) if self.groups.backend == "nccl" else "cpu"
        return torch.empty(receive.shape, dtype=receive.dtype, device=device)

    @contextmanager
    def _waiting(self, request: Request | str) -> Iterator[None]:
        """Turns what communication raises into `RankFailed` with what was waited for and who failed first."""
        start_s = time.monotonic()
        try:
            yield
        except HydraulisError:
            raise
        except RuntimeError as error:
            raise RankFailed(self._failure_text(request, error, time.monotonic() - start_s)) from error

    def _failure_text(self, request: Request | str, error: RuntimeError, waited_s: float) -> str:
        what = request if isinstance(request, str) else describe_request(request)
        head = f"rank {self.groups.rank}: waited {waited_s:.1f} s (limit {self.timeout_s:g} s) for {what}"
        lines = [head, f"  {str(error).splitlines()[0]}"]
        if self.channel is not None:
            lines.append(f"  {self.channel.diagnose()}")
        return "\n".join(lines)
