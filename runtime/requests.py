"""Communication requests: what a rank's program asks of whoever drives it.

Everything a rank does in a step is one Python generator. Computation happens inside it; wherever ranks must talk it
yields a request and is sent the result. `runtime/gloo.py` (real processes) and `runtime/virtual_cluster.py` (N
simulated ranks in one process, in lockstep) drive the same generators, so the same executables run on both.

A rank may run *tasks* beside itself: generators that exchange messages while it computes. `Start` begins one, `Join`
waits for its end; `Signal` and `Await` let the generator and its tasks wait for each other, on one rank. A task asks
for no collective; its messages have tags that no other generator of the rank uses meanwhile. Every post is waited for,
every task joined.

Results: `AllReduce` -> the reduced tensor; `AllGather` -> list of tensors in group order; `ReduceScatter` -> this
rank's reduced chunk; `AllToAll` -> list of received tensors in group order; `Exchange` -> list of received tensors in
order of `receives`; `Post` -> a `Posted`; `Wait` -> as of the exchange that was posted; `Start` -> a `Task`; `Join` ->
what the task returned; `Signal`, `Await` -> None. A tensor given to a request belongs to the driver until the result is
there; an `AllReduce` may be done in place. Sends of an `Exchange` do not block: a tensor that is sent is left unchanged
until the generator ends; those of a `Post` until the `Wait` for it is answered, by when all have been sent.

Every request has a `label` for logs and time-out messages, such as `bridge parameters` or `1F3 send`.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Await",
    "Exchange",
    "Join",
    "Post",
    "Posted",
    "RankGenerator",
    "Receive",
    "ReduceScatter",
    "Request",
    "Send",
    "Signal",
    "Start",
    "Task",
    "Wait",
]


@dataclass(slots=True)
class AllReduce:
    group: tuple[int, ...]
    tensor: Tensor
    op: Literal["sum", "max"] = "sum"
    label: str = ""


@dataclass(slots=True)
class AllGather:
    """`shapes[i]` is the shape that group member i contributes; shapes may differ, empty ones included."""

    group: tuple[int, ...]
    tensor: Tensor
    shapes: tuple[tuple[int, ...], ...]
    label: str = ""


@dataclass(slots=True)
class ReduceScatter:
    """`chunks[i]` is this rank's term for group member i."""

    group: tuple[int, ...]
    chunks: list[Tensor]
    op: Literal["sum", "max"] = "sum"
    label: str = ""


@dataclass(slots=True)
class AllToAll:
    """`chunks[i]` goes to group member i; `shapes[i]` is the shape of what comes from it."""

    group: tuple[int, ...]
    chunks: list[Tensor]
    shapes: tuple[tuple[int, ...], ...]
    label: str = ""


@dataclass(slots=True)
class Send:
    """Messages of one pair of ranks and one tag are received in the order they were sent."""

    peer: int
    tensor: Tensor
    tag: int = 0


@dataclass(slots=True)
class Receive:
    """`buffer`, contiguous and of that shape and dtype, is where the message is put; without one, in a new tensor."""

    peer: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    tag: int = 0
    buffer: Tensor | None = None


@dataclass(slots=True)
class Exchange:
    """A batch of point-to-point messages; completes when all receives have completed."""

    sends: list[Send] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    label: str = ""


@dataclass(eq=False, slots=True)
class Posted:
    """An exchange on its way; `state` belongs to the driver."""

    exchange: Exchange
    state: Any = None


@dataclass(slots=True)
class Post:
    """Begins an exchange, which the same generator waits for once."""

    exchange: Exchange


@dataclass(slots=True)
class Wait:
    """Completes when the messages posted are there and those sent may be overwritten."""

    posted: Posted


@dataclass(eq=False, slots=True)
class Task:
    """A generator that runs beside the one that started it; `state` belongs to the driver."""

    label: str
    state: Any = None


@dataclass(slots=True)
class Start:
    """Begins a task; only the generator of the rank itself may."""

    generator: Generator[Any, Any, Any]
    label: str


@dataclass(slots=True)
class Join:
    task: Task


@dataclass(slots=True)
class Signal:
    """Says on this rank that `event` has happened, once for all; drivers write it into their trace."""

    event: str


@dataclass(slots=True)
class Await:
    """Completes when `event` has been signalled on this rank, at once where it has been before."""

    event: str


Request: TypeAlias = (
    AllReduce | AllGather | ReduceScatter | AllToAll | Exchange | Post | Wait | Start | Join | Signal | Await
)

Result = TypeVar("Result")
RankGenerator: TypeAlias = Generator[Request, Any, Result]
