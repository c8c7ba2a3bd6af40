"""What one rank does in a reshard plan, worked out once: slices, shapes and the order of writes.

Invariants
----------
- Free dims are never cut, so nothing here depends on their length; `Region.lengths` fills it in.
- Both ranks of a pair list the moves between them in the order of the plan, so a message needs no header.
- Writes are in the order of the plan. A write into elements that nothing has written before is a copy, whatever it is
  in the plan: combining with the neutral element changes nothing. `is_covered` says whether copies fill the buffer.
- A scratch buffer is the smallest box that holds what shares elements among all that is written and read there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hgraph.reshard_plan import Collective, Combine, Destination, Move, Origin, ReshardPlan
from hgraph.shard_map import Box, Piece, box_numel, box_shape, intersect, relative, shard_map

__all__ = ["LocalCollective", "LocalPhase", "PreparedReshard", "Region", "Write", "prepare"]


@dataclass(frozen=True, slots=True)
class Region:
    """Part of a local buffer: the slices that select it, and its shape but for the free dims.

    `scratch` is the number of the scratch buffer, None for a source or target buffer.
    """

    slices: tuple[slice, ...]
    shape: tuple[int, ...]
    free_dims: tuple[int, ...] = ()
    scratch: int | None = None

    def lengths(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the region's shape where the tensor has the global shape `shape`."""
        if not self.free_dims:
            return self.shape
        return tuple(shape[dim] if dim in self.free_dims else length for dim, length in enumerate(self.shape))


@dataclass(frozen=True, slots=True)
class Write:
    """One write into the target buffer, or into scratch where `target` says so.

    What is written is a local region, a part of a message, or a part of a collective's result.

    `peer` and `index` select the part: `index` in the message from `peer`; with `peer` None, the local `region` of
    buffer `origin`, or, where `collective` is given, part `index` of its result.
    """

    target: Region
    combine: Combine
    index: int = 0
    peer: int | None = None
    collective: int | None = None
    origin: Origin = "source"
    region: Region | None = None


@dataclass(frozen=True, slots=True)
class LocalCollective:
    """This rank's part of a collective: what it reads (one region per chunk) and the shapes of what it gets."""

    kind: str
    group: tuple[int, ...]
    combine: Combine
    origin: Origin
    reads: tuple[Region | None, ...]
    receives: tuple[Region | None, ...]


@dataclass(frozen=True, slots=True)
class LocalPhase:
    """This rank's part of a phase. Messages are lists of regions, by peer, in ascending order of peer."""

    collectives: tuple[LocalCollective, ...]
    sends: tuple[tuple[int, tuple[tuple[Origin, Region], ...]], ...]
    receives: tuple[tuple[int, tuple[Region, ...]], ...]
    writes: tuple[Write, ...]


@dataclass(frozen=True, slots=True)
class PreparedReshard:
    """A plan as one rank sees it.

    `source` and `target` are the whole local buffers, None where the rank has none; `scratch` are the buffers in which
    it sums for others. `is_all_reduce`: the rank does nothing but reduce its whole buffer in place. `direct`: the
    target is the value of the only write.
    """

    plan: ReshardPlan
    rank: int
    source: Region | None
    target: Region | None
    phases: tuple[LocalPhase, ...]
    is_covered: bool
    is_all_reduce: bool
    direct: bool
    scratch: tuple[Region, ...] = ()


def prepare(plan: ReshardPlan, rank: int) -> PreparedReshard:
    """Returns the part of `rank` in `plan`; it holds for every length of the plan's free dims."""
    concrete = plan.at([max(length, 1) if dim in plan.free_dims else length for dim, length in enumerate(plan.shape)])
    return _Preparation(concrete, rank).prepare(plan)


class _Preparation:
    def __init__(self, plan: ReshardPlan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.source = _box_of(shard_map(plan.source, plan.shape).pieces, rank)
        self.target = _box_of(shard_map(plan.target, plan.shape).pieces, rank)
        self.scratch = _join_boxes(_scratch_uses(plan, rank))
        self.written: list[Box] = []
        self.num_copied = 0

    def prepare(self, plan: ReshardPlan) -> PreparedReshard:
        phases = tuple(self._phase(phase) for phase in self.plan.phases)
        num_elements = 0 if self.target is None else box_numel(self.target)
        writes = [write for phase in phases for write in phase.writes]
        is_one_copy = len(writes) == 1 and writes[0].combine == "copy" and writes[0].target.scratch is None
        whole = is_one_copy and self.num_copied == num_elements
        return PreparedReshard(
            plan=plan,
            rank=self.rank,
            source=None if self.source is None else self._region(self.source, self.source),
            target=None if self.target is None else self._region(self.target, self.target),
            phases=phases,
            is_covered=self.num_copied == num_elements,
            is_all_reduce=whole and self._is_all_reduce(phases),
            direct=whole,
            scratch=tuple(self._region(box, box, number) for number, box in enumerate(self.scratch)),
        )

    def _is_all_reduce(self, phases: Sequence[LocalPhase]) -> bool:
        collectives = [collective for phase in phases for collective in phase.collectives]
        only = len(collectives) == 1 and not any(phase.sends or phase.receives for phase in phases)
        return only and collectives[0].kind == "all_reduce" and self.source == self.target

    def _phase(self, operations: Sequence[Move | Collective]) -> LocalPhase:
        collectives: list[LocalCollective] = []
        sends: dict[int, list[tuple[Origin, Region]]] = {}
        receives: dict[int, list[Region]] = {}
        writes: list[Write] = []
        for operation in operations:
            if isinstance(operation, Collective):
                if self.rank in operation.ranks:
                    writes.extend(self._collective_writes(operation, len(collectives)))
                    collectives.append(self._collective(operation))
            elif operation.sender == self.rank:
                region = self._read(operation.box, operation.origin)
                if operation.receiver == self.rank:
                    write = self._write(operation.box, operation.combine, operation.destination)
                    writes.append(replace(write, origin=operation.origin, region=region))
                else:
                    sends.setdefault(operation.receiver, []).append((operation.origin, region))
            elif operation.receiver == self.rank:
                parts = receives.setdefault(operation.sender, [])
                write = self._write(operation.box, operation.combine, operation.destination)
                writes.append(replace(write, index=len(parts), peer=operation.sender))
                parts.append(write.target)
        return LocalPhase(
            tuple(collectives),
            tuple((peer, tuple(sends[peer])) for peer in sorted(sends)),
            tuple((peer, tuple(receives[peer])) for peer in sorted(receives)),
            tuple(writes),
        )

    def _collective(self, operation: Collective) -> LocalCollective:
        at = operation.ranks.index(self.rank)
        contributed, received = operation.contributed[at], operation.received[at]
        if operation.kind in ("all_reduce", "all_gather"):
            reads = [contributed]
            receives = list(operation.contributed)
        elif operation.kind == "reduce_scatter":
            reads = list(operation.received)
            receives = [received]
        else:
            reads = [_common(contributed, box) for box in operation.received]
            receives = [_common(box, received) for box in operation.contributed]
        return LocalCollective(
            operation.kind,
            operation.ranks,
            operation.combine,
            operation.origin,
            tuple(self._read(box, operation.origin) if box_numel(box) else None for box in reads),
            tuple(self._region(box, received) if box_numel(box) else None for box in receives),
        )

    def _collective_writes(self, operation: Collective, number: int) -> Iterator[Write]:
        received = operation.received[operation.ranks.index(self.rank)]
        parts = [received]
        if operation.kind in ("all_gather", "all_to_all"):
            parts = [_common(box, received) for box in operation.contributed]
        for index, box in enumerate(parts):
            if box_numel(box):
                yield replace(self._write(box, "copy"), index=index, collective=number)

    def _write(self, box: Box, combine: Combine, destination: Destination = "target") -> Write:
        if destination == "scratch":
            return Write(self._scratch_region(box), combine)
        assert self.target is not None, f"rank {self.rank} has no target buffer in {self.plan}"
        if combine == "copy" or all(intersect(box, earlier) is None for earlier in self.written):
            combine = "copy"
            self.num_copied += box_numel(box)
        self.written.append(box)
        return Write(self._region(box, self.target), combine)

    def _read(self, box: Box, origin: Origin) -> Region:
        if origin == "scratch":
            return self._scratch_region(box)
        buffer = self.source if origin == "source" else self.target
        assert buffer is not None, f"rank {self.rank} has no {origin} buffer in {self.plan}"
        return self._region(box, buffer)

    def _scratch_region(self, box: Box) -> Region:
        numbers = [number for number, buffer in enumerate(self.scratch) if intersect(box, buffer) == box]
        assert numbers, f"rank {self.rank} has no scratch buffer for {box} in {self.plan}"
        return self._region(box, self.scratch[numbers[0]], numbers[0])

    def _region(self, box: Box, origin: Box, scratch: int | None = None) -> Region:
        free = self.plan.free_dims
        slices = tuple(slice(None) if dim in free else selected for dim, selected in enumerate(relative(box, origin)))
        return Region(slices, box_shape(box), free, scratch)


def _scratch_uses(plan: ReshardPlan, rank: int) -> Iterator[Box]:
    """Yields what `rank` writes into scratch or reads there."""
    for operation in itertools.chain(*plan.phases):
        if isinstance(operation, Collective):
            if operation.origin == "scratch" and rank in operation.ranks:
                yield operation.contributed[operation.ranks.index(rank)]
        elif (operation.destination == "scratch" and operation.receiver == rank) or (
            operation.origin == "scratch" and operation.sender == rank
        ):
            yield operation.box


def _join_boxes(boxes: Iterable[Box]) -> list[Box]:
    """Returns disjoint boxes that hold `boxes`: those that share elements are joined."""
    found: list[Box] = []
    for box in boxes:
        while (met := next((other for other in found if intersect(box, other) is not None), None)) is not None:
            found.remove(met)
            ends = zip(box, met, strict=True)
            box = tuple((min(a, c), max(b, d)) for (a, b), (c, d) in ends)
        found.append(box)
    return found


def _box_of(pieces: Sequence[Piece], rank: int) -> Box | None:
    return next((piece.box for piece in pieces if piece.rank == rank), None)


def _common(first: Box, second: Box) -> Box:
    """Returns the common part, an empty box where there is none."""
    common = intersect(first, second)
    return tuple((start, start) for start, _ in first) if common is None else common
