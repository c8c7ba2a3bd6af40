"""The plan of one step: which strategy, who gets which sequence, in which micro-batches.

Per strategy a lower bound in closed form and a fast heuristic; strategies whose bound exceeds the best plan are
dropped. That is the first plan, there within milliseconds. When it is further than a set gap from the pool's bound, the
bounds are sharpened by their program and the integer program runs for strategies still alive. What a solver returns is
used only if the checker accepts it and it is faster.

The plan depends on profile, pool, options and lengths alone: sequences are put in order of falling length, equal ones
of rising index, before anything else, so the order of the batch decides nothing but which of equal sequences goes
where. No randomness, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hgraph.check_plan import check_plan
from hgraph.errors import InvalidInput
from hgraph.plan import StepPlan
from hgraph.profile import Profile
from hgraph.strategy import Pool, Strategy
from strategies.cost import ReplicaKind, replica_kinds
from strategies.heuristic import by_length
from strategies.integer_program import SolveFunction, highs
from strategies.options import PlannerOptions
from strategies.packing import Packer
from strategies.search import Search, plan_strategy
from strategies.step_plans import empty_plan, step_plan

__all__ = ["Planner"]


class Planner:
    """Plans the steps of one pool; what can be kept between steps (kinds of replica, packings) is kept, in bounds.

    What is kept changes how fast plans are made, never which. `options.only` restricts the pool to one strategy;
    `solve_with` solves integer programs.
    """

    def __init__(
        self, pool: Pool, profile: Profile, options: PlannerOptions | None = None, solve_with: SolveFunction = highs
    ) -> None:
        self.pool, self.profile = pool, profile
        self.options = options or PlannerOptions()
        self._solve_with = solve_with
        self._strategies = _usable(pool, self.options)
        self._kinds = {strategy.name: replica_kinds(strategy, profile) for strategy in self._strategies}
        self._packer = Packer(by_flow=self.options.objective == "flow")

    def plan(self, lengths: Sequence[int], step: int = 0) -> StepPlan:
        """Returns the last of `plans`."""
        for plan in self.plans(lengths, step):
            best = plan
        return best

    def first_plan(self, lengths: Sequence[int], step: int = 0) -> StepPlan:
        """Returns the first of `plans`."""
        return next(self.plans(lengths, step))

    def plans(self, lengths: Sequence[int], step: int = 0) -> Iterator[StepPlan]:
        """Yields checked plans of `step` for a batch of `lengths` [tokens], each at least as good as the one before.

        The first comes before any solver runs; each later one is faster, has a sharper bound, or says that a solver ran
        in vain (`StepPlan.runs`), and work is done only when it is asked for. `plan_ms` is left at 0 for the caller to
        fill in. An empty batch has one plan, in which all replicas are idle. Raises InvalidInput for a length below 1
        and for a sequence that no strategy can hold.
        """
        own_lengths = _checked(lengths)
        if not own_lengths:
            yield self._sound(empty_plan(step, self._strategies, self.profile), own_lengths)
            return
        order = by_length(range(len(own_lengths)), own_lengths)
        search = self._search(own_lengths, [own_lengths[index] for index in order])
        search.run_heuristics()
        last = self._plan_of(search, step, order, own_lengths)
        yield last
        if not self.options.program or search.is_good_enough:
            return
        for _ in search.improvements(self._solve_with):
            plan = self._plan_of(search, step, order, own_lengths)
            if plan != last:
                yield plan
            last = plan

    def _search(self, lengths: Sequence[int], falling: Sequence[int]) -> Search:
        able = [one for one in self._strategies if _limit(self._kinds[one.name]) >= falling[0]]
        if not able:
            raise InvalidInput(_no_strategy(self._kinds, lengths, self.options))
        planned = [plan_strategy(one, self._kinds[one.name], self.profile, falling) for one in able]
        return Search(tuple(falling), self.profile, self.options, planned, self._packer)

    def _plan_of(self, search: Search, step: int, order: Sequence[int], lengths: Sequence[int]) -> StepPlan:
        return self._sound(step_plan(search, step, order, self._strategies, self._kinds), lengths)

    def _sound(self, plan: StepPlan, lengths: Sequence[int]) -> StepPlan:
        check_plan(plan, replace(self.pool, strategies=self._strategies), self.profile, lengths)
        return plan


def _usable(pool: Pool, options: PlannerOptions) -> tuple[Strategy, ...]:
    strategies = pool.strategies if options.only is None else (pool[options.only],)
    if not options.require_all_ranks:
        return strategies
    full = tuple(one for one in strategies if len(one.ranks) == pool.num_ranks)
    if full:
        return full
    most = max(strategies, key=lambda one: len(one.ranks))
    idle = list(pool.idle_ranks(most.name))
    raise InvalidInput(
        f"plan: expected a strategy that uses all {pool.num_ranks} ranks (require_all_ranks), got none; "
        f"{most.name} comes closest and leaves {idle} idle. Add a replica to it, or allow idle ranks"
    )


def _checked(lengths: Sequence[int]) -> tuple[int, ...]:
    for index, length in enumerate(lengths):
        if length < 1 or int(length) != length:
            raise InvalidInput(
                f"plan: sequence {index}: expected a length of 1 token or more, got {length}; drop empty ones first"
            )
    return tuple(int(length) for length in lengths)


def _limit(kinds: Sequence[ReplicaKind]) -> int:
    return max(kind.max_tokens for kind in kinds)


def _no_strategy(kinds: Mapping[str, Sequence[ReplicaKind]], lengths: Sequence[int], options: PlannerOptions) -> str:
    index = max(range(len(lengths)), key=lambda index: (lengths[index], -index))
    limit = max(map(_limit, kinds.values()))
    holder = next(name for name, own in kinds.items() if _limit(own) == limit)
    where = "the pool" if options.only is None else f"strategy {options.only}"
    by = f" (strategy {holder})" if options.only is None else ""
    return (
        f"plan: sequence {index} has {lengths[index]:,} tokens; the largest limit of {where} is {limit:,} tokens per "
        f"micro-batch{by}. Cut long sequences (policy 'cut') or add a strategy with a larger limit"
    )
