"""`hgraph plan`: what would happen to sequences of given lengths, and why."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hgraph.errors import InvalidInput
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
    pool_option,
    print_json,
    settings_argument,
    shown_path,
    strategies_named,
    working,
)
from runtime.cli.plan_lengths import read_lengths
from runtime.cli.plan_tables import Answered, as_data, print_plan, write_picture

if TYPE_CHECKING:
    from runtime.config import RunConfig
    from strategies.options import PlannerOptions

__all__ = ["command"]


@click.command(name="plan")
@config_option
@pool_option
@click.option("--lengths", metavar="LIST", help="Lengths in tokens: 100,2000,20x300 (20x300: twenty of 300).")
@click.option("--lengths-file", metavar="F.json", help='JSON file: [100, 2000, ...] or {"lengths": [...]}.')
@click.option("--batches", "batches_path", metavar="B.json", help="Plan every batch of a file: [[100, 2000], [300]].")
@click.option("--profile", "profile_path", metavar="P.yaml|NAME", help="Costs and token limits (docs/profiles.md).")
@click.option("--save-profile", metavar="P.yaml", help="Write the costs that were used to this file.")
@click.option("--strategy", metavar="NAME", help="Plan for this strategy of the pool only.")
@click.option("--no-solver", is_flag=True, help="Take the first checked plan; run no integer program.")
@click.option("--refuse-idle", is_flag=True, help="Take no strategy that leaves ranks of the pool without a replica.")
@click.option("--explain", "is_long", is_flag=True, help="Show every micro-batch, what decides, what would gain.")
@click.option("--picture", metavar="FILE.svg", help="Draw the plan: a bar per replica, micro-batches stacked by cost.")
@json_option
@settings_argument
def command(
    config_path: str | None,
    pool_path: str | None,
    lengths: str | None,
    lengths_file: str | None,
    batches_path: str | None,
    profile_path: str | None,
    save_profile: str | None,
    strategy: str | None,
    no_solver: bool,
    refuse_idle: bool,
    is_long: bool,
    picture: str | None,
    as_json: bool,
    settings: tuple[str, ...],
) -> None:
    """Show what would happen to sequences of these lengths, and why.

    Plans one step as training does, and prints every strategy of the pool with its predicted time, its lower bound, the
    gap between them and why it is taken or not, then what each replica of the taken one runs. Costs come from
    --profile (a file, or the name of a published one), or are measured once by running the compiled programs on
    simulated ranks in this process, and kept in the folder `calibration.cache`. KEY=VALUE changes settings of the
    configuration. Nothing is trained. With --batches, many batches are planned one after another, with the time that
    each took; with a profile and a pool, this needs neither model nor torch.

    \b
    Examples:
      hgraph plan --pool examples/first_light/strategies.yaml --lengths 100,2000,20x300 --save-profile costs.yaml
      hgraph plan --pool examples/first_light/strategies.yaml --lengths 12x700 --profile costs.yaml
      hgraph plan --pool examples/first_light/strategies.yaml --lengths 12x700 --profile costs.yaml --strategy tp4
      hgraph plan --pool examples/first_light/strategies.yaml --lengths 2000 --profile costs.yaml --explain
      hgraph plan --pool examples/first_light/strategies.yaml --lengths 3000 --profile costs.yaml --json
    """
    if batches_path is not None:
        _check_batches_alone(lengths, lengths_file, is_long, picture)
    numbers = read_lengths(lengths, lengths_file) if batches_path is None else []
    for written in filter(None, (save_profile, picture)):
        check_folder(Path(written).parent)
    pool, profile, options, origin = _inputs(config_path, pool_path, profile_path, settings)
    if strategy is not None:
        strategies_named(pool, [strategy])
    options = replace(
        options,
        only=strategy or options.only,
        program=options.program and not no_solver,
        require_all_ranks=options.require_all_ranks or refuse_idle,
    )
    if save_profile is not None:
        write_profile_file(save_profile, ProfileFile.of(profile))
    if batches_path is not None:
        from runtime.cli.plan_batches import plan_batches

        plan_batches(pool, profile, options, batches_path, as_json=as_json)
        return
    with working("planning"):
        answered = _answered(pool, profile, options, numbers, origin, is_long)
    if picture is not None:
        write_picture(answered, picture)
    if as_json:
        print_json(as_data(answered))
        return
    print_plan(answered)
    if picture is not None:
        click.echo(f"wrote {picture}")


def _check_batches_alone(lengths: str | None, lengths_file: str | None, is_long: bool, picture: str | None) -> None:
    given = {"--lengths": lengths, "--lengths-file": lengths_file, "--explain": is_long, "--picture": picture}
    wrong = [name for name, value in given.items() if value]
    if wrong:
        raise InvalidInput(
            f"--batches plans a file of batches; {' and '.join(wrong)} are for one batch: leave them out"
        )


def _answered(
    pool: Pool, profile: Profile, options: PlannerOptions, lengths: list[int], origin: str, is_long: bool
) -> Answered:
    """Returns the plan of one batch with what explains it."""
    from strategies.anytime import AnytimePlanner, planned_step
    from strategies.explain import deciding, explain
    from strategies.one_more import one_more

    made = list(AnytimePlanner(pool, profile, options).answers(lengths, 0))
    plan = planned_step(made[0], made[-1]).plan
    answered = Answered(plan, explain(plan, pool, profile, lengths), pool, profile, lengths, origin)
    if not is_long:
        return answered
    return replace(
        answered,
        deciding=deciding(plan, answered.explanation, pool, profile, lengths, options),
        one_more=one_more(plan, pool, profile, lengths, options),
    )


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
