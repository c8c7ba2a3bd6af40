"""One simulated workload: a model's costs on a cluster, sampled batches, and the ladder of systems run on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hgraph.communication_costs import CommunicationCosts, resized
from hgraph.errors import InvalidInput
from hgraph.scheme_profile import ProfileFile
from hgraph.step_parts import Communication, Part, StepClock
from hgraph.strategy import Pool
from hgraph.topology import Topology
from strategies.ladder import Entry, LadderResult, Progress, entries, run_ladder
from strategies.ladder_facts import rung_note
from strategies.length_data import LengthData, sample_batches
from strategies.options import PlannerOptions
from strategies.systems import Batch, Setting

__all__ = ["Simulation", "Workload", "result_data"]


@dataclass(frozen=True, slots=True)
class Workload:
    """Batches of `tokens` tokens drawn from `data`, cut at `longest`: `calibration` ones to choose by, then `count`."""

    data: LengthData
    tokens: int
    longest: int
    count: int = 20
    calibration: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("count", 1), ("calibration", 1)):
            if getattr(self, name) < least:
                raise InvalidInput(f"simulate: expected {name} of {least} or more, got {getattr(self, name)}")

    def batches(self) -> tuple[list[Batch], list[Batch]]:
        """Returns the calibration batches and those that are timed, from one stream of draws."""
        drawn: list[Batch] = list(
            sample_batches(
                self.data,
                tokens=self.tokens,
                longest=self.longest,
                count=self.calibration + self.count,
                seed=self.seed,
            )
        )
        return drawn[: self.calibration], drawn[self.calibration :]


@dataclass(frozen=True)
class Simulation:
    """A workload on a cluster with a pool; `published` is the pool of the published algorithm, `pool` where None.

    `keys` chooses systems; all by default. The cluster is made as large as the pool. `costs` are those of another
    simulation of the same model and cluster, whose bridges then need no planning.
    """

    profile: ProfileFile
    pool: Pool
    topology: Topology
    workload: Workload
    published: Pool | None = None
    communication: Communication = "overlapped"
    options: PlannerOptions = field(default_factory=lambda: PlannerOptions(program=False))
    keys: tuple[str, ...] = ()
    costs: CommunicationCosts | None = None

    def setting(self) -> Setting:
        """Returns costs, limits and clock for as many ranks as the pool has."""
        costs = self.costs if self.communication != "none" else None
        if self.communication != "none" and costs is None:
            if self.profile.model is None:
                raise InvalidInput(
                    f"simulate: profile {self.profile.name or '(no name)'} has no `model`, whose sizes say what is "
                    "sent; add it, or leave communication out (--communication none)"
                )
            costs = CommunicationCosts(self.profile.model, resized(self.topology, self.pool.num_ranks))
        clock = StepClock(self.communication, costs)
        return Setting(self.profile.profile(self.pool.num_ranks), clock, self.workload.longest, self.options)

    def entries(self, setting: Setting) -> tuple[Entry, ...]:
        """Returns the chosen systems; raises `InvalidInput` for a key that none has."""
        if self.published is not None and self.published.num_ranks != self.pool.num_ranks:
            raise InvalidInput(
                f"simulate: expected pools of as many ranks, got {self.pool.num_ranks} and "
                f"{self.published.num_ranks} (published)"
            )
        known = entries(setting, self.pool, self.published)
        wrong = set(self.keys) - {entry.key for entry in known}
        if wrong:
            raise InvalidInput(
                f"simulate: no system {sorted(wrong)[0]!r}; there are {', '.join(entry.key for entry in known)}"
            )
        return tuple(entry for entry in known if not self.keys or entry.key in self.keys)

    def run(self, progress: Progress | None = None) -> LadderResult:
        """Returns the times of all chosen systems."""
        setting = self.setting()
        calibration, batches = self.workload.batches()
        return run_ladder(self.entries(setting), setting, calibration, batches, progress)

    def step(self, key: str, number: int) -> tuple[StepClock, tuple[Part, ...]]:
        """Returns the clock and what system `key` runs in step `number`, counted from 0."""
        setting = self.setting()
        calibration, batches = self.workload.batches()
        if not 0 <= number < len(batches):
            raise InvalidInput(f"simulate: expected a step from 0 to {len(batches) - 1}, got {number}")
        system = next(entry.system for entry in self.entries(setting) if entry.key == key)
        system.fit(calibration)
        return setting.clock, system.parts(batches[number])


def result_data(result: LadderResult, reference: str, seed: int) -> list[dict[str, Any]]:
    """Returns the systems as data for JSON; speed-ups and notes where their other side was run too."""
    there = {one.key for one in result.systems}
    rows = []
    for one in result.systems:
        before = result.before(one.key)
        rows.append(
            {
                "key": one.key,
                "system": one.title,
                "is_rung": one.is_rung,
                "layout": one.layout,
                "mean_ms": _interval(one.mean(seed)),
                "flow_ms": _mean(one.flow_ms),
                "compute_ms": _mean(one.compute_ms),
                "speed_up": _interval(result.speed_up(one.key, reference, seed)) if reference in there else None,
                "over_rung_before": None if before is None else _interval(result.speed_up(one.key, before, seed)),
                "note": rung_note(result, one.key),
                "steps_ms": list(one.ms),
                "strategies": list(one.strategies),
            }
        )
    return rows


def _interval(interval: Any) -> list[float]:
    return [interval.value, interval.low, interval.high]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
