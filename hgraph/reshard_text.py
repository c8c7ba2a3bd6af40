"""Writes reshard plans for people: boxes, and a line for every move and collective.

`[0:4, 2:6]` is a box (a half-open interval per dim, so rows 0 to 3 and columns 2 to 5), `[]` that of a scalar.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hgraph.annotation import Annotation, ranks_text
from hgraph.reshard_plan import Collective, Operation, ReshardPlan
from hgraph.shard_map import Box, Piece, box_numel, shard_map

__all__ = ["box_text", "held_texts", "operation_text", "phase_texts"]

_NAMES = {
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
}
_MOST_SHOWN = 8
"""Members of a collective whose boxes are told one by one."""


def box_text(box: Box) -> str:
    """Returns a box as text: `[0:4, 2:6]`."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def held_texts(annotation: Annotation, shape: Sequence[int]) -> dict[int, str]:
    """Returns what each rank holds of a tensor, by rank: a box, and which term of a sum or maximum it is, if it is one.

    Several sums, one per subgroup, that give the same value are told apart as copies. Raises `InvalidAnnotation` where
    the annotation does not fit `shape`.
    """
    held = shard_map(annotation, shape)
    families = sorted({piece.family for piece in held.pieces})
    terms = {family: sorted({p.term for p in held.pieces if p.family == family}) for family in families}

    def text(piece: Piece) -> str:
        box = box_text(piece.box) if box_numel(piece.box) else f"{box_text(piece.box)} (empty)"
        known = terms[piece.family]
        if len(known) > 1:
            reduce = "sum" if held.reduce == "sum" else "maximum"
            box += f", term {known.index(piece.term) + 1} of {len(known)} of a {reduce}"
        if len(families) > 1:
            box += f", copy {families.index(piece.family) + 1} of {len(families)}"
        return box

    return {piece.rank: text(piece) for piece in held.pieces}


def operation_text(operation: Operation) -> str:
    """Returns one line for a move or a collective: who, what, from and into which buffer."""
    if isinstance(operation, Collective):
        return _collective_text(operation)
    origin, destination = operation.origin, operation.destination
    if operation.sender == operation.receiver:
        does = {"copy": "copies", "sum": "adds", "max": "takes the maximum of"}[operation.combine]
        joined = "and" if operation.combine == "max" else "to"
        return f"rank {operation.sender} {does} {box_text(operation.box)} from its {origin} {joined} its {destination}"
    does = {"copy": "writes it to", "sum": "adds it to", "max": "takes the maximum of it and"}[operation.combine]
    return (
        f"rank {operation.sender} sends {box_text(operation.box)} of its {origin} to rank {operation.receiver}, "
        f"which {does} its {destination}"
    )


def phase_texts(plan: ReshardPlan) -> Iterator[tuple[int, Operation, str]]:
    """Yields the number of the phase (from 1), the operation and its line, for all operations in order."""
    for number, phase in enumerate(plan.phases, start=1):
        for operation in phase:
            yield number, operation, operation_text(operation)


def _collective_text(collective: Collective) -> str:
    name = _NAMES[collective.kind]
    if collective.kind in ("all_reduce", "reduce_scatter"):
        name += f" ({'maximum' if collective.combine == 'max' else 'sum'})"
    group = ranks_text(collective.ranks)
    where = f"on ranks {group}" + ("" if collective.origin == "source" else f" from their {collective.origin}")
    if collective.kind == "all_reduce":
        return f"{name} of {box_text(collective.contributed[0])} {where}"
    gives = [f"gives {_part_text(box)}" for box in collective.contributed]
    gets = [f"gets {_part_text(box)}" for box in collective.received]
    if collective.kind == "reduce_scatter":
        return f"{name} of {box_text(collective.contributed[0])} {where}: {_listed(collective.ranks, gets)}"
    if collective.kind == "all_gather":
        return f"{name} into {box_text(collective.received[0])} {where}: {_listed(collective.ranks, gives)}"
    both = [f"{given}, {got}" for given, got in zip(gives, gets, strict=True)]
    return f"{name} {where}: {_listed(collective.ranks, both)}"


def _part_text(box: Box) -> str:
    return box_text(box) if box_numel(box) else "nothing"


def _listed(ranks: Sequence[int], words: Sequence[str]) -> str:
    """Returns what each rank does in a row, a few of them where there are many."""
    parts = [f"{rank} {own}" for rank, own in zip(ranks, words, strict=True)]
    if len(parts) <= _MOST_SHOWN:
        return "; ".join(parts)
    return f"{'; '.join(parts[: _MOST_SHOWN - 1])}; and so on to {parts[-1]}"
