"""The time of many layouts on one batch, estimated at once by longest-first dispatch.

Each sequence, longest first, goes to the replica whose time is then the least; a replica's time is that of the
planner's heuristic (`strategies/heuristic.py`): work, c for each micro-batch, and for a pipeline (pp - 1) of its
largest one, in the best number of equal micro-batches that its token limit allows. No packing and no search, so the
real plan is about as long or up to 5 % shorter: what is chosen here is planned afterwards.

On a large cluster several sequences of about one length go at once, each to a replica of its own among those that would
be done first; the last ones, which level what is left, always go one at a time.

S layouts, R replicas (of the largest layout), T schemes, M sequences at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strategies.scheme_table import Floats, Ints, Layout, SchemeTable

__all__ = ["estimate_ms"]

MAX_CELLS = 400_000
"""Layouts x replicas handled together; more would leave the processor's cache."""
RANKS_AT_ONCE = 64
"""One sequence goes at once for so many ranks, ..."""
ALIKE = 0.8
"""... if the shortest has this share of the longest one's length, ..."""
NEAR = 1.1
"""... and none of their replicas is done so much later than another and last of all, ..."""
LAST = 16
"""... until so many times as many sequences are left."""


def estimate_ms(table: SchemeTable, layouts: Sequence[Layout], lengths: Sequence[int]) -> Floats:
    """Returns the estimated step time in ms of each layout; inf where a sequence is too long for it."""
    if not len(layouts):
        return np.zeros(0)
    most = max(map(sum, layouts))
    chunk = max(1, MAX_CELLS // max(most, 1))
    parts = [_Dispatch(table, layouts[begin : begin + chunk]) for begin in range(0, len(layouts), chunk)]
    return np.concatenate([part.run(lengths) for part in parts])


class _Dispatch:
    def __init__(self, table: SchemeTable, layouts: Sequence[Layout]) -> None:
        num_replicas = max(map(sum, layouts))
        kind_SR = np.full((len(layouts), num_replicas), -1, dtype=np.int64)
        for row, layout in enumerate(layouts):
            kinds = np.repeat(np.arange(len(table)), layout)
            kind_SR[row, : len(kinds)] = kinds
        missing_SR = kind_SR < 0
        self.a_SR, self.b_SR, self.c_SR = (own_T[kind_SR] for own_T in (table.a_T, table.b_T, table.c_T))
        self.limit_SR = np.where(missing_SR, 0.0, table.limit_T[kind_SR])
        self.token_share_SR = 1.0 / np.maximum(self.limit_SR, 1.0)
        self.ramp_SR = (table.pp_T[kind_SR] - 1).astype(np.float64)
        # The best number of micro-batches is sqrt((pp-1) work / c).
        self.ideal_SR = np.where(self.c_SR > 0, self.ramp_SR / np.maximum(self.c_SR, 1e-300), 1e300)
        self.has_ramp = bool(self.ramp_SR.any())
        self.rows_S = np.arange(len(layouts))
        self.at_once = max(1, min(table.num_ranks(layouts[0]) // RANKS_AT_ONCE, min(map(sum, layouts)) // 2))

    def run(self, lengths: Sequence[int]) -> Floats:
        """Returns the slowest replica's estimate of each layout in ms."""
        work_SR, tokens_SR, longest_SR = (np.zeros(self.a_SR.shape) for _ in range(3))
        slowest_S = np.zeros(len(self.rows_S))
        ordered = np.array(sorted(lengths, reverse=True), dtype=np.float64)
        begin = 0
        while begin < len(ordered):
            length = ordered[begin]
            own_SR = (self.a_SR * length + self.b_SR) * length
            after_SR = self._time(work_SR + own_SR, tokens_SR + length, np.maximum(longest_SR, own_SR))
            after_SR[self.limit_SR < length] = np.inf
            at = self._first(after_SR, self._alike(ordered, begin), slowest_S)
            slowest_S = np.maximum(slowest_S, after_SR[at].max(axis=1))
            count = at[1].shape[1]
            own_M = ordered[begin : begin + count]
            own_SM = (self.a_SR[at] * own_M + self.b_SR[at]) * own_M
            work_SR[at] += own_SM
            tokens_SR[at] += own_M
            longest_SR[at] = np.maximum(longest_SR[at], own_SM)
            begin += count
        time_SR = np.where(tokens_SR > 0, self._time(work_SR, tokens_SR, longest_SR), 0.0)
        return np.asarray(np.where(np.isfinite(slowest_S), time_SR.max(axis=1), np.inf))

    def _alike(self, ordered: Floats, begin: int) -> int:
        """Returns how many sequences of about the length of the next one may go at once."""
        most = min(self.at_once, len(ordered) - begin - LAST * self.at_once)
        if most <= 1:
            return 1
        return int(np.count_nonzero(ordered[begin : begin + most] >= ALIKE * ordered[begin]))

    def _first(self, after_SR: Floats, count: int, slowest_S: Floats) -> tuple[Ints, Ints]:
        """Returns the replicas of each layout that are then done first: `count` different ones, else one.

        Where one of several would become the slowest and another be done much earlier, one at a time is better.
        """
        if count > 1:
            first_SM = np.argpartition(after_SR, count - 1, axis=1)[:, :count]
            own_SM = np.take_along_axis(after_SR, first_SM, axis=1)
            near_S = np.maximum(slowest_S, NEAR * own_SM.min(axis=1))
            if (own_SM.max(axis=1) <= near_S).all():  # inf: a layout that cannot hold a sequence, whatever follows
                return self.rows_S[:, None], first_SM
        return self.rows_S[:, None], after_SR.argmin(axis=1)[:, None]

    def _time(self, work_SR: Floats, tokens_SR: Floats, longest_SR: Floats) -> Floats:
        num_SR = np.ceil(tokens_SR * self.token_share_SR)
        if not self.has_ramp:
            return np.asarray(work_SR + self.c_SR * num_SR)
        ideal_SR = np.minimum(np.sqrt(self.ideal_SR * work_SR), work_SR / np.maximum(longest_SR, 1e-300))
        num_SR = np.maximum(np.maximum(num_SR, ideal_SR), 1.0)
        ramp_SR = self.ramp_SR * (np.maximum(work_SR / num_SR, longest_SR) + self.c_SR)
        return np.asarray(work_SR + self.c_SR * num_SR + ramp_SR)
