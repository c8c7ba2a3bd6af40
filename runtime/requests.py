"""Communication requests: what a rank's program asks of whoever drives it.

Everything a rank does in a step is one Python generator. Computation happens inside it; wherever ranks must talk it
yields a request and is sent the result. `runtime/gloo.py` (real processes) and `runtime/virtual_cluster.py` (N
simulated ranks in one process, in lockstep) drive the same generators, so the same executables run on both.

Results: `AllReduce` -> the reduced tensor; `AllGather` -> list of tensors in group order; `ReduceScatter` -> this
rank's reduced chunk; `AllToAll` -> list of received tensors in group order; `Exchange` -> list of received tensors in
order of `receives`. A tensor given to a request belongs to the driver until the result is there; an `AllReduce` may be
done in place. Sends of an `Exchange` do not block: a tensor that is sent is left unchanged until the generator ends.

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
    "Exchange",
    "RankGenerator",
    "Receive",
    "ReduceScatter",
    "Request",
    "Send",
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
    peer: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    tag: int = 0


@dataclass(slots=True)
class Exchange:
    """A batch of point-to-point messages; completes when all receives have completed."""

    sends: list[Send] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    label: str = ""


Request: TypeAlias = AllReduce | AllGather | ReduceScatter | AllToAll | Exchange

Result = TypeVar("Result")
RankGenerator: TypeAlias = Generator[Request, Any, Result]
