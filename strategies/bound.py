"""A proven lower bound on the time of one strategy.

Sequences of one length are a class. A replica that runs the sequences of a multiset S in v >= 1 micro-batches takes,
under any schedule and order, at least

    sum over S of f(s) + c v + o     with  f(s) = a s^2 + b s,  o = (pp - 1) (c + f(shortest of the batch)),

because its last stage works for all of it and waits for one micro-batch to come and one to go back; and at least
`pp (f(s) + c)` for every s in S, because that sequence's micro-batch passes every stage forward and backward. And
`v >= 1`, `v >= sum s / L`, `v >= number of s > L/2`, L being the token limit. So a step of time T exists only if there
is a fractional assignment x of the classes to the kinds of replica (M_t replicas of kind t) such that

    sum_t x_kt = n_k                                                 every sequence is somewhere
    x_kt = 0 unless s_k <= L_t and pp_t (f_t(s_k) + c_t) <= T        eligibility
    sum_k (f_t(s_k) + c_t phi_g(s_k)) x_kt + M_t (o_t + [g = one] c_t) <= M_t T
                                                                     for g in {one, tokens, halves}

with phi_one = 0, phi_tokens(s) = s / L, phi_halves(s) = 1 if s > L/2 else 0. Averaging over equal replicas loses
nothing, the conditions being convex. A kind with no eligible class is empty and its row is dropped; empty replicas of
other kinds satisfy their rows. With one kind of replica all tokens are on it, and their row counts whole
micro-batches: ceil(tokens / L) together. **The bound is the least T that is feasible.**

For a fixed eligibility this is a linear program in (x, T). For any weights w_tg >= 0, sum w_tg M_t = 1, its Lagrangian

    sum_k n_k min over eligible t of sum_g w_tg (f_t(s_k) + c_t phi_g(s_k)) + sum_tg w_tg M_t (o_t + [g = one] c_t)

is below the optimum (`certificate`). Here the weights are found in closed form: exact for one kind, and for two kinds
whenever one g per kind is active. `strategies/bound_program.py` takes them from the linear program itself. Either way
the number returned is a certificate, so a solver that errs weakens the bound and cannot make it wrong.

Symbols: K classes, T kinds, G = 3 rows per kind, in the order one, tokens, halves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from strategies.cost import ReplicaKind

__all__ = ["BoundProblem", "bound_problem", "certificate", "closed_form_ms", "least_time_ms"]

Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]

NUM_ROWS = 3
NUM_GUESSES = 16


@dataclass(frozen=True, slots=True, eq=False)
class BoundProblem:
    """The data of the linear program of one strategy and batch.

    `counts_K`: sequences per class; `replicas_T`: replicas per kind; `cost_GKT`: what a sequence adds to row g of kind
    t; `constant_GT`: the rows' constants over M_t; `threshold_KT`: the least step time at which the class may be on the
    kind, inf for never. All in ms.
    """

    counts_K: Floats
    replicas_T: Floats
    cost_GKT: Floats
    constant_GT: Floats
    threshold_KT: Floats

    @property
    def num_kinds(self) -> int:
        return len(self.replicas_T)

    def eligible_KT(self, time_ms: float) -> Bools:
        """Returns which class may be on which kind in a step of `time_ms`."""
        return self.threshold_KT <= time_ms

    def active_constant_GT(self, eligible_KT: Bools) -> Floats:
        """Returns the constants in ms, 0 for kinds without an eligible class."""
        return np.asarray(self.constant_GT * eligible_KT.any(axis=0))


def bound_problem(kinds: Sequence[ReplicaKind], lengths: Sequence[int]) -> BoundProblem:
    """Returns the program's data for a strategy with replicas of `kinds` and a batch of `lengths`."""
    classes = Counter(lengths)
    length_K = np.array(sorted(classes, reverse=True), dtype=np.float64)
    distinct = Counter(kinds)
    cost_GKT = np.zeros((NUM_ROWS, len(length_K), len(distinct)))
    constant_GT = np.zeros((NUM_ROWS, len(distinct)))
    threshold_KT = np.zeros((len(length_K), len(distinct)))
    for t, kind in enumerate(distinct):
        c, limit = kind.cost.c, kind.max_tokens
        work_K = (kind.cost.a * length_K + kind.cost.b) * length_K
        cost_GKT[:, :, t] = work_K, work_K + c * length_K / limit, work_K + c * (2 * length_K > limit)
        constant_GT[:, t] = (kind.pp - 1) * (c + work_K[-1])
        constant_GT[0, t] += c
        if len(distinct) == 1:
            tokens = sum(lengths)
            constant_GT[1, t] += c * (-(-tokens // limit) - tokens / limit) / len(kinds)
        threshold_KT[:, t] = np.where(length_K <= limit, kind.pp * (work_K + c), np.inf)
    return BoundProblem(
        np.array([classes[int(length)] for length in length_K], dtype=np.float64),
        np.array(list(distinct.values()), dtype=np.float64),
        cost_GKT,
        constant_GT,
        threshold_KT,
    )


def certificate(problem: BoundProblem, weight_GT: Floats, eligible_KT: Bools) -> float:
    """Returns the Lagrangian in ms for weights >= 0 (scaled here): a lower bound on the time under this eligibility.

    inf where a class is eligible nowhere; 0.0 for weights that say nothing.
    """
    weight_GT = np.maximum(weight_GT, 0.0)
    scale = float((weight_GT * problem.replicas_T).sum())
    if not np.isfinite(scale) or scale <= 0.0:
        return 0.0
    weight_GT = weight_GT / scale
    price_KT = np.where(eligible_KT, np.einsum("gt,gkt->kt", weight_GT, problem.cost_GKT), np.inf)
    constant = (weight_GT * problem.replicas_T * problem.active_constant_GT(eligible_KT)).sum()
    return float(problem.counts_K @ price_KT.min(axis=1) + constant)


def closed_form_ms(problem: BoundProblem, eligible_KT: Bools) -> float:
    """Returns the best certificate in ms among weights found without a solver."""
    if not eligible_KT.any(axis=1).all():
        return float("inf")
    return max(certificate(problem, weight_GT, eligible_KT) for weight_GT in _weights(problem, eligible_KT))


def _weights(problem: BoundProblem, eligible_KT: Bools) -> list[Floats]:
    num_kinds = problem.num_kinds
    if num_kinds == 1:
        return list(np.eye(NUM_ROWS)[:, :, None])
    if num_kinds == 2:
        return [_balance(problem, rows, eligible_KT) for rows in product(range(NUM_ROWS), repeat=2)]
    picks = np.unique(np.linspace(0, len(problem.counts_K) - 1, NUM_GUESSES).astype(int))
    equal_price = [1.0 / np.maximum(problem.cost_GKT[g, k], 1e-300) for g in range(NUM_ROWS) for k in picks]
    return [_in_row(index // len(picks), weight_T) for index, weight_T in enumerate(equal_price)]


def _in_row(row: int, weight_T: Floats) -> Floats:
    weight_GT = np.zeros((NUM_ROWS, len(weight_T)))
    weight_GT[row] = weight_T
    return weight_GT


def _balance(problem: BoundProblem, rows: tuple[int, ...], eligible_KT: Bools) -> Floats:
    """Returns the best weights of two kinds, one row each: the Lagrangian bends only where a class is indifferent.

    With ratio r = w_0 / w_1, a class pays min(r cost_0, cost_1): cost_1 once r reaches cost_1 / cost_0.
    """
    cost_0, cost_1 = (np.where(eligible_KT[:, t], problem.cost_GKT[rows[t], :, t], np.inf) for t in range(2))
    constant_T = problem.active_constant_GT(eligible_KT)[list(rows), [0, 1]] * problem.replicas_T
    both = np.isfinite(cost_0) & np.isfinite(cost_1) & (cost_0 > 0)
    ratio_C = np.concatenate([[0.0], np.sort(cost_1[both] / cost_0[both])])
    order = np.argsort(cost_1[both] / cost_0[both], kind="stable")
    pays_1 = np.concatenate([[0.0], np.cumsum((problem.counts_K * np.where(both, cost_1, 0))[both][order])])
    all_0 = (problem.counts_K * np.where(both, cost_0, 0))[both][order]
    pays_0 = np.concatenate([[all_0.sum()], all_0.sum() - np.cumsum(all_0)])
    only_0 = float(problem.counts_K @ np.where(np.isfinite(cost_0) & ~both, cost_0, 0.0))
    only_1 = float(problem.counts_K @ np.where(np.isfinite(cost_1) & ~np.isfinite(cost_0), cost_1, 0.0))
    value_C = ratio_C * (pays_0 + only_0 + constant_T[0]) + pays_1 + only_1 + constant_T[1]
    value_C = value_C / (ratio_C * problem.replicas_T[0] + problem.replicas_T[1])
    limit = (only_0 + constant_T[0]) / problem.replicas_T[0]
    best = int(value_C.argmax())
    weight_T = np.array([1.0, 0.0]) if limit > value_C[best] else np.array([ratio_C[best], 1.0])
    weight_GT = np.zeros((NUM_ROWS, 2))
    weight_GT[list(rows), [0, 1]] = weight_T
    return weight_GT


def least_time_ms(problem: BoundProblem, bound_ms: Callable[[BoundProblem, Bools], float]) -> float:
    """Returns the least T in ms that `bound_ms` (a lower bound for a fixed eligibility) cannot refute; inf for no plan.

    Between two thresholds the eligibility is fixed, and some T in between is feasible if and only if the bound there is
    below the next threshold. What is feasible in a short step is feasible in a longer one, so bisection finds the first
    such interval; the first two probes are where the answer usually is.
    """
    thresholds = np.unique(problem.threshold_KT[np.isfinite(problem.threshold_KT)])
    floor_ms = float(problem.threshold_KT.min(axis=1).max())
    if not np.isfinite(floor_ms):
        return float("inf")
    values: dict[int, float] = {}

    def value_ms(interval: int) -> float:
        if interval not in values:
            values[interval] = bound_ms(problem, problem.eligible_KT(thresholds[interval]))
        return values[interval]

    low, high = int(np.searchsorted(thresholds, floor_ms)), len(thresholds) - 1
    guess = int(np.searchsorted(thresholds, value_ms(high), side="right")) - 1
    probes = [guess, guess - 1]
    while low < high:
        probe = probes.pop() if probes else (low + high) // 2
        if not low <= probe < high:
            continue
        if value_ms(probe) < thresholds[probe + 1]:
            high = probe
        else:
            low = probe + 1
    return max(floor_ms, float(thresholds[low]), value_ms(low))
