"""The published proposal: one layout per class of longest sequence, by dynamic programming over (devices, length).

Hydraulis (arXiv 2412.07894), its section on proposing strategies, and the code published with it. On the sums of a
whole data set, not on batches: t(n, s) is the least time in which n ranks run all sequences of at most s tokens, where
d replicas of scheme k share the lengths in (s', s] and fewer ranks run the shorter ones:

    t(n, s) = min over k, s' < s <= L_k, d of  max( t(n - d size_k, s'),  F_k(s', s) / d )
    F_k(s', s) = sum over lengths in (s', s] of (a_k l^2 + b_k l + c_k)  +  (pp_k - 1) (a_k m^2 + b_k m + c_k)

m being the longest length in (s', s]. c is charged once per sequence, as published (`charge_c`). The pool is every
distinct layout of t(N, s) for s in steps of `length_step` up to the longest. It is kept as a baseline: it knows nothing
of a batch, and its layouts may leave ranks idle.

N rank counts in steps of the greatest common divisor of the replica sizes, K length classes (0 first), T schemes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from hgraph.errors import InvalidInput
from strategies.scheme_table import Floats, Layout, SchemeTable

__all__ = ["PublishedPlan", "published_layouts"]


@dataclass(frozen=True, slots=True)
class PublishedPlan:
    """The layout for sequences of at most `longest` tokens and its time in ms on the sums of the whole data set."""

    longest: int
    layout: Layout
    total_ms: float


@dataclass(frozen=True, slots=True)
class _Choice:
    """How t(n, s) is reached: `count` replicas of `scheme` for the lengths above class `below`."""

    scheme: int
    below: int
    count: int


def published_layouts(
    table: SchemeTable,
    num_ranks: int,
    lengths: NDArray[np.int64],
    *,
    longest: int,
    length_step: int = 128,
    charge_c: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[PublishedPlan]:
    """Returns the plan of every length class that some layout can hold, shortest class first.

    Sequences above `longest` are cut to it; classes end at the multiples of `length_step` from `length_step` to the
    first at or above `longest`. Raises `InvalidInput` where nothing can hold that.
    """
    if length_step < 1 or longest < 1:
        raise InvalidInput(f"propose: expected longest and length_step of 1 or more, got {longest} and {length_step}")
    solver = _Dynamic(table, num_ranks, np.minimum(lengths, longest), longest, length_step, charge_c)
    solver.run(progress)
    plans = solver.plans()
    if not plans or plans[-1].longest < longest:
        raise InvalidInput(
            f"propose: no layout holds a sequence of {longest:,} tokens on {num_ranks} ranks; the largest limit of the "
            f"schemes is {table.limit_T.max():,} tokens per micro-batch"
        )
    return plans


class _Dynamic:
    def __init__(
        self,
        table: SchemeTable,
        num_ranks: int,
        lengths: NDArray[np.int64],
        longest: int,
        length_step: int,
        charge_c: bool,
    ) -> None:
        self.table = table
        self.step = gcd(*table.size_T.tolist())
        self.num_steps = num_ranks // self.step
        # By tp, then pp, as published: of equally fast plans the first is kept.
        self.order = sorted(range(len(table)), key=lambda t: (table.size_T[t] // table.pp_T[t], table.pp_T[t]))
        num_classes = -(-longest // length_step)
        self.class_K = np.arange(num_classes + 1) * length_step
        self.cost_TKK = _costs(table, lengths, self.class_K, charge_c)
        self.time_NK = np.full((self.num_steps + 1, num_classes + 1), np.inf)
        self.time_NK[:, 0] = 0.0
        self.choices: dict[tuple[int, int], _Choice] = {}

    def run(self, progress: Callable[[str, int, int], None] | None) -> None:
        """Fills in t(n, s) for rising n."""
        for n in range(1, self.num_steps + 1):
            if progress is not None:
                progress("dynamic programming", n, self.num_steps)
            self.time_NK[n] = self.time_NK[n - 1]
            for scheme in self.order:
                size = int(self.table.size_T[scheme]) // self.step
                if size <= n:
                    self._take(n, scheme, size, n // size)

    def _take(self, n: int, scheme: int, size: int, most: int) -> None:
        """Uses 1 to `most` replicas of a scheme for the longest lengths where that is faster than what is known."""
        reach = int(np.searchsorted(self.class_K, self.table.limit_T[scheme], side="right"))
        below = np.arange(reach - 1, -1, -1)  # short ranges of lengths first, as published: the first of equals is kept
        counts_D = np.arange(1, most + 1)
        before_DK = self.time_NK[n - counts_D * size][:, below]
        for above in range(1, reach):
            start = reach - above  # position of class above - 1 in `below`
            own_K = self.cost_TKK[scheme, below[start:], above]
            value_KD = np.maximum(before_DK[:, start:].T, own_K[:, None] / counts_D)
            best = int(value_KD.argmin())
            value_ms = float(value_KD.flat[best])
            if value_ms < self.time_NK[n, above]:
                self.time_NK[n, above] = value_ms
                row, column = divmod(best, most)
                self.choices[n, above] = _Choice(scheme, int(below[start + row]), int(counts_D[column]))

    def plans(self) -> list[PublishedPlan]:
        """Returns the plan of each class, for all ranks."""
        times = self.time_NK[self.num_steps].tolist()
        return [
            PublishedPlan(int(self.class_K[k]), self._layout(k), times[k])
            for k in range(1, len(self.class_K))
            if np.isfinite(times[k])
        ]

    def _layout(self, k: int) -> Layout:
        layout = [0] * len(self.table)
        n = self.num_steps
        while k > 0:
            choice = self.choices.get((n, k))
            if choice is None or self.time_NK[n, k] == self.time_NK[n - 1, k]:
                n -= 1
                continue
            layout[choice.scheme] += choice.count
            n -= choice.count * int(self.table.size_T[choice.scheme]) // self.step
            k = choice.below
        return tuple(layout)


def _costs(table: SchemeTable, lengths: NDArray[np.int64], class_K: NDArray[np.int64], charge_c: bool) -> Floats:
    """Returns F_k(s', s) in ms as [T, s', s]."""
    c_T = table.c_T if charge_c else np.zeros(len(table))
    ordered = np.sort(lengths).astype(np.float64)
    ends_K = np.searchsorted(ordered, class_K, side="right")
    total_KT = np.zeros((len(class_K), len(table)))
    for t in range(len(table)):
        own = (table.a_T[t] * ordered + table.b_T[t]) * ordered + c_T[t]
        total_KT[:, t] = np.concatenate([[0.0], np.cumsum(own)])[ends_K]
    longest_K = np.concatenate([[0.0], ordered])[ends_K]
    # The longest length in (s', s] is the longest up to s, unless that lies at or below s'.
    longest_KK = np.where(ends_K[None, :] > ends_K[:, None], longest_K[None, :], 0.0)
    ramp_TKK = (table.pp_T - 1)[:, None, None] * (
        (table.a_T[:, None, None] * longest_KK + table.b_T[:, None, None]) * longest_KK + c_T[:, None, None]
    )
    sums_TKK = total_KT.T[:, None, :] - total_KT.T[:, :, None]
    return np.asarray(sums_TKK + ramp_TKK)
