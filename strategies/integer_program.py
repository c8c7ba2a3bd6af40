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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from strategies.cost import ReplicaKind
from strategies.heuristic import Assignment
from strategies.options import PlannerOptions
from strategies.packing import Packing
from strategies.solver import FEASIBLE_POINT, solve_with_highs

if TYPE_CHECKING:
    import cvxpy as cp

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
MAX_COUNTS = 400
CLASS_STEP = 16
CUTOFF_SLACK = 1.0 + 1e-6

Floats: TypeAlias = NDArray[np.float64]
SolveFunction: TypeAlias = Callable[["cp.Problem", PlannerOptions, float], str]


@dataclass(frozen=True, slots=True, eq=False)
class DispatchProgram:
    """A program with a batch's numbers in it. `counts` is [K, columns]; `column_replica` is the replica of each column.

    `is_slots` says that a column is a micro-batch, else it is a whole replica. `members` lists each class's indices, in
    the order of the rows; rows beyond them are empty. `kept` are the indices of replicas that the program leaves alone.
    Its times are in units of `unit_ms`.
    """

    problem: cp.Problem
    counts: cp.Variable
    column_replica: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    is_slots: bool
    kept: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    unit_ms: float = 1.0


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
    import cvxpy as cp

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
    for variable in program.problem.variables():
        variable.save_value(None)
    try:
        status = solve_with(program.problem, options, target_ms / program.unit_ms)
    except Exception as error:
        first_line = (str(error).strip() or "no text").splitlines()[0]
        return ProgramAnswer(f"{type(error).__name__}: {first_line}", float("inf"), None)
    if status not in ("optimal", "limit"):
        return ProgramAnswer(status, float("inf"), None)
    values = program.counts.value
    if values is None or not np.isfinite(values).all():
        return ProgramAnswer(f"{status}, but without a point", float("inf"), None)
    model_ms = program.problem.value
    answer_ms = float("inf") if model_ms is None else float(model_ms) * program.unit_ms
    return ProgramAnswer(status, answer_ms, _groups(program, values))


def _groups(program: DispatchProgram, values: Floats) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Returns the indices in each column, by replica, reading the rounded counts as they are.

    Lower indices go to earlier columns. Counts that do not add up leave sequences out or repeat them, which the checker
    finds.
    """
    counts = np.clip(np.rint(values), 0, None).astype(int)
    columns: list[list[int]] = [[] for _ in program.column_replica]
    for members, row in zip(program.members, counts, strict=False):
        position = 0
        for column, count in enumerate(row):
            columns[column] += [
                members[(position + i) % len(members)] for i in range(min(int(count), 2 * len(members)))
            ]
            position += int(count)
    num_replicas = max(*program.column_replica, *program.kept, 0) + 1
    by_replica: list[list[tuple[int, ...]]] = [[] for _ in range(num_replicas)]
    for replica, kept in program.kept.items():
        by_replica[replica].append(kept)
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
    def of(kinds: Sequence[ReplicaKind], lengths: Sequence[int], indices: Sequence[int] | None = None) -> _Classes:
        """Returns the classes of the sequences `indices`, by default of all."""
        members: dict[int, list[int]] = {}
        for index in range(len(lengths)) if indices is None else indices:
            members.setdefault(lengths[index], []).append(index)
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
    import cvxpy as cp

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


class _CountsProgram:
    """The counts program of a number of classes and replicas, in parameters: canonicalised once, for any batch."""

    def __init__(self, num_classes: int, num_replicas: int) -> None:
        import cvxpy as cp

        shape = (num_classes, num_replicas)
        self.parameters = {
            name: cp.Parameter(size, nonneg=True)
            for name, size in {
                "count_K": num_classes,
                "length_K": num_classes,
                "upper_KR": shape,
                "halves_KR": shape,
                "work_KR": shape,
                "limit_R": num_replicas,
                "fixed_R": num_replicas,
                "ramp_R": num_replicas,
                "fewest_R": num_replicas,
                "most_R": num_replicas,
                "cutoff": (),
            }.items()
        }
        given = self.parameters
        self.counts = cp.Variable(shape, integer=True)
        number = cp.Variable(num_replicas, integer=True)
        z = cp.Variable()
        work_R = cp.sum(cp.multiply(given["work_KR"], self.counts), axis=0)
        constraints = [
            self.counts >= 0,
            self.counts <= given["upper_KR"],
            number >= given["fewest_R"],
            number <= given["most_R"],
            cp.sum(self.counts, axis=1) == given["count_K"],
            given["length_K"] @ self.counts <= cp.multiply(given["limit_R"], number),
            cp.sum(cp.multiply(given["halves_KR"], self.counts), axis=0) <= number,
            work_R + cp.multiply(given["fixed_R"], number) + given["ramp_R"] <= z,
            z <= given["cutoff"],
        ]
        self.problem = cp.Problem(cp.Minimize(z), constraints)


@lru_cache(maxsize=8)
def _counts_program(num_classes: int, num_replicas: int) -> _CountsProgram:
    """Returns the program of a size. Shared, and harmless to share: whatever it answers is checked."""
    return _CountsProgram(num_classes, num_replicas)


def counts_program(
    kinds: Sequence[ReplicaKind], lengths: Sequence[int], heuristic: Assignment, cutoff_ms: float
) -> DispatchProgram:
    """Returns the counts program around the heuristic's plan, cut off at `cutoff_ms`.

    Beyond `MAX_COUNTS` counts, the replicas are the slowest one and those that are done first; the others keep what
    they have. Works are in units of the cut-off.
    """
    replicas = _neighbourhood(heuristic, lengths)
    freed = sorted(index for replica in replicas for index in heuristic.indices[replica])
    own_kinds = [kinds[replica] for replica in replicas]
    classes = _Classes.of(own_kinds, lengths, freed)
    num = -(-len(classes.members) // CLASS_STEP) * CLASS_STEP
    program = _counts_program(num, len(replicas))
    fewest, most = _micro_batch_range(own_kinds, [heuristic.packings[replica] for replica in replicas], len(freed))
    slope_R, ramp_R = _ramps(kinds, lengths, heuristic)
    limit_R = np.array([kind.max_tokens for kind in own_kinds], dtype=np.float64)
    unit_ms = cutoff_ms if cutoff_ms > 0 else 1.0
    values = {
        "count_K": classes.count_K,
        "length_K": classes.length_K,
        "upper_KR": classes.count_K[:, None] * classes.fits_KR,
        "halves_KR": (2 * classes.length_K[:, None] > limit_R[None, :]).astype(np.float64),
        "work_KR": classes.work_KR * (1.0 + slope_R[list(replicas)]) / unit_ms,
        "limit_R": limit_R,
        "fixed_R": np.array([kind.cost.c for kind in own_kinds]) / unit_ms,
        "ramp_R": ramp_R[list(replicas)] / unit_ms,
        "fewest_R": fewest,
        "most_R": most,
        "cutoff": np.array(cutoff_ms * CUTOFF_SLACK / unit_ms),
    }
    for name, value in values.items():
        rows = num - len(value) if name.partition("_")[2].startswith("K") else 0
        program.parameters[name].value = np.pad(value, [(0, rows), (0, 0)][: value.ndim]) if rows else value
    kept = {replica: own for replica, own in enumerate(heuristic.indices) if replica not in replicas}
    return DispatchProgram(program.problem, program.counts, replicas, classes.members, False, kept, unit_ms)


def _neighbourhood(heuristic: Assignment, lengths: Sequence[int]) -> tuple[int, ...]:
    """Returns the replicas the program may change: all, or the slowest and the first done while it stays small."""
    order = sorted(range(len(heuristic.packings)), key=lambda replica: (heuristic.packings[replica].ms, replica))
    chosen = [order[-1]]
    seen = {lengths[index] for index in heuristic.indices[order[-1]]}
    for replica in order[:-1]:
        seen |= {lengths[index] for index in heuristic.indices[replica]}
        if len(seen) * (len(chosen) + 1) > MAX_COUNTS and len(chosen) > 1:
            break
        chosen.append(replica)
    return tuple(sorted(chosen))


def _micro_batch_range(
    kinds: Sequence[ReplicaKind], packings: Sequence[Packing], num_sequences: int
) -> tuple[Floats, Floats]:
    fewest, most = np.zeros(len(kinds)), np.full(len(kinds), float(num_sequences))
    for replica, (kind, packing) in enumerate(zip(kinds, packings, strict=True)):
        if kind.pp > 1 and packing.groups:
            fewest[replica] = most[replica] = len(packing.groups)
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
