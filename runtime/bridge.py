"""Bridges: many tensors from one layout to another in one exchange, one message per pair of ranks.

Used for parameters (optimizer layout to the compute layout of a strategy, cast on the way out) and for gradients (terms
of all replicas to their owner in the optimizer layout, one hop). Slices, sizes and the order of writes are worked out
once; a run packs each message in one batch of copies and unpacks all of them in a few.

Invariants
----------
- Every rank builds the bridge from the same plans in the same order, so a message needs no header.
- Terms are combined in the order of the plan, whatever arrives first: writes that meet are in different layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hgraph.errors import InvalidInput, PlanError
from hgraph.reshard_plan import Combine, Move, ReshardPlan
from hgraph.shard_map import Box, box_numel, intersect
from runtime.requests import Exchange, RankGenerator, Receive, Send
from runtime.reshard import neutral_value
from runtime.reshard_steps import LocalPhase, PreparedReshard, Region, Write, prepare

__all__ = ["Bridge"]


@dataclass(frozen=True, slots=True)
class _Part:
    """A region of one named tensor, and where it lies in the message of its pair."""

    name: str
    region: Region


@dataclass(frozen=True, slots=True)
class _Message:
    """All parts that travel between this rank and `peer` in one direction."""

    peer: int
    parts: tuple[_Part, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class _NamedWrite:
    """A write into a named target; from a message, `index` counts through the whole message of the pair."""

    name: str
    write: Write
    index: int


class Bridge:
    """The part of one rank in resharding all of `plans`, whose phases are moves from the source.

    Attributes: `names`; `num_messages`, how many this rank sends; `total_bytes`, what crosses between all ranks.

    Raises `PlanError` for a plan with collectives, with several phases or with free dims.
    """

    def __init__(
        self, plans: Mapping[str, ReshardPlan], rank: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        for name, plan in plans.items():
            _check_plan(name, plan)
        self.rank, self.dtype, self.device = rank, dtype, device
        self.names = tuple(plans)
        self._prepared = {name: prepare(plan, rank) for name, plan in plans.items()}
        self._elements_sent = _elements_sent(plans.values())
        phases = {name: item.phases[0] for name, item in self._prepared.items() if item.phases}
        self._sends = _messages(
            (name, peer, [r for _, r in parts]) for name, p in phases.items() for peer, parts in p.sends
        )
        self._receives = _messages((name, peer, parts) for name, p in phases.items() for peer, parts in p.receives)
        self._layers = _layers(phases)
        self.num_messages = len(self._sends)

    def holds_source(self, name: str) -> bool:
        """Returns whether this rank holds part of tensor `name` under its source layout."""
        return self._prepared[name].source is not None

    def bytes_sent(self, rank: int) -> int:
        """Returns what `rank`, which need not be this one, sends to others in one run."""
        return self._elements_sent[rank] * self.dtype.itemsize

    @property
    def total_bytes(self) -> int:
        return self._elements_sent.total() * self.dtype.itemsize

    @torch.no_grad()
    def _pack(self, message: _Message, tensors: Mapping[str, Tensor]) -> Tensor:
        buffer = torch.empty(message.num_elements, dtype=self.dtype, device=self.device)
        pieces = [
            piece.view(part.region.shape)
            for piece, part in zip(buffer.split(message.sizes), message.parts, strict=True)
        ]
        torch._foreach_copy_(pieces, [tensors[part.name][part.region.slices] for part in message.parts])
        return buffer

    def run(self, tensors: Mapping[str, Tensor | None], label: str) -> RankGenerator[dict[str, Tensor]]:
        """Returns, by name, what this rank holds under the targets, in the bridge's dtype.

        `tensors` holds what it has under the sources, in any dtype; names of which it holds nothing may be missing or
        None. A tensor that need not move is returned itself where it has the dtype already.
        """
        sources = self._checked(tensors)
        results = {name: self._new_target(name, sources) for name, item in self._prepared.items() if item.target}
        received = []
        if self._sends or self._receives:
            sends = [Send(message.peer, self._pack(message, sources)) for message in self._sends]
            receives = [Receive(message.peer, (message.num_elements,), self.dtype) for message in self._receives]
            received = yield Exchange(sends, receives, label)
        self._write(results, sources, received)
        return results

    @torch.no_grad()
    def _write(self, results: Mapping[str, Tensor], sources: Mapping[str, Tensor], received: Sequence[Tensor]) -> None:
        parts = {
            message.peer: buffer.split(message.sizes) for message, buffer in zip(self._receives, received, strict=True)
        }
        for combine, writes in self._layers:
            targets = [results[item.name][item.write.target.slices] for item in writes]
            values = [
                sources[item.name][_local(item.write).slices].to(self.dtype)
                if item.write.peer is None
                else parts[item.write.peer][item.index].view(item.write.target.shape)
                for item in writes
            ]
            _combine_all(targets, values, combine)

    def _new_target(self, name: str, sources: Mapping[str, Tensor]) -> Tensor:
        prepared = self._prepared[name]
        if prepared.plan.is_nothing:
            return sources[name].to(self.dtype)
        assert prepared.target is not None
        if prepared.is_covered:
            return torch.empty(prepared.target.shape, dtype=self.dtype, device=self.device)
        value = neutral_value(prepared.plan.target.reduce or prepared.plan.source.reduce, self.dtype)
        return torch.full(prepared.target.shape, value, dtype=self.dtype, device=self.device)

    def _checked(self, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Returns the sources that this rank holds, each of the right shape."""
        unknown = [name for name in tensors if name not in self._prepared]
        if unknown:
            raise InvalidInput(f"bridge: expected tensors of its plans, got {', '.join(unknown)}")
        sources = {}
        for name, prepared in self._prepared.items():
            tensor = tensors.get(name)
            _check_source(name, prepared, tensor)
            if tensor is not None:
                sources[name] = tensor
        return sources


def _check_plan(name: str, plan: ReshardPlan) -> None:
    if plan.free_dims:
        raise PlanError(f"bridge: {name}: expected a plan of fixed lengths, got free dims {plan.free_dims}")
    if len(plan.phases) > 1 or not all(isinstance(operation, Move) for phase in plan.phases for operation in phase):
        raise PlanError(f"bridge: {name}: expected one phase of moves; plan with collectives=False")


def _check_source(name: str, prepared: PreparedReshard, tensor: Tensor | None) -> None:
    expected = None if prepared.source is None else prepared.source.shape
    got = None if tensor is None else tuple(tensor.shape)
    if expected != got:
        raise InvalidInput(
            f"bridge: {name}: rank {prepared.rank} expected {'nothing' if expected is None else list(expected)}, "
            f"got {'nothing' if got is None else list(got)}, of {list(prepared.plan.shape)} as {prepared.plan.source}"
        )


def _elements_sent(plans: Iterable[ReshardPlan]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for plan in plans:
        for operation in plan.phases[0] if plan.phases else ():
            if isinstance(operation, Move) and operation.sender != operation.receiver:
                counts[operation.sender] += box_numel(operation.box)
    return counts


def _messages(parts: Iterable[tuple[str, int, Sequence[Region]]]) -> tuple[_Message, ...]:
    """Returns one message per peer, in ascending order, its parts in the order given."""
    by_peer: dict[int, list[_Part]] = {}
    for name, peer, regions in parts:
        by_peer.setdefault(peer, []).extend(_Part(name, region) for region in regions)
    return tuple(
        _Message(peer, tuple(by_peer[peer]), tuple(_numel(part.region) for part in by_peer[peer]))
        for peer in sorted(by_peer)
    )


def _numel(region: Region) -> int:
    return box_numel(_box(region))


def _box(region: Region) -> Box:
    return tuple((selected.start, selected.stop) for selected in region.slices)


def _local(write: Write) -> Region:
    assert write.region is not None
    return write.region


def _layers(phases: Mapping[str, LocalPhase]) -> tuple[tuple[Combine, tuple[_NamedWrite, ...]], ...]:
    """Returns the writes in layers that run one after another; no two writes of a layer touch one element.

    A write's depth is one more than that of any earlier write it meets, so each element sees its terms in the order of
    the plan.
    """
    layers: dict[tuple[int, Combine], list[_NamedWrite]] = {}
    in_message: Counter[int] = Counter()
    for name, phase in phases.items():
        earlier: list[tuple[Box, int]] = []
        for write in phase.writes:
            box = _box(write.target)
            depth = max((depth + 1 for other, depth in earlier if intersect(box, other) is not None), default=0)
            earlier.append((box, depth))
            index = 0 if write.peer is None else in_message[write.peer] + write.index
            layers.setdefault((depth, write.combine), []).append(_NamedWrite(name, write, index))
        in_message.update({peer: len(regions) for peer, regions in phase.receives})
    return tuple((combine, tuple(layers[depth, combine])) for depth, combine in sorted(layers))


def _combine_all(targets: list[Tensor], values: list[Tensor], combine: Combine) -> None:
    if combine == "copy":
        torch._foreach_copy_(targets, values)
    elif combine == "sum":
        torch._foreach_add_(targets, values)
    else:
        torch._foreach_maximum_(targets, values)
