"""`hgraph plan`: what would happen to sequences of given lengths, and why."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hgraph.errors import InvalidInput
from hgraph.plan import StepPlan
from hgraph.profile import Profile
from hgraph.profile_file import ProfileFile, read_profile_file, write_profile_file
from hgraph.strategy import Pool
from hgraph.strategy_file import load_pool
from runtime.cli.options import (
    check_folder,
    config_option,
    json_option,
    load_run_config,
    make_model,
    out,
    pool_option,
    print_json,
    read_json,
    settings_argument,
    shown_path,
    strategies_named,
    table,
    working,
)
from runtime.cli.tables import ranks_text

if TYPE_CHECKING:
    from runtime.config import RunConfig
    from strategies.explain import Explanation
    from strategies.options import PlannerOptions

__all__ = ["command"]

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
_SHOWN_MICRO_BATCHES = 5


@click.command(name="plan")
@config_option
@pool_option
@click.option("--lengths", metavar="LIST", help="Lengths in tokens: 100,2000,20x300 (20x300: twenty of 300).")
@click.option("--lengths-file", metavar="F.json", help='JSON file: [100, 2000, ...] or {"lengths": [...]}.')
@click.option("--profile", "profile_path", metavar="P.yaml|NAME", help="Costs and token limits (docs/profiles.md).")
@click.option("--save-profile", metavar="P.yaml", help="Write the costs that were used to this file.")
@click.option("--strategy", metavar="NAME", help="Plan for this strategy of the pool only.")
@json_option
@settings_argument
def command(
    config_path: str | None,
    pool_path: str | None,
    lengths: str | None,
    lengths_file: str | None,
    profile_path: str | None,
    save_profile: str | None,
    strategy: str | None,
    as_json: bool,
    settings: tuple[str, ...],
) -> None:
    """Show what would happen to sequences of these lengths, and why.

    Plans one step as training does, and prints every strategy of the pool with its predicted time, its lower bound, the
    gap between them and why it is taken or not, then what each replica of the taken one runs. Costs come from
    --profile, or are measured once by running the compiled programs on simulated ranks in this process, and kept in the
    folder `calibration.cache`. KEY=VALUE changes settings of the configuration. Nothing is trained.

    \b
    Examples:
      hgraph plan --pool examples/first_light/strategies.yaml --lengths 100,2000,20x300 --save-profile costs.yaml
      hgraph plan --pool examples/first_light/strategies.yaml --lengths 12x700 --profile costs.yaml
      hgraph plan --pool examples/first_light/strategies.yaml --lengths 12x700 --profile costs.yaml --strategy tp4
      hgraph plan --pool examples/first_light/strategies.yaml --lengths 3000 --profile costs.yaml --json
    """
    numbers = _lengths(lengths, lengths_file)
    if save_profile is not None:
        check_folder(Path(save_profile).parent)
    pool, profile, options, origin = _inputs(config_path, pool_path, profile_path, settings)
    if strategy is not None:
        strategies_named(pool, [strategy])
        options = replace(options, only=strategy)
    if save_profile is not None:
        write_profile_file(save_profile, ProfileFile.of(profile))
    with working("planning"):
        from strategies.explain import explain
        from strategies.select import plan_step

        start_s = time.perf_counter()
        plan = plan_step(pool, profile, numbers, options=options)
        plan = replace(plan, plan_ms=1e3 * (time.perf_counter() - start_s))
    explanation = explain(plan, pool, profile, numbers)
    if as_json:
        print_json(_as_data(plan, explanation, profile, numbers, origin))
        return
    _show(plan, explanation, pool, numbers, origin)


def _lengths(text: str | None, path: str | None) -> list[int]:
    if (text is None) == (path is None):
        raise InvalidInput("expected the lengths of the sequences: --lengths 100,2000,20x300 or --lengths-file F.json")
    return _lengths_of_text(text) if text is not None else _lengths_of_file(str(path))


def _lengths_of_text(text: str) -> list[int]:
    numbers: list[int] = []
    for position, part in enumerate(text.split(","), start=1):
        match = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\d+)\s*", part)
        if match is None or int(match[2]) < 1:
            raise InvalidInput(
                f"--lengths: item {position}: expected a length of 1 token or more, or COUNTxLENGTH, "
                f"got {part.strip()!r}"
            )
        numbers += [int(match[2])] * int(match[1] or 1)
    if not numbers:
        raise InvalidInput(f"--lengths: expected at least one sequence, got {text!r}")
    return numbers


def _lengths_of_file(path: str) -> list[int]:
    data = read_json(path)
    if isinstance(data, dict) and "lengths" in data:
        data = data["lengths"]
    if not isinstance(data, list) or not data:
        raise InvalidInput(f'{path}: expected a list of lengths such as [100, 2000], or {{"lengths": [100, 2000]}}')
    for position, value in enumerate(data, start=1):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidInput(f"{path}: item {position}: expected a length of 1 token or more, got {value!r}")
    return data


def _inputs(
    config_path: str | None, pool_path: str | None, profile_path: str | None, settings: Sequence[str]
) -> tuple[Pool, Profile, PlannerOptions, str]:
    """Returns pool, costs, settings of the planner, and where the costs are from."""
    from strategies.options import PlannerOptions

    if profile_path is not None and config_path is None and pool_path is not None and not settings:
        # Nothing here needs a model, so nothing waits for torch.
        pool = load_pool(pool_path)
        return pool, _profile(profile_path, pool), PlannerOptions(), f"from {profile_path}"
    config = load_run_config(config_path, pool_path, settings)
    if profile_path is not None:
        pool = load_pool(shown_path(config.pool))
        return pool, _profile(profile_path, pool), config.planner.options(), f"from {profile_path}"
    pool, profile, origin = _calibrated(config)
    return pool, profile, config.planner.options(), origin


def _profile(path: str, pool: Pool) -> Profile:
    return read_profile_file(path).profile(pool.num_ranks)


def _calibrated(config: RunConfig) -> tuple[Pool, Profile, str]:
    """Returns pool and costs, measured on simulated ranks of this process, or read where they were measured before."""
    path = shown_path(config.pool)
    num_ranks = load_pool(path, trainable=True).num_ranks  # a fault of the file is told before the work begins
    with working("compiling the pool and measuring its costs"), _one_thread():
        from runtime.calibrate import MemoryLimits, calibrate
        from runtime.cluster import SimulatedCluster
        from runtime.models.build import loss_of
        from runtime.program import Program, compile

        measured: list[str] = []

        def profile_of(program: Program) -> Profile:
            return calibrate(
                program,
                MemoryLimits(config.memory.budget_mib, config.memory.max_tokens),
                lengths=config.calibration.lengths,
                repeats=config.calibration.repeats,
                cache=config.calibration.cache,
                progress=measured.append,
            )

        model = make_model(config, on_meta=True)
        cluster = SimulatedCluster(num_ranks)
        with compile(model, loss_of(model), path, profile=profile_of, depth=0, cluster=cluster) as program:
            profile = program.planning.profile
    cache = config.calibration.cache
    kept = f", kept in {cache}" if cache is not None else ""
    origin = f"measured just now on simulated ranks{kept}" if measured else f"measured before, from {cache}"
    return program.pool, profile, origin


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Measures as training runs: one thread a rank. Several would wait for each other, worst on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _show(plan: StepPlan, explanation: Explanation, pool: Pool, lengths: Sequence[int], origin: str) -> None:
    console = out()
    click.echo(
        f"{_count(len(lengths), 'sequence')}, {sum(lengths):,} tokens, the longest {max(lengths):,}; "
        f"{_count(len(pool.strategies), 'strategy')} on {_count(pool.num_ranks, 'rank')}; costs {origin}"
    )
    console.print(table("Strategies", _CANDIDATE_HEADERS, _candidate_rows(explanation), numbers=(2, 3, 4)))
    rows = _replica_rows(plan, explanation, lengths)
    console.print(table(f"Replicas of {plan.strategy}", _REPLICA_HEADERS, rows, numbers=(4, 5, 6)))
    click.echo(
        f"predicted {plan.predicted_ms:,.1f} ms, bridges included; lower bound of the pool {plan.bound_ms:,.1f} ms, "
        f"gap {plan.gap:.1%}; slowest replica over mean {explanation.imbalance:.2f}; "
        f"planned by {plan.solver} in {plan.plan_ms:.0f} ms"
    )


def _candidate_rows(explanation: Explanation) -> list[list[str]]:
    return [
        [
            ">" if row.is_taken else "",
            row.strategy,
            _ms(row.predicted_ms),
            _ms(row.bound_ms),
            "-" if row.gap is None else f"{row.gap:.1%}",
            row.reason,
        ]
        for row in explanation.candidates
    ]


def _replica_rows(plan: StepPlan, explanation: Explanation, lengths: Sequence[int]) -> list[list[str]]:
    rows = []
    for row in explanation.replicas:
        slowest = " (slowest)" if row.is_slowest and len(explanation.replicas) > 1 else ""
        decided = "idle"
        if row.deciding_sequence is not None:
            decided = f"sequence {row.deciding_sequence}: {row.deciding_length:,} tokens"
        rows.append(
            [
                f"{row.replica}{slowest}",
                row.scheme,
                ranks_text(row.ranks),
                _micro_batches(plan, row.replica, lengths),
                f"{row.num_sequences:,}",
                f"{row.tokens:,}",
                _ms(row.predicted_ms),
                decided,
            ]
        )
    return rows


def _micro_batches(plan: StepPlan, replica: int, lengths: Sequence[int]) -> str:
    tokens = [sum(lengths[index] for index in own) for own in plan.replicas[replica].micro_batches]
    if not tokens:
        return "none"
    shown = " + ".join(f"{count:,}" for count in tokens[:_SHOWN_MICRO_BATCHES])
    more = f" + {len(tokens) - _SHOWN_MICRO_BATCHES} more" if len(tokens) > _SHOWN_MICRO_BATCHES else ""
    return f"{len(tokens)}: {shown}{more}"


def _as_data(
    plan: StepPlan, explanation: Explanation, profile: Profile, lengths: Sequence[int], origin: str
) -> dict[str, Any]:
    """Returns the plan with what explains it; `plan` reads back as `StepPlan.from_json`."""
    return {
        "lengths": list(lengths),
        "strategy": plan.strategy,
        "predicted_ms": plan.predicted_ms,
        "bound_ms": plan.bound_ms,
        "gap": plan.gap,
        "candidates": [asdict(row) for row in explanation.candidates],
        "replicas": [
            {**asdict(row), "micro_batches": [list(own) for own in plan.replicas[row.replica].micro_batches]}
            for row in explanation.replicas
        ],
        "imbalance": explanation.imbalance,
        "costs": origin,
        "max_tokens": {name: cost.max_tokens for name, cost in profile.schemes.items()},
        "plan": asdict(plan),
    }


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _count(number: int, what: str) -> str:
    if number == 1:
        return f"1 {what}"
    return f"{number:,} {what[:-1] + 'ies' if what.endswith('y') else what + 's'}"
