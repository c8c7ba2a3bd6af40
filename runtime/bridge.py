"""Bridges: many tensors from one layout to another by one plan, bucket by bucket.

Used for parameters (optimizer layout to the compute layout of a strategy, cast on the way out) and for gradients (terms
of all replicas to their owner in the optimizer layout, one hop; summed inside a node first where the plan says so).
Slices, sizes and the order of writes are worked out once (`runtime/bridge_steps.py`); a run packs each message in one
batch of copies and unpacks all messages of a level in a few.

Invariants
----------
- Every rank builds the bridge from the same plan, so a message needs no header. Within a level of a bucket there is one
  message per pair of ranks.
- Levels begin in the order (bucket, level) on every rank, so messages of one pair are sent in the order in which they
  are received, and ranks cannot wait for each other in a circle.
- At most two buckets are in flight: while one travels, the next is packed and sent; it takes the buffer of the one
  before. So messages and sums take at most `peak_extra_bytes` at any time.
- Terms are combined in the order of the plan, whatever arrives first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from hgraph.bridge_plan import BridgePlan
from hgraph.errors import InvalidInput
from hgraph.reshard_plan import Combine
from runtime.bridge_steps import LocalBucket, Part, Step, prepare_buckets
from runtime.buffer_pool import BufferPool
from runtime.requests import Await, Exchange, Post, Posted, RankGenerator, Receive, Send, Signal, Wait
from runtime.reshard import neutral_value

__all__ = ["Bridge", "LaterSources", "Sources", "arrived", "ended", "landed", "posted"]

Sources = Mapping[str, Tensor | None]


@dataclass(frozen=True, slots=True)
class LaterSources:
    """Sources that become final one by one: `tensor(name)` is asked for after the event `ready(name)`."""

    ready: Callable[[str], str]
    tensor: Callable[[str], Tensor]


_FIRST_TAG = 1
"""Messages between stages have tag 0."""


class Bridge:
    """The part of one rank in a bridge plan.

    `dtype` is that of messages, sums and results: float32 or float64 where terms are summed. `pool` lends the buffers
    (by default one of its own); `lane` (0 or 1) keeps the messages of two bridges apart that run at one time.

    Attributes: `names` of all tensors; `num_messages`, how many this rank sends; `total_bytes`, what crosses between
    all ranks; `peak_extra_bytes`, the most that messages and sums of this rank take at one time.
    """

    def __init__(
        self,
        plan: BridgePlan,
        rank: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        *,
        pool: BufferPool | None = None,
        lane: int = 0,
    ) -> None:
        self.plan, self.rank, self.dtype, self.device, self.lane = plan, rank, dtype, device, lane
        self.pool = pool or BufferPool(device)
        self.names = tuple(tensor.reshard.name for tensor in plan.tensors)
        self.local, self.buckets = prepare_buckets(plan, rank)
        self.slots = _slots(self.buckets)
        self._elements_sent = _elements_sent(plan)
        self.num_messages = sum(len(step.sends) for bucket in self.buckets for step in bucket.steps)

    @property
    def num_buckets(self) -> int:
        return len(self.buckets)

    @property
    def total_bytes(self) -> int:
        return int(self._elements_sent.sum()) * self.dtype.itemsize

    @property
    def peak_extra_bytes(self) -> int:
        """The sizes of both buffers: of the largest bucket and, where there are several, the largest that meets it."""
        return sum(self.slots) * self.dtype.itemsize

    def holds_source(self, name: str) -> bool:
        """Returns whether this rank holds part of tensor `name` under its source layout."""
        return self.local[self.plan.positions[name]].source is not None

    def bytes_sent(self, rank: int) -> int:
        """Returns what `rank`, which need not be this one, sends to others in one run."""
        return int(self._elements_sent[rank]) * self.dtype.itemsize if rank < len(self._elements_sent) else 0

    def run(
        self,
        tensors: Sources | LaterSources,
        label: str,
        *,
        results: dict[str, Tensor] | None = None,
    ) -> RankGenerator[dict[str, Tensor]]:
        """Returns, by name, what this rank holds under the targets, in the bridge's dtype.

        `tensors` holds what it has under the sources, in any dtype; names of which it holds nothing may be missing or
        None. A tensor that need not move is returned itself where it has the dtype already. The sources must stay as
        they are until the end.

        As a task: a bucket waits for those of its `LaterSources` that this rank holds. `results` is filled as tensors
        arrive; once all are there that this rank holds, the event `arrived(label)` is signalled, and at the end
        `ended(label)`. `posted(label, k)` and `landed(label, k)` say that bucket k has left and has come.
        """
        run = _Run(self, tensors, label, {} if results is None else results)
        yield from run.all_buckets()
        return run.results


def arrived(label: str) -> str:
    """Returns the event that everything is there that a rank gets from a bridge."""
    return f"{label}: all arrived"


def ended(label: str) -> str:
    """Returns the event that a bridge needs its sources and its buffers no more."""
    return f"{label}: ended"


def posted(label: str, bucket: int) -> str:
    """Returns the event that a rank has posted its first messages of a bucket."""
    return f"{label}: bucket {bucket} posted"


def landed(label: str, bucket: int) -> str:
    """Returns the event that all messages of a bucket from and to a rank have come."""
    return f"{label}: bucket {bucket} landed"


@dataclass(frozen=True, slots=True)
class _Flight:
    """One level of a bucket on its way: its buffer, and the sums in it."""

    bucket: LocalBucket
    step: Step
    posted: Posted
    buffer: Tensor
    sums: Sequence[Tensor]

    @property
    def is_last(self) -> bool:
        return self.step is self.bucket.steps[-1]


class _Run:
    """The buffers of one rank during one run; `sources` and `results` by the tensor's position in the plan."""

    def __init__(
        self,
        bridge: Bridge,
        tensors: Sources | LaterSources,
        label: str,
        results: dict[str, Tensor],
    ) -> None:
        self.bridge, self.label, self.results = bridge, label, results
        self.later = tensors if isinstance(tensors, LaterSources) else None
        self.sources = self._checked(tensors) if isinstance(tensors, Mapping) else {}
        self.targets: dict[int, Tensor] = {}
        self._missing: set[int] = set()

    def all_buckets(self) -> RankGenerator[None]:
        bridge = self.bridge
        self._missing = {bucket.number for bucket in bridge.buckets if bucket.targets}
        if not self._missing:
            yield Signal(arrived(self.label))
        buffers = [bridge.pool.take(size, bridge.dtype) for size in bridge.slots]
        try:
            flight: _Flight | None = None
            for bucket in bridge.buckets:
                yield from self._await_sources(bucket)
                self._new_targets(bucket)
                if bucket.steps:
                    flight = yield from self._send(bucket, buffers[0], flight)
                    buffers.reverse()
                else:
                    self._copy_here(bucket, ())
                    yield from self._complete(bucket)
            yield from self._land(flight)
        finally:
            for buffer in buffers:
                bridge.pool.give_back(buffer)
        yield Signal(ended(self.label))

    def _await_sources(self, bucket: LocalBucket) -> RankGenerator[None]:
        if self.later is None:
            return
        for position in bucket.sources:
            name = self.bridge.names[position]
            yield Await(self.later.ready(name))
            tensor = self.later.tensor(name)
            self._check(position, tensor)
            self.sources[position] = tensor

    def _send(self, bucket: LocalBucket, buffer: Tensor, previous: _Flight | None) -> RankGenerator[_Flight]:
        """Sends a bucket level by level, each once the one before has landed; the last is left on its way.

        `previous`, the bucket before, lands once the first level has been sent.
        """
        sums = [buffer[start : start + math.prod(shape)].view(shape) for start, shape in bucket.sums]
        flight: _Flight | None = None
        for step in bucket.steps:
            yield from self._land(flight)
            exchange = self._exchange(step, buffer, sums, f"{self.label}, bucket {bucket.number}.{step.level}")
            handle = yield Post(exchange)
            if flight is None:
                yield Signal(posted(self.label, bucket.number))
                self._copy_here(bucket, sums)
                yield from self._land(previous)
            flight = _Flight(bucket, step, handle, buffer, sums)
        assert flight is not None
        return flight

    @torch.no_grad()
    def _exchange(self, step: Step, buffer: Tensor, sums: Sequence[Tensor], label: str) -> Exchange:
        bridge, tag = self.bridge, _FIRST_TAG + self.bridge.lane
        sends = []
        for message in step.sends:
            flat = buffer[message.start : message.start + message.num_elements]
            pieces = [
                piece.view(part.shape) for piece, part in zip(flat.split(message.sizes), message.parts, strict=True)
            ]
            torch._foreach_copy_(pieces, [self._read(part, sums) for part in message.parts])
            sends.append(Send(message.peer, flat, tag))
        receives = [
            Receive(
                message.peer,
                (message.num_elements,),
                bridge.dtype,
                tag,
                buffer[message.start : message.start + message.num_elements],
            )
            for message in step.receives
        ]
        return Exchange(sends, receives, label)

    def _land(self, flight: _Flight | None) -> RankGenerator[None]:
        """Waits for a level and writes what it brought."""
        if flight is None:
            return
        received = yield Wait(flight.posted)
        self._write(flight, received)
        if flight.is_last:
            yield Signal(landed(self.label, flight.bucket.number))
            yield from self._complete(flight.bucket)

    @torch.no_grad()
    def _write(self, flight: _Flight, received: Sequence[Tensor]) -> None:
        pieces = [buffer.split(message.sizes) for message, buffer in zip(flight.step.receives, received, strict=True)]
        for combine, writes in flight.step.layers:
            targets = [self._read(write.target, flight.sums) for write in writes]
            values = [pieces[write.message][write.part].view(write.target.shape) for write in writes]
            _combine_all(targets, values, combine)

    def _complete(self, bucket: LocalBucket) -> RankGenerator[None]:
        if bucket.number in self._missing:
            self._missing.remove(bucket.number)
            if not self._missing:
                yield Signal(arrived(self.label))

    @torch.no_grad()
    def _copy_here(self, bucket: LocalBucket, sums: Sequence[Tensor]) -> None:
        if bucket.copies:
            targets = [self._read(target, sums) for target, _ in bucket.copies]
            torch._foreach_copy_(targets, [self._read(source, sums) for _, source in bucket.copies])

    def _read(self, part: Part, sums: Sequence[Tensor]) -> Tensor:
        if part.origin == "scratch":
            return sums[part.sum]
        held = self.sources if part.origin == "source" else self.targets
        return held[part.tensor][part.slices]

    def _new_targets(self, bucket: LocalBucket) -> None:
        for position in bucket.targets:
            self.targets[position] = self._new_target(position)
            self.results[self.bridge.names[position]] = self.targets[position]

    def _new_target(self, position: int) -> Tensor:
        local, dtype, device = self.bridge.local[position], self.bridge.dtype, self.bridge.device
        if local.is_in_place:
            return self.sources[position].to(dtype)
        assert local.target is not None
        if local.is_covered:
            return torch.empty(local.target, dtype=dtype, device=device)
        return torch.full(local.target, neutral_value(local.reduce, dtype), dtype=dtype, device=device)

    def _checked(self, tensors: Sources) -> dict[int, Tensor]:
        """Returns the sources that this rank holds, each of the right shape."""
        bridge = self.bridge
        unknown = [name for name in tensors if name not in bridge.plan.positions]
        if unknown:
            raise InvalidInput(f"bridge: expected tensors of its plan, got {', '.join(unknown)}")
        for position, name in enumerate(bridge.names):
            self._check(position, tensors.get(name))
        given = ((bridge.plan.positions[name], tensor) for name, tensor in tensors.items())
        return {position: tensor for position, tensor in given if tensor is not None}

    def _check(self, position: int, tensor: Tensor | None) -> None:
        bridge, expected = self.bridge, self.bridge.local[position].source
        got = None if tensor is None else tuple(tensor.shape)
        if expected != got:
            reshard = bridge.plan.tensors[position].reshard
            raise InvalidInput(
                f"bridge: {bridge.names[position]}: rank {bridge.rank} expected {_shape_text(expected)}, got "
                f"{_shape_text(got)}, of {list(reshard.shape)} as {reshard.source}"
            )


def _shape_text(shape: Sequence[int] | None) -> str:
    return "nothing" if shape is None else str(list(shape))


def _combine_all(targets: list[Tensor], values: list[Tensor], combine: Combine) -> None:
    if combine == "copy":
        torch._foreach_copy_(targets, values)
    elif combine == "sum":
        torch._foreach_add_(targets, values)
    else:
        torch._foreach_maximum_(targets, values)


def _slots(buckets: Sequence[LocalBucket]) -> list[int]:
    """Returns the elements of the buffers that buckets take in turn: one for one bucket, else two."""
    sizes = [bucket.num_elements for bucket in buckets if bucket.steps]
    return [max(sizes[turn::2]) for turn in range(min(2, len(sizes)))]


def _elements_sent(plan: BridgePlan) -> numpy.ndarray:
    """Returns, per rank, the elements that it sends in one run."""
    routes = plan.routes
    return numpy.bincount(routes.sender, plan.elements()[routes.bundle], minlength=plan.topology.num_ranks)
