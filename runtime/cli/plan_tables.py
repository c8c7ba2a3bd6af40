"""What `hgraph plan` prints of one plan: tables, JSON and the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from hgraph.annotation import ranks_text
from hgraph.pictures.plan_svg import Bar, Block, plan_svg
from hgraph.plan import StepPlan
from hgraph.profile import Profile
from hgraph.strategy import Pool
from runtime.cli.options import out, table
from strategies.explain import Deciding, Explanation, MicroBatchRow, ReplicaRow
from strategies.one_more import OneMore

__all__ = ["Answered", "as_data", "count_text", "lengths_text", "ms_text", "picture_of", "print_plan", "write_picture"]

_CANDIDATE_HEADERS = ("", "strategy", "predicted ms", "bound ms", "gap", "why")
_REPLICA_HEADERS = (
    "replica",
    "scheme",
    "ranks",
    "micro-batches (tokens)",
    "sequences",
    "tokens",
    "predicted ms",
    "decided by",
)
_MICRO_BATCH_HEADERS = ("replica", "micro-batch", "lengths", "tokens", "ms in a stage")
_ONE_MORE_HEADERS = ("strategy", "bound ms", "predicted ms", "gain", "gain at most", "idle ranks")
_SHOWN_MICRO_BATCHES = 5
_SHOWN_STRATEGIES = 8


@dataclass(frozen=True, slots=True)
class Answered:
    """A planned batch with what explains it; `deciding` and `one_more` where that was asked for."""

    plan: StepPlan
    explanation: Explanation
    pool: Pool
    profile: Profile
    lengths: Sequence[int]
    origin: str
    deciding: Deciding | None = None
    one_more: OneMore | None = None


def print_plan(answered: Answered) -> None:
    """Prints the tables."""
    plan, explanation, pool, lengths = answered.plan, answered.explanation, answered.pool, answered.lengths
    console = out()
    click.echo(
        f"{count_text(len(lengths), 'sequence')}, {sum(lengths):,} tokens, the longest {max(lengths):,}; "
        f"{count_text(len(pool.strategies), 'strategy')} on {count_text(pool.num_ranks, 'rank')}; "
        f"costs {answered.origin}"
    )
    console.print(table("Strategies", _CANDIDATE_HEADERS, _candidate_rows(explanation), numbers=(2, 3, 4)))
    _echo_lines(_idle_of_strategies(plan, pool))
    rows = [_replica_row(row, is_alone=len(explanation.replicas) == 1) for row in explanation.replicas]
    console.print(table(f"Replicas of {plan.strategy}", _REPLICA_HEADERS, rows, numbers=(4, 5, 6)))
    _echo_lines(_idle_of_plan(plan, pool))
    if answered.deciding is not None:
        rows = _micro_batch_rows(explanation)
        console.print(table("Micro-batches, in the order they run", _MICRO_BATCH_HEADERS, rows, numbers=(0, 1, 3, 4)))
    if answered.one_more is not None:
        _print_one_more(answered.one_more)
    click.echo(
        f"predicted {plan.predicted_ms:,.1f} ms, bridges included; lower bound of the pool {plan.bound_ms:,.1f} ms, "
        f"gap {plan.gap:.1%}; slowest replica over mean {explanation.imbalance:.2f}; "
        f"planned by {plan.solver} in {plan.plan_ms:.0f} ms"
    )
    _echo_lines(_runs(plan))
    if answered.deciding is not None:
        click.echo(_deciding_text(answered.deciding, answered))


def as_data(answered: Answered) -> dict[str, Any]:
    """Returns the plan with what explains it; `plan` reads back as `StepPlan.from_json`."""
    plan, is_long = answered.plan, answered.deciding is not None
    data = {
        "lengths": list(answered.lengths),
        "strategy": plan.strategy,
        "predicted_ms": plan.predicted_ms,
        "bound_ms": plan.bound_ms,
        "gap": plan.gap,
        "idle_ranks": list(plan.idle_ranks(answered.pool)),
        "candidates": [
            {**asdict(row), "idle_ranks": list(answered.pool.idle_ranks(row.strategy))}
            for row in answered.explanation.candidates
        ],
        "replicas": [_replica_data(row, is_long=is_long) for row in answered.explanation.replicas],
        "imbalance": answered.explanation.imbalance,
        "costs": answered.origin,
        "max_tokens": {name: cost.max_tokens for name, cost in answered.profile.schemes.items()},
        "plan": asdict(plan),
    }
    if answered.deciding is not None:
        data["deciding"] = asdict(answered.deciding)
    if answered.one_more is not None:
        data["one_more"] = _one_more_data(answered.one_more)
    return data


def picture_of(answered: Answered) -> str:
    """Returns the picture of the plan as SVG: a bar per replica, micro-batches stacked by cost."""
    plan = answered.plan
    title = (
        f"{plan.strategy}: {count_text(len(answered.lengths), 'sequence')}, {sum(answered.lengths):,} tokens, "
        f"predicted {ms_text(plan.predicted_ms)} ms, gap {plan.gap:.1%}"
    )
    most = answered.explanation.slowest.deciding_sequence
    bars = [_bar(row, most) for row in answered.explanation.replicas]
    return plan_svg(bars, title, step_ms=plan.predicted_ms, bound_ms=plan.bound_ms)


def write_picture(answered: Answered, path: str) -> None:
    """Writes the picture; folders are made as needed."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(picture_of(answered), encoding="utf-8")


def ms_text(value: float | None) -> str:
    """Returns milliseconds for a table, `-` where there are none."""
    return "-" if value is None else f"{value:,.1f}"


def count_text(number: int, what: str) -> str:
    """Returns `1 rank`, `2 ranks`, `2 strategies`, `2 batches`."""
    if number == 1:
        return f"1 {what}"
    plural = what[:-1] + "ies" if what.endswith("y") else what + ("es" if what.endswith("ch") else "s")
    return f"{number:,} {plural}"


def lengths_text(lengths: Sequence[int]) -> str:
    """Returns lengths, longest first, as `--lengths` takes them: `2000,3x300`."""
    groups = [(length, len(list(own))) for length, own in groupby(sorted(lengths, reverse=True))]
    return ",".join(str(length) if count == 1 else f"{count}x{length}" for length, count in groups)


def _candidate_rows(explanation: Explanation) -> list[list[str]]:
    return [
        [
            ">" if row.is_taken else "",
            row.strategy,
            ms_text(row.predicted_ms),
            ms_text(row.bound_ms),
            "-" if row.gap is None else f"{row.gap:.1%}",
            row.reason,
        ]
        for row in explanation.candidates
    ]


def _idle_of_strategies(plan: StepPlan, pool: Pool) -> list[str]:
    """Returns a line on strategies that leave ranks without a replica, where there are any."""
    idle = [(name, pool.idle_ranks(name)) for name in (candidate.strategy for candidate in plan.candidates)]
    texts = [f"{ranks_text(ranks)} in {name}" for name, ranks in idle if ranks]
    return [f"ranks in no replica of a strategy: {'; '.join(texts)}"] if texts else []


def _idle_of_plan(plan: StepPlan, pool: Pool) -> list[str]:
    """Returns a line on ranks that run nothing in this plan, and why, where there are any."""
    idle, unnamed = plan.idle_ranks(pool), pool.idle_ranks(plan.strategy)
    if not idle:
        return []
    empty = [rank for rank in idle if rank not in unnamed]
    reasons = [f"{ranks_text(unnamed)} in no replica of {plan.strategy}"] if unnamed else []
    reasons += [f"{ranks_text(empty)} in replicas without a sequence"] if empty else []
    return [f"idle ranks: {len(idle)} of {pool.num_ranks}: {', '.join(reasons)}"]


def _runs(plan: StepPlan) -> list[str]:
    """Returns a line on solver runs, by what they were for, where there were any."""
    runs = plan.runs
    if not runs:
        return []
    saved = runs.integer_gain_ms / (plan.predicted_ms + runs.integer_gain_ms) if runs.integer_gain_ms > 0 else 0.0
    raised = runs.bound_gain_ms / plan.bound_ms if runs.bound_gain_ms > 0 else 0.0
    return [
        f"solver: the program of the bound ran {runs.bound} times and raised the bound by {raised:.2%}; the integer "
        f"program of the plan ran {runs.integer} times and saved {saved:.2%}"
    ]


def _echo_lines(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(line)


def _replica_row(row: ReplicaRow, *, is_alone: bool) -> list[str]:
    decided = "idle"
    if row.deciding_sequence is not None:
        decided = f"sequence {row.deciding_sequence}: {row.deciding_length:,} tokens"
    return [
        f"{row.replica}{' (slowest)' if row.is_slowest and not is_alone else ''}",
        row.scheme,
        ranks_text(row.ranks),
        _micro_batches(row.micro_batches),
        f"{row.num_sequences:,}",
        f"{row.tokens:,}",
        ms_text(row.predicted_ms),
        decided,
    ]


def _micro_batches(micro_batches: Sequence[MicroBatchRow]) -> str:
    if not micro_batches:
        return "none"
    shown = " + ".join(f"{own.tokens:,}" for own in micro_batches[:_SHOWN_MICRO_BATCHES])
    rest = len(micro_batches) - _SHOWN_MICRO_BATCHES
    return f"{len(micro_batches)}: {shown}{f' + {rest} more' if rest > 0 else ''}"


def _micro_batch_rows(explanation: Explanation) -> list[list[str]]:
    rows = []
    for row in explanation.replicas:
        for number, own in enumerate(row.micro_batches):
            first = str(row.replica) if number == 0 else ""
            rows.append([first, str(number), lengths_text(own.lengths), f"{own.tokens:,}", ms_text(own.ms)])
    return rows


def _print_one_more(found: OneMore) -> None:
    rows = [
        [
            row.strategy,
            ms_text(row.bound_ms),
            ms_text(row.predicted_ms),
            "-" if row.gain is None else f"{row.gain:.1%}",
            f"{row.most_gain:.1%}",
            str(row.idle_ranks or "-"),
        ]
        for row in found.rows
        if row.gain is None or row.gain > 0
    ]
    if not rows:
        least = "none can hold the batch" if found.best_bound_ms == float("inf") else ""
        least = least or f"their least bound is {ms_text(found.best_bound_ms)} ms"
        click.echo(f"One more strategy would gain nothing: {found.num_tried} tried, {least}")
        return
    title = f"One more strategy in the pool ({found.num_tried} tried, those that gain)"
    out().print(table(title, _ONE_MORE_HEADERS, rows[:_SHOWN_STRATEGIES], numbers=(1, 2, 3, 4, 5)))


def _deciding_text(deciding: Deciding, answered: Answered) -> str:
    slowest = answered.explanation.slowest
    share = deciding.own_ms / slowest.predicted_ms if slowest.predicted_ms > 0 else 0.0
    text = (
        f"replica {deciding.replica} ({slowest.scheme}) decides, in it most of all sequence {deciding.sequence} of "
        f"{deciding.length:,} tokens: alone in its micro-batch it would take {ms_text(deciding.own_ms)} ms, "
        f"{share:.0%} of the replica's time"
    )
    if deciding.without_ms is None:
        return f"{text}; it is the only one"
    saved = 1.0 - deciding.without_ms / answered.plan.predicted_ms if answered.plan.predicted_ms > 0 else 0.0
    return f"{text}; without it the step would take {ms_text(deciding.without_ms)} ms, {saved:.1%} less"


def _replica_data(row: ReplicaRow, *, is_long: bool) -> dict[str, Any]:
    """Returns a replica with its micro-batches as lists of indices; with `is_long` their lengths and times, too."""
    data = asdict(row)
    data["micro_batches"] = [list(own.sequences) for own in row.micro_batches]
    if is_long:
        data["micro_batch_lengths"] = [list(own.lengths) for own in row.micro_batches]
        data["micro_batch_ms"] = [own.ms for own in row.micro_batches]
    return data


def _one_more_data(found: OneMore) -> dict[str, Any]:
    least_ms = None if found.best_bound_ms == float("inf") else found.best_bound_ms
    return {
        "rows": [asdict(row) for row in found.rows],
        "num_tried": found.num_tried,
        "best_bound_ms": least_ms,
    }


def _bar(row: ReplicaRow, most: int | None) -> Bar:
    blocks = tuple(
        Block(
            own.ms,
            f"{own.tokens:,}",
            f"micro-batch {number}: {own.tokens:,} tokens, {own.ms:.4g} ms in a stage; lengths "
            f"{lengths_text(own.lengths)}",
            tuple(sorted(own.sequence_ms, reverse=True)),
            is_deciding=most in own.sequences,
        )
        for number, own in enumerate(row.micro_batches)
    )
    note = f"{ms_text(row.predicted_ms)} ms, {count_text(row.num_sequences, 'sequence')}" if row.tokens else "idle"
    return Bar(f"{row.replica} {row.scheme}", blocks, row.predicted_ms, note)
