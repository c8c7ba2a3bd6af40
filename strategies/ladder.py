"""The ladder from padding to our planner, with the baselines beside it, run on the same sampled batches.

Every rung adds one thing to the one before; where a rung has a choice of its own (its one layout), it makes it on the
calibration batches. `reference` is what is compared with: the static homogeneous layout as practised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hgraph.scheme_text import parse_scheme
from hgraph.step_parts import Part, StepClock, check_parts
from hgraph.strategy import Pool, Replica, Strategy
from strategies.baselines import (
    assign_balanced,
    assign_balanced_finely,
    assign_packs,
    assign_padded_packs,
    assign_padded_rows,
)
from strategies.intervals import Interval, mean_interval, ratio_interval
from strategies.ladder_facts import StepFacts, mean_facts, step_facts
from strategies.systems import (
    Batch,
    InTurn,
    OneFixed,
    PerBatch,
    PlannedPool,
    Published,
    Setting,
    System,
    planned_assign,
)

__all__ = ["REFERENCE", "Entry", "LadderResult", "SystemResult", "entries", "homogeneous_strategies", "run_ladder"]

REFERENCE = "static"
Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with a system's title, how many of its steps are done, and how many there are."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One system: a short key, a title, what it is, and whether it is a rung or stands beside the ladder."""

    key: str
    title: str
    system: System
    is_rung: bool


@dataclass(frozen=True, slots=True)
class SystemResult:
    """Times of one system in ms, a batch each: simulated (communication as the clock has it), flow, computation alone.

    `strategies` are those of each step; `facts` say what the steps' times are made of.
    """

    key: str
    title: str
    is_rung: bool
    layout: str
    ms: tuple[float, ...]
    flow_ms: tuple[float, ...]
    compute_ms: tuple[float, ...]
    strategies: tuple[str, ...]
    facts: StepFacts

    def mean(self, seed: int = 0) -> Interval:
        """Returns the mean simulated time."""
        return mean_interval(self.ms, seed)


@dataclass(frozen=True, slots=True)
class LadderResult:
    """All systems on the same batches, in order."""

    systems: tuple[SystemResult, ...]

    def __getitem__(self, key: str) -> SystemResult:
        return next(one for one in self.systems if one.key == key)

    def speed_up(self, key: str, over: str = REFERENCE, seed: int = 0) -> Interval:
        """Returns how many times faster `key` is than `over`, by mean simulated times."""
        return ratio_interval(self[over].ms, self[key].ms, seed)

    def before(self, key: str) -> str | None:
        """Returns the rung before, None for the first and for what is no rung."""
        rungs = [one.key for one in self.systems if one.is_rung]
        return rungs[rungs.index(key) - 1] if key in rungs[1:] else None


def homogeneous_strategies(setting: Setting, num_ranks: int) -> tuple[Strategy, ...]:
    """Returns every layout of equal replicas on all ranks, one per scheme of the profile that divides them."""
    found = []
    for name in setting.profile.schemes:
        scheme = parse_scheme(name)
        if num_ranks % scheme.num_ranks:
            continue
        count = num_ranks // scheme.num_ranks
        starts = range(0, num_ranks, scheme.num_ranks)
        replicas = tuple(Replica(scheme, tuple(range(start, start + scheme.num_ranks))) for start in starts)
        found.append(Strategy(f"{count}x{name}" if count > 1 else name, replicas))
    return tuple(found)


def entries(setting: Setting, pool: Pool, published: Pool | None = None) -> tuple[Entry, ...]:
    """Returns all systems for `pool`; the published algorithm has a pool of its own where `published` is given."""
    equal = homogeneous_strategies(setting, pool.num_ranks)
    planner = planned_assign(setting)

    def fixed(key: str, title: str, assign: Callable[..., Part], strategies: Sequence[Strategy] = equal) -> Entry:
        return Entry(key, title, OneFixed(setting, strategies, assign), is_rung=True)

    def beside(key: str, title: str, system: System) -> Entry:
        return Entry(key, title, system, is_rung=False)

    finely = assign_balanced_finely
    return (
        beside("rows", "padded rows", OneFixed(setting, equal, assign_padded_rows)),
        fixed("padded", "packs padded to the context window", assign_padded_packs),
        fixed(REFERENCE, "static homogeneous: fixed-length packing", assign_packs),
        fixed("balanced", "+ balanced dispatch", assign_balanced),
        fixed("fine", "+ fine-grained packing", finely),
        fixed("planned", "+ our planner on the equal replicas", planner),
        fixed("unequal", "+ unequal replicas, one strategy", planner, (*pool.strategies, *equal)),
        Entry("pool", "+ choice of a strategy in every step", PlannedPool(setting, pool, planner), is_rung=True),
        beside("per-batch", "homogeneous, chosen per batch", PerBatch(setting, equal, finely)),
        beside("in-turn", "homogeneous in turn within a step (HotSPa-like)", InTurn(setting, equal, finely)),
        beside("published", "published algorithm", Published(setting, published or pool)),
    )


def run_ladder(
    systems: Sequence[Entry],
    setting: Setting,
    calibration: Sequence[Batch],
    batches: Sequence[Batch],
    progress: Progress | None = None,
) -> LadderResult:
    """Fits every system on `calibration` and times it on `batches`; each step is checked to run every sequence once."""
    results = []
    for entry in systems:
        entry.system.fit(calibration)
        steps = []
        for number, lengths in enumerate(batches):
            parts = entry.system.parts(lengths)
            check_parts(parts, setting.profile, lengths)
            steps.append(parts)
            if progress is not None:
                progress(entry.title, number + 1, len(batches))
        results.append(_result(entry, setting, steps, batches))
    return LadderResult(tuple(results))


def _result(
    entry: Entry, setting: Setting, steps: Sequence[tuple[Part, ...]], batches: Sequence[Batch]
) -> SystemResult:
    clock, alone = setting.clock, StepClock()
    facts = [step_facts(parts, setting.profile, lengths) for parts, lengths in zip(steps, batches, strict=True)]
    return SystemResult(
        entry.key,
        entry.title,
        entry.is_rung,
        entry.system.layout,
        tuple(clock.ms(parts) for parts in steps),
        tuple(clock.flow_ms(parts) for parts in steps),
        tuple(alone.ms(parts) for parts in steps),
        tuple(", then ".join(part.strategy.name for part in parts) for parts in steps),
        mean_facts(facts),
    )
