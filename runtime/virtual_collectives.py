"""Collectives of simulated ranks: whether all members ask for the same one, and what each of them gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hgraph.errors import PlanError
from runtime.messages import Collective, describe_request, reduce_in_order
from runtime.requests import AllGather, AllReduce, AllToAll, ReduceScatter

__all__ = ["check_match", "complete"]


def check_match(first: int, first_request: Collective, second: int, second_request: Collective) -> None:
    """Raises `PlanError` where two ranks ask for different collectives."""
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


def complete(group: tuple[int, ...], meeting: Mapping[int, Collective]) -> dict[int, Any]:
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
