"""Systems that train on the same batches: what each may choose before the first step, and in every step.

A system is fitted on calibration batches, which stand for what is known of the data before training, and then makes the
parts of each step. What a choice is judged by is the clock of the simulation, communication included where it has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from hgraph.errors import InvalidInput
from hgraph.profile import Profile
from hgraph.step_parts import Part, StepClock, planned_part
from hgraph.strategy import Pool, Strategy
from strategies.baselines import Assign
from strategies.options import PlannerOptions
from strategies.published import published_plan
from strategies.select import plan_step

__all__ = ["Batch", "InTurn", "OneFixed", "PerBatch", "PlannedPool", "Published", "Setting", "System", "planned_assign"]

Batch: TypeAlias = Sequence[int]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all systems share: costs, clock, the context window [tokens], and how hard the planner tries."""

    profile: Profile
    clock: StepClock
    context: int
    options: PlannerOptions = field(default_factory=lambda: PlannerOptions(program=False))

    def limit(self, strategy: Strategy) -> int:
        """Returns the longest sequence that a strategy holds."""
        return max(self.profile.cost(replica.scheme).max_tokens for replica in strategy.replicas)


class System(Protocol):
    """`fit` is called once, then `parts` for every step; `layout` says in words what was chosen by then."""

    layout: str

    def fit(self, batches: Sequence[Batch]) -> None: ...

    def parts(self, lengths: Batch) -> tuple[Part, ...]: ...


def planned_assign(setting: Setting) -> Assign:
    """Returns the planner as a way to assign a batch to one strategy; what was planned once is remembered."""
    known: dict[tuple[Strategy, tuple[int, ...]], Part] = {}

    def assign(strategy: Strategy, profile: Profile, lengths: Sequence[int], context: int) -> Part:
        key = (strategy, tuple(lengths))
        if key not in known:
            alone = Pool(max(strategy.ranks) + 1, (strategy,))
            plan = plan_step(alone, profile, lengths, options=setting.options)
            known[key] = planned_part(plan, strategy, profile, lengths)
        return known[key]

    return assign


class OneFixed:
    """One strategy for all steps: of those that hold the context window, the one of least mean calibration time."""

    def __init__(self, setting: Setting, strategies: Sequence[Strategy], assign: Assign) -> None:
        self.setting, self.assign = setting, assign
        self.able = [one for one in strategies if setting.limit(one) >= setting.context]
        if not self.able:
            limit = max(map(setting.limit, strategies), default=0)
            raise InvalidInput(
                f"simulate: none of {len(strategies)} strategies holds a context window of {setting.context:,} tokens; "
                f"the largest limit is {limit:,}"
            )
        self.layout = ""
        self.chosen = self.able[0]

    def fit(self, batches: Sequence[Batch]) -> None:
        if len(self.able) > 1:
            self.chosen = min(self.able, key=lambda one: sum(self._ms(one, lengths) for lengths in batches))
        self.layout = self.chosen.name

    def parts(self, lengths: Batch) -> tuple[Part, ...]:
        return (self._part(self.chosen, lengths),)

    def _part(self, strategy: Strategy, lengths: Batch) -> Part:
        return self.assign(strategy, self.setting.profile, lengths, self.setting.context)

    def _ms(self, strategy: Strategy, lengths: Batch) -> float:
        return self.setting.clock.ms((self._part(strategy, lengths),))


class PerBatch:
    """For each batch the fastest of the strategies that hold its longest sequence."""

    def __init__(self, setting: Setting, strategies: Sequence[Strategy], assign: Assign) -> None:
        self.setting, self.strategies, self.assign = setting, tuple(strategies), assign
        self.layout = f"{len(self.strategies)} layouts"

    def fit(self, batches: Sequence[Batch]) -> None:
        """Nothing is known beforehand."""

    def parts(self, lengths: Batch) -> tuple[Part, ...]:
        able = [one for one in self.strategies if self.setting.limit(one) >= max(lengths)]
        made = [(self.assign(one, self.setting.profile, lengths, self.setting.context),) for one in able]
        return min(made, key=self.setting.clock.ms)


@dataclass(frozen=True, slots=True)
class _Segment:
    """Sequences of more than the segment before and at most `longest` tokens run under `strategy`."""

    longest: int
    strategy: Strategy


class InTurn:
    """Several homogeneous strategies one after another in every step, each for one class of lengths (HotSPa).

    Rebuilt from Ge et al., "Enabling Parallelism Hot Switching for Efficient Training of Large Language Models" (SOSP
    2024): short sequences run under a layout of many small replicas, then the layout changes within the step, with
    parameters and gathered gradients, for longer ones. Borders (powers of two; the first is 2,048, or less where a
    layout holds no more) and layouts are the best for the calibration batches, by dynamic programming, switches
    included; a step leaves out what it has no sequence for.
    """

    def __init__(self, setting: Setting, strategies: Sequence[Strategy], assign: Assign) -> None:
        self.setting, self.strategies, self.assign = setting, tuple(strategies), assign
        self.segments: tuple[_Segment, ...] = ()
        self.layout = ""

    def fit(self, batches: Sequence[Batch]) -> None:
        context = self.setting.context
        first = min(11, int(math.log2(min(map(self.setting.limit, self.strategies)))))
        borders = [2**power for power in range(first, 40) if 2**power < context] + [context]
        # best[strategy of the last segment]: time of all up to the border, and the segments; None is the beginning.
        best: list[dict[Strategy | None, tuple[float, tuple[_Segment, ...]]]] = [{None: (0.0, ())}]
        for upper in range(1, len(borders) + 1):
            best.append(self._ending_at(borders, upper, best, batches))
        self.segments = min(best[-1].values(), key=lambda found: found[0])[1]
        texts = [f"{one.strategy.name} to {one.longest:,}" for one in self.segments]
        self.layout = ", ".join(texts)

    def _ending_at(
        self,
        borders: Sequence[int],
        upper: int,
        best: Sequence[dict[Strategy | None, tuple[float, tuple[_Segment, ...]]]],
        batches: Sequence[Batch],
    ) -> dict[Strategy | None, tuple[float, tuple[_Segment, ...]]]:
        """Returns the best ways to run all sequences of up to `borders[upper - 1]` tokens, by their last strategy."""
        found: dict[Strategy | None, tuple[float, tuple[_Segment, ...]]] = {}
        for strategy in self.strategies:
            if self.setting.limit(strategy) < borders[upper - 1]:
                continue
            for lower in range(upper):
                own_ms = self._segment_ms(strategy, borders[lower - 1] if lower else 0, borders[upper - 1], batches)
                for before, (ms, segments) in best[lower].items():
                    switch_ms = 0.0 if before is None else self._switch_ms(before, strategy)
                    total_ms = ms + switch_ms + own_ms
                    if before != strategy and total_ms < found.get(strategy, (float("inf"),))[0]:
                        found[strategy] = (total_ms, (*segments, _Segment(borders[upper - 1], strategy)))
        return found

    def _segment_ms(self, strategy: Strategy, above: int, longest: int, batches: Sequence[Batch]) -> float:
        """Returns the mean time of the sequences of more than `above` and at most `longest` tokens."""
        computing = StepClock()
        total_ms = 0.0
        for lengths in batches:
            own = [length for length in lengths if above < length <= longest]
            if own:
                total_ms += computing.ms((self.assign(strategy, self.setting.profile, own, self.setting.context),))
        return total_ms / max(1, len(batches))

    def _switch_ms(self, start: Strategy, end: Strategy) -> float:
        empty = [Part(one, ((),) * len(one.replicas)) for one in (start, end)]
        return self.setting.clock.switch_ms(empty, 1)

    def parts(self, lengths: Batch) -> tuple[Part, ...]:
        made = []
        above = 0
        for segment in self.segments:
            own = [index for index, length in enumerate(lengths) if above < length <= segment.longest]
            above = segment.longest
            if own:
                mine = [lengths[index] for index in own]
                part = self.assign(segment.strategy, self.setting.profile, mine, self.setting.context)
                made.append(_renumbered(part, own))
        return tuple(made)


def _renumbered(part: Part, numbers: Sequence[int]) -> Part:
    """Returns the part with `numbers[i]` for every index i."""
    replicas = tuple(
        tuple(replace(one, sequences=tuple(numbers[index] for index in one.sequences)) for one in own)
        for own in part.replicas
    )
    return Part(part.strategy, replicas)


class PlannedPool:
    """Our planner over a pool: in every step the best strategy for its batch.

    Bridges of each strategy are charged at what they add to a step on the calibration batches.
    """

    def __init__(self, setting: Setting, pool: Pool, assign: Assign) -> None:
        self.setting, self.pool, self.assign = setting, pool, assign
        self.profile = setting.profile
        self.layout = f"{len(pool.strategies)} strategies"

    def fit(self, batches: Sequence[Batch]) -> None:
        if self.setting.clock.communication == "none":
            return
        self.profile = replace(
            self.setting.profile,
            bridge_ms={strategy.name: self._added_ms(strategy, batches) for strategy in self.pool.strategies},
        )

    def _added_ms(self, strategy: Strategy, batches: Sequence[Batch]) -> float:
        """Returns the mean of what communication adds to a step of `strategy`."""
        limit = self.setting.limit(strategy)
        added_ms = []
        for lengths in batches:
            own = [min(length, limit) for length in lengths]
            parts = (self.assign(strategy, self.setting.profile, own, self.setting.context),)
            added_ms.append(self.setting.clock.ms(parts) - StepClock().ms(parts))
        return max(0.0, sum(added_ms) / max(1, len(added_ms)))

    def parts(self, lengths: Batch) -> tuple[Part, ...]:
        plan = plan_step(self.pool, self.profile, lengths, options=self.setting.options)
        return (planned_part(plan, self.pool[plan.strategy], self.profile, lengths),)


class Published:
    """The published algorithm over a pool (`strategies/published.py`)."""

    def __init__(self, setting: Setting, pool: Pool) -> None:
        self.setting, self.pool = setting, pool
        self.layout = f"{len(pool.strategies)} strategies"

    def fit(self, batches: Sequence[Batch]) -> None:
        """It knows nothing beforehand but its pool."""

    def parts(self, lengths: Batch) -> tuple[Part, ...]:
        return (published_plan(self.pool, self.setting.profile, lengths).part,)
