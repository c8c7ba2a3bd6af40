"""Annotations: how a tensor lies on ranks (HSPMD, arXiv 2504.20490, section 3).

Two tiers. *Bottom*: a `Subgroup` is an ordered device group shaped as a mesh, with one placement per axis.
*Top*: an `Annotation` is a union of subgroups and one placement along the hetero dim, which says how the subgroups
share the tensor: `Shard(dim)` split, `Replicate()` duplicate, `Partial()` terms of one sum.

Text form, which parses back:

- subgroup: `0-3[S(0)]` (ranks 0 to 3, one axis), `0,2,1,3[2x2: S(0), R]` (mesh 2 by 2), `5[]` (one rank);
- union: `0-1[S(1)] + 2[] @ S(0)`; the part after `@` is the hetero placement.

Invariants
----------
- A subgroup has at least one rank, each once; the mesh's sizes multiply to their number; one placement per axis.
- Ranks are below `MOST_RANKS`.
- Axes that shard one dim nest in mesh order (the first cuts, the next cuts each piece).
- A rank appears in one subgroup only. A union of one subgroup has no hetero placement (it is `Replicate()`).
- All partial placements of one annotation have the same reduction.
- Canonical form: no axis of size 1; neighbouring axes that both replicate, or both are partial, are one axis.
- `Annotation.parse(str(a)) == a`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hgraph.errors import InvalidAnnotation
from hgraph.placements import Partial, Placement, Replicate, Shard, balanced_sizes, parse_placement

__all__ = ["MOST_RANKS", "Annotation", "Subgroup", "ranks_text", "replicated", "sharded"]

MOST_RANKS = 2**20
"""More than any cluster has. A number above it is a slip, and is refused before anything is made for each rank."""


@dataclass(frozen=True, slots=True)
class Subgroup:
    """An ordered device group, laid out row-major on a mesh, with one placement per mesh axis."""

    ranks: tuple[int, ...]
    mesh: tuple[int, ...] = ()
    placements: tuple[Placement, ...] = ()

    def __post_init__(self) -> None:
        ranks, mesh, placements = tuple(self.ranks), tuple(self.mesh), tuple(self.placements)
        if not ranks:
            raise InvalidAnnotation("subgroup: expected at least one rank, got none")
        if len(set(ranks)) != len(ranks) or min(ranks) < 0:
            raise InvalidAnnotation(f"subgroup: expected distinct ranks of 0 or more, got {ranks}")
        if max(ranks) >= MOST_RANKS:
            raise InvalidAnnotation(f"subgroup: {_too_large(max(ranks))}")
        if math.prod(mesh) != len(ranks) or any(size < 1 for size in mesh):
            raise InvalidAnnotation(f"subgroup: expected a mesh of {len(ranks)} ranks, got {_mesh_text(ranks, mesh)}")
        if len(placements) != len(mesh):
            raise InvalidAnnotation(
                f"subgroup: expected one placement per axis of mesh {mesh}, got {len(placements)} placements"
            )
        for size, placement in zip(mesh, placements, strict=True):
            if isinstance(placement, Shard) and placement.sizes is not None and len(placement.sizes) != size:
                raise InvalidAnnotation(f"subgroup: {placement} on an axis of {size} ranks; expected {size} sizes")
        mesh, placements = _merge_axes(mesh, placements)
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "placements", placements)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Returns the position of `rank` along each mesh axis."""
        index = self.ranks.index(rank)
        result = []
        for size in reversed(self.mesh):
            index, position = divmod(index, size)
            result.append(position)
        return tuple(reversed(result))

    def __str__(self) -> str:
        inner = ", ".join(map(str, self.placements))
        if len(self.mesh) > 1:
            inner = f"{'x'.join(map(str, self.mesh))}: {inner}"
        return f"{ranks_text(self.ranks)}[{inner}]"

    @staticmethod
    def parse(text: str) -> Subgroup:
        """Returns the subgroup that `str` writes as `text`."""
        match = re.fullmatch(r"\s*([\d,\-\s]+)\[(.*)\]\s*", text)
        if match is None:
            raise InvalidAnnotation(f"subgroup: expected ranks[placements], as in 0-3[S(0)], got {text!r}")
        ranks = _parse_ranks(match[1])
        mesh_text, separator, inner = match[2].rpartition(": ")
        placements = tuple(parse_placement(part) for part in _split_outside_parentheses(inner))
        if separator:
            try:
                mesh = tuple(int(size) for size in mesh_text.strip().split("x"))
            except ValueError as error:
                raise InvalidAnnotation(f"subgroup: expected a mesh such as 2x2, got {mesh_text!r}") from error
        else:
            mesh = (len(ranks),) if placements else ()
        return Subgroup(ranks, mesh, placements)


@dataclass(frozen=True, slots=True)
class Annotation:
    """A union of subgroups and the placement along the hetero dim. See the module's text."""

    subgroups: tuple[Subgroup, ...]
    hetero: Placement = Replicate()

    def __post_init__(self) -> None:
        subgroups = tuple(self.subgroups)
        if not subgroups:
            raise InvalidAnnotation("annotation: expected at least one subgroup, got none")
        object.__setattr__(self, "subgroups", subgroups)
        seen: dict[int, Subgroup] = {}
        for subgroup in subgroups:
            for rank in subgroup.ranks:
                if rank in seen:
                    raise InvalidAnnotation(f"annotation: rank {rank} is in two subgroups, {seen[rank]} and {subgroup}")
                seen[rank] = subgroup
        if len(subgroups) == 1:
            object.__setattr__(self, "hetero", Replicate())
        sizes = self.hetero.sizes if isinstance(self.hetero, Shard) else None
        if sizes is not None and len(sizes) != len(subgroups):
            raise InvalidAnnotation(f"annotation: hetero {self.hetero} for {len(subgroups)} subgroups")
        if len(self._reduces()) > 1:
            raise InvalidAnnotation(f"annotation: expected one kind of partial, got both sum and max in {self}")

    def placements(self) -> tuple[Placement, ...]:
        """Returns every placement, the hetero one first."""
        return self.hetero, *(placement for subgroup in self.subgroups for placement in subgroup.placements)

    def _reduces(self) -> set[str]:
        return {placement.reduce for placement in self.placements() if isinstance(placement, Partial)}

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, in order of subgroups."""
        return tuple(rank for subgroup in self.subgroups for rank in subgroup.ranks)

    @property
    def hsize(self) -> int:
        """The number of subgroups (HSize)."""
        return len(self.subgroups)

    @property
    def is_partial(self) -> bool:
        return bool(self._reduces())

    @property
    def reduce(self) -> str | None:
        """`sum` or `max` where any placement is partial, else None."""
        return next(iter(self._reduces()), None)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return all(isinstance(placement, Replicate) for placement in self.placements())

    def subgroup_of(self, rank: int) -> Subgroup:
        """Returns the subgroup that holds `rank`."""
        for subgroup in self.subgroups:
            if rank in subgroup.ranks:
                return subgroup
        raise InvalidAnnotation(f"annotation: rank {rank} is not in {self}")

    def map_placements(self, function: Callable[[Placement], Placement]) -> Annotation:
        """Returns the same groups and meshes with `function` applied to every placement, the hetero one included."""
        subgroups = tuple(
            Subgroup(subgroup.ranks, subgroup.mesh, tuple(map(function, subgroup.placements)))
            for subgroup in self.subgroups
        )
        return Annotation(subgroups, function(self.hetero) if len(subgroups) > 1 else Replicate())

    def relabel(self, ranks: Sequence[int] | Mapping[int, int]) -> Annotation:
        """Returns the same layout on other ranks: rank r becomes `ranks[r]`."""
        subgroups = tuple(
            Subgroup(tuple(ranks[rank] for rank in subgroup.ranks), subgroup.mesh, subgroup.placements)
            for subgroup in self.subgroups
        )
        return Annotation(subgroups, self.hetero)

    def simplify(self, shape: Sequence[object]) -> Annotation:
        """Returns the annotation without explicit sizes that say what the balanced split of `shape` says anyway.

        Dims of `shape` that are not plain integers (symbolic ones) are left as they are.
        """

        def drop(placement: Placement) -> Placement:
            if not isinstance(placement, Shard) or placement.sizes is None or placement.dim >= len(shape):
                return placement
            if placement.sizes == balanced_sizes(sum(placement.sizes), len(placement.sizes)):
                return Shard(placement.dim)
            return placement

        return self.map_placements(drop)

    def __str__(self) -> str:
        text = " + ".join(map(str, self.subgroups))
        return text if self.hsize == 1 else f"{text} @ {self.hetero}"

    @staticmethod
    def parse(text: str) -> Annotation:
        """Returns the annotation that `str` writes as `text`."""
        body, separator, hetero = text.partition("@")
        subgroups = tuple(Subgroup.parse(part) for part in body.split("+"))
        if len(subgroups) > 1 and not separator:
            raise InvalidAnnotation(f"annotation: a union needs a hetero placement, as in '... @ R', got {text!r}")
        return Annotation(subgroups, parse_placement(hetero) if separator else Replicate())


def replicated(ranks: Sequence[int]) -> Annotation:
    """Returns the annotation under which every one of `ranks` holds the whole tensor."""
    return Annotation((Subgroup(tuple(ranks), (len(ranks),), (Replicate(),)),))


def sharded(ranks: Sequence[int], dim: int, sizes: Sequence[int] | None = None) -> Annotation:
    """Returns the annotation under which `ranks` hold consecutive pieces of dim `dim`."""
    shard = Shard(dim, None if sizes is None else tuple(sizes))
    return Annotation((Subgroup(tuple(ranks), (len(ranks),), (shard,)),))


def _merge_axes(
    mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    merged: list[tuple[int, Placement]] = []
    for size, placement in zip(mesh, placements, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == placement and not isinstance(placement, Shard):
            merged[-1] = (merged[-1][0] * size, placement)
        else:
            merged.append((size, placement))
    return tuple(size for size, _ in merged), tuple(placement for _, placement in merged)


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns ranks as annotations write them: `0-3,6`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _mesh_text(ranks: tuple[int, ...], mesh: tuple[int, ...]) -> str:
    if not mesh:
        return f"no axis; write {ranks_text(ranks)}[R] where each holds the whole"
    return "x".join(map(str, mesh))


def _parse_ranks(text: str) -> tuple[int, ...]:
    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            start, end = int(first), int(last if dash else first)
        except ValueError as error:
            raise InvalidAnnotation(f"ranks: expected numbers and ranges such as 0-3,5, got {text!r}") from error
        if max(start, end) >= MOST_RANKS:
            raise InvalidAnnotation(f"ranks: {_too_large(max(start, end))}")
        if len(ranks) + end - start >= MOST_RANKS:
            raise InvalidAnnotation(f"ranks: expected distinct ranks, at most {MOST_RANKS:,} of them, got more")
        ranks.extend(range(start, end + 1))
    return tuple(ranks)


def _too_large(rank: int) -> str:
    return f"expected ranks below {MOST_RANKS} (2^20), got rank {rank}"


def _split_outside_parentheses(text: str) -> list[str]:
    parts = re.split(r",(?![^()]*\))", text)
    return [part for part in parts if part.strip()]
