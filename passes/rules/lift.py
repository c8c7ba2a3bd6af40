"""Lifts a rule from one axis to meshes and unions.

The inputs are brought to one *structure* (the subgroups' ranks and meshes); then the hetero dim is solved as one more
axis, and each subgroup axis by axis. Inputs of another structure must first be replicated on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hgraph.annotation import Annotation, Subgroup
from hgraph.graph import Size
from hgraph.placements import Partial, Placement, Replicate, balanced_sizes
from passes.rules.sharding import AxisSolution, OpSharding, solve_axis

__all__ = ["Solution", "solve"]

Structure: TypeAlias = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Solution:
    """The annotations the inputs must have and those the outputs get; `reduced` lists inputs whose partial must go."""

    required: tuple[Annotation, ...]
    outputs: tuple[Annotation | None, ...]
    moved: float
    reduced: tuple[int, ...]
    rule: OpSharding


def solve(
    rules: Sequence[OpSharding],
    inputs: Sequence[Annotation | None],
    ranks: tuple[int, ...],
    numels: Sequence[float],
    is_parameter: Sequence[bool],
    wanted: Sequence[Annotation | None] = (),
) -> Solution:
    """Returns the cheapest solution over all alternatives of a rule.

    `inputs` has None for values that every rank can have whole for nothing (derived from the batch alone); `ranks` is
    the device group of the stage the operator runs on.
    """
    structure = _choose_structure(inputs, ranks, numels, is_parameter, wanted)
    placed = [_on_structure(annotation, structure) for annotation in inputs]
    aims = [_on_structure(annotation, structure) if annotation is not None else None for annotation in wanted]
    solutions = [_solve_structure(rule, placed, structure, numels, aims) for rule in rules]
    best = min(solutions, key=lambda solution: solution.moved)
    reduced = tuple(
        index
        for index, (given, required) in enumerate(zip(inputs, best.required, strict=True))
        if given is not None and given.is_partial and not required.is_partial
    )
    return Solution(best.required, best.outputs, best.moved, reduced, best.rule)


def _choose_structure(
    inputs: Sequence[Annotation | None],
    ranks: tuple[int, ...],
    numels: Sequence[float],
    is_parameter: Sequence[bool],
    wanted: Sequence[Annotation | None],
) -> Structure:
    """The structure with most elements already on it, split parameters first (they should not move)."""
    weights: dict[Structure, tuple[float, float]] = {}
    for annotation, numel, parameter in zip(inputs, numels, is_parameter, strict=True):
        if annotation is None or annotation.is_replicated or not set(annotation.ranks) <= set(ranks):
            continue
        structure = _structure(annotation)
        fixed, total = weights.get(structure, (0.0, 0.0))
        weights[structure] = (fixed + numel * parameter, total + numel)
    if weights:
        return max(weights, key=lambda structure: weights[structure])
    for annotation in wanted:
        if annotation is not None and not annotation.is_replicated:
            return _structure(annotation)
    confined = [
        (numel * parameter, numel, annotation)
        for annotation, numel, parameter in zip(inputs, numels, is_parameter, strict=True)
        if annotation is not None and set(annotation.ranks) < set(ranks)
    ]
    whole = any(annotation is not None and set(annotation.ranks) == set(ranks) for annotation in inputs)
    held = [item for item in confined if item[0] or not whole]
    if held:
        return _structure(max(held, key=lambda item: item[:2])[2])
    return ((ranks, (len(ranks),) if len(ranks) > 1 else ()),)


def _structure(annotation: Annotation) -> Structure:
    return tuple((subgroup.ranks, subgroup.mesh) for subgroup in annotation.subgroups)


def _on_structure(annotation: Annotation | None, structure: Structure) -> Annotation:
    """The annotation itself where it has the structure, else what it must first become: replicated on it."""
    if annotation is not None and _structure(annotation) == structure:
        return annotation
    subgroups = tuple(Subgroup(ranks, mesh, (Replicate(),) * len(mesh)) for ranks, mesh in structure)
    return Annotation(subgroups)


def _solve_structure(
    rule: OpSharding,
    inputs: Sequence[Annotation],
    structure: Structure,
    numels: Sequence[float],
    wanted: Sequence[Annotation | None],
) -> Solution:
    rule = OpSharding(
        rule.inputs, rule.outputs, rule.sizes, rule.fixed, rule.contraction, rule.linear, rule.is_view, tuple(numels)
    )
    sizes: dict[str, Size | None] = dict(rule.sizes)
    moved = 0.0
    top: AxisSolution | None = None
    if len(structure) > 1:
        aims = [None if aim is None else aim.hetero for aim in wanted]
        top = solve_axis(rule, [annotation.hetero for annotation in inputs], len(structure), sizes, aims)
        moved += top.moved
    columns: list[tuple[list[tuple[Placement, ...]], list[tuple[Placement, ...] | None]]] = []
    for index, (_, mesh) in enumerate(structure):
        inner = _piece(sizes, top, index, len(structure))
        aims_of = [None if aim is None else _expand(aim.subgroups[index], mesh) for aim in wanted]
        given = [_expand(annotation.subgroups[index], mesh) for annotation in inputs]
        required, outputs, cost = _solve_mesh(rule, given, mesh, inner, aims_of)
        moved += cost
        columns.append((required, outputs))
    return Solution(
        tuple(
            _assemble(structure, [column[0][number] for column in columns], top.required[number] if top else None)
            for number in range(len(inputs))
        ),
        tuple(
            None
            if rule.outputs[number] is None
            else _assemble(structure, [column[1][number] for column in columns], top.outputs[number] if top else None)
            for number in range(len(rule.outputs))
        ),
        moved,
        (),
        rule,
    )


def _solve_mesh(
    rule: OpSharding,
    given: Sequence[tuple[Placement, ...]],
    mesh: tuple[int, ...],
    sizes: Mapping[str, Size | None],
    wanted: Sequence[tuple[Placement, ...] | None],
) -> tuple[list[tuple[Placement, ...]], list[tuple[Placement, ...] | None], float]:
    required: list[list[Placement]] = [[] for _ in given]
    outputs: list[list[Placement] | None] = [None if dims is None else [] for dims in rule.outputs]
    moved, left = 0.0, dict(sizes)
    for axis, parts in enumerate(mesh):
        aims = [None if aim is None else aim[axis] for aim in wanted]
        solution = solve_axis(rule, [placements[axis] for placements in given], parts, left, aims)
        moved += solution.moved
        for column, placement in zip(required, solution.required, strict=True):
            column.append(placement)
        for result, output in zip(outputs, solution.outputs, strict=True):
            if result is not None and output is not None:
                result.append(output)
        if solution.letter is not None:
            left[solution.letter] = _even_piece(left[solution.letter], solution, parts)
    return (
        [tuple(column) for column in required],
        [None if column is None else tuple(column) for column in outputs],
        moved,
    )


def _piece(
    sizes: Mapping[str, Size | None], top: AxisSolution | None, index: int, parts: int
) -> dict[str, Size | None]:
    """The letters' lengths inside subgroup `index`."""
    inner = dict(sizes)
    if top is None or top.letter is None:
        return inner
    length = sizes[top.letter]
    if top.letter_sizes is not None:
        inner[top.letter] = top.letter_sizes[index]
    else:
        inner[top.letter] = balanced_sizes(length, parts)[index] if isinstance(length, int) else None
    return inner


def _even_piece(length: Size | None, solution: AxisSolution, parts: int) -> Size | None:
    if solution.letter_sizes is not None:
        return solution.letter_sizes[0] if len(set(solution.letter_sizes)) == 1 else None
    return length // parts if isinstance(length, int) and length % parts == 0 else None


def _expand(subgroup: Subgroup, mesh: tuple[int, ...]) -> tuple[Placement, ...]:
    """The placements per axis of `mesh`; a replicated subgroup may have been merged to fewer axes."""
    if subgroup.mesh == mesh:
        return subgroup.placements
    placement: Placement = subgroup.placements[0] if subgroup.placements else Replicate()
    assert isinstance(placement, Replicate | Partial), f"{subgroup} is not on mesh {mesh}"
    return (placement,) * len(mesh)


def _assemble(
    structure: Structure, placements: Sequence[tuple[Placement, ...] | None], hetero: Placement | None
) -> Annotation:
    subgroups = tuple(
        Subgroup(ranks, mesh, own or ()) for (ranks, mesh), own in zip(structure, placements, strict=True)
    )
    return Annotation(subgroups, hetero if hetero is not None else Replicate())
