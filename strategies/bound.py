"""A proven lower bound on the simulated time of one strategy, in closed form; `docs/planner.md` has the proofs.

Sequences of one length are a class. In a step of time T, a replica of kind t that runs v micro-batches does at most
`capacity_tv(T)` of work (`strategies/schedule_cuts.py`), holds at most `L v` tokens and at most v sequences longer than
L/2, L being its token limit. With `f(s) = a s^2 + b s` it follows for each g in {one, tokens, halves}, summed over the
M_t replicas of the kind, that

    sum_k (f_t(s_k) + c_t phi_g(s_k)) x_kt <= M_t max over v of (capacity_tv(T) + [g is not one] c_t v)

with phi_one = 0, phi_tokens(s) = s / L, phi_halves(s) = 1 if s > L/2 else 0. A class may be on a kind only if
s_k <= L_t and `pp_t (f_t(s_k) + c_t) <= T`, because its micro-batch passes every stage forward and backward. With one
kind, which has all tokens, the row tokens counts whole micro-batches: ceil(tokens / L) together.

The right sides, written `M_t (T - constant_gt(T))`, have constants that do not fall as T grows. So the constants at a
proven bound hold for every longer step, and with them the least T of a fractional assignment x is a linear program:

    minimise T,  sum_t x_kt = n_k,  sum_k cost_gkt x_kt + M_t constant_gt <= M_t T,  x_kt = 0 where not eligible.

For any weights w_gt >= 0 with sum w_gt M_t = 1 its Lagrangian

    sum_k n_k min over eligible t of sum_g w_gt cost_gkt + sum_gt w_gt M_t constant_gt

is below the optimum (`certificate`). The weights are found without a solver: exact for one kind, and for two kinds
whenever one g per kind is active. `least_time_ms` repeats this with the constants at the new bound until it stays.
`strategies/bound_program.py` proves more, with a solver that need not be trusted.

Symbols: K classes, T kinds, G = 3 rows per kind, in the order one, tokens, halves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from strategies.cost import ReplicaKind
from strategies.schedule_cuts import LAST_OF_TABLE, capacities_ms

__all__ = ["BoundProblem", "bound_problem", "certificate", "closed_form_ms", "least_time_ms"]

Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]

NUM_ROWS = 3
NUM_GUESSES = 16
MAX_ROUNDS = 20
STEADY = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class BoundProblem:
    """The data of the bound of one strategy and batch.

    `kinds`, `replicas_T`: distinct kinds and how many replicas of each; `length_K`, `counts_K`: classes, longest first;
    `work_KT`: f in ms; `cost_GKT`: what a sequence adds to row g of kind t; `constant_GT`: the constants at some step
    time; `whole_GT`: what counting whole micro-batches adds to them; `threshold_KT`: the least step time at which the
    class may be on the kind, inf for never; `most_T`: more micro-batches of a replica are not worth counting. Times are
    in ms.
    """

    kinds: tuple[ReplicaKind, ...]
    replicas_T: Floats
    length_K: Floats
    counts_K: Floats
    work_KT: Floats
    cost_GKT: Floats
    constant_GT: Floats
    whole_GT: Floats
    threshold_KT: Floats
    most_T: tuple[int, ...]

    @property
    def num_kinds(self) -> int:
        return len(self.replicas_T)

    def eligible_KT(self, time_ms: float) -> Bools:
        """Returns which class may be on which kind in a step of `time_ms`."""
        return self.threshold_KT <= time_ms

    def active_constant_GT(self, eligible_KT: Bools) -> Floats:
        """Returns the constants in ms, 0 for kinds without an eligible class."""
        return np.asarray(self.constant_GT * eligible_KT.any(axis=0))

    def at(self, time_ms: float) -> BoundProblem:
        """Returns the problem with the constants that hold in steps of `time_ms` and longer."""
        constant_GT = self.whole_GT.copy()
        for t, (kind, most) in enumerate(zip(self.kinds, self.most_T, strict=True)):
            capacity = capacities_ms(kind, time_ms, most, float(self.work_KT[-1, t]))
            rest_ms = time_ms - float((capacity + kind.cost.c * np.arange(1, most + 1)).max())
            constant_GT[:, t] += time_ms - float(capacity.max()), rest_ms, rest_ms
        return replace(self, constant_GT=np.maximum(constant_GT, 0.0))


def bound_problem(kinds: Sequence[ReplicaKind], lengths: Sequence[int]) -> BoundProblem:
    """Returns the bound's data for a strategy with replicas of `kinds` and a batch of `lengths`.

    The constants are those of the shortest step in which every class is eligible somewhere.
    """
    classes = Counter(lengths)
    length_K = np.array(sorted(classes, reverse=True), dtype=np.float64)
    counts_K = np.array([classes[int(length)] for length in length_K], dtype=np.float64)
    distinct = Counter(kinds)
    shape = (len(length_K), len(distinct))
    cost_GKT, whole_GT = np.zeros((NUM_ROWS, *shape)), np.zeros((NUM_ROWS, len(distinct)))
    work_KT, threshold_KT = np.zeros(shape), np.zeros(shape)
    most = []
    for t, kind in enumerate(distinct):
        c, limit = kind.cost.c, kind.max_tokens
        work_K = (kind.cost.a * length_K + kind.cost.b) * length_K
        work_KT[:, t] = work_K
        cost_GKT[:, :, t] = work_K, work_K + c * length_K / limit, work_K + c * (2 * length_K > limit)
        threshold_KT[:, t] = np.where(length_K <= limit, kind.pp * (work_K + c), np.inf)
        fitting_K = counts_K * (length_K <= limit)
        most.append(_most_micro_batches(kind, length_K, fitting_K))
    if len(distinct) == 1:
        tokens = sum(lengths)
        whole_GT[1, 0] = c * (-(-tokens // limit) - tokens / limit) / len(kinds)
    problem = BoundProblem(
        tuple(distinct),
        np.array(list(distinct.values()), dtype=np.float64),
        length_K,
        counts_K,
        work_KT,
        cost_GKT,
        np.zeros_like(whole_GT),
        whole_GT,
        threshold_KT,
        tuple(most),
    )
    floor_ms = _floor_ms(problem)
    return problem.at(floor_ms) if np.isfinite(floor_ms) else problem


def _most_micro_batches(kind: ReplicaKind, length_K: Floats, fitting_K: Floats) -> int:
    """Returns a number v such that a replica with more micro-batches satisfies every row of v.

    Enough for all tokens and all halves, and beyond the table, where the capacity falls with v.
    """
    enough = max(-(-int(length_K @ fitting_K) // kind.max_tokens), int(fitting_K @ (2 * length_K > kind.max_tokens)))
    at_least = 1 if kind.pp == 1 else LAST_OF_TABLE + 1
    if kind.schedule == "gpipe" and kind.pp > 1:
        at_least = int(fitting_K.sum())
    return max(1, min(int(fitting_K.sum()), max(at_least, enough)))


def _floor_ms(problem: BoundProblem) -> float:
    """Returns the least step time at which every class is eligible somewhere; inf for never."""
    return float(problem.threshold_KT.min(axis=1).max())


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
    if problem.num_kinds > 2:
        return _best_of_guesses(problem, eligible_KT)
    if problem.num_kinds == 2:
        return _best_of_balances(problem, eligible_KT)
    return max(certificate(problem, weight_GT, eligible_KT) for weight_GT in np.eye(NUM_ROWS)[:, :, None])


def _best_of_guesses(problem: BoundProblem, eligible_KT: Bools) -> float:
    """Returns the best certificate in ms of weights on one row that make some class cost the same on every kind."""
    picks = np.unique(np.linspace(0, len(problem.counts_K) - 1, NUM_GUESSES).astype(int))
    constant_GT = problem.replicas_T * problem.active_constant_GT(eligible_KT)
    best_ms = 0.0
    for row in range(NUM_ROWS):
        cost_KT = problem.cost_GKT[row]
        weight_IT = 1.0 / np.maximum(cost_KT[picks], 1e-300)
        weight_IT /= (weight_IT @ problem.replicas_T)[:, None]
        price_IKT = np.where(eligible_KT, weight_IT[:, None, :] * cost_KT, np.inf)
        best_ms = max(best_ms, float((price_IKT.min(axis=2) @ problem.counts_K + weight_IT @ constant_GT[row]).max()))
    return best_ms


def _best_of_balances(problem: BoundProblem, eligible_KT: Bools) -> float:
    """Returns the best certificate in ms of two kinds, one row each: it bends only where a class is indifferent.

    With ratio r = w_0 / w_1, a class pays min(r cost_0, cost_1): cost_1 once r reaches cost_1 / cost_0. All pairs of
    rows [P] are looked at together, and all ratios [P, C] at which some class is indifferent, 0 and infinity.
    """
    rows_P = np.array(list(product(range(NUM_ROWS), repeat=2)))
    cost_0, cost_1 = (problem.cost_GKT[rows_P[:, t], :, t] for t in range(2))
    active_GT = problem.active_constant_GT(eligible_KT)
    constant_0, constant_1 = (active_GT[rows_P[:, t], t] * problem.replicas_T[t] for t in range(2))
    both = eligible_KT.all(axis=1)
    only_0, only_1 = (eligible_KT[:, t] & ~both for t in range(2))
    fixed_0 = cost_0[:, only_0] @ problem.counts_K[only_0] + constant_0
    fixed_1 = cost_1[:, only_1] @ problem.counts_K[only_1] + constant_1
    all_0, all_1 = (cost[:, both] * problem.counts_K[both] for cost in (cost_0, cost_1))
    ratio_PC = all_1 / np.maximum(all_0, 1e-300)
    order = np.argsort(ratio_PC, axis=1, kind="stable")
    ratio_PC, all_0, all_1 = (np.take_along_axis(values, order, axis=1) for values in (ratio_PC, all_0, all_1))
    start = np.zeros((len(rows_P), 1))
    ratio_PC = np.concatenate([start, ratio_PC], axis=1)
    pays_1 = np.concatenate([start, np.cumsum(all_1, axis=1)], axis=1) + fixed_1[:, None]
    pays_0 = all_0.sum(axis=1, keepdims=True) - np.concatenate([start, np.cumsum(all_0, axis=1)], axis=1)
    pays_0 = np.maximum(pays_0, 0.0) + fixed_0[:, None]
    value_PC = (ratio_PC * pays_0 + pays_1) / (ratio_PC * problem.replicas_T[0] + problem.replicas_T[1])
    return max(float(value_PC.max()), float(fixed_0.max() / problem.replicas_T[0]))


def least_time_ms(problem: BoundProblem, bound_ms: Callable[[BoundProblem, Bools], float]) -> float:
    """Returns the least T in ms that `bound_ms` (a lower bound for fixed constants and eligibility) cannot refute.

    inf where no plan exists. The constants are those at the bound found so far, until it grows no more.
    """
    time_ms = _floor_ms(problem)
    for _ in range(MAX_ROUNDS):
        better_ms = _least_time_ms(problem.at(time_ms), bound_ms) if np.isfinite(time_ms) else time_ms
        if better_ms <= time_ms * (1.0 + STEADY):
            return max(time_ms, better_ms)
        time_ms = better_ms
    return time_ms


def _least_time_ms(problem: BoundProblem, bound_ms: Callable[[BoundProblem, Bools], float]) -> float:
    """Returns the same with the problem's own constants.

    Between two thresholds the eligibility is fixed, and some T in between is feasible if and only if the bound there is
    below the next threshold. What is feasible in a short step is feasible in a longer one, so bisection finds the first
    such interval; the first two probes are where the answer usually is.
    """
    thresholds = np.unique(problem.threshold_KT[np.isfinite(problem.threshold_KT)])
    floor_ms = _floor_ms(problem)
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
