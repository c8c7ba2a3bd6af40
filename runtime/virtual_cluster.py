"""The virtual cluster: N simulated ranks in one process, in lockstep and deterministic.

Each rank is a generator of requests (`runtime/requests.py`). Ranks advance in ascending order, each until it yields a
request that cannot complete yet. Collectives complete when every member has asked for the same one; reductions run in
group order; a send is copied and does not block. What real processes would get wrong in silence is an error here:
members that ask for different collectives, messages of the wrong shape, a deadlock, a message nobody receives.
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
    Message,
    check_request,
    complete_alone,
    describe_request,
    messages_of,
    reduce_in_order,
    tensor_text,
)
from runtime.requests import AllGather, AllReduce, AllToAll, Exchange, RankGenerator, Receive, ReduceScatter, Request

__all__ = ["VirtualCluster"]


class VirtualCluster:
    """Runs one generator per rank.

    Attributes: `num_ranks`; `log`, every message of the last run in order of completion, a collective once (with the
    bytes of all members) and a message once (as `send`).
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.log: list[Message] = []
        self._logs: dict[int, list[Message]] = {}

    def log_of(self, rank: int) -> list[Message]:
        """Returns the messages of `rank` in the last run, in the order it asked for them."""
        return self._logs.get(rank, [])

    def run(self, generators: Mapping[int, RankGenerator[Any]]) -> dict[int, Any]:
        """Returns what the generator of each rank returned.

        Raises `PlanError` on a mismatch, a deadlock or a message that is never received; an exception inside a
        generator gets a note that names the rank. All generators are closed in the end.
        """
        self.log = []
        self._logs = {rank: [] for rank in generators}
        lockstep = _Lockstep(self.num_ranks, generators, self.log, self._logs)
        try:
            return lockstep.run()
        finally:
            for generator in generators.values():
                generator.close()


@dataclass(slots=True)
class _Rank:
    """Where one rank stands: the request it waits for, or the answer it is given next."""

    number: int
    generator: RankGenerator[Any]
    waiting: Request | None = None
    received: list[Tensor | None] = field(default_factory=list)
    answer: Any = None
    finished: bool = False
    result: Any = None


class _Lockstep:
    def __init__(
        self,
        num_ranks: int,
        generators: Mapping[int, RankGenerator[Any]],
        log: list[Message],
        logs: dict[int, list[Message]],
    ) -> None:
        self.num_ranks = num_ranks
        self.ranks = {rank: _Rank(rank, generators[rank]) for rank in sorted(generators)}
        self.log, self.logs = log, logs
        self.mailboxes: dict[tuple[int, int, int], deque[Tensor]] = {}
        self.meetings: dict[frozenset[int], dict[int, Collective]] = {}

    def run(self) -> dict[int, Any]:
        while not all(rank.finished for rank in self.ranks.values()):
            advanced = [self._advance_noted(rank) for rank in self.ranks.values()]
            if not any(advanced):
                raise PlanError(self._deadlock_text())
        left = [f"{sender} -> {receiver} (tag {tag})" for (sender, receiver, tag), box in self.mailboxes.items() if box]
        if left:
            raise PlanError(f"messages sent and never received: {', '.join(left)}")
        return {number: rank.result for number, rank in self.ranks.items()}

    def _advance_noted(self, rank: _Rank) -> bool:
        try:
            return self._advance(rank)
        except Exception as error:
            error.add_note(f"on rank {rank.number} of the virtual cluster")
            raise

    def _advance(self, rank: _Rank) -> bool:
        """Returns whether `rank` could do anything."""
        if isinstance(rank.waiting, Exchange):
            self._complete_exchange(rank, rank.waiting)
        advanced = False
        while rank.waiting is None and not rank.finished:
            advanced = True
            answer, rank.answer = rank.answer, None
            try:
                request = rank.generator.send(answer)
            except StopIteration as stop:
                rank.finished, rank.result = True, stop.value
                break
            self._offer(rank, request)
        return advanced

    @torch.no_grad()
    def _offer(self, rank: _Rank, request: Request) -> None:
        check_request(rank.number, request, self.num_ranks)
        entries = messages_of(rank.number, request)
        self.logs[rank.number].extend(entries)
        rank.waiting = request
        if isinstance(request, Exchange):
            self.log.extend(entry for entry in entries if entry.kind == "send")
            for send in request.sends:
                box = self.mailboxes.setdefault((rank.number, send.peer, send.tag), deque())
                box.append(send.tensor.detach().clone(memory_format=torch.contiguous_format))
            rank.received = [None] * len(request.receives)
            self._complete_exchange(rank, request)
        elif len(request.group) == 1:
            rank.waiting, rank.answer = None, complete_alone(request)
        else:
            self._meet(rank, request)

    def _complete_exchange(self, rank: _Rank, request: Exchange) -> None:
        """Takes what has arrived, in order of `receives`, and completes the exchange when nothing is missing."""
        for index, receive in enumerate(request.receives):
            box = self.mailboxes.get((receive.peer, rank.number, receive.tag))
            if rank.received[index] is not None or not box:
                continue
            tensor = box.popleft()
            _check_message(rank.number, receive, tensor, request.label)
            rank.received[index] = tensor
        if all(tensor is not None for tensor in rank.received):
            rank.waiting, rank.answer = None, rank.received

    def _meet(self, rank: _Rank, request: Collective) -> None:
        meeting = self.meetings.setdefault(frozenset(request.group), {})
        for other, other_request in meeting.items():
            _check_match(other, other_request, rank.number, request)
        meeting[rank.number] = request
        if len(meeting) < len(request.group):
            return
        del self.meetings[frozenset(request.group)]
        self._log_collective(request.group, meeting)
        for number, answer in _complete(request.group, meeting).items():
            self.ranks[number].waiting, self.ranks[number].answer = None, answer

    def _log_collective(self, group: tuple[int, ...], meeting: Mapping[int, Collective]) -> None:
        entries = [entry for number in group for entry in messages_of(number, meeting[number])]
        num_bytes = sum(entry.num_bytes for entry in entries)
        self.log.append(Message(entries[0].kind, group, num_bytes, entries[0].label))

    def _deadlock_text(self) -> str:
        lines = [f"  rank {rank.number} {self._wait_text(rank)}" for rank in self.ranks.values()]
        return "\n".join(["deadlock: no rank can advance", *lines])

    def _wait_text(self, rank: _Rank) -> str:
        request = rank.waiting
        if request is None:
            return "has finished"
        if isinstance(request, Exchange):
            missing = [
                f"rank {receive.peer} (tag {receive.tag}, {tensor_text(receive.shape, receive.dtype)})"
                for receive, tensor in zip(request.receives, rank.received, strict=True)
                if tensor is None
            ]
            return f"waits in exchange {request.label!r} for a message from {', '.join(missing)}"
        present = self.meetings[frozenset(request.group)]
        absent = [str(number) for number in request.group if number not in present]
        return f"waits for ranks {', '.join(absent)} in {describe_request(request)}"


def _check_message(rank: int, receive: Receive, tensor: Tensor, label: str) -> None:
    if tuple(tensor.shape) == tuple(receive.shape) and tensor.dtype == receive.dtype:
        return
    raise PlanError(
        f"exchange {label!r}: rank {rank} expected {tensor_text(receive.shape, receive.dtype)} "
        f"from rank {receive.peer} (tag {receive.tag}), got {tensor_text(tensor.shape, tensor.dtype)}"
    )


def _check_match(first: int, first_request: Collective, second: int, second_request: Collective) -> None:
    if _signature(first_request) == _signature(second_request) and _pair_fits(
        first, first_request, second, second_request
    ):
        return
    raise PlanError(
        f"mismatch: ranks {first} and {second} ask for different collectives\n"
        f"  rank {first}: {describe_request(first_request)}\n"
        f"  rank {second}: {describe_request(second_request)}"
    )


def _signature(request: Collective) -> tuple[object, ...]:
    """Returns what must be equal on all members."""
    common = (type(request).__name__, tuple(request.group), request.label)
    if isinstance(request, AllReduce):
        return (*common, request.op, request.tensor.dtype, tuple(request.tensor.shape))
    if isinstance(request, AllGather):
        return (*common, request.tensor.dtype, tuple(map(tuple, request.shapes)))
    if isinstance(request, ReduceScatter):
        shapes = tuple(tuple(chunk.shape) for chunk in request.chunks)
        return (*common, request.op, request.chunks[0].dtype, shapes)
    return (*common, request.chunks[0].dtype)


def _pair_fits(first: int, first_request: Collective, second: int, second_request: Collective) -> bool:
    """Returns whether two members of an all-to-all send each other the shapes they expect."""
    if not isinstance(first_request, AllToAll) or not isinstance(second_request, AllToAll):
        return True
    at_first, at_second = first_request.group.index(first), first_request.group.index(second)
    return tuple(first_request.chunks[at_second].shape) == tuple(second_request.shapes[at_first]) and tuple(
        second_request.chunks[at_first].shape
    ) == tuple(first_request.shapes[at_second])


def _complete(group: tuple[int, ...], meeting: Mapping[int, Collective]) -> dict[int, Any]:
    """Returns the answer of each member; no two answers share memory."""
    requests = [meeting[number] for number in group]
    first = requests[0]
    if isinstance(first, AllReduce):
        total = reduce_in_order([request.tensor for request in requests], first.op)  # type: ignore[union-attr]
        return {number: _overwrite(request.tensor, total) for number, request in meeting.items()}  # type: ignore[union-attr]
    if isinstance(first, AllGather):
        return {number: [_copy(request.tensor) for request in requests] for number in group}  # type: ignore[union-attr]
    columns = {number: [request.chunks[at] for request in requests] for at, number in enumerate(group)}  # type: ignore[union-attr]
    if isinstance(first, ReduceScatter):
        return {number: reduce_in_order(terms, first.op) for number, terms in columns.items()}
    return {number: [_copy(chunk) for chunk in chunks] for number, chunks in columns.items()}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _overwrite(tensor: Tensor, value: Tensor) -> Tensor:
    """Returns the tensor of the request, overwritten as an all-reduce does (a copy where not contiguous)."""
    return tensor.copy_(value) if tensor.is_contiguous() else value.clone()
