"""`hgraph check`: everything that is wrong with a strategy file, in one report."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import click

from hgraph.errors import InvalidInput, Problem
from hgraph.strategy import Pool
from hgraph.strategy_file import check_pool_file
from hgraph.strategy_file_reader import PoolReport
from hgraph.yaml_report import nearest
from runtime.cli.options import (
    captured_model,
    config_option,
    json_option,
    load_run_config,
    out,
    print_json,
    settings_argument,
    shown_path,
    table,
)
from runtime.cli.tables import STRATEGY_HEADERS, strategy_rows

if TYPE_CHECKING:
    from runtime.config import RunConfig

__all__ = ["command"]


@click.command(name="check")
@click.argument("file", required=False)
@config_option
@click.option("--refuse-idle", is_flag=True, help="A strategy that leaves ranks idle is a problem, not a note.")
@json_option
@settings_argument
def command(
    file: str | None, config_path: str | None, refuse_idle: bool, as_json: bool, settings: tuple[str, ...]
) -> None:
    """Report everything that is wrong with the strategy file FILE.

    With --config, what depends on the model is checked too: heads, layers, names and shapes of parameters, and whether
    the configuration names strategies and schemes that there are; FILE may then be left out. Exit status 1 if there are
    problems. The format is described in docs/strategy-files.md.

    \b
    Examples:
      hgraph check examples/first_light/strategies.yaml
      hgraph check examples/first_light/strategies.yaml --refuse-idle
      hgraph check examples/first_light/strategies.yaml --config examples/first_light/config.yaml
      hgraph check examples/first_light/strategies.yaml --json
    """
    if file is not None and config_path is not None and "=" in file:
        settings = (file, *settings)
        file = None
    if settings and config_path is None:
        raise InvalidInput(f"expected one file, got {settings[0]!r} as well; settings need --config RUN.yaml")
    if config_path is None:
        if file is None:
            raise InvalidInput("expected a strategy file: hgraph check FILE, or hgraph check --config RUN.yaml")
        report = check_pool_file(file, refuse_idle=refuse_idle, trainable=True)
    else:
        report = _with_model(file, load_run_config(config_path, file, settings), refuse_idle)
    if as_json:
        print_json(_as_data(report))
    else:
        _show(report)
    if report.problems:
        raise SystemExit(1)


def _with_model(file: str | None, config: RunConfig, refuse_idle: bool) -> PoolReport:
    """Returns the report with what the model and the configuration add to it."""
    from runtime.facts import leaf_template, model_facts

    model, captured = captured_model(config)
    facts = model_facts(captured)
    path = file or shown_path(config.pool)
    report = check_pool_file(path, model=facts, refuse_idle=refuse_idle, trainable=True)
    notes = list(report.notes)
    if facts is None:
        text = f"{type(model).__name__} has no list of layers with attention; what depends on it was not checked"
        notes.append(Problem(0, "model", text))
    if report.pool is None:
        return replace(report, notes=tuple(notes))
    problems = list(_config_problems(config, report.pool))
    try:
        leaf_template(report.pool, model)
    except InvalidInput as error:
        problems.append(Problem(0, "template", str(error)))
    pool = None if problems else report.pool
    return replace(report, pool=pool, problems=(*report.problems, *problems), notes=tuple(notes))


def _config_problems(config: RunConfig, pool: Pool) -> list[Problem]:
    """Returns what the configuration says of a pool that does not hold for this one."""
    problems = []
    if config.num_processes != pool.num_ranks:
        text = f"the configuration has num_processes: {config.num_processes}, the pool has ranks: {pool.num_ranks}"
        problems.append(Problem(0, "ranks", text))
    names = [strategy.name for strategy in pool.strategies]
    if config.planner.only is not None and config.planner.only not in names:
        text = f"no strategy {config.planner.only!r} in the pool{nearest(config.planner.only, names)}"
        problems.append(Problem(0, "planner.only", text))
    schemes = [str(scheme) for scheme in pool.schemes]
    for name in config.memory.max_tokens:
        if name not in schemes:
            text = f"no scheme {name!r} in the pool{nearest(name, schemes)}; it has {', '.join(schemes)}"
            problems.append(Problem(0, "memory.max_tokens", text))
    if config.memory.budget_mib is None:
        missing = [name for name in schemes if name not in config.memory.max_tokens]
        problems += [Problem(0, "memory.max_tokens", f"no budget_mib, and no limit for {name}") for name in missing]
    return problems


def _show(report: PoolReport) -> None:
    click.echo(str(report))
    if report.pool is not None:
        out().print(table("", STRATEGY_HEADERS, strategy_rows(report.pool)))


def _as_data(report: PoolReport) -> dict[str, object]:
    pool = report.pool
    strategies = (
        []
        if pool is None
        else [
            {
                "name": strategy.name,
                "replicas": [{"scheme": str(r.scheme), "ranks": list(r.ranks)} for r in strategy.replicas],
                "idle_ranks": list(pool.idle_ranks(strategy.name)),
            }
            for strategy in pool.strategies
        ]
    )
    return {
        "path": report.path,
        "ok": not report.problems,
        "problems": [asdict(problem) for problem in report.problems],
        "notes": [asdict(note) for note in report.notes],
        "ranks": None if pool is None else pool.num_ranks,
        "strategies": strategies,
    }
