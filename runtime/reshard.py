"""Runs a reshard plan on one rank, as a generator of requests.

All moves between two ranks in one phase travel in one message. Reads of a phase come before its writes; writes are in
the order of the plan, so sums do not depend on which message came first. A rank that sums terms for others keeps them
in scratch buffers, which live as long as the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hgraph.errors import InvalidInput
from hgraph.reshard_plan import Combine, Origin, ReshardPlan
from runtime.requests import AllGather, AllReduce, AllToAll, Exchange, RankGenerator, Receive, ReduceScatter, Send
from runtime.reshard_steps import LocalCollective, LocalPhase, PreparedReshard, Region, Write, prepare

__all__ = ["PreparedReshard", "combine_into", "neutral_value", "prepare", "run_reshard"]


def run_reshard(
    plan: ReshardPlan | PreparedReshard,
    rank: int,
    tensor: Tensor | None,
    *,
    label: str,
    dtype: torch.dtype,
    device: torch.device | None = None,
    shape: Sequence[int] | None = None,
    may_overwrite: bool = False,
) -> RankGenerator[Tensor | None]:
    """Returns what `rank` holds under the plan's target, None where it holds nothing.

    `tensor` is what it holds under the source (None where nothing). `shape` is the global shape where the lengths of
    free dims are others than the plan's. The result is contiguous and may share memory with `tensor`; `may_overwrite`
    allows an all-reduce in place. A hot path gives the plan as `prepare(plan, rank)` and keeps that.

    Raises `InvalidInput` where `tensor` is not what the source annotation says.
    """
    prepared = plan if isinstance(plan, PreparedReshard) else prepare(plan, rank)
    lengths = prepared.plan.shape if shape is None else tuple(shape)
    _check_source(prepared, tensor, lengths, label)
    if tensor is not None and tensor.dtype != dtype:
        tensor, may_overwrite = tensor.to(dtype), True
    if prepared.plan.is_nothing:
        return tensor
    if prepared.is_all_reduce:
        assert tensor is not None
        return (yield _all_reduce_request(prepared, tensor, label, may_overwrite))
    run = _Run(prepared, tensor, lengths, label, dtype, device)
    for phase in prepared.phases:
        yield from run.phase(phase)
    return run.target


def neutral_value(combine: str | None, dtype: torch.dtype) -> float | int:
    """Returns what changes nothing when it is combined: 0 for a sum, the smallest value for a max."""
    if combine != "max":
        return 0
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def combine_into(target: Tensor, value: Tensor, combine: Combine) -> None:
    """Writes `value` into `target`, or combines it with what is there."""
    if combine == "copy":
        target.copy_(value)
    elif combine == "sum":
        target.add_(value)
    else:
        torch.maximum(target, value, out=target)


def _check_source(prepared: PreparedReshard, tensor: Tensor | None, shape: Sequence[int], label: str) -> None:
    expected = None if prepared.source is None else prepared.source.lengths(shape)
    got = None if tensor is None else tuple(tensor.shape)
    if expected == got:
        return
    raise InvalidInput(
        f"reshard {label!r}: rank {prepared.rank} expected {'nothing' if expected is None else list(expected)}, "
        f"got {'nothing' if got is None else list(got)}, of a tensor {list(shape)} as {prepared.plan.source}"
    )


def _all_reduce_request(prepared: PreparedReshard, tensor: Tensor, label: str, may_overwrite: bool) -> AllReduce:
    (collective,) = (collective for phase in prepared.phases for collective in phase.collectives)
    operand = tensor if may_overwrite else tensor.clone(memory_format=torch.contiguous_format)
    return AllReduce(collective.group, operand, "max" if collective.combine == "max" else "sum", label)


class _Run:
    """The buffers of one rank during one run."""

    def __init__(
        self,
        prepared: PreparedReshard,
        tensor: Tensor | None,
        shape: Sequence[int],
        label: str,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> None:
        self.prepared, self.source, self.shape, self.label = prepared, tensor, shape, label
        self.dtype = dtype
        self.device = tensor.device if tensor is not None else device
        self.target = None if prepared.target is None or prepared.direct else self._new_target(prepared.target)
        self.scratch = [
            torch.empty(region.lengths(shape), dtype=dtype, device=self.device) for region in prepared.scratch
        ]

    def _new_target(self, region: Region) -> Tensor:
        lengths = region.lengths(self.shape)
        if self.prepared.is_covered:
            return torch.empty(lengths, dtype=self.dtype, device=self.device)
        plan = self.prepared.plan
        value = neutral_value(plan.target.reduce or plan.source.reduce, self.dtype)
        return torch.full(lengths, value, dtype=self.dtype, device=self.device)

    def phase(self, phase: LocalPhase) -> RankGenerator[None]:
        results = []
        for collective in phase.collectives:
            results.append((yield from self._collective(collective)))
        messages = yield from self._exchange(phase)
        values = [self._value(write, results, messages) for write in phase.writes]
        if self.prepared.direct and values:
            self.target = values[0].contiguous()
            return
        for write, value in zip(phase.writes, values, strict=True):
            number = write.target.scratch
            buffer = self.target if number is None else self.scratch[number]
            assert buffer is not None
            combine_into(buffer[write.target.slices], value, write.combine)

    def _read(self, origin: Origin, region: Region) -> Tensor:
        if region.scratch is not None:
            return self.scratch[region.scratch][region.slices]
        buffer = self.source if origin == "source" else self.target
        assert buffer is not None
        return buffer[region.slices]

    def _value(self, write: Write, results: list[list[Tensor]], messages: dict[int, list[Tensor]]) -> Tensor:
        if write.collective is not None:
            return results[write.collective][write.index]
        if write.peer is not None:
            return messages[write.peer][write.index]
        assert write.region is not None
        return self._read(write.origin, write.region)

    def _exchange(self, phase: LocalPhase) -> RankGenerator[dict[int, list[Tensor]]]:
        """Returns the parts of each peer's message."""
        if not phase.sends and not phase.receives:
            return {}
        sends = []
        for peer, parts in phase.sends:
            flat = [self._read(origin, region).reshape(-1) for origin, region in parts]
            sends.append(Send(peer, flat[0] if len(flat) == 1 else torch.cat(flat)))
        shapes = {peer: [region.lengths(self.shape) for region in regions] for peer, regions in phase.receives}
        receives = [Receive(peer, (sum(map(math.prod, lengths)),), self.dtype) for peer, lengths in shapes.items()]
        received = yield Exchange(sends, receives, self.label)
        messages = {}
        for message, (peer, lengths) in zip(received, shapes.items(), strict=True):
            parts = message.split([math.prod(part) for part in lengths])
            messages[peer] = [part.view(length) for part, length in zip(parts, lengths, strict=True)]
        return messages

    def _collective(self, collective: LocalCollective) -> RankGenerator[list[Tensor]]:
        """Returns the parts of the result."""
        chunks = [self._chunk(collective.origin, region) for region in collective.reads]
        group, label = collective.group, self.label
        op = "max" if collective.combine == "max" else "sum"
        if collective.kind == "all_reduce":
            operand = chunks[0].clone(memory_format=torch.contiguous_format)
            return [(yield AllReduce(group, operand, op, label))]  # type: ignore[arg-type]
        if collective.kind == "reduce_scatter":
            return [(yield ReduceScatter(group, chunks, op, label))]  # type: ignore[arg-type]
        shapes = tuple((0,) if region is None else region.lengths(self.shape) for region in collective.receives)
        if collective.kind == "all_gather":
            return (yield AllGather(group, chunks[0], shapes, label))
        return (yield AllToAll(group, chunks, shapes, label))

    def _chunk(self, origin: Origin, region: Region | None) -> Tensor:
        if region is None:
            return torch.empty((0,), dtype=self.dtype, device=self.device)
        return self._read(origin, region)
