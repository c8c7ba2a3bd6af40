"""The integer program of one strategy: who runs which sequences, in cvxpy, solved by HiGHS.

Sequences of one length are a class: n_k sequences of s_k tokens; f_r(s) = a_r s^2 + b_r s. Two programs, by size.

**Slots** (few classes times slots; exact for pp = 1 and for GPipe, and for the *flow* time otherwise). Slot j of
replica r is a micro-batch that may be used:

    minimise z
    y_kj in {0, 1, ..}, u_j in {0, 1}                `counts`, `used`
    sum_j y_kj = n_k                                 every sequence is somewhere
    sum_k s_k y_kj <= L_r u_j                        token limit; an unused slot is empty
    t_j = sum_k f_r(s_k) y_kj + c_r u_j              `slot_ms`: real time of the micro-batch
    sum over slots of r of t_j + (pp_r - 1) m_r <= z,   m_r >= t_j        `longest_ms`
    t_j >= t_j+1                                     slots of a replica in order (breaks symmetry)

**Counts** (otherwise). How a replica packs is left to integer numbers of micro-batches:

    minimise z
    x_kr in {0, 1, ..}, v_r in {0, 1, ..}            `counts`, `num_micro_batches`
    sum_r x_kr = n_k;  sum_k s_k x_kr <= L_r v_r;  number of s_k > L_r / 2 on r <= v_r
    sum_k f_r(s_k) x_kr + c_r v_r + ramp_r <= z
    ramp_r = (pp_r - 1) q_r (sum_k f_r(s_k) x_kr / v*_r + c_r)

where, from the heuristic's plan of a pipelined replica, v*_r is its number of micro-batches (v_r is fixed to it) and
q_r its real ramp over that of equal micro-batches: the model reproduces the heuristic's simulated time and extrapolates
around it. The result is packed and ordered by `strategies/packing.py`.

Both: a class may not be where it cannot fit, and `z <= cutoff`. cvxpy passes no starting point to HiGHS. Limits are on
nodes, so that a plan is reproducible. Nothing a solver says is believed: what comes back is rounded, packed, timed by
the schedule and checked by `hgraph/check_plan.py`; if it is not a better plan, the reason says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import cvxpy as cp
import numpy as np
from numpy.typing import NDArray

from strategies.cost import ReplicaKind
from strategies.heuristic import Assignment
from strategies.options import PlannerOptions
from strategies.solver import FEASIBLE_POINT, solve_with_highs

__all__ = [
    "DispatchProgram",
    "ProgramAnswer",
    "SolveFunction",
    "counts_program",
    "highs",
    "program_for",
    "slots_program",
    "solve",
]

MAX_SLOT_PRODUCT = 160
CUTOFF_SLACK = 1.0 + 1e-6

Floats: TypeAlias = NDArray[np.float64]
SolveFunction: TypeAlias = Callable[[cp.Problem, PlannerOptions, float], str]


@dataclass(frozen=True, slots=True, eq=False)
class DispatchProgram:
    """A built program. `counts` is [K, columns]; `column_replica` names the replica of each column.

    `is_slots` says that a column is a micro-batch, else it is a whole replica. `members` lists each class's indices.
    """

    problem: cp.Problem
    counts: cp.Variable
    column_replica: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    is_slots: bool


@dataclass(frozen=True, slots=True)
class ProgramAnswer:
    """What came of a program: `status` in words, the model's time in ms, and the groups of indices per replica.

    For a slots program each group is a micro-batch; for a counts program there is one group per replica. `groups` is
    None where the solver left no point.
    """

    status: str
    model_ms: float
    groups: tuple[tuple[tuple[int, ...], ...], ...] | None


def highs(problem: cp.Problem, options: PlannerOptions, target_ms: float) -> str:
    """Solves in place and returns the outcome: `optimal`, `limit`, `no incumbent`, or the solver's own status.

    Stops as soon as a point of at most `target_ms` is found. HiGHS's own large searches for points are off: they take
    most of its time, and the heuristic's plan is there already. Raises what cvxpy raises.
    """
    solve_with_highs(
        problem,
        mip_rel_gap=options.gap / 5,
        mip_max_nodes=options.max_nodes,
        mip_heuristic_run_rins=False,
        mip_heuristic_run_rens=False,
        mip_heuristic_run_root_reduced_cost=False,
        time_limit=float(options.time_limit_s),
        objective_target=target_ms,
    )
    if problem.status == cp.OPTIMAL:
        return "optimal"
    if problem.status not in (cp.USER_LIMIT, cp.OPTIMAL_INACCURATE):
        return str(problem.status)
    point = problem.solver_stats.extra_stats.primal_solution_status
    return "limit" if point == FEASIBLE_POINT else "no incumbent"


def solve(
    program: DispatchProgram, options: PlannerOptions, target_ms: float, solve_with: SolveFunction
) -> ProgramAnswer:
    """Returns the answer of `solve_with`; whatever it raises becomes the status."""
    try:
        status = solve_with(program.problem, options, target_ms)
    except Exception as error:
        first_line = (str(error).strip() or "no text").splitlines()[0]
        return ProgramAnswer(f"{type(error).__name__}: {first_line}", float("inf"), None)
    if status not in ("optimal", "limit"):
        return ProgramAnswer(status, float("inf"), None)
    values = program.counts.value
    if values is None or not np.isfinite(values).all():
        return ProgramAnswer(f"{status}, but without a point", float("inf"), None)
    model_ms = program.problem.value
    return ProgramAnswer(status, float("inf") if model_ms is None else float(model_ms), _groups(program, values))


def _groups(program: DispatchProgram, values: Floats) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Returns the indices in each column, by replica, reading the rounded counts as they are.

    Lower indices go to earlier columns. Counts that do not add up leave sequences out or repeat them, which the checker
    finds.
    """
    counts = np.clip(np.rint(values), 0, None).astype(int)
    columns: list[list[int]] = [[] for _ in program.column_replica]
    for members, row in zip(program.members, counts, strict=True):
        position = 0
        for column, count in enumerate(row):
            columns[column] += [
                members[(position + i) % len(members)] for i in range(min(int(count), 2 * len(members)))
            ]
            position += int(count)
    num_replicas = max(program.column_replica) + 1
    by_replica: list[list[tuple[int, ...]]] = [[] for _ in range(num_replicas)]
    for replica, own in zip(program.column_replica, columns, strict=True):
        if own or not program.is_slots:
            by_replica[replica].append(tuple(sorted(own)))
    return tuple(map(tuple, by_replica))


@dataclass(frozen=True, slots=True, eq=False)
class _Classes:
    length_K: Floats
    count_K: Floats
    members: tuple[tuple[int, ...], ...]
    work_KR: Floats
    fits_KR: Floats

    @staticmethod
    def of(kinds: Sequence[ReplicaKind], lengths: Sequence[int]) -> _Classes:
        members: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            members.setdefault(length, []).append(index)
        ordered = sorted(members, reverse=True)
        return _Classes(
            np.array(ordered, dtype=np.float64),
            np.array([len(members[length]) for length in ordered], dtype=np.float64),
            tuple(tuple(members[length]) for length in ordered),
            np.array([[kind.cost.sequence_ms(length) for kind in kinds] for length in ordered]),
            np.array([[float(length <= kind.max_tokens) for kind in kinds] for length in ordered]),
        )


def num_slots(kind: ReplicaKind, lengths: Sequence[int], cutoff_ms: float) -> int:
    """Returns how many slots a replica of `kind` can need in a plan of at most `cutoff_ms`.

    With pp = 1 two micro-batches that fit together are one, so any two exceed the limit; with pp > 1 only the number of
    sequences and the fixed cost bound them.
    """
    fitting = [length for length in lengths if length <= kind.max_tokens]
    most = len(fitting) if kind.pp > 1 else max(1, -(-2 * sum(fitting) // kind.max_tokens) - 1)
    if kind.cost.c > 0 and np.isfinite(cutoff_ms):
        most = min(most, int(cutoff_ms * CUTOFF_SLACK / kind.cost.c))
    return min(most, len(fitting))


def program_for(
    kinds: Sequence[ReplicaKind], lengths: Sequence[int], heuristic: Assignment, best_ms: float
) -> DispatchProgram:
    """Returns the program suited to the size, cut off at the better of the heuristic's plan and `best_ms`.

    Where the model is an upper estimate (slots, 1F1B with pp > 1), the heuristic's value in that model is the cut-off.
    """
    num_classes = len(set(lengths))
    flows_ms = [
        kind.flow_ms(kind.micro_batch_ms([lengths[i] for i in group] for group in heuristic.micro_batches(replica)))
        for replica, kind in enumerate(kinds)
    ]
    slots = sum(num_slots(kind, lengths, max(flows_ms)) for kind in kinds)
    if num_classes * slots > MAX_SLOT_PRODUCT:
        return counts_program(kinds, lengths, heuristic, min(heuristic.ms, best_ms))
    exact = all(kind.pp == 1 or kind.schedule == "gpipe" for kind in kinds)
    return slots_program(kinds, lengths, min(max(flows_ms), best_ms) if exact else max(flows_ms))


def slots_program(kinds: Sequence[ReplicaKind], lengths: Sequence[int], cutoff_ms: float) -> DispatchProgram:
    """Returns the slots program for a finite or infinite `cutoff_ms`."""
    classes = _Classes.of(kinds, lengths)
    slots = [num_slots(kind, lengths, cutoff_ms) for kind in kinds]
    column_replica = tuple(replica for replica, count in enumerate(slots) for _ in range(count))
    owner = np.array(column_replica, dtype=np.int64)
    upper_KJ = (classes.count_K[:, None] * classes.fits_KR)[:, owner]
    counts = cp.Variable(upper_KJ.shape, integer=True, bounds=[np.zeros_like(upper_KJ), upper_KJ])
    used = cp.Variable(len(owner), boolean=True)
    z = cp.Variable()
    limit_J = np.array([kinds[replica].max_tokens for replica in owner], dtype=np.float64)
    fixed_J = np.array([kinds[replica].cost.c for replica in owner])
    slot_ms = cp.sum(cp.multiply(classes.work_KR[:, owner], counts), axis=0) + cp.multiply(fixed_J, used)
    constraints = [
        cp.sum(counts, axis=1) == classes.count_K,
        classes.length_K @ counts <= cp.multiply(limit_J, used),
    ]
    same = np.flatnonzero(owner[1:] == owner[:-1])
    if len(same):
        constraints.append(slot_ms[same] >= slot_ms[same + 1])
    member_RJ = (owner[None, :] == np.arange(len(kinds))[:, None]).astype(np.float64)
    ramps_R = np.array([kind.pp - 1 for kind in kinds], dtype=np.float64)
    if ramps_R.any():
        longest_ms = cp.Variable(len(kinds), nonneg=True)
        constraints.append(longest_ms[owner] >= slot_ms)
        constraints.append(member_RJ @ slot_ms + cp.multiply(ramps_R, longest_ms) <= z)
    else:
        constraints.append(member_RJ @ slot_ms <= z)
    if np.isfinite(cutoff_ms):
        constraints.append(z <= cutoff_ms * CUTOFF_SLACK)
    return DispatchProgram(cp.Problem(cp.Minimize(z), constraints), counts, column_replica, classes.members, True)


def counts_program(
    kinds: Sequence[ReplicaKind], lengths: Sequence[int], heuristic: Assignment, cutoff_ms: float
) -> DispatchProgram:
    """Returns the counts program around the heuristic's plan, cut off at `cutoff_ms`."""
    classes = _Classes.of(kinds, lengths)
    num_replicas = len(kinds)
    upper_KR = classes.count_K[:, None] * classes.fits_KR
    counts = cp.Variable(upper_KR.shape, integer=True, bounds=[np.zeros_like(upper_KR), upper_KR])
    fewest, most = _micro_batch_range(kinds, heuristic, len(lengths))
    num_micro_batches = cp.Variable(num_replicas, integer=True, bounds=[fewest, most])
    z = cp.Variable()
    limit_R = np.array([kind.max_tokens for kind in kinds], dtype=np.float64)
    fixed_R = np.array([kind.cost.c for kind in kinds])
    halves_KR = (2 * classes.length_K[:, None] > limit_R[None, :]).astype(np.float64)
    ramp_R, ramp_fixed_R = _ramps(kinds, lengths, heuristic)
    work_R = cp.sum(cp.multiply(classes.work_KR, counts), axis=0)
    constraints = [
        cp.sum(counts, axis=1) == classes.count_K,
        classes.length_K @ counts <= cp.multiply(limit_R, num_micro_batches),
        cp.sum(cp.multiply(halves_KR, counts), axis=0) <= num_micro_batches,
        cp.multiply(1.0 + ramp_R, work_R) + cp.multiply(fixed_R, num_micro_batches) + ramp_fixed_R <= z,
        z <= cutoff_ms * CUTOFF_SLACK,
    ]
    problem = cp.Problem(cp.Minimize(z), constraints)
    return DispatchProgram(problem, counts, tuple(range(num_replicas)), classes.members, False)


def _micro_batch_range(
    kinds: Sequence[ReplicaKind], heuristic: Assignment, num_sequences: int
) -> tuple[Floats, Floats]:
    fewest, most = np.zeros(len(kinds)), np.full(len(kinds), float(num_sequences))
    for replica, kind in enumerate(kinds):
        groups = heuristic.packings[replica].groups
        if kind.pp > 1 and groups:
            fewest[replica] = most[replica] = len(groups)
    return fewest, most


def _ramps(kinds: Sequence[ReplicaKind], lengths: Sequence[int], heuristic: Assignment) -> tuple[Floats, Floats]:
    """Returns per replica the ramp's coefficient on the work and its constant in ms."""
    slope, fixed = np.zeros(len(kinds)), np.zeros(len(kinds))
    for replica, kind in enumerate(kinds):
        groups = heuristic.micro_batches(replica)
        if kind.pp == 1:
            continue
        times_ms = kind.micro_batch_ms([lengths[index] for index in group] for group in groups)
        total_ms, number = sum(times_ms), max(1, len(times_ms))
        equal_ms = (kind.pp - 1) * total_ms / number
        share = (heuristic.packings[replica].ms - total_ms) / equal_ms if equal_ms > 0 else 1.0
        slope[replica] = (kind.pp - 1) * share / number
        fixed[replica] = (kind.pp - 1) * share * kind.cost.c if groups else 0.0
    return slope, fixed
