"""`hgraph plan --batches`: many batches planned in one process, with what each plan took to make."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
from tqdm import tqdm

from hgraph.plan import SolverRuns, StepPlan
from hgraph.profile import Profile
from hgraph.strategy import Pool
from runtime.cli.options import out, print_json, table
from runtime.cli.plan_lengths import check_limits, read_batches
from runtime.cli.plan_tables import count_text, ms_text
from strategies.options import PlannerOptions

__all__ = ["PlannedBatch", "plan_batches"]

_HEADERS = (
    "batch",
    "sequences",
    "tokens",
    "longest",
    "strategy",
    "flow ms",
    "simulated ms",
    "bound ms",
    "gap",
    "solver",
    "first ms",
    "total ms",
)


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """A plan and the time of this process that it took: until the first checked plan, and in all."""

    lengths: Sequence[int]
    plan: StepPlan
    first_predicted_ms: float
    latency_ms: float
    total_ms: float


def plan_batches(pool: Pool, profile: Profile, options: PlannerOptions, path: str, *, as_json: bool) -> None:
    """Plans the batches in the JSON file at `path` one after another and prints what came of each."""
    batches = read_batches(path)
    check_limits(path, batches, pool, profile, options.only)
    shown = tqdm(batches, unit="batch", file=sys.stderr, leave=False, disable=not sys.stderr.isatty())
    planned = list(_planned(pool, profile, options, batches, shown))
    if as_json:
        print_json([_as_data(one, pool) for one in planned])
        return
    rows = [_row(number, one) for number, one in enumerate(planned)]
    title = f"{count_text(len(batches), 'batch')} on {count_text(pool.num_ranks, 'rank')}"
    out().print(table(title, _HEADERS, rows, numbers=(0, 1, 2, 3, 5, 6, 7, 8, 10, 11)))
    click.echo(_summary(planned))
    click.echo(_idle(planned, pool))


def _planned(
    pool: Pool,
    profile: Profile,
    options: PlannerOptions,
    batches: Sequence[Sequence[int]],
    shown: Sequence[Sequence[int]],
) -> Iterator[PlannedBatch]:
    from strategies.anytime import AnytimePlanner

    planner = AnytimePlanner(pool, profile, options)
    # What is imported and set up once is no part of a plan's time.
    list(planner.answers(batches[0], 0))
    for number, lengths in enumerate(shown):
        start_s = time.process_time()
        making = planner.answers(lengths, number)
        first = next(making)
        latency_ms = 1e3 * (time.process_time() - start_s)
        *_, last = [first, *making]
        total_ms = 1e3 * (time.process_time() - start_s)
        if last.error is not None:
            raise last.error
        assert first.plan is not None and last.plan is not None
        yield PlannedBatch(lengths, last.plan, first.plan.predicted_ms, latency_ms, total_ms)


def _as_data(one: PlannedBatch, pool: Pool) -> dict[str, Any]:
    plan = one.plan
    return {
        "strategy": plan.strategy,
        "flow_ms": plan.flow_ms,
        "simulated_ms": plan.predicted_ms,
        "bound_ms": plan.bound_ms,
        "gap": plan.gap,
        "solver": plan.solver,
        "runs": asdict(plan.runs),
        "idle_ranks": list(plan.idle_ranks(pool)),
        "latency_ms": one.latency_ms,
        "total_ms": one.total_ms,
        "replicas": [
            {
                "tp": _degree([stage.tp for stage in replica.scheme.stages]),
                "pp": replica.scheme.pp,
                "cp": _degree([stage.cp for stage in replica.scheme.stages]),
                "ms": planned.predicted_ms,
                "micro_batches": [list(own) for own in planned.micro_batches],
            }
            for replica, planned in zip(pool[plan.strategy].replicas, plan.replicas, strict=True)
        ],
    }


def _degree(degrees: Sequence[int]) -> int | list[int]:
    """Returns the degree of all stages, or a list of one a stage where they differ."""
    return degrees[0] if len(set(degrees)) == 1 else list(degrees)


def _row(number: int, one: PlannedBatch) -> list[str]:
    plan = one.plan
    return [
        str(number),
        f"{len(one.lengths):,}",
        f"{sum(one.lengths):,}",
        f"{max(one.lengths, default=0):,}",
        plan.strategy,
        ms_text(plan.flow_ms),
        ms_text(plan.predicted_ms),
        ms_text(plan.bound_ms),
        f"{plan.gap:.2%}",
        plan.solver,
        ms_text(one.latency_ms),
        ms_text(one.total_ms),
    ]


def _idle(planned: Sequence[PlannedBatch], pool: Pool) -> str:
    counts = [len(one.plan.idle_ranks(pool)) for one in planned]
    if not any(counts):
        return "no plan leaves a rank idle"
    return (
        f"{sum(map(bool, counts))} of {len(planned)} plans leave ranks idle, {max(counts)} of {pool.num_ranks} at most"
    )


def _summary(planned: Sequence[PlannedBatch]) -> str:
    latencies_ms = [one.latency_ms for one in planned]
    gaps = [one.plan.gap for one in planned]
    return (
        f"mean simulated {ms_text(statistics.fmean(one.plan.predicted_ms for one in planned))} ms; "
        f"gap {statistics.median(gaps):.2%} median, {max(gaps):.2%} at most; first checked plan after a median "
        f"{ms_text(statistics.median(latencies_ms))} ms of processor time, {ms_text(max(latencies_ms))} at most; "
        f"{_runs_text(planned)}"
    )


def _runs_text(planned: Sequence[PlannedBatch]) -> str:
    """Returns how often each program ran, and what it gained over all batches."""
    runs = sum((one.plan.runs for one in planned), SolverRuns())
    bounds_ms, whole_ms = sum(one.plan.bound_ms for one in planned), sum(one.first_predicted_ms for one in planned)
    better = [one for one in planned if one.plan.runs.integer_gain_ms > 0]
    return (
        f"the program of the bound ran {runs.bound} times for {sum(one.plan.runs.bound > 0 for one in planned)} of "
        f"{len(planned)} and raised the bounds by {runs.bound_gain_ms / bounds_ms if bounds_ms > 0 else 0.0:.2%}; the "
        f"integer program ran {runs.integer} times for {sum(one.plan.runs.integer > 0 for one in planned)}, found a "
        f"better plan for {len(better)}, and saved {runs.integer_gain_ms / whole_ms if whole_ms > 0 else 0.0:.2%} of "
        "all predicted time"
    )
