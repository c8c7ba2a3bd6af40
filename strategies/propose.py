"""A small pool of strategies for a cluster, costs and batches: found by search, judged by the planner.

1. For each sampled batch, good layouts are searched (`strategies/mixes.py`); those near the best are candidates, with
   all layouts of equal replicas.
2. Every candidate is estimated on every batch (`strategies/layout_estimate.py`), and a generous pool is chosen
   (`strategies/pool_choice.py`): the finalists.
3. The planner of training plans each batch with each finalist that is near the fastest there.
4. The pool is chosen among the finalists by those times.

With a clock that counts communication, the layouts of equal replicas are finalists too, every finalist is charged what
communication adds to its plan of one batch, and plans are timed by that clock; the search itself knows nothing of it.

A pool must hold the longest sequence that may come, sampled or not: one more batch with it is scored with a small
weight. Everything is a function of the arguments: no clock, no randomness. An interrupt ends the search; the pool is
then chosen from what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from hgraph.errors import InvalidInput
from hgraph.plan import StepPlan
from hgraph.profile import Profile
from hgraph.step_parts import StepClock, planned_part
from hgraph.strategy import Pool, Strategy
from hgraph.topology import Topology
from strategies.layout_estimate import estimate_ms
from strategies.mixes import AT_FLOOR, MixSearch
from strategies.options import PlannerOptions
from strategies.placement import place_layout
from strategies.pool_choice import PoolChoice, choose_pool
from strategies.proposal import Proposal, ProposalOptions, ProposedStrategy
from strategies.scheme_table import Floats, Layout, SchemeTable, layout_text
from strategies.select import plan_step

__all__ = ["Batch", "Progress", "judge", "planned_ms", "propose"]

Batch: TypeAlias = tuple[int, ...]
Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""

LONGEST_WEIGHT = 1e-3
"""Of the batch with the longest sequence, relative to a sampled one."""


def propose(
    table: SchemeTable,
    profile: Profile,
    topology: Topology,
    batches: Sequence[Batch],
    *,
    longest: int,
    options: ProposalOptions | None = None,
    progress: Progress | None = None,
    clock: StepClock | None = None,
) -> Proposal:
    """Returns the pool for `batches` of sampled lengths; it can hold a sequence of `longest` tokens.

    `clock` times the plans; without one, computation alone counts.

    Raises `InvalidInput` where no layout can hold it; `KeyboardInterrupt` only before the first batch was searched.
    """
    if not batches:
        raise InvalidInput("propose: expected at least one sampled batch, got none")
    search = _search(table, profile, topology, batches, longest, options, progress, clock)
    try:
        search.run()
    except KeyboardInterrupt:
        if not search.candidates:
            raise
        search.interrupted = True
        search.finish()
    return search.proposal()


def judge(
    table: SchemeTable,
    profile: Profile,
    topology: Topology,
    batches: Sequence[Batch],
    layouts: Sequence[Layout],
    *,
    longest: int,
    options: ProposalOptions | None = None,
    progress: Progress | None = None,
    clock: StepClock | None = None,
) -> Proposal:
    """Returns what `propose` says, for a pool of exactly these layouts.

    Raises `InvalidInput` where they cannot hold `longest` or a layout does not fit onto the nodes.
    """
    search = _search(table, profile, topology, batches, longest, options, progress, clock)
    search.given = tuple(layouts)
    search.scored = batches
    search.finish()
    search.plan()
    return search.proposal()


def _search(
    table: SchemeTable,
    profile: Profile,
    topology: Topology,
    batches: Sequence[Batch],
    longest: int,
    options: ProposalOptions | None,
    progress: Progress | None,
    clock: StepClock | None,
) -> _ProposalSearch:
    own = options or ProposalOptions(), progress or _quiet, clock or StepClock()
    return _ProposalSearch(table, profile, topology, batches, longest, *own)


def planned_ms(strategy: Strategy, profile: Profile, lengths: Batch, num_ranks: int) -> float:
    """Returns the step time in ms of a strategy by the planner, without its solver and without communication."""
    return _plan(strategy, profile, lengths, num_ranks).predicted_ms


def _plan(strategy: Strategy, profile: Profile, lengths: Batch, num_ranks: int) -> StepPlan:
    options = PlannerOptions(program=False, gap=float("inf"))
    return plan_step(Pool(num_ranks, (strategy,)), profile, lengths, options=options)


def _quiet(what: str, done: int, total: int) -> None:
    return None


@dataclass(slots=True)
class _ProposalSearch:
    """The search at work; `times_FB` are the finalists' times on the batches, the last one that with the longest."""

    table: SchemeTable
    profile: Profile
    topology: Topology
    batches: Sequence[Batch]
    longest: int
    options: ProposalOptions
    progress: Progress
    clock: StepClock
    candidates: dict[Layout, None] = field(default_factory=dict)
    scored: Sequence[Batch] = ()
    placed: dict[Layout, Strategy] = field(default_factory=dict)
    finalists: list[Layout] = field(default_factory=list)
    times_FB: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    every_ms: float = float("nan")
    static: Layout = ()
    num_planned: int = 0
    interrupted: bool = False
    given: tuple[Layout, ...] = ()
    mixes: MixSearch = field(init=False)

    def __post_init__(self) -> None:
        self.mixes = MixSearch(self.table, self.topology.num_ranks)

    def run(self) -> None:
        self.search()
        self.finish()
        self.plan()

    def search(self) -> None:
        """Collects candidates, batch by batch."""
        for number, batch in enumerate(self.batches):
            self.progress("searching layouts", number, len(self.batches))
            known = self.mixes.run(batch, list(self.candidates)[-self.options.kept :])
            near = sorted((layout for layout in known if np.isfinite(known[layout])), key=lambda own: (known[own], own))
            self.candidates.update(dict.fromkeys(near[: 3 * self.options.kept : 3]))
            self.scored = self.batches[: number + 1]
        self.progress("searching layouts", len(self.batches), len(self.batches))

    def finish(self) -> None:
        """Estimates the candidates on the batches that were searched, and chooses the finalists."""
        if self.finalists:
            return
        layouts = self._placed_layouts()
        times_SB = np.stack([estimate_ms(self.table, layouts, batch) for batch in self._columns()], axis=1)
        own_SB = times_SB[[layouts.index(layout) for layout in self.given or layouts]]
        if not np.isfinite(own_SB[:, -1]).any():
            raise InvalidInput(self._cannot_hold())
        self.every_ms = float(own_SB[:, :-1].min(axis=0).mean())
        if self.given:
            rows = tuple(layouts.index(layout) for layout in self.given)
        else:
            rows = choose_pool(times_SB, self.weights_B(), most=max(self.options.finalists, self.most)).members
        self.static, static_row = self._best_static(layouts, times_SB)
        rows = (*rows, static_row) if static_row not in rows else rows
        if self.clock.communication != "none" and not self.given:
            equal = {layouts.index(layout) for layout in self._equal() if layout in layouts}
            rows = (*rows, *sorted(equal - set(rows)))
        self.finalists = [layouts[row] for row in rows]
        self.times_FB = times_SB[list(rows)]
        if self.clock.communication != "none":
            self.times_FB += np.array([self._added_ms(row) for row in range(len(rows))])[:, None]

    def _placed_layouts(self) -> list[Layout]:
        """Returns the layouts to score that fit onto the nodes: those found, or given, and those of equal replicas."""
        for layout in self.given:
            if self._strategy(layout) is None:
                name = layout_text(self.table.schemes, layout)
                raise InvalidInput(f"propose: {name} does not fit onto the nodes of {self.topology.name}")
        found = self.given or {*self.candidates, *self._holders()}
        layouts = sorted({*found, *self._equal()})
        return [layout for layout in layouts if self._strategy(layout) is not None]

    def _equal(self) -> list[Layout]:
        return self.table.homogeneous(self.topology.num_ranks)

    def _added_ms(self, row: int) -> float:
        """Returns what communication adds to the plan of a finalist for the first batch that it holds."""
        held = np.flatnonzero(np.isfinite(self.times_FB[row]))
        if not held.size:
            return 0.0
        batch = self._columns()[int(held[0])]
        plan = _plan(self.placed[self.finalists[row]], self.profile, batch, self.topology.num_ranks)
        return self._timed_ms(row, batch, plan) - plan.predicted_ms

    def _timed_ms(self, row: int, batch: Batch, plan: StepPlan) -> float:
        if self.clock.communication == "none":
            return plan.predicted_ms
        return self.clock.ms((planned_part(plan, self.placed[self.finalists[row]], self.profile, batch),))

    @property
    def most(self) -> int:
        return self.options.most if self.options.size is None else self.options.size

    def weights_B(self) -> Floats:
        return np.array([1.0] * len(self.scored) + [LONGEST_WEIGHT])

    def _columns(self) -> list[Batch]:
        """Returns the batches to score: the sampled ones, then the first again with the longest sequence in it."""
        return [*self.scored, _with_longest(self.batches[0], self.longest)]

    def _holders(self) -> list[Layout]:
        """Returns layouts found for the batch with the longest sequence."""
        known = self.mixes.run(self._columns()[-1])
        return sorted(known, key=lambda layout: (known[layout], layout))[: self.options.kept]

    def _strategy(self, layout: Layout) -> Strategy | None:
        """Returns the strategy of a layout, placed; None where it does not fit onto the nodes."""
        if layout not in self.placed:
            replicas = place_layout(self.table.schemes, layout, self.topology)
            if replicas is None:
                return None
            self.placed[layout] = Strategy(layout_text(self.table.schemes, layout), replicas)
        return self.placed[layout]

    def _best_static(self, layouts: Sequence[Layout], times_SB: Floats) -> tuple[Layout, int]:
        """Returns the layout of equal replicas that is fastest over all batches, and its row."""
        single = [row for row, layout in enumerate(layouts) if sum(count > 0 for count in layout) == 1]
        able = [row for row in single if np.isfinite(times_SB[row]).all()] or single or list(range(len(layouts)))
        best = min(able, key=lambda row: (float(times_SB[row].sum()), row))
        return layouts[best], best

    def plan(self) -> None:
        """Replaces estimates by planned times wherever a finalist is near the fastest; the static one always is."""
        columns = self._columns()
        work = 0
        for number, batch in enumerate(columns):
            self.progress("planning", number, len(columns))
            for row in self._to_plan(number, batch):
                layout = self.finalists[row]
                work += sum(layout) * len(batch)
                if work > self.options.max_work:
                    return
                plan = _plan(self.placed[layout], self.profile, batch, self.topology.num_ranks)
                self.times_FB[row, number] = self._timed_ms(row, batch, plan)
                self.num_planned += 1
        self.progress("planning", len(columns), len(columns))

    def _to_plan(self, number: int, batch: Batch) -> list[int]:
        """Returns the finalists to plan on a batch: near the fastest, and not known to be unable to do any better."""
        times_F = self.times_FB[:, number].copy()
        near_F = times_F <= times_F.min() * (1.0 + self.options.reach)
        near_F[self.finalists.index(self.static)] = True
        floors_F = self.table.floors_ms(self.finalists, max(batch))
        return np.flatnonzero(near_F & np.isfinite(times_F) & (times_F > floors_F * (1.0 + AT_FLOOR))).tolist()

    def _choice(self) -> PoolChoice:
        if self.given:
            own_GB = self.times_FB[: len(self.given)]
            return PoolChoice(
                tuple(range(len(self.given))), choose_pool(own_GB, self.weights_B(), most=self.most).means_ms
            )
        gain = self.options.gain if self.options.size is None else 0.0
        return choose_pool(self.times_FB, self.weights_B(), most=self.most, gain=gain)

    def proposal(self) -> Proposal:
        """Returns the pool chosen by the times there are, and what can be said about it."""
        choice = self._choice()
        members = list(choice.members)
        times_MB = self.times_FB[members, :-1]
        strategies = tuple(self.placed[self.finalists[row]] for row in members)
        return Proposal(
            pool=Pool(self.topology.num_ranks, strategies),
            strategies=tuple(self._proposed(row, index, times_MB) for index, row in enumerate(members)),
            mean_ms=float(times_MB.min(axis=0).mean()),
            means_ms=choice.means_ms,
            static=layout_text(self.table.schemes, self.static),
            static_ms=_mean_ms(self.times_FB[[self.finalists.index(self.static)], :-1]),
            every_ms=self.every_ms,
            num_batches=len(self.scored),
            num_candidates=len(self.given or self.candidates),
            num_planned=self.num_planned,
            idle=self.topology.num_ranks - self.mixes.num_ranks,
            interrupted=self.interrupted,
        )

    def _proposed(self, row: int, index: int, times_MB: Floats) -> ProposedStrategy:
        layout = self.finalists[row]
        return ProposedStrategy(
            layout_text(self.table.schemes, layout),
            layout,
            self.table.holds(layout),
            float((times_MB.argmin(axis=0) == index).mean()),
            _mean_ms(np.delete(times_MB, index, axis=0)),
        )

    def _cannot_hold(self) -> str:
        return (
            f"propose: no layout holds a sequence of {self.longest:,} tokens on {self.topology.num_ranks} ranks; the "
            f"largest limit of the schemes is {self.table.limit_T.max():,} tokens per micro-batch"
        )


def _mean_ms(times_MB: Floats) -> float | None:
    """Returns the mean of the fastest; None where a batch is held by none."""
    mean_ms = float(times_MB.min(axis=0).mean()) if len(times_MB) else float("inf")
    return mean_ms if np.isfinite(mean_ms) else None


def _with_longest(batch: Batch, longest: int) -> Batch:
    """Returns a batch of no more tokens than `batch`, where those suffice, with one sequence of `longest`."""
    others, missing = [], sum(batch) - longest
    for length in batch:
        if length <= missing:
            others.append(length)
            missing -= length
    return (longest, *others)
