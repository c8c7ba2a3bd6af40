"""What one rank does in a bridge, worked out once from the plan: messages, sums on the way and the order of writes.

The moves of a pattern are worked out once for all tensors that are cut alike and have the same shape, so that a model
of many equal layers costs little more than one layer. Every message and every sum has a fixed place in one flat buffer
per bucket.

Invariants
----------
- Both ranks of a pair list the moves between them in the order of the plan, so a message needs no header.
- Writes that run together do not meet; those that meet run in the order of the plan.
- What a rank sends before it has received anything of a bucket comes from source buffers.
- The places of a bucket do not overlap and fill exactly what the plan states (`BridgePlan.buffer_elements`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from hgraph.bridge_plan import BridgePlan
from hgraph.bundles import Tensor, scale_box
from hgraph.errors import PlanError
from hgraph.reshard_plan import Combine, Move
from hgraph.shard_map import Box, ShardMap, box_numel, box_shape, intersect, relative, shard_map

__all__ = ["LocalBucket", "LocalTensor", "Message", "Part", "Step", "prepare_buckets"]

Slices: TypeAlias = tuple[slice, ...]
Shape: TypeAlias = tuple[int, ...]


class Part(NamedTuple):
    """A region of a buffer of tensor `tensor` (its position in the plan): of its source, its target, or sum `sum`."""

    tensor: int
    origin: str
    slices: Slices
    shape: Shape
    sum: int = -1


@dataclass(frozen=True, slots=True)
class Message:
    """All that goes between this rank and `peer` in one level of a bucket; `start` is its place in the buffer."""

    peer: int
    parts: tuple[Part, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def num_elements(self) -> int:
        return sum(self.sizes)


class Write(NamedTuple):
    """Puts part `part` of received message `message` into `target`."""

    target: Part
    message: int
    part: int


Layers: TypeAlias = tuple[tuple[Combine, tuple[Write, ...]], ...]


@dataclass(frozen=True, slots=True)
class Step:
    """This rank's part of one level of a bucket; `layers` are the writes of what it receives."""

    level: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    layers: Layers


@dataclass(frozen=True, slots=True)
class LocalBucket:
    """This rank's part of a bucket.

    `sources` and `targets` are the tensors (positions in the plan) of which it holds something before and after;
    `copies` are pairs (target, source) on this rank; `sums` are places and shapes in the buffer.
    """

    number: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    copies: tuple[tuple[Part, Part], ...]
    steps: tuple[Step, ...]
    sums: tuple[tuple[int, Shape], ...]
    num_elements: int


@dataclass(frozen=True, slots=True)
class _Receipt:
    """One move to this rank: from whom, where to, and after how many writes that it meets."""

    peer: int
    part: Part
    combine: Combine
    depth: int


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """This rank's part of one tensor; parts have no tensor yet, sums count from 0.

    `source` and `target` are the local shapes, None where it holds nothing. `is_covered`: writes fill the whole target.
    """

    source: Shape | None
    target: Shape | None
    is_in_place: bool
    is_covered: bool
    reduce: str | None
    copies: tuple[tuple[Part, Part], ...]
    sends: tuple[tuple[tuple[int, Part], ...], ...]
    receipts: tuple[tuple[_Receipt, ...], ...]
    sums: tuple[Shape, ...]


def prepare_buckets(plan: BridgePlan, rank: int) -> tuple[list[LocalTensor], list[LocalBucket]]:
    """Returns what `rank` holds and does of every tensor, and of every bucket."""
    known: dict[tuple[int, Shape], LocalTensor] = {}
    maps: dict[int, tuple[ShardMap, ShardMap]] = {}
    tensors = []
    for tensor in plan.tensors:
        key = tensor.pattern, tensor.scale
        if key not in known:
            if tensor.pattern not in maps:
                pattern = plan.patterns[tensor.pattern]
                source, target = pattern.source, pattern.target
                maps[tensor.pattern] = shard_map(source, pattern.shape), shard_map(target, pattern.shape)
            known[key] = _prepare_tensor(plan, tensor, rank, *maps[tensor.pattern])
        tensors.append(known[key])
    buckets = [_prepare_bucket(number, bucket, tensors) for number, bucket in enumerate(plan.buckets)]
    return tensors, buckets


def _prepare_tensor(plan: BridgePlan, tensor: Tensor, rank: int, source: ShardMap, target: ShardMap) -> LocalTensor:
    boxes = {"source": _box_of(source, rank, tensor.scale), "target": _box_of(target, rank, tensor.scale)}
    held = [None if box is None else box_shape(box) for box in boxes.values()]
    draft = _Draft(rank, tensor.reshard.name, boxes)
    for level, moves in enumerate(plan.moves(tensor, rank)):
        draft.begin_level()
        for move in moves:
            draft.add(level, move)
    reduce = target.reduce or source.reduce
    covered = held[1] is None or draft.num_copied == math.prod(held[1])
    return LocalTensor(
        held[0],
        held[1],
        plan.patterns[tensor.pattern].is_in_place,
        covered,
        reduce,
        tuple(draft.copies),
        tuple(map(tuple, draft.sends)),
        tuple(map(tuple, draft.receipts)),
        tuple(map(box_shape, draft.sums)),
    )


def _box_of(held: ShardMap, rank: int, scale: Sequence[int]) -> Box | None:
    return next((scale_box(piece.box, scale) for piece in held.pieces if piece.rank == rank), None)


class _Draft:
    """The moves of one tensor that a rank takes part in, as they are read from the plan."""

    def __init__(self, rank: int, name: str, boxes: dict[str, Box | None]) -> None:
        self.rank, self.name, self.boxes = rank, name, boxes
        self.copies: list[tuple[Part, Part]] = []
        self.sends: list[list[tuple[int, Part]]] = []
        self.receipts: list[list[_Receipt]] = []
        self.sums: list[Box] = []
        self.num_copied = 0
        self._written: list[tuple[str, Box, int]] = []

    def begin_level(self) -> None:
        self.sends.append([])
        self.receipts.append([])
        self._written = []

    def add(self, level: int, move: Move) -> None:
        if move.sender == self.rank == move.receiver:
            if level or move.origin != "source" or move.combine != "copy":
                raise PlanError(f"bridge: {self.name}: expected copies of the source alone on a rank, got {move}")
            self.copies.append((self._target(move), self._part(move.origin, move.box)))
        elif move.sender == self.rank:
            self.sends[-1].append((move.receiver, self._part(move.origin, move.box)))
        else:
            self.receipts[-1].append(_Receipt(move.sender, self._target(move), move.combine, self._depth(move)))

    def _target(self, move: Move) -> Part:
        if move.destination == "scratch" and move.combine == "copy":
            if any(intersect(move.box, other) for other in self.sums):
                raise PlanError(f"bridge: {self.name}: rank {self.rank} sums two values of one place, {move.box}")
            self.sums.append(move.box)
        elif move.destination == "target" and move.combine == "copy":
            self.num_copied += box_numel(move.box)
        return self._part(move.destination, move.box)

    def _part(self, origin: str, box: Box) -> Part:
        if origin == "scratch":
            if box not in self.sums:
                raise PlanError(f"bridge: {self.name}: rank {self.rank} reads or adds to a sum it has not, {box}")
            shape = box_shape(box)
            return Part(-1, origin, tuple(slice(0, length) for length in shape), shape, self.sums.index(box))
        held = self.boxes[origin]
        if held is None:
            raise PlanError(f"bridge: {self.name}: rank {self.rank} has no {origin} buffer")
        return Part(-1, origin, relative(box, held), box_shape(box))

    def _depth(self, move: Move) -> int:
        """One more than that of any earlier write of this level that it meets."""
        met = [
            depth + 1
            for place, box, depth in self._written
            if place == move.destination and intersect(box, move.box) is not None
        ]
        depth = max(met, default=0)
        self._written.append((move.destination, move.box, depth))
        return depth


def _prepare_bucket(number: int, bucket: Sequence[int], tensors: Sequence[LocalTensor]) -> LocalBucket:
    own = [(position, tensors[position]) for position in bucket]
    first_sum: dict[int, int] = {}
    shapes: list[Shape] = []
    for position, local in own:
        first_sum[position] = len(shapes)
        shapes.extend(local.sums)

    def place(position: int, part: Part) -> Part:
        return part._replace(tensor=position, sum=part.sum if part.sum < 0 else first_sum[position] + part.sum)

    copies = [(place(at, target), place(at, source)) for at, local in own for target, source in local.copies]
    steps: list[Step] = []
    filled = 0
    for level in range(max((len(local.sends) for _, local in own), default=0)):
        sent = [(peer, place(at, part)) for at, local in own for peer, part in local.sends[level]]
        received = [
            replace(receipt, part=place(at, receipt.part)) for at, local in own for receipt in local.receipts[level]
        ]
        if not sent and not received:
            continue
        assert steps or all(part.origin == "source" for _, part in sent), "sent before it is there"
        sends = _messages(sent, filled)
        filled += sum(message.num_elements for message in sends)
        receives = _messages([(receipt.peer, receipt.part) for receipt in received], filled)
        filled += sum(message.num_elements for message in receives)
        steps.append(Step(level, sends, receives, _layers(receives, received)))
    sums = []
    for shape in shapes:
        sums.append((filled, shape))
        filled += math.prod(shape)
    return LocalBucket(
        number,
        tuple(position for position, local in own if local.source is not None),
        tuple(position for position, local in own if local.target is not None),
        tuple(copies),
        tuple(steps),
        tuple(sums),
        filled,
    )


def _messages(parts: Iterable[tuple[int, Part]], start: int) -> tuple[Message, ...]:
    """Returns one message per peer, in ascending order, its parts in the order given."""
    by_peer: dict[int, list[Part]] = {}
    for peer, part in parts:
        by_peer.setdefault(peer, []).append(part)
    messages = []
    for peer in sorted(by_peer):
        sizes = tuple(math.prod(part.shape) for part in by_peer[peer])
        messages.append(Message(peer, tuple(by_peer[peer]), sizes, start))
        start += sum(sizes)
    return tuple(messages)


def _layers(receives: Sequence[Message], receipts: Iterable[_Receipt]) -> Layers:
    """Returns the writes of what is received in layers that run one after another."""
    number = {message.peer: at for at, message in enumerate(receives)}
    next_index: Counter[int] = Counter()
    layers: dict[tuple[int, Combine], list[Write]] = {}
    for receipt in receipts:
        at = number[receipt.peer]
        layers.setdefault((receipt.depth, receipt.combine), []).append(Write(receipt.part, at, next_index[at]))
        next_index[at] += 1
    return tuple((combine, tuple(layers[depth, combine])) for depth, combine in sorted(layers))
