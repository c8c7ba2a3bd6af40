"""A small pool of strategies for a cluster, costs and batches: found by search, judged by the planner.

1. For each sampled batch, good layouts are searched (`strategies/mixes.py`); those near the best are candidates, with
   all layouts of equal replicas.
2. Every candidate is estimated on every batch (`strategies/layout_estimate.py`), and a generous pool is chosen
   (`strategies/pool_choice.py`): the finalists.
3. The planner of training plans each batch with each finalist that is near the fastest there.
4. The pool is chosen among the finalists by those times.

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
from hgraph.profile import Profile
from hgraph.strategy import Pool, Strategy
from hgraph.topology import Topology
from strategies.layout_estimate import estimate_ms
from strategies.mixes import MixSearch
from strategies.options import PlannerOptions
from strategies.placement import place_layout
from strategies.pool_choice import choose_pool
from strategies.scheme_table import Floats, Layout, SchemeTable, layout_text
from strategies.select import plan_step

__all__ = ["Batch", "Progress", "Proposal", "ProposalOptions", "ProposedStrategy", "planned_ms", "propose"]

Batch: TypeAlias = tuple[int, ...]
Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""

LONGEST_WEIGHT = 1e-3
"""Of the batch with the longest sequence, relative to a sampled one."""


@dataclass(frozen=True, slots=True)
class ProposalOptions:
    """How large a pool, and how hard to look for it.

    `size`: strategies in the pool, exactly where so many help; None: as many as gain, `most` at most. `gain`: the share
    of the mean step time that one more strategy has to save. `kept`: candidates kept of each batch. `finalists`: how
    many candidates the planner judges. `reach`: it plans those whose estimate is at most this above the least (0.05 =
    5 %).
    """

    size: int | None = None
    most: int = 10
    gain: float = 0.002
    kept: int = 12
    finalists: int = 24
    reach: float = 0.05

    def __post_init__(self) -> None:
        for name, value in (("size", self.size), ("most", self.most), ("kept", self.kept)):
            if value is not None and value < 1:
                raise InvalidInput(f"propose: expected {name} of 1 or more, got {value}")
        for name in ("gain", "reach", "finalists"):
            if not getattr(self, name) >= 0:
                raise InvalidInput(f"propose: expected {name} of 0 or more, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class ProposedStrategy:
    """One strategy of the pool: the share of the batches in which it is the fastest, and the mean in ms without it.

    None where the others cannot hold every batch.
    """

    name: str
    layout: Layout
    share: float
    without_ms: float | None


@dataclass(frozen=True, slots=True)
class Proposal:
    """A pool and what was found about it; all times are means over the sampled batches, in ms.

    `means_ms`: of the best pool of 1, 2, ... strategies. `static_ms`: of the best single layout of equal replicas,
    named `static`. `every_ms`: of all candidates together, as estimated. `num_planned` counts plans of the planner,
    `idle` ranks that no replica can use.
    """

    pool: Pool
    strategies: tuple[ProposedStrategy, ...]
    mean_ms: float
    means_ms: tuple[float, ...]
    static: str
    static_ms: float
    every_ms: float
    num_batches: int
    num_candidates: int
    num_planned: int
    idle: int = 0
    interrupted: bool = False


def propose(
    table: SchemeTable,
    profile: Profile,
    topology: Topology,
    batches: Sequence[Batch],
    *,
    longest: int,
    options: ProposalOptions | None = None,
    progress: Progress | None = None,
) -> Proposal:
    """Returns the pool for `batches` of sampled lengths; it can hold a sequence of `longest` tokens.

    Raises `InvalidInput` where no layout can hold it; `KeyboardInterrupt` only before the first batch was searched.
    """
    if not batches:
        raise InvalidInput("propose: expected at least one sampled batch, got none")
    search = _ProposalSearch(
        table, profile, topology, batches, longest, options or ProposalOptions(), progress or _quiet
    )
    try:
        search.run()
    except KeyboardInterrupt:
        if not search.candidates:
            raise
        search.interrupted = True
        search.finish()
    return search.proposal()


def planned_ms(strategy: Strategy, profile: Profile, lengths: Batch, num_ranks: int) -> float:
    """Returns the step time in ms of a strategy by the planner, without its solver."""
    options = PlannerOptions(program=False, gap=float("inf"))
    return plan_step(Pool(num_ranks, (strategy,)), profile, lengths, options=options).predicted_ms


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
    candidates: dict[Layout, None] = field(default_factory=dict)
    scored: Sequence[Batch] = ()
    placed: dict[Layout, Strategy] = field(default_factory=dict)
    finalists: list[Layout] = field(default_factory=list)
    times_FB: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    every_ms: float = float("nan")
    static: Layout = ()
    num_planned: int = 0
    interrupted: bool = False
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
        weights_B = self.weights_B()
        layouts = sorted({*self.candidates, *self.table.homogeneous(self.topology.num_ranks), *self._holders()})
        layouts = [layout for layout in layouts if self._strategy(layout) is not None]
        times_SB = np.stack([estimate_ms(self.table, layouts, batch) for batch in self._columns()], axis=1)
        if not np.isfinite(times_SB[:, -1]).any():
            raise InvalidInput(self._cannot_hold())
        self.every_ms = float(times_SB[:, :-1].min(axis=0).mean())
        rows = choose_pool(times_SB, weights_B, most=max(self.options.finalists, self.most)).members
        self.static, static_row = self._best_static(layouts, times_SB)
        rows = (*rows, static_row) if static_row not in rows else rows
        self.finalists = [layouts[row] for row in rows]
        self.times_FB = times_SB[list(rows)]

    @property
    def most(self) -> int:
        return self.options.most if self.options.size is None else self.options.size

    def weights_B(self) -> Floats:
        return np.array([1.0] * len(self.scored) + [LONGEST_WEIGHT])

    def _columns(self) -> list[Batch]:
        """Returns the batches to score: the sampled ones, then the one with most tokens again, with the longest."""
        tokens = max(map(sum, self.batches))
        return [*self.scored, _with_longest(self.batches[0], self.longest, tokens)]

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
        static_row = self.finalists.index(self.static)
        columns = self._columns()
        for number, batch in enumerate(columns):
            self.progress("planning", number, len(columns))
            limit_ms = self.times_FB[:, number].min() * (1.0 + self.options.reach)
            near = set(np.flatnonzero(self.times_FB[:, number] <= limit_ms).tolist())
            if np.isfinite(self.times_FB[static_row, number]):
                near.add(static_row)
            for row in sorted(near):
                strategy = self.placed[self.finalists[row]]
                self.times_FB[row, number] = planned_ms(strategy, self.profile, batch, self.topology.num_ranks)
                self.num_planned += 1
        self.progress("planning", len(columns), len(columns))

    def proposal(self) -> Proposal:
        gain = self.options.gain if self.options.size is None else 0.0
        choice = choose_pool(self.times_FB, self.weights_B(), most=self.most, gain=gain)
        members = list(choice.members)
        times_MB = self.times_FB[members, :-1]
        fastest_B = times_MB.argmin(axis=0)
        static_ms = float(self.times_FB[self.finalists.index(self.static), :-1].mean())
        strategies = tuple(self.placed[self.finalists[row]] for row in members)
        without_ms = [_mean_ms(np.delete(times_MB, index, axis=0)) for index in range(len(members))]
        return Proposal(
            Pool(self.topology.num_ranks, strategies),
            tuple(
                ProposedStrategy(
                    strategy.name, self.finalists[row], float((fastest_B == index).mean()), without_ms[index]
                )
                for index, (row, strategy) in enumerate(zip(members, strategies, strict=True))
            ),
            float(times_MB.min(axis=0).mean()),
            choice.means_ms,
            layout_text(self.table.schemes, self.static),
            static_ms,
            self.every_ms,
            len(self.scored),
            len(self.candidates),
            self.num_planned,
            self.topology.num_ranks - self.mixes.num_ranks,
            self.interrupted,
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


def _with_longest(batch: Batch, longest: int, tokens: int) -> Batch:
    """Returns a batch of about `tokens` tokens with one sequence of `longest`, the others as in `batch`."""
    others, missing = [], tokens - longest
    for length in batch:
        if length <= missing:
            others.append(length)
            missing -= length
    return (longest, *others)
