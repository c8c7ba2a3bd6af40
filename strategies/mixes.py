"""Good mixes of schemes for one batch.

In a step of T ms, a replica of scheme t can do T - o_t ms of work, o_t = (pp_t - 1) (c_t + f_t(shortest)) being the
ramp of its pipeline. A sequence s on scheme t takes f_t(s) + c_t s / L_t of it (L_t: token limit), so it occupies

    size_t (f_t(s) + c_t s / L_t) / (T - o_t)     ranks for the whole step,

and where fractions of replicas are allowed, the least number of ranks that finish in T is found by giving each sequence
to the scheme that occupies least, among those that can hold it in time: s <= L_t and pp_t (f_t(s) + c_t) <= T. The
*ideal mix* is that of the least T whose ranks are there: bisection, no solver. Whole numbers near it are improved by
exchanging a few replicas for others of the same size (`estimate_ms` is the judge).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

import numpy as np

from hgraph.errors import InvalidInput
from strategies.layout_estimate import estimate_ms
from strategies.scheme_table import Floats, Ints, Layout, SchemeTable

__all__ = ["AT_FLOOR", "MixSearch", "ideal_mix", "usable_ranks"]

BISECTIONS = 40
MAX_ROUNDS = 30
MAX_WORK = 30_000_000
"""Layouts x replicas x sequences of one round of exchanges."""

AT_FLOOR = 1e-3
"""An estimate this near to what the longest sequence takes alone cannot be improved on."""
EXCHANGED_RANKS = 32
COUNTS = (1, 2, 3, 4, 6, 8)


def ideal_mix(table: SchemeTable, num_ranks: int, lengths: Sequence[int]) -> tuple[float, Floats]:
    """Returns (step time in ms, replicas of each scheme, fractions allowed) of the ideal mix of a batch.

    Raises `InvalidInput` for a sequence that no scheme holds.
    """
    length_K = np.array(sorted(lengths, reverse=True), dtype=np.float64)[:, None]
    if length_K[0, 0] > table.limit_T.max():
        raise InvalidInput(
            f"propose: a sequence has {int(length_K[0, 0]):,} tokens; the largest limit of the schemes is "
            f"{table.limit_T.max():,} tokens per micro-batch. Cut it with a smaller longest length"
        )
    work_KT = (table.a_T * length_K + table.b_T) * length_K
    held_KT = length_K <= table.limit_T
    least_KT = np.where(held_KT, table.pp_T * (work_KT + table.c_T), np.inf)
    charged_KT = np.where(held_KT, table.size_T * (work_KT + table.c_T * length_K / table.limit_T), np.inf)
    ramp_T = (table.pp_T - 1) * (table.c_T + work_KT[-1])
    low_ms = float(least_KT.min(axis=1).max())
    high_ms = max(low_ms, float(charged_KT.min(axis=1).sum()) + float(ramp_T.max())) * 2.0 + 1.0
    mix_T = _ranks(least_KT, charged_KT, ramp_T, high_ms)
    for _ in range(BISECTIONS):
        middle_ms = (low_ms + high_ms) / 2.0
        ranks_T = _ranks(least_KT, charged_KT, ramp_T, middle_ms)
        if ranks_T.sum() <= num_ranks:
            high_ms, mix_T = middle_ms, ranks_T
        else:
            low_ms = middle_ms
    return high_ms, mix_T / table.size_T


def _ranks(least_KT: Floats, charged_KT: Floats, ramp_T: Floats, time_ms: float) -> Floats:
    """Returns the ranks that each scheme needs for a step of `time_ms`; inf where it cannot be done."""
    left_T = np.maximum(time_ms - ramp_T, 1e-9)
    price_KT = np.where((least_KT <= time_ms) & (ramp_T < time_ms), charged_KT / left_T, np.inf)
    chosen_K = price_KT.argmin(axis=1)
    ranks_T = np.bincount(chosen_K, price_KT[np.arange(len(chosen_K)), chosen_K], minlength=len(ramp_T))
    return ranks_T.astype(np.float64)


def usable_ranks(table: SchemeTable, num_ranks: int) -> int:
    """Returns how many of `num_ranks` ranks replicas of these schemes can fill."""
    mask = (1 << (num_ranks + 1)) - 1
    before, reachable = 0, 1  # bit n: n ranks can be filled
    while reachable != before:
        before = reachable
        for size in table.size_T.tolist():
            reachable |= (reachable << size) & mask
    return reachable.bit_length() - 1


class MixSearch:
    """Searches layouts of one cluster; remembers none of the batches."""

    def __init__(self, table: SchemeTable, num_ranks: int) -> None:
        self.table = table
        self.num_ranks = usable_ranks(table, num_ranks)
        self.exchanges_ET = _exchanges(table, self.num_ranks)

    def run(self, lengths: Sequence[int], starts: Iterable[Layout] = ()) -> dict[Layout, float]:
        """Returns the layouts that were looked at for this batch with their estimates in ms, the best ones among them.

        The search begins at `starts`, at equal replicas and around the ideal mix.
        """
        _, mix_T = ideal_mix(self.table, self.num_ranks, lengths)
        first = {*starts, *self.table.homogeneous(self.num_ranks), *self._rounded(mix_T)}
        known = self._estimated(sorted(first), lengths)
        alone_ms = float(self.table.floors_ms([(1,) * len(self.table)], max(lengths))[0])
        for turn in range(MAX_ROUNDS):
            best = min(known, key=lambda layout: (known[layout], layout))
            if known[best] <= alone_ms * (1.0 + AT_FLOOR):
                break  # the longest sequence alone takes as long
            new = [layout for layout in self._neighbours(best) if layout not in known]
            # So many at most that large clusters do not take for ever; other ones each time.
            stride = -(-len(new) * sum(best) * len(lengths) // MAX_WORK) or 1
            found = self._estimated(new[turn % stride :: stride], lengths)
            known.update(found)
            if not found or min(found.values()) >= known[best]:
                break
        return known

    def _estimated(self, layouts: Sequence[Layout], lengths: Sequence[int]) -> dict[Layout, float]:
        times_ms = estimate_ms(self.table, layouts, lengths).tolist()
        return dict(zip(layouts, times_ms, strict=True))

    def _neighbours(self, layout: Layout) -> list[Layout]:
        moved_ET = np.array(layout) + self.exchanges_ET
        return [tuple(row) for row in moved_ET[(moved_ET >= 0).all(axis=1)].tolist()]

    def _rounded(self, mix_T: Floats) -> set[Layout]:
        """Returns whole numbers around a mix that fill the ranks: rounded down, the rest filled in different ways."""
        layouts: set[Layout] = set()
        for base_T in (np.floor(mix_T + 1e-9), np.floor(mix_T + 0.5)):
            layout_T = base_T.astype(np.int64)
            while (layout_T * self.table.size_T).sum() > self.num_ranks:
                layout_T[np.flatnonzero(layout_T)[0]] -= 1
            layouts |= {filled for first in range(len(self.table)) if (filled := self._filled(layout_T, first))}
        return layouts

    def _filled(self, layout_T: Ints, first: int) -> Layout | None:
        """Returns the layout with the free ranks given to scheme `first`, then to large ones; None if some are left."""
        layout_T = layout_T.copy()
        free = self.num_ranks - int((layout_T * self.table.size_T).sum())
        for scheme in (first, *reversed(range(len(self.table)))):
            count, free = divmod(free, int(self.table.size_T[scheme]))
            layout_T[scheme] += count
        return tuple(layout_T.tolist()) if not free else None


def _exchanges(table: SchemeTable, num_ranks: int) -> Ints:
    """Returns changes of a layout, one a row: a few replicas out, others of as many ranks in."""
    bundles: dict[int, list[Ints]] = {}
    unit = np.eye(len(table), dtype=np.int64)
    most = min(EXCHANGED_RANKS, num_ranks)
    singles = [(unit[t] * count, 2 * most if count == 1 else most) for t in range(len(table)) for count in COUNTS]
    pairs = [
        (unit[first] * left + unit[second] * right, most // 2)
        for first, second in combinations(range(len(table)), 2)
        for left in (1, 2)
        for right in (1, 2)
    ]
    for bundle_T, limit in (*singles, *pairs):
        size = int(bundle_T @ table.size_T)
        if size <= limit:
            bundles.setdefault(size, []).append(bundle_T)
    changes = {
        tuple((into_T - out_T).tolist())
        for same_size in bundles.values()
        for out_T in same_size
        for into_T in same_size
        if not (out_T * into_T).any()
    }
    return np.array(sorted(changes), dtype=np.int64).reshape(-1, len(table))
