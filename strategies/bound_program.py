"""A sharper lower bound on the simulated time of one strategy: integer numbers of micro-batches, longest sequences.

Every replica of a plan has an *option* o: its kind t, a range of numbers of micro-batches, and a range for its longest
sequence. In a step of time T, a replica of option o that runs v micro-batches does at most `capacity_ov(T)` of work
(`strategies/schedule_cuts.py`: one micro-batch takes at least as long as the shortest of the range), holds at most
`L v` tokens, at most v sequences longer than L/2, at most n_k of class k, and none above the range. The program looks
for a fractional assignment of as much of the batch as possible, the number m_o of replicas per option being free:

    maximise share
    sum_o x_ko = n_k share                           every class is somewhere      `everywhere`
    sum_k f_o(s_k) x_ko <= capacity_o m_o            duals `work_O`
    sum_k s_k x_ko <= L_o v_o m_o                    duals `tokens_O`
    sum over s_k > L_o / 2 of x_ko <= v_o m_o        duals `halves_O`
    x_ko <= n_k m_o                                  for the longest classes; duals `whole_JO`
    sum over o of kind t of m_o <= M_t

share < 1 means that no plan takes at most T. That is not believed: the duals are prices, and `refutes` computes from
them, for every class and every number of micro-batches, that what the batch costs exceeds what the replicas can pay:

    sum_k n_k min over eligible o of p_ko  >  sum_t M_t max over o of kind t, v in the range, of
                                              work_o capacity_ov(T) + tokens_o L v + halves_o v + sum_j n_j whole_jo
    p_ko = work_o f_o(s_k) + tokens_o s_k + halves_o [s_k > L/2] + whole_jo,  j the group of class k

so any prices are sound, also those of a solver that errs. Prices found at one T refute longer steps as well, up to the
bound that is returned. In the program classes beyond the longest are merged (means), to find prices; in `refutes` they
are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from strategies.bound import BoundProblem, closed_form_ms, least_time_ms
from strategies.schedule_cuts import long_capacities_ms
from strategies.solver import solve_with_highs

if TYPE_CHECKING:
    import cvxpy as cp

__all__ = ["Prices", "program_bound_ms", "refutes"]

Floats: TypeAlias = NDArray[np.float64]
SolveBound: TypeAlias = Callable[["cp.Problem"], None]

NUM_LONG = 12
NUM_GROUPS = 48
OPTION_STEP = 8
MAX_SOLVES = 8
TOLERANCE = 1e-9
PRECISION = 2e-4
SHARE_TOLERANCE = 1e-7
MOST_SHARE = 2.0
MOST_RATIO = 2.0
LONG_SHARES = (0.92, 0.84, 0.76, 0.68, 0.6, 0.5, 0.4, 0.3)


@dataclass(frozen=True, slots=True)
class Option:
    """What a replica of kind `kind` may be: `fewest` to `most` micro-batches, the longest of its sequences of at most
    `longest` tokens, and one micro-batch of at least `long_ms`."""

    kind: int
    fewest: int
    most: int
    longest: float
    long_ms: float


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """The duals: `work_O`, `tokens_O`, `halves_O` per option, `whole_JO` per group of classes."""

    work_O: Floats
    tokens_O: Floats
    halves_O: Floats
    whole_JO: Floats


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Classes merged for the program: `group_K` of each class, first class first; means per group; `count_J`."""

    group_K: NDArray[np.intp]
    count_J: Floats
    length_J: Floats
    work_JT: Floats

    @staticmethod
    def of(problem: BoundProblem) -> _Groups:
        """Returns the longest classes alone, and the others in groups of about equal work, at most `NUM_GROUPS`."""
        num = len(problem.counts_K)
        work_K = problem.counts_K * problem.work_KT.mean(axis=1)
        rest = np.cumsum(work_K[NUM_LONG:])
        share = rest / rest[-1] if len(rest) and rest[-1] > 0 else np.linspace(0.0, 1.0, len(rest))
        number = NUM_LONG + np.minimum((share * (NUM_GROUPS - NUM_LONG)).astype(np.intp), NUM_GROUPS - NUM_LONG - 1)
        group_K = np.unique(np.concatenate([np.arange(min(num, NUM_LONG)), number]), return_inverse=True)[1]
        count_J = np.bincount(group_K, problem.counts_K).astype(np.float64)
        length_J = np.asarray(np.bincount(group_K, problem.counts_K * problem.length_K) / count_J)
        work = [np.bincount(group_K, problem.counts_K * own_K) / count_J for own_K in problem.work_KT.T]
        return _Groups(group_K, count_J, length_J, np.stack(work, axis=1))


def options_of(problem: BoundProblem, time_ms: float) -> tuple[Option, ...]:
    """Returns options that every replica of every plan of at most `time_ms` is one of, bar those that are empty."""
    options: list[Option] = []
    for t in range(problem.num_kinds):
        eligible_K = problem.threshold_KT[:, t] <= time_ms
        if eligible_K.any():
            options += _options_of_kind(problem, t, time_ms, problem.length_K[eligible_K])
    return tuple(options)


def _options_of_kind(problem: BoundProblem, t: int, time_ms: float, length_K: Floats) -> list[Option]:
    kind = problem.kinds[t]
    ranges = [(float("inf"), 0.0)] if kind.pp == 1 else _length_ranges(problem, t, time_ms, length_K)
    if kind.pp > 1:
        return [Option(t, 1, problem.most_T[t], longest, long_ms) for longest, long_ms in ranges]
    tokens = float(problem.counts_K @ problem.length_K)
    work_ms = float(problem.counts_K @ problem.work_KT[:, t])
    usual = int(min(time_ms * tokens / work_ms if work_ms > 0 else tokens, tokens) / kind.max_tokens)
    firsts = sorted({1, max(1, usual - 1), max(1, usual), usual + 1, usual + 2, usual + 3})
    firsts = [first for first in firsts if first <= problem.most_T[t]]
    lasts = [*(first - 1 for first in firsts[1:]), problem.most_T[t]]
    return [Option(t, first, last, float("inf"), 0.0) for first, last in zip(firsts, lasts, strict=True)]


def _length_ranges(problem: BoundProblem, t: int, time_ms: float, length_K: Floats) -> list[tuple[float, float]]:
    """Returns (longest length, time of its micro-batch at least) of each range; the last one knows nothing."""
    cost, stages = problem.kinds[t].cost, problem.kinds[t].pp
    ms_K = (cost.a * length_K + cost.b) * length_K + cost.c
    ranges: list[tuple[float, float]] = []
    first = 0
    for share in LONG_SHARES:
        end = int(np.searchsorted(-ms_K, -share * time_ms / stages, side="right"))
        if end > first:
            ranges.append((float(length_K[first]), float(ms_K[end - 1])))
            first = end
    if first < len(length_K):
        ranges.append((float(length_K[first]), 0.0))
    return ranges


def _capacities(problem: BoundProblem, options: tuple[Option, ...], time_ms: float) -> list[Floats]:
    """Returns the capacities in ms of each option for each of its numbers of micro-batches; -inf: it cannot be."""
    by_kind: dict[int, Floats] = {}
    capacities: list[Floats] = []
    for t in dict.fromkeys(option.kind for option in options):
        own = [option for option in options if option.kind == t]
        long_ms = np.array([option.long_ms for option in own])
        shortest_ms = float(problem.work_KT[-1, t])
        by_kind[t] = long_capacities_ms(problem.kinds[t], time_ms, problem.most_T[t], long_ms, shortest_ms)
    rows = dict.fromkeys(by_kind, 0)
    for option in options:
        capacity = by_kind[option.kind][rows[option.kind]][option.fewest - 1 : option.most]
        rows[option.kind] += 1
        least_ms = max(0.0, option.long_ms - problem.kinds[option.kind].cost.c)
        capacities.append(np.where(capacity >= least_ms * (1.0 - TOLERANCE), capacity, -np.inf))
    return capacities


def refutes(
    problem: BoundProblem, options: tuple[Option, ...], groups: _Groups, prices: Prices, time_ms: float
) -> bool:
    """Returns whether the prices prove that no plan takes at most `time_ms`."""
    paid_O, capacity_O = np.zeros((2, len(options)))
    for o, (option, capacity) in enumerate(zip(options, _capacities(problem, options, time_ms), strict=True)):
        v = np.arange(option.fewest, option.most + 1)
        per_v = prices.tokens_O[o] * problem.kinds[option.kind].max_tokens + prices.halves_O[o]
        worth = np.where(np.isfinite(capacity), prices.work_O[o] * np.maximum(capacity, 0.0) + per_v * v, -np.inf)
        paid_O[o], capacity_O[o] = worth.max(), capacity.max()
    paid_O += (prices.whole_JO * _most_of_class(problem, options, groups, capacity_O)).sum(axis=0)
    paid_T = np.zeros(problem.num_kinds)
    np.maximum.at(paid_T, [option.kind for option in options], paid_O)
    cost_K = np.full(len(problem.counts_K), np.inf)
    for o, option in enumerate(options):
        halves_K = 2 * problem.length_K > problem.kinds[option.kind].max_tokens
        price_K = prices.work_O[o] * problem.work_KT[:, option.kind] + prices.tokens_O[o] * problem.length_K
        price_K = price_K + prices.halves_O[o] * halves_K + prices.whole_JO[groups.group_K, o]
        may_K = (problem.threshold_KT[:, option.kind] <= time_ms) & (problem.length_K <= option.longest)
        cost_K = np.minimum(cost_K, np.where(may_K, price_K, np.inf))
    return float(problem.counts_K @ cost_K) > float(problem.replicas_T @ paid_T) * (1.0 + TOLERANCE)


class _Program:
    """The program for a number of options, in parameters: canonicalised once, solved for any strategy and batch.

    Works are in units of the step time and lengths of the longest, so that all numbers are moderate.
    """

    def __init__(self, num_options: int) -> None:
        import cvxpy as cp

        shape, long_shape = (NUM_GROUPS, num_options), (NUM_LONG, num_options)
        self.work_JO = cp.Parameter(shape, nonneg=True)
        self.halves_JO = cp.Parameter(shape, nonneg=True)
        self.upper_JO = cp.Parameter(shape, nonneg=True)
        self.whole_LO = cp.Parameter(long_shape, nonneg=True)
        self.count_J = cp.Parameter(NUM_GROUPS, nonneg=True)
        self.length_J = cp.Parameter(NUM_GROUPS, nonneg=True)
        self.capacity_O = cp.Parameter(num_options, nonneg=True)
        self.room_O = cp.Parameter(num_options, nonneg=True)
        self.number_O = cp.Parameter(num_options, nonneg=True)
        self.member_TO = cp.Parameter((num_options, num_options), nonneg=True)
        self.replicas_T = cp.Parameter(num_options, nonneg=True)
        self.share = cp.Variable()
        assigned = cp.Variable(shape, nonneg=True)
        used_O = cp.Variable(num_options, nonneg=True)
        used_LO = np.ones((NUM_LONG, 1)) @ cp.reshape(used_O, (1, num_options), order="C")
        self.work = cp.sum(cp.multiply(self.work_JO, assigned), axis=0) <= cp.multiply(self.capacity_O, used_O)
        self.tokens = self.length_J @ assigned <= cp.multiply(self.room_O, used_O)
        self.halves = cp.sum(cp.multiply(self.halves_JO, assigned), axis=0) <= cp.multiply(self.number_O, used_O)
        self.whole = assigned[:NUM_LONG] <= cp.multiply(self.whole_LO, used_LO)
        others = [
            cp.sum(assigned, axis=1) == self.count_J * self.share,
            self.share <= MOST_SHARE,
            assigned <= self.upper_JO,
            self.member_TO @ used_O <= self.replicas_T,
        ]
        self.problem = cp.Problem(cp.Maximize(self.share), [self.work, self.tokens, self.halves, self.whole, *others])


@lru_cache(maxsize=4)
def _program(num_options: int) -> _Program:
    """Returns the program of a size. Shared, and harmless to share: what it answers is checked by `refutes`."""
    return _Program(num_options)


def program_bound_ms(
    problem: BoundProblem, below_ms: float = float("inf"), solve_with: SolveBound = solve_with_highs
) -> float:
    """Returns a lower bound in ms on the time of one strategy and batch; inf where no plan exists.

    A bound of `below_ms` (the time of a plan) is enough. Never below the closed form, whatever the solver does.
    """
    low_ms = least_time_ms(problem, closed_form_ms)
    if not np.isfinite(low_ms) or low_ms >= below_ms or low_ms <= 0.0:
        return low_ms
    high_ms = most_ms = min(below_ms, MOST_RATIO * low_ms)
    options, groups = options_of(problem, most_ms), _Groups.of(problem)
    time_ms = high_ms * (1.0 - PRECISION)
    for _ in range(MAX_SOLVES):
        answer = _prices(problem, options, groups, time_ms, solve_with)
        if answer is None:
            return low_ms
        share, prices = answer
        low_ms = _most_refuted_ms(problem, options, groups, prices, low_ms, most_ms)
        high_ms = high_ms if share < 1.0 - SHARE_TOLERANCE else time_ms
        if high_ms <= low_ms * (1.0 + PRECISION):
            return low_ms
        time_ms = _next_probe_ms(time_ms, share, low_ms, high_ms)
    return low_ms


def _next_probe_ms(time_ms: float, share: float, low_ms: float, high_ms: float) -> float:
    """Returns where the whole batch would just fit, the share growing with the time; else the middle."""
    probe_ms = time_ms / max(share, 1e-9) * (1.0 - PRECISION / 2)
    if abs(share - 1.0) > PRECISION and low_ms < probe_ms < high_ms:
        return probe_ms
    return (low_ms + high_ms) / 2


def _most_refuted_ms(
    problem: BoundProblem, options: tuple[Option, ...], groups: _Groups, prices: Prices, low_ms: float, high_ms: float
) -> float:
    """Returns the longest time found that the prices refute, `low_ms` where none."""
    if refutes(problem, options, groups, prices, high_ms):
        return high_ms
    first_ms = low_ms
    while high_ms > low_ms * (1.0 + PRECISION / 10):
        middle_ms = (low_ms + high_ms) / 2
        if refutes(problem, options, groups, prices, middle_ms):
            low_ms = middle_ms
        elif low_ms == first_ms and middle_ms <= first_ms * (1.0 + PRECISION):
            return first_ms
        else:
            high_ms = middle_ms
    return low_ms


def _prices(
    problem: BoundProblem, options: tuple[Option, ...], groups: _Groups, time_ms: float, solve_with: SolveBound
) -> tuple[float, Prices] | None:
    """Returns the share of the batch that fits into `time_ms` and the prices; None where the solver has no answer."""
    import cvxpy as cp

    program = _program(-(-len(options) // OPTION_STEP) * OPTION_STEP)
    unit_tokens = float(problem.length_K[0])
    _fill(program, problem, options, groups, time_ms, unit_tokens)
    rows = (program.work, program.tokens, program.halves, program.whole)
    program.share.save_value(None)
    for row in rows:
        row.dual_variables[0].save_value(None)
    try:
        solve_with(program.problem)
        duals = [row.dual_value for row in rows]
        share = float(program.share.value)
    except (cp.error.SolverError, ValueError, ArithmeticError, TypeError):
        return None
    if program.problem.status not in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE) or any(dual is None for dual in duals):
        return None
    num = len(options)
    work_O, tokens_O, halves_O, whole_LO = (np.maximum(np.nan_to_num(dual), 0.0)[..., :num] for dual in duals)
    whole_JO = np.zeros((len(groups.count_J), num))
    num_long = min(NUM_LONG, len(groups.count_J))
    whole_JO[:num_long] = whole_LO[:num_long]
    return share, Prices(work_O / time_ms, tokens_O / unit_tokens, halves_O, whole_JO)


def _fill(
    program: _Program,
    problem: BoundProblem,
    options: tuple[Option, ...],
    groups: _Groups,
    time_ms: float,
    unit_tokens: float,
) -> None:
    """Sets the parameters; options and groups beyond those there are hold nothing."""
    num = program.capacity_O.shape[0]
    count_J, length_J = _padded(groups.count_J, NUM_GROUPS), _padded(groups.length_J, NUM_GROUPS)
    capacity_O, room_O, number_O, replicas_T = np.zeros((4, num))
    work_JO, halves_JO, upper_JO = np.zeros((3, NUM_GROUPS, num))
    member_TO = np.zeros((num, num))
    replicas_T[: problem.num_kinds] = problem.replicas_T
    for o, (option, capacity) in enumerate(zip(options, _capacities(problem, options, time_ms), strict=True)):
        kind = problem.kinds[option.kind]
        number_O[o] = option.fewest if kind.pp == 1 else option.most
        room_O[o] = kind.max_tokens * number_O[o] / unit_tokens
        capacity_O[o] = max(0.0, float(capacity.max())) / time_ms
        work_JO[:, o] = _padded(groups.work_JT[:, option.kind], NUM_GROUPS) / time_ms
        halves_JO[:, o] = 2 * length_J > kind.max_tokens
        threshold_J = kind.pp * (work_JO[:, o] * time_ms + kind.cost.c)
        may_J = (threshold_J <= time_ms) & (length_J <= min(option.longest, kind.max_tokens))
        upper_JO[:, o] = MOST_SHARE * count_J * may_J
        member_TO[option.kind, o] = 1.0
    most_JO = _most_of_class(problem, options, groups, capacity_O[: len(options)] * time_ms)[:NUM_LONG]
    whole_LO = np.zeros((NUM_LONG, num))
    whole_LO[: len(most_JO), : len(options)] = most_JO
    values = {
        program.work_JO: work_JO,
        program.halves_JO: halves_JO,
        program.upper_JO: upper_JO,
        program.whole_LO: whole_LO,
        program.count_J: count_J,
        program.length_J: length_J / unit_tokens,
        program.capacity_O: capacity_O,
        program.room_O: room_O,
        program.number_O: number_O,
        program.member_TO: member_TO,
        program.replicas_T: replicas_T,
    }
    for parameter, value in values.items():
        parameter.value = value


def _padded(values: Floats, num: int) -> Floats:
    return np.concatenate([values, np.zeros(num - len(values))])


def _most_of_class(problem: BoundProblem, options: tuple[Option, ...], groups: _Groups, capacity_O: Floats) -> Floats:
    """Returns [J, O] how many sequences of a group one replica can run; all of them for groups of several lengths."""
    kind_O = np.array([option.kind for option in options])
    single_J = np.bincount(groups.group_K) == 1
    work_JO = np.maximum(groups.work_JT[:, kind_O], 1e-300)
    whole_JO = np.floor(np.maximum(capacity_O, 0.0) * (1.0 + TOLERANCE) / work_JO + TOLERANCE)
    return np.minimum(groups.count_J[:, None], np.where(single_J[:, None], whole_JO, np.inf))
