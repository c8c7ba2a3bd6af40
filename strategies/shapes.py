"""Micro-batches of unequal times that 1F1B runs fastest: rising at the start, falling towards the end.

The pipeline fills one stage at a time, so small micro-batches come first; and nothing overlaps the last backward
passes, so the last micro-batches are small again. `schedule_cuts.json` holds the times that are best if sequences
could be cut anywhere (`tests/schedule_cuts_table.py`); here bins of real sequences are made after them.
"""

from __future__ import annotations

from collections.abc import Sequence

from strategies.cost import ReplicaKind
from strategies.schedule_cuts import best_times

__all__ = ["shaped_bins"]

Groups = tuple[tuple[int, ...], ...]


def shaped_bins(kind: ReplicaKind, lengths: Sequence[int], work_ms: Sequence[float], num_bins: int) -> Groups | None:
    """Returns bins of positions in running order, in the shape of the best times; None where none is known or fits.

    Longest first, each sequence into the bin that is furthest below its time and has room for the tokens.
    """
    shape = best_times(kind, num_bins)
    if shape is None:
        return None
    whole_ms = sum(work_ms) + num_bins * kind.cost.c
    missing_ms = [max(0.0, share * whole_ms - kind.cost.c) for share in shape]
    room = [kind.max_tokens] * num_bins
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for position, length in enumerate(lengths):
        index = max((i for i in range(num_bins) if room[i] >= length), key=missing_ms.__getitem__, default=None)
        if index is None:
            return None
        bins[index].append(position)
        missing_ms[index] -= work_ms[position]
        room[index] -= length
    return tuple(tuple(own) for own in bins if own)
