"""Messages as values: what a request sends, in the one form that every driver logs, and the checks all drivers share.

The log of a rank is the list of its messages in the order in which it asked for them, so the logs of the virtual
cluster and of real processes are equal for equal generators. Groups of one rank communicate nothing and log nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hgraph.errors import PlanError
from runtime.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Await,
    Exchange,
    Join,
    Post,
    Receive,
    ReduceScatter,
    Request,
    Signal,
    Start,
    Wait,
)

__all__ = [
    "Collective",
    "Event",
    "Message",
    "check_request",
    "check_task_request",
    "complete_alone",
    "describe_request",
    "messages_of",
    "reduce_in_order",
    "tensor_text",
]

Collective: TypeAlias = AllReduce | AllGather | ReduceScatter | AllToAll

KINDS: dict[type, Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]] = {
    AllReduce: "all_reduce",
    AllGather: "all_gather",
    ReduceScatter: "reduce_scatter",
    AllToAll: "all_to_all",
}


@dataclass(frozen=True, slots=True)
class Message:
    """One entry of a log.

    `ranks` is the group in its order, or (sender, receiver). `num_bytes` is what the rank puts into a collective, or
    the size of the message.
    """

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "receive"]
    ranks: tuple[int, ...]
    num_bytes: int
    label: str
    tag: int = 0

    def __str__(self) -> str:
        separator = "->" if self.kind in ("send", "receive") else ","
        tag = f" tag {self.tag}" if self.tag else ""
        return f"{self.kind} {separator.join(map(str, self.ranks))}{tag} {self.num_bytes} B {self.label!r}"


class Event(NamedTuple):
    """One entry of a trace: what happened on a rank, and when, in seconds or in the order of the virtual cluster."""

    when: float
    rank: int
    text: str


def messages_of(rank: int, request: Request) -> list[Message]:
    """Returns the log entries of one request of `rank`: one for a collective, one per message of an exchange."""
    if isinstance(request, Post):
        request = request.exchange
    if isinstance(request, Exchange):
        sends = [
            Message("send", (rank, send.peer), send.tensor.nbytes, request.label, send.tag) for send in request.sends
        ]
        receives = [
            Message("receive", (receive.peer, rank), _receive_bytes(receive), request.label, receive.tag)
            for receive in request.receives
        ]
        return sends + receives
    if isinstance(request, Wait | Start | Join | Signal | Await) or len(request.group) == 1:
        return []
    return [Message(KINDS[type(request)], request.group, _contributed_bytes(request), request.label)]


def _receive_bytes(receive: Receive) -> int:
    return math.prod(receive.shape) * receive.dtype.itemsize


def _contributed_bytes(request: Collective) -> int:
    if isinstance(request, AllReduce | AllGather):
        return request.tensor.nbytes
    return sum(chunk.nbytes for chunk in request.chunks)


def check_request(rank: int, request: Request, num_ranks: int) -> None:
    """Raises `PlanError` where a request is wrong in itself, whatever the other ranks ask."""
    fault = None
    if isinstance(request, Exchange | Post):
        fault = _exchange_fault(rank, request.exchange if isinstance(request, Post) else request, num_ranks)
    elif isinstance(request, AllReduce | AllGather | ReduceScatter | AllToAll):
        fault = _group_fault(rank, request, num_ranks) or _chunks_fault(rank, request)
    elif not isinstance(request, Wait | Start | Join | Signal | Await):
        raise PlanError(f"rank {rank}: expected a request of runtime.requests, got {type(request).__name__}")
    if fault is not None:
        raise PlanError(f"rank {rank}: {describe_request(request)}: {fault}")


def _exchange_fault(rank: int, request: Exchange, num_ranks: int) -> str | None:
    for peer in [message.peer for message in request.sends] + [message.peer for message in request.receives]:
        if peer == rank:
            return "a rank cannot send to itself; use what it has"
        if not 0 <= peer < num_ranks:
            return f"expected a peer below {num_ranks}, got {peer}"
    return next((fault for receive in request.receives if (fault := _buffer_fault(receive))), None)


def _buffer_fault(receive: Receive) -> str | None:
    buffer = receive.buffer
    if buffer is None:
        return None
    fits = tuple(buffer.shape) == tuple(receive.shape) and buffer.dtype == receive.dtype and buffer.is_contiguous()
    if fits:
        return None
    return (
        f"from rank {receive.peer}: expected a contiguous buffer of {tensor_text(receive.shape, receive.dtype)}, "
        f"got {tensor_text(buffer.shape, buffer.dtype)}"
    )


def check_task_request(label: str, request: object) -> None:
    """Raises `PlanError` where a task asks for what only the generator of the rank itself may."""
    if not isinstance(request, Exchange | Post | Wait | Signal | Await):
        raise PlanError(f"task {label!r}: expected messages, signals and waits for them, got {type(request).__name__}")


def _group_fault(rank: int, request: Collective, num_ranks: int) -> str | None:
    group = request.group
    if rank not in group:
        return f"rank {rank} is not in the group"
    if len(set(group)) != len(group) or min(group) < 0 or max(group) >= num_ranks:
        return f"expected distinct ranks below {num_ranks}"
    return None


def _chunks_fault(rank: int, request: Collective) -> str | None:
    if isinstance(request, AllReduce):
        return None
    count = len(request.shapes if isinstance(request, AllGather) else request.chunks)
    if count != len(request.group):
        return f"expected one chunk per member, {len(request.group)}, got {count}"
    if isinstance(request, AllGather):
        own: Sequence[int] = request.shapes[request.group.index(rank)]
        same = tuple(request.tensor.shape) == tuple(own)
        return None if same else f"announced the shape {tuple(own)}, gave {tuple(request.tensor.shape)}"
    if len({chunk.dtype for chunk in request.chunks}) > 1:
        return f"expected chunks of one dtype, got {[str(chunk.dtype) for chunk in request.chunks]}"
    if isinstance(request, AllToAll) and len(request.shapes) != len(request.group):
        return f"expected one shape per member, {len(request.group)}, got {len(request.shapes)}"
    return None


def complete_alone(request: Collective) -> Any:
    """Returns the result of a collective whose group is this rank alone."""
    if isinstance(request, AllReduce):
        return request.tensor
    if isinstance(request, AllGather):
        return [request.tensor]
    return request.chunks[0] if isinstance(request, ReduceScatter) else [request.chunks[0]]


def reduce_in_order(terms: Sequence[Tensor], op: Literal["sum", "max"]) -> Tensor:
    """Returns a new tensor: the terms reduced in the order given, so that the result is the same on every rank."""
    total = terms[0].clone(memory_format=torch.contiguous_format)
    for term in terms[1:]:
        if op == "sum":
            total.add_(term)
        else:
            torch.maximum(total, term, out=total)
    return total


def tensor_text(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Returns a short text such as `float32[2, 3]`."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def describe_request(request: Request) -> str:
    """Returns one line: kind, label, group or peers, reduction, shapes."""
    if isinstance(request, Post | Wait):
        request = request.exchange if isinstance(request, Post) else request.posted.exchange
    if isinstance(request, Start | Join):
        return f"task {(request.label if isinstance(request, Start) else request.task.label)!r}"
    if isinstance(request, Signal | Await):
        return f"event {request.event!r}"
    if isinstance(request, Exchange):
        peers = [f"to {send.peer} (tag {send.tag})" for send in request.sends]
        peers += [f"from {receive.peer} (tag {receive.tag})" for receive in request.receives]
        return f"exchange {request.label!r} {', '.join(peers) or 'of nothing'}"
    head = f"{KINDS[type(request)]} {request.label!r} over ranks {list(request.group)}"
    if isinstance(request, AllReduce):
        return f"{head}, {request.op} of {tensor_text(request.tensor.shape, request.tensor.dtype)}"
    if isinstance(request, AllGather):
        return f"{head} of {_shapes_text(request.shapes)} {str(request.tensor.dtype).removeprefix('torch.')}"
    chunks = _shapes_text([chunk.shape for chunk in request.chunks])
    dtype = str(request.chunks[0].dtype).removeprefix("torch.") if request.chunks else ""
    op = f", {request.op}" if isinstance(request, ReduceScatter) else ""
    return f"{head}{op} of {chunks} {dtype}"


def _shapes_text(shapes: Sequence[Sequence[int]]) -> str:
    return " ".join(str(list(shape)) for shape in shapes)
