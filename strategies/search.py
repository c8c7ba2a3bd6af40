"""The state of planning one step, and the moves that improve it: heuristics, sharper bounds, integer programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hgraph.check_plan import check_replica_plans
from hgraph.errors import PlanError
from hgraph.plan import ReplicaPlan, SolverRuns
from hgraph.profile import Profile
from hgraph.strategy import Strategy
from strategies.bound import BoundProblem, bound_problem, closed_form_ms, least_time_ms
from strategies.bound_program import program_bound_ms
from strategies.cost import ReplicaKind
from strategies.heuristic import (
    Assignment,
    Start,
    heuristic_assignment,
    pack_assignment,
    refine_slowest,
    searched,
    value_ms,
)
from strategies.integer_program import ProgramAnswer, SolveFunction, program_for, solve
from strategies.options import PlannerOptions
from strategies.packing import Packer, ordered
from strategies.solver import solve_with_highs

if TYPE_CHECKING:
    import cvxpy as cp

__all__ = ["EQUAL", "Planned", "Search", "plan_strategy", "replica_plans"]

EQUAL = 1e-9
SEARCHED_WITHIN = 0.05
REFINED_WITHIN = 0.02
ENOUGH_OF_GAP = 0.1
WORTHWHILE = 0.05


@dataclass(slots=True)
class Planned:
    """What is known of one strategy while planning. `bound_ms` and the assignment's time are without the bridges.

    `is_sharp`: the bound's program has been solved; `is_searched`: the local search has run.
    `solver` says how a program found the assignment; `fell_back` why a program's answer was not taken.
    """

    strategy: Strategy
    kinds: tuple[ReplicaKind, ...]
    bridge_ms: float
    problem: BoundProblem
    bound_ms: float
    is_sharp: bool = False
    is_searched: bool = False
    assignment: Assignment | None = None
    solver: str = ""
    fell_back: str = ""

    @property
    def step_bound_ms(self) -> float:
        return self.bound_ms + self.bridge_ms

    @property
    def step_ms(self) -> float:
        return self.assignment.ms + self.bridge_ms if self.assignment is not None else float("inf")

    @property
    def step_flow_ms(self) -> float:
        return self.assignment.flow_ms + self.bridge_ms if self.assignment is not None else float("inf")

    def take(self, assignment: Assignment) -> None:
        """Makes `assignment` the strategy's plan; a bound is never above it, rounding included."""
        self.assignment = assignment
        self.bound_ms = min(self.bound_ms, assignment.ms)


def plan_strategy(
    strategy: Strategy, kinds: tuple[ReplicaKind, ...], profile: Profile, lengths: Sequence[int]
) -> Planned:
    """Returns a strategy that can hold every sequence, with its closed-form bound and no plan yet."""
    problem = bound_problem(kinds, lengths)
    bridge_ms = profile.bridge_ms.get(strategy.name, 0.0)
    return Planned(strategy, kinds, bridge_ms, problem, least_time_ms(problem, closed_form_ms))


@dataclass(slots=True)
class Search:
    """Planning of one step: `planned` are the strategies that can hold the batch, in the pool's order.

    Plans of more flow time than `flow_limit_ms` are not taken. It is set once, by the heuristics, so that the best plan
    never gets slower. `runs` counts what solvers were asked, and what came of it.
    """

    lengths: tuple[int, ...]
    profile: Profile
    options: PlannerOptions
    planned: list[Planned]
    packer: Packer
    flow_limit_ms: float = float("inf")
    runs: SolverRuns = field(default_factory=SolverRuns)

    @property
    def best(self) -> Planned:
        """The strategy of least simulated time among those within the limit of flow time; by flow, of least flow time.

        Of equal ones the first in the pool's order.
        """
        limit_ms = self.flow_limit_ms
        if self.options.objective == "flow":
            limit_ms = min(one.step_flow_ms for one in self.planned) * (1.0 + EQUAL)
        able = [one for one in self.planned if one.step_flow_ms <= limit_ms]
        fastest_ms = min(one.step_ms for one in able)
        return next(one for one in able if one.step_ms <= fastest_ms * (1.0 + EQUAL))

    @property
    def bound_ms(self) -> float:
        """The smallest bound of the pool's strategies, and never above the best plan."""
        return min(min(one.step_bound_ms for one in self.planned), self.best.step_ms)

    @property
    def gap(self) -> float:
        """How far the best plan is from the pool's bound; 0.0 where nothing takes time."""
        return self.best.step_ms / self.bound_ms - 1.0 if self.bound_ms > 0 else 0.0

    @property
    def is_good_enough(self) -> bool:
        return self.gap <= self.options.gap

    def run_heuristics(self) -> None:
        """Plans strategies, those that dispatch best first, leaving out those whose bound exceeds the best plan so far.

        A strategy whose dispatch is far from the best plan is packed as it is, without a search.
        """
        starts = [(one, Start.of(one.kinds, self.lengths)) for one in self.planned]
        rounds = self.options.max_rounds
        best_ms = limit_ms = float("inf")
        for one, start in sorted(starts, key=lambda pair: pair[1].ms + pair[0].bridge_ms):
            if one.step_bound_ms > limit_ms * (1.0 + EQUAL):
                continue
            is_near = start.ms + one.bridge_ms <= best_ms * (1.0 + SEARCHED_WITHIN)
            enough_ms = one.bound_ms * (1.0 + self.options.gap * ENOUGH_OF_GAP)
            one.take(searched(start, self.lengths, self.packer, rounds if is_near else 0, enough_ms))
            one.is_searched = is_near
            best_ms = min(best_ms, one.step_ms)
            # A plan of less flow time may be preferred to a faster one, but none is faster than its bound.
            limit_ms = min(limit_ms, one.step_flow_ms)
        self.flow_limit_ms = limit_ms * (1.0 + self.options.flow_slack) * (1.0 + EQUAL) if limit_ms > 0 else 0.0
        for one in self.planned:
            if one.assignment is not None and one.step_ms <= best_ms * (1.0 + REFINED_WITHIN):
                self._offer(one, refine_slowest(one.kinds, self.lengths, one.assignment, self.packer))

    def sharpen_bounds(self) -> None:
        """Solves the bound's program for the strategy of the least bound, while that can close the gap.

        A bound as high as the best plan is enough.
        """
        before_ms = self.bound_ms
        while not self.is_good_enough:
            lowest = min(self.planned, key=lambda one: one.step_bound_ms)
            if lowest.is_sharp:
                break
            enough_ms = self.best.step_ms - lowest.bridge_ms
            sharp_ms = max(lowest.bound_ms, program_bound_ms(lowest.problem, enough_ms, self._solve_bound))
            lowest.bound_ms = sharp_ms if lowest.assignment is None else min(sharp_ms, lowest.assignment.ms)
            lowest.is_sharp = True
        self.runs += SolverRuns(bound_gain_ms=self.bound_ms - before_ms)

    def _solve_bound(self, problem: cp.Problem) -> None:
        self.runs += SolverRuns(bound=1)
        solve_with_highs(problem)

    def improvements(self, solve_with: SolveFunction) -> Iterator[None]:
        """Yields after each thing done for a smaller gap, until it is closed or nothing is left to do.

        First the bounds are sharpened; then strategies that could still win and have not been searched are; then
        integer programs run, fastest plan first, each strategy's as long as they help.
        """
        self.sharpen_bounds()
        yield
        for one in self._alive():
            if not one.is_searched:
                found = heuristic_assignment(one.kinds, self.lengths, self.packer, self.options.max_rounds)
                one.is_searched = True
                self._offer(one, found)
                yield
        runs = 0
        for one in self._alive():
            while runs < self.options.max_programs and one in self._alive(self.options.reach):
                runs, before_ms, best_ms = runs + 1, one.step_ms, self.best.step_ms
                self._improve(one, best_ms, solve_with)
                self.runs += SolverRuns(integer_gain_ms=best_ms - self.best.step_ms)
                yield
                if one.step_ms > before_ms * (1.0 - self.options.gap * WORTHWHILE):
                    break

    def _alive(self, reach: float = float("inf")) -> list[Planned]:
        """Returns the strategies whose bound leaves room for a better plan, fastest first; none when that is enough.

        Only those with a plan at most `reach` slower than the best, where that is given.
        """
        if self.is_good_enough:
            return []
        best_ms = self.best.step_ms
        able = [one for one in self.planned if one.step_bound_ms < best_ms * (1.0 - EQUAL)]
        able = [one for one in able if reach == float("inf") or one.step_ms <= best_ms * (1.0 + reach)]
        return sorted(able, key=lambda one: one.step_ms)

    def _offer(self, one: Planned, new: Assignment) -> bool:
        """Makes `new` the plan of a strategy if it is faster and does not take it over the limit of flow time."""
        if one.assignment is not None:
            is_faster = value_ms(new, self.packer) < value_ms(one.assignment, self.packer) * (1.0 - EQUAL)
            flow_ms = new.flow_ms + one.bridge_ms
            if not is_faster or flow_ms > max(self.flow_limit_ms, one.step_flow_ms):
                return False
        one.take(new)
        return True

    def _improve(self, one: Planned, best_ms: float, solve_with: SolveFunction) -> None:
        """Takes the program's plan of a strategy if it is sound and faster than what there is; notes what happened."""
        assert one.assignment is not None
        if len(one.kinds) == len(self.lengths) == 1:
            return
        program = program_for(one.kinds, self.lengths, one.assignment, best_ms - one.bridge_ms)
        self.runs += SolverRuns(integer=1)
        answer = solve(program, self.options, one.bound_ms * (1.0 + self.options.gap / 2), solve_with)
        if answer.groups is None:
            one.fell_back = answer.status
            return
        try:
            assignment = self._assignment(one, answer, program.is_slots)
            plans = replica_plans(assignment)
            check_replica_plans(plans, one.strategy, self.profile, self.lengths, f"{answer.status}, but its plan")
        except PlanError as error:
            one.fell_back = str(error)
            return
        if not self._offer(one, assignment):
            one.fell_back = f"{answer.status}, no faster plan"
            return
        one.solver = f"highs ({answer.status})"

    def _assignment(self, one: Planned, answer: ProgramAnswer, is_slots: bool) -> Assignment:
        """Returns the answer's groups as an assignment: micro-batches as they are, or whole replicas to be packed."""
        assert answer.groups is not None
        groups = [*answer.groups, *((),) * (len(one.kinds) - len(answer.groups))]
        if is_slots:
            return refine_slowest(one.kinds, self.lengths, _as_given(one.kinds, groups, self.lengths), self.packer)
        replicas = [own[0] if own else () for own in groups]
        for replica, (kind, own) in enumerate(zip(one.kinds, replicas, strict=True)):
            longest = max((self.lengths[index] for index in own), default=0)
            if longest > kind.max_tokens:
                raise PlanError(
                    f"{answer.status}, but its plan, replica {replica}: a sequence of {longest:,} tokens exceeds the "
                    f"limit of {kind.max_tokens:,}"
                )
        packed = pack_assignment(one.kinds, replicas, self.lengths, self.packer)
        return refine_slowest(one.kinds, self.lengths, packed, self.packer)


def _as_given(
    kinds: Sequence[ReplicaKind], groups: Sequence[tuple[tuple[int, ...], ...]], lengths: Sequence[int]
) -> Assignment:
    """Returns the assignment with exactly these micro-batches, put in the best order."""
    indices, packings = [], []
    for kind, own in zip(kinds, groups, strict=True):
        flat = [index for group in own for index in group]
        ends = [sum(len(group) for group in own[: number + 1]) for number in range(len(own))]
        positions = tuple(tuple(range(end - len(group), end)) for end, group in zip(ends, own, strict=True))
        indices.append(tuple(flat))
        packings.append(ordered(kind, [lengths[index] for index in flat], positions))
    return Assignment(tuple(indices), tuple(packings))


def replica_plans(assignment: Assignment) -> tuple[ReplicaPlan, ...]:
    """Returns the assignment as plan values."""
    return tuple(
        ReplicaPlan(assignment.micro_batches(replica), packing.ms)
        for replica, packing in enumerate(assignment.packings)
    )
