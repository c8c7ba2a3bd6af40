"""The time of many layouts on one batch, estimated at once by longest-first dispatch.

Each sequence, longest first, goes to the replica whose time is then the least; a replica's time is that of the
planner's heuristic (`strategies/heuristic.py`): work, c for each micro-batch, and for a pipeline (pp - 1) of its
largest one, in the best number of equal micro-batches that its token limit allows. No packing and no search, so the
real plan is about as long or up to 5 % shorter: what is chosen here is planned afterwards.

S layouts, R replicas (of the largest layout), T schemes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strategies.scheme_table import Floats, Layout, SchemeTable

__all__ = ["estimate_ms"]

MAX_CELLS = 400_000
"""Layouts x replicas handled together; more would leave the processor's cache."""


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

    def run(self, lengths: Sequence[int]) -> Floats:
        """Returns the slowest replica's estimate of each layout in ms."""
        work_SR, tokens_SR, longest_SR, time_SR = (np.zeros(self.a_SR.shape) for _ in range(4))
        held_S = np.ones(len(self.rows_S), dtype=bool)
        for length in sorted(lengths, reverse=True):
            own_SR = (self.a_SR * length + self.b_SR) * length
            after_SR = self._time(work_SR + own_SR, tokens_SR + length, np.maximum(longest_SR, own_SR))
            after_SR[self.limit_SR < length] = np.inf
            best_S = after_SR.argmin(axis=1)
            at = self.rows_S, best_S
            time_SR[at] = after_SR[at]
            held_S &= np.isfinite(time_SR[at])
            work_SR[at] += own_SR[at]
            tokens_SR[at] += length
            longest_SR[at] = np.maximum(longest_SR[at], own_SR[at])
        return np.asarray(np.where(held_S, time_SR.max(axis=1), np.inf))

    def _time(self, work_SR: Floats, tokens_SR: Floats, longest_SR: Floats) -> Floats:
        num_SR = np.ceil(tokens_SR * self.token_share_SR)
        if not self.has_ramp:
            return np.asarray(work_SR + self.c_SR * num_SR)
        ideal_SR = np.minimum(np.sqrt(self.ideal_SR * work_SR), work_SR / np.maximum(longest_SR, 1e-300))
        num_SR = np.maximum(np.maximum(num_SR, ideal_SR), 1.0)
        ramp_SR = self.ramp_SR * (np.maximum(work_SR / num_SR, longest_SR) + self.c_SR)
        return np.asarray(work_SR + self.c_SR * num_SR + ramp_SR)
