"""The virtual cluster: N simulated ranks in one process, in lockstep and deterministic.

Each rank is a generator of requests (`runtime/requests.py`). Ranks advance in ascending order, each until it yields a
request that cannot complete yet; so do then its tasks, in the order of their start. Collectives complete when every
member has asked for the same one; reductions run in group order; a send is copied and does not block. What real
processes would get wrong in silence is an error here: members that ask for different collectives, messages of the wrong
shape, a deadlock, a message nobody receives, a post nobody waits for, a task nobody joins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hgraph.errors import PlanError
from runtime.messages import (
    Collective,
    Event,
    Message,
    check_request,
    check_task_request,
    complete_alone,
    describe_request,
    messages_of,
    tensor_text,
)
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
    Signal,
    Start,
    Task,
    Wait,
)
from runtime.virtual_collectives import check_match, complete

__all__ = ["VirtualCluster"]


class VirtualCluster:
    """Runs one generator per rank.

    Attributes: `num_ranks`; `log`, every message of the last run in order of completion, a collective once (with the
    bytes of all members) and a message once (as `send`); `trace`, what was signalled in the last run, in order.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.log: list[Message] = []
        self.trace: list[Event] = []
        self._logs: dict[int, list[Message]] = {}

    def log_of(self, rank: int) -> list[Message]:
        """Returns the messages of `rank` in the last run, in the order it asked for them; a task's at its join."""
        return self._logs.get(rank, [])

    def run(self, generators: Mapping[int, RankGenerator[Any]]) -> dict[int, Any]:
        """Returns what the generator of each rank returned.

        Raises `PlanError` on a mismatch, a deadlock, a message that is never received, a post that is never waited for
        or a task that is never joined; an exception inside a generator gets a note that names the rank. All generators
        are closed in the end.
        """
        lockstep = _Lockstep(self.num_ranks, generators)
        self.log, self.trace = lockstep.log, lockstep.trace
        self._logs = {rank: lines[0].log for rank, lines in lockstep.lines.items()}
        try:
            return lockstep.run()
        finally:
            for line in lockstep.all_lines():
                line.generator.close()


@dataclass(eq=False, slots=True)
class _Line:
    """Where one generator of a rank stands: the request it waits for, or the answer it is given next.

    `task` is None for the generator of the rank itself. `posted` holds, by exchange, what has arrived of it.
    """

    rank: int
    generator: RankGenerator[Any]
    task: Task | None = None
    waiting: Request | None = None
    answer: Any = None
    finished: bool = False
    joined: bool = False
    result: Any = None
    log: list[Message] = field(default_factory=list)
    posted: dict[int, tuple[Exchange, list[Tensor | None]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"rank {self.rank}" if self.task is None else f"rank {self.rank}, task {self.task.label!r}"


class _Lockstep:
    def __init__(self, num_ranks: int, generators: Mapping[int, RankGenerator[Any]]) -> None:
        self.num_ranks = num_ranks
        self.lines = {rank: [_Line(rank, generators[rank])] for rank in sorted(generators)}
        self.log: list[Message] = []
        self.trace: list[Event] = []
        self.mailboxes: dict[tuple[int, int, int], deque[Tensor]] = {}
        self.meetings: dict[frozenset[int], dict[int, Collective]] = {}
        self.events: set[tuple[int, str]] = set()

    def all_lines(self) -> list[_Line]:
        return [line for lines in self.lines.values() for line in lines]

    def run(self) -> dict[int, Any]:
        while not all(line.finished for line in self.all_lines()):
            advanced = [self._advance_rank(rank) for rank in self.lines]
            if not any(advanced):
                raise PlanError(self._deadlock_text())
        self._check_end()
        return {rank: lines[0].result for rank, lines in self.lines.items()}

    def _check_end(self) -> None:
        left = [f"{sender} -> {receiver} (tag {tag})" for (sender, receiver, tag), box in self.mailboxes.items() if box]
        if left:
            raise PlanError(f"messages sent and never received: {', '.join(left)}")
        for line in self.all_lines():
            labels = [repr(exchange.label) for exchange, _ in line.posted.values()]
            if labels:
                raise PlanError(f"{line.name}: posted and never waited for: {', '.join(labels)}")
            if line.task is not None and not line.joined:
                raise PlanError(f"{line.name} was started and never joined")

    def _advance_rank(self, rank: int) -> bool:
        """Returns whether `rank` could do anything; its own generator goes first, then its tasks."""
        advanced = False
        while any(self._advance_noted(line) for line in self.lines[rank]):
            advanced = True
        return advanced

    def _advance_noted(self, line: _Line) -> bool:
        try:
            return self._advance(line)
        except Exception as error:
            error.add_note(f"on rank {line.rank} of the virtual cluster")
            raise

    def _advance(self, line: _Line) -> bool:
        """Returns whether the generator could do anything."""
        if line.waiting is not None:
            self._try_complete(line, line.waiting)
        advanced = False
        while line.waiting is None and not line.finished:
            advanced = True
            answer, line.answer = line.answer, None
            try:
                request = line.generator.send(answer)
            except StopIteration as stop:
                line.finished, line.result = True, stop.value
                break
            self._offer(line, request)
        return advanced

    @torch.no_grad()
    def _offer(self, line: _Line, request: Request) -> None:
        check_request(line.rank, request, self.num_ranks)
        if line.task is not None:
            check_task_request(line.task.label, request)
        entries = messages_of(line.rank, request)
        line.log.extend(entries)
        line.waiting = request
        if isinstance(request, Exchange | Post):
            self.log.extend(entry for entry in entries if entry.kind == "send")
            self._post(line, request.exchange if isinstance(request, Post) else request)
        elif isinstance(request, Start):
            task = Task(request.label)
            task.state = _Line(line.rank, request.generator, task)
            self.lines[line.rank].append(task.state)
            line.waiting, line.answer = None, task
        elif isinstance(request, Signal):
            self.events.add((line.rank, request.event))
            self.trace.append(Event(len(self.trace), line.rank, request.event))
            line.waiting = None
        elif isinstance(request, Wait):
            if id(request.posted.exchange) not in line.posted:
                raise PlanError(f"{line.name}: {describe_request(request)} was not posted here, or has been waited for")
        elif not isinstance(request, Join | Await):
            self._meet(line, request)
        if line.waiting is not None:
            self._try_complete(line, line.waiting)

    def _post(self, line: _Line, exchange: Exchange) -> None:
        for send in exchange.sends:
            box = self.mailboxes.setdefault((line.rank, send.peer, send.tag), deque())
            box.append(send.tensor.detach().clone(memory_format=torch.contiguous_format))
        line.posted[id(exchange)] = (exchange, [None] * len(exchange.receives))

    def _try_complete(self, line: _Line, request: Request) -> None:
        """Gives `line` its answer where what it waits for has happened."""
        if isinstance(request, Post):
            line.waiting, line.answer = None, Posted(request.exchange)
        elif isinstance(request, Exchange | Wait):
            exchange = request if isinstance(request, Exchange) else request.posted.exchange
            self._receive(line)
            received = line.posted[id(exchange)][1]
            if all(tensor is not None for tensor in received):
                del line.posted[id(exchange)]
                line.waiting, line.answer = None, received
        elif isinstance(request, Await):
            if (line.rank, request.event) in self.events:
                line.waiting = None
        elif isinstance(request, Join) and request.task.state.finished:
            task = request.task.state
            task.joined = True
            line.log.extend(task.log)
            line.waiting, line.answer = None, task.result

    @torch.no_grad()
    def _receive(self, line: _Line) -> None:
        """Takes what has arrived, in the order in which it was asked for."""
        for exchange, received in line.posted.values():
            for index, receive in enumerate(exchange.receives):
                box = self.mailboxes.get((receive.peer, line.rank, receive.tag))
                if received[index] is not None or not box:
                    continue
                tensor = box.popleft()
                _check_message(line.rank, receive, tensor, exchange.label)
                received[index] = tensor if receive.buffer is None else receive.buffer.copy_(tensor)

    def _meet(self, line: _Line, request: Collective) -> None:
        if len(request.group) == 1:
            line.waiting, line.answer = None, complete_alone(request)
            return
        meeting = self.meetings.setdefault(frozenset(request.group), {})
        for other, other_request in meeting.items():
            check_match(other, other_request, line.rank, request)
        meeting[line.rank] = request
        if len(meeting) < len(request.group):
            return
        del self.meetings[frozenset(request.group)]
        self._log_collective(request.group, meeting)
        for number, answer in complete(request.group, meeting).items():
            member = self.lines[number][0]
            member.waiting, member.answer = None, answer

    def _log_collective(self, group: tuple[int, ...], meeting: Mapping[int, Collective]) -> None:
        entries = [entry for number in group for entry in messages_of(number, meeting[number])]
        num_bytes = sum(entry.num_bytes for entry in entries)
        self.log.append(Message(entries[0].kind, group, num_bytes, entries[0].label))

    def _deadlock_text(self) -> str:
        lines = [
            f"  {line.name} {self._wait_text(line)}" for line in self.all_lines() if line.task is None or line.waiting
        ]
        return "\n".join(["deadlock: no rank can advance", *lines])

    def _wait_text(self, line: _Line) -> str:
        request = line.waiting
        if request is None:
            return "has finished"
        if isinstance(request, Exchange | Wait):
            exchange = request if isinstance(request, Exchange) else request.posted.exchange
            missing = [
                f"rank {receive.peer} (tag {receive.tag}, {tensor_text(receive.shape, receive.dtype)})"
                for receive, tensor in zip(exchange.receives, line.posted[id(exchange)][1], strict=True)
                if tensor is None
            ]
            return f"waits in exchange {exchange.label!r} for a message from {', '.join(missing)}"
        if isinstance(request, AllReduce | AllGather | ReduceScatter | AllToAll):
            present = self.meetings[frozenset(request.group)]
            absent = [str(number) for number in request.group if number not in present]
            return f"waits for ranks {', '.join(absent)} in {describe_request(request)}"
        return f"waits for {'the end of ' if isinstance(request, Join) else ''}{describe_request(request)}"


def _check_message(rank: int, receive: Receive, tensor: Tensor, label: str) -> None:
    if tuple(tensor.shape) == tuple(receive.shape) and tensor.dtype == receive.dtype:
        return
    raise PlanError(
        f"exchange {label!r}: rank {rank} expected {tensor_text(receive.shape, receive.dtype)} "
        f"from rank {receive.peer} (tag {receive.tag}), got {tensor_text(tensor.shape, tensor.dtype)}"
    )
