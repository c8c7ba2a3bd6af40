"""Sharding rules as letters, and their propagation along one device axis.

A rule states, for one operator on concrete global shapes, which dims correspond: each dim of each input and output is a
product of *letters*, major first (`view [T, 64] -> [T, 4, 16]` is `t (hd) -> t h d`). A letter may be sharded unless it
is `fixed`; a sharded letter that an output lacks makes that output partial (`contraction`). `linear` lists the sets of
inputs that may all be partial at once, the output being partial then.

`solve_axis` applies any rule to one axis; `passes/rules/lift.py` lifts it to meshes and unions (HSPMD, arXiv
2504.20490, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import sympy

from hgraph.graph import Shape, Size, evaluate_shape
from hgraph.placements import Partial, Placement, Reduce, Replicate, Shard, balanced_sizes

__all__ = ["AxisSolution", "Dims", "OpSharding", "Representative", "letters_of", "solve_axis"]

Dims: TypeAlias = tuple[tuple[str, ...], ...]
"""Letters of each dim of a tensor, major first; a dim of size 1 has none."""

Representative = 4096
"""Tokens assumed when the bytes of a symbolic shape are weighed."""


@dataclass(frozen=True, slots=True)
class OpSharding:
    """One way to shard an operator. `outputs` has None for results that are not tensors."""

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims | None, ...]
    sizes: Mapping[str, Size]
    fixed: frozenset[str] = frozenset()
    contraction: Reduce | None = None
    linear: tuple[frozenset[int], ...] = ()
    is_view: bool = False
    weights: tuple[float, ...] = field(default=())

    def may_shard(self, letter: str) -> bool:
        """Whether `letter` may be sharded at all."""
        if letter in self.fixed:
            return False
        contracted = any(dims is not None and letter not in letters_of(dims) for dims in self.outputs)
        return not contracted or self.contraction is not None


def letters_of(dims: Dims) -> set[str]:
    """Returns the letters of a tensor."""
    return {letter for dim in dims for letter in dim}


@dataclass(frozen=True, slots=True)
class AxisSolution:
    """What one axis does: the placements the inputs must have, those the outputs get, and the elements to move."""

    required: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]
    moved: float
    letter: str | None = None
    letter_sizes: tuple[int, ...] | None = None


def solve_axis(
    rule: OpSharding,
    placements: Sequence[Placement],
    parts: int,
    sizes: Mapping[str, Size | None],
    wanted: Sequence[Placement | None] = (),
) -> AxisSolution:
    """Returns the cheapest way to run an operator along one axis of `parts` positions.

    `sizes` are the letters' lengths left by outer axes (None: differs by position). `wanted` are output placements to
    prefer where the inputs do not decide (the gradient of a split embedding).
    """
    if (partial := _solve_partial(rule, placements)) is not None:
        return partial
    replicated = _solve_letter(rule, placements, parts, sizes, None, None)
    assert replicated is not None, "everything replicated always works"
    candidates = [replicated]
    seen: set[tuple[str, tuple[int, ...] | None]] = set()
    for dims, placement in _sources(rule, placements, wanted):
        key = _as_letter(dims, placement, parts, sizes)
        if key is None or key in seen or not rule.may_shard(key[0]):
            continue
        seen.add(key)
        solution = _solve_letter(rule, placements, parts, sizes, *key)
        if solution is not None:
            candidates.append(solution)
    # Ties go to the last candidate: sharded rather than replicated, as nothing moves either way.
    best = min(range(len(candidates)), key=lambda index: (candidates[index].moved, index == 0, index))
    return candidates[best]


def _sources(
    rule: OpSharding, placements: Sequence[Placement], wanted: Sequence[Placement | None]
) -> Iterable[tuple[Dims, Placement]]:
    yield from zip(rule.inputs, placements, strict=True)
    for dims, placement in zip(rule.outputs, wanted, strict=False):
        if dims is not None and placement is not None:
            yield dims, placement


def _solve_partial(rule: OpSharding, placements: Sequence[Placement]) -> AxisSolution | None:
    """The solution under which partial inputs stay partial, if the rule is linear in just these."""
    partial = frozenset(index for index, placement in enumerate(placements) if isinstance(placement, Partial))
    if not partial or partial not in rule.linear:
        return None
    reduces = {placements[index].reduce for index in partial}  # type: ignore[union-attr]
    if len(reduces) > 1 or ("max" in reduces and not rule.is_view):
        return None
    if any(not isinstance(placement, Partial | Replicate) for placement in placements):
        return None
    outputs = tuple(None if dims is None else Partial(next(iter(reduces))) for dims in rule.outputs)
    return AxisSolution(tuple(placements), outputs, 0.0)


def _solve_letter(
    rule: OpSharding,
    placements: Sequence[Placement],
    parts: int,
    sizes: Mapping[str, Size | None],
    letter: str | None,
    letter_sizes: tuple[int, ...] | None,
) -> AxisSolution | None:
    required: list[Placement] = []
    for dims in rule.inputs:
        placement = _as_placement(dims, letter, letter_sizes, parts, sizes)
        if placement is None:
            return None
        required.append(placement)
    outputs: list[Placement | None] = []
    for result in rule.outputs:
        if result is None:
            outputs.append(None)
            continue
        if letter is not None and letter not in letters_of(result):
            assert rule.contraction is not None, "may_shard let a letter through that cannot be contracted"
            outputs.append(Partial(rule.contraction))
            continue
        output = _as_placement(result, letter, letter_sizes, parts, sizes)
        if output is None:
            return None
        outputs.append(output)
    weights = rule.weights or (1.0,) * len(placements)
    moved = sum(weight * _moved(old, new) for old, new, weight in zip(placements, required, weights, strict=True))
    return AxisSolution(tuple(required), tuple(outputs), moved, letter, letter_sizes)


def _moved(old: Placement, new: Placement) -> float:
    if old == new or isinstance(old, Replicate):
        return 0.0
    return 2.0 if isinstance(old, Partial) else 1.0


def _as_letter(
    dims: Dims, placement: Placement, parts: int, sizes: Mapping[str, Size | None]
) -> tuple[str, tuple[int, ...] | None] | None:
    """The letter that a shard cuts and its sizes, or None where the cut does not fall between whole letters."""
    if not isinstance(placement, Shard) or placement.dim >= len(dims) or not dims[placement.dim]:
        return None
    letter, *minor = dims[placement.dim]
    inner = _product(minor, sizes)
    length = sizes[letter]
    if inner == 1:
        return letter, _simplify(placement.sizes)
    if not isinstance(inner, int) or not isinstance(length, int):
        return None
    pieces = placement.split(length * inner, parts)
    if any(piece % inner for piece in pieces):
        return None
    return letter, _simplify(tuple(piece // inner for piece in pieces))


def _as_placement(
    dims: Dims,
    letter: str | None,
    letter_sizes: tuple[int, ...] | None,
    parts: int,
    sizes: Mapping[str, Size | None],
) -> Placement | None:
    """The placement that shards `letter`; None where the letter is not the major one of its dim."""
    if letter is None:
        return Replicate()
    for dim, letters in enumerate(dims):
        if letter not in letters:
            continue
        if letters[0] != letter:
            return None
        inner = _product(letters[1:], sizes)
        if inner == 1:
            return Shard(dim, letter_sizes)
        length = sizes[letter]
        if not isinstance(inner, int) or (letter_sizes is None and not isinstance(length, int)):
            return None
        pieces = letter_sizes if letter_sizes is not None else balanced_sizes(length, parts)  # type: ignore[arg-type]
        return Shard(dim, _simplify(tuple(piece * inner for piece in pieces)))
    return Replicate()


def _simplify(sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if sizes is not None and sizes == balanced_sizes(sum(sizes), len(sizes)):
        return None
    return sizes


def _product(letters: Iterable[str], sizes: Mapping[str, Size | None]) -> Size | None:
    result: Size = 1
    for letter in letters:
        size = sizes[letter]
        if size is None:
            return None
        result = result * size
    return int(result) if isinstance(result, int | sympy.Integer) else result


def representative_numel(shape: Shape) -> int:
    """Returns the number of elements with `Representative` tokens (and as many sequences)."""
    return math.prod(evaluate_shape(shape, Representative, Representative))
