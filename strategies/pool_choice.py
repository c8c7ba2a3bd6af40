"""Which layouts make the best pool: those whose fastest member per batch is the fastest on average.

Greedy with exchanges: the layout that lowers the mean most is added, then members are exchanged for others while that
lowers it further (facility location; the gain of one more member can only shrink). S layouts, B batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strategies.scheme_table import Floats

__all__ = ["PoolChoice", "choose_pool"]

BETTER = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """The chosen rows in order of what they gain, and the mean in ms of the best pool of 1, 2, ... members."""

    members: tuple[int, ...]
    means_ms: tuple[float, ...]


def choose_pool(times_SB: Floats, weights_B: Floats, *, most: int, gain: float = 0.0) -> PoolChoice:
    """Returns at most `most` rows of `times_SB` [ms, inf: cannot hold it] that minimise the weighted mean minimum.

    It ends earlier when one more member would lower the mean by less than the share `gain`, but never before every
    batch is held. Ties go to the lower row.
    """
    finite = times_SB[np.isfinite(times_SB)]
    unheld_ms = 1e3 * float(finite.max()) if finite.size else 1.0
    times_SB = np.where(np.isfinite(times_SB), times_SB, unheld_ms)
    weights_B = weights_B / weights_B.sum()
    members: list[int] = []
    means_ms: list[float] = []
    while len(members) < min(most, len(times_SB)):
        grown = _exchanged(times_SB, weights_B, [*members, _best_addition(times_SB, weights_B, members)])
        mean_ms = _mean_ms(times_SB, weights_B, grown)
        held = bool(members) and times_SB[members].min(axis=0).max() < unheld_ms
        if held and mean_ms > means_ms[-1] * min(BETTER, 1.0 - gain):
            break
        members, means_ms = grown, [*means_ms, mean_ms]
    return PoolChoice(tuple(_by_gain(times_SB, weights_B, members)), tuple(means_ms))


def _mean_ms(times_SB: Floats, weights_B: Floats, members: Sequence[int]) -> float:
    return float(times_SB[list(members)].min(axis=0) @ weights_B)


def _best_addition(times_SB: Floats, weights_B: Floats, members: Sequence[int]) -> int:
    best_B = times_SB[list(members)].min(axis=0) if members else np.full(times_SB.shape[1], np.inf)
    return int((np.minimum(times_SB, best_B) @ weights_B).argmin())


def _exchanged(times_SB: Floats, weights_B: Floats, members: list[int]) -> list[int]:
    """Returns the members after the exchanges that lower the mean most, one at a time, until none does."""
    while True:
        mean_ms = _mean_ms(times_SB, weights_B, members)
        best_ms, best = mean_ms * BETTER, None
        for position in range(len(members)):
            rest = [*members[:position], *members[position + 1 :]]
            into = _best_addition(times_SB, weights_B, rest)
            after_ms = _mean_ms(times_SB, weights_B, [*rest, into])
            if after_ms < best_ms:
                best_ms, best = after_ms, [*rest, into]
        if best is None:
            return members
        members = best


def _by_gain(times_SB: Floats, weights_B: Floats, members: Sequence[int]) -> list[int]:
    """Returns the members in the order in which a greedy choice among them takes them."""
    ordered: list[int] = []
    left = sorted(members)
    while left:
        ordered.append(min(left, key=lambda row: (_mean_ms(times_SB, weights_B, [*ordered, row]), row)))
        left.remove(ordered[-1])
    return ordered
