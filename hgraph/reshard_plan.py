"""Reshard plans as values: the moves and collectives that turn one annotation of a tensor into another.

Each rank has a *source* buffer (its box under the source annotation) and a *target* buffer (its box under the target
annotation). A plan is a sequence of phases; the operations of one phase run concurrently. An operation reads the
source buffer, or (`origin`) what earlier phases have put into the target buffer or the *scratch* buffer, where a rank
sums terms on their way to others; it writes the target buffer or (`destination`) the scratch buffer. Planned by
`plan_reshard` and `plan_bridge`, proved by `check_reshard`, run by `runtime/reshard.py` and `runtime/bridge.py`.

Invariants
----------
- All boxes are in global coordinates, lie inside `shape` and are not empty; but a rank that gives nothing to an
  all-to-all, or gets nothing from one or from a reduce-scatter, has the `empty_box`.
- A dim in `free_dims` is whole in every box of the plan, so the plan holds for every length of it (`ReshardPlan.at`).
- An operation of a phase never reads what the same phase writes.
- Scratch starts empty: the first write of an element is a "copy", later ones combine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from hgraph.annotation import Annotation
from hgraph.shard_map import Box

if TYPE_CHECKING:
    from hgraph.topology import Topology
    from hgraph.traffic import ReshardCost

__all__ = ["Collective", "Combine", "Destination", "Move", "Operation", "Origin", "ReshardPlan", "empty_box"]

Combine: TypeAlias = Literal["copy", "sum", "max"]
Origin: TypeAlias = Literal["source", "target", "scratch"]
Destination: TypeAlias = Literal["target", "scratch"]


@dataclass(frozen=True, slots=True)
class Move:
    """Copies, or combines into what is there, `box` from rank `sender` to rank `receiver` (local where equal)."""

    sender: int
    receiver: int
    box: Box
    combine: Combine = "copy"
    origin: Origin = "source"
    destination: Destination = "target"


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective over `ranks`, in that order; `contributed[i]` and `received[i]` belong to `ranks[i]`.

    - `all_reduce`: all contribute and receive the same box.
    - `reduce_scatter`: all contribute the union, rank i receives its box, reduced; the boxes make up the union.
    - `all_gather`: rank i contributes its box, all receive the union, which the boxes make up.
    - `all_to_all`: rank i contributes its box and receives its box; each pair exchanges the intersection. What is
      contributed is disjoint and all of it received, by one rank or several.
    """

    kind: Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
    ranks: tuple[int, ...]
    contributed: tuple[Box, ...]
    received: tuple[Box, ...]
    combine: Combine = "copy"
    origin: Origin = "source"


Operation: TypeAlias = Move | Collective


def empty_box(like: Box, free_dims: Sequence[int]) -> Box:
    """Returns the box of who takes no part in an exchange of boxes such as `like`: empty in every dim not free."""
    return tuple(interval if dim in free_dims else (0, 0) for dim, interval in enumerate(like))


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """The phases that turn `source` into `target` for a tensor of global shape `shape`."""

    source: Annotation
    target: Annotation
    shape: tuple[int, ...]
    phases: tuple[tuple[Operation, ...], ...]
    free_dims: tuple[int, ...] = ()

    @property
    def is_nothing(self) -> bool:
        """Whether every rank's target buffer is its source buffer."""
        return not self.phases

    def cost(self, topology: Topology, element_bytes: int) -> ReshardCost:
        """Returns bytes by link class, the least that must move, and predicted ms (`hgraph/traffic.py`)."""
        from hgraph.traffic import reshard_cost

        return reshard_cost(self, topology, element_bytes)

    def at(self, shape: Sequence[int]) -> ReshardPlan:
        """Returns the same plan for other lengths of the free dims."""
        shape = tuple(shape)
        if shape == self.shape:
            return self
        for dim, (old, new) in enumerate(zip(self.shape, shape, strict=True)):
            assert old == new or dim in self.free_dims, f"plan for {self.shape} does not hold for {shape}: dim {dim}"

        def resize(box: Box) -> Box:
            return tuple((0, shape[dim]) if dim in self.free_dims else pair for dim, pair in enumerate(box))

        def resize_operation(operation: Operation) -> Operation:
            if isinstance(operation, Move):
                return replace(operation, box=resize(operation.box))
            return replace(
                operation,
                contributed=tuple(map(resize, operation.contributed)),
                received=tuple(map(resize, operation.received)),
            )

        phases = tuple(tuple(map(resize_operation, phase)) for phase in self.phases)
        return replace(self, shape=shape, phases=phases)
