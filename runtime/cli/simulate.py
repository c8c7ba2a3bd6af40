"""`hgraph simulate`: what a training step takes on a described cluster, for ours and for other systems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hgraph.errors import InvalidInput
from runtime.cli.options import check_folder, json_option, out, print_json, table, working

if TYPE_CHECKING:
    from strategies.ladder import LadderResult
    from strategies.simulation import Simulation

__all__ = ["command"]

_HEADERS = ("", "system", "layout", "mean ms", "95 %", "flow ms", "compute ms", "speed-up", "95 %", "over rung before")


@click.command(name="simulate")
@click.option("--pool", "pool_path", metavar="FILE", required=True, help="Strategy file; its ranks are the cluster's.")
@click.option("--profile", "profile_path", metavar="NAME|FILE", required=True, help="Costs (docs/profiles.md).")
@click.option("--lengths", metavar="NAME|FILE", default="commoncrawl-like", show_default=True, help="Length data.")
@click.option("--cluster", metavar="NAME|FILE", default="8x8-a800", show_default=True, help="Nodes and links.")
@click.option("--tokens", type=click.IntRange(min=1), default=200_000, show_default=True, help="Tokens per step.")
@click.option("--longest", type=click.IntRange(min=1), default=32_768, show_default=True, help="Context window.")
@click.option("--batches", type=click.IntRange(min=1), default=20, show_default=True, help="Steps that are timed.")
@click.option("--calibration", type=click.IntRange(min=1), default=5, show_default=True, help="Batches to choose by.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the batches drawn.")
@click.option(
    "--communication",
    type=click.Choice(["overlapped", "serial", "none"]),
    default="overlapped",
    show_default=True,
    help="How bridges go with computation; none leaves messages, bridges and switches out.",
)
@click.option("--published", metavar="FILE", help="Pool of the published algorithm, in place of --pool.")
@click.option("--system", "keys", metavar="KEY", multiple=True, help="Only these systems; the keys are in the table.")
@click.option("--solver", is_flag=True, help="Let the planner run its integer programs too.")
@click.option("--figure", metavar="FILE.png|svg", help="Draw mean times and speed-ups.")
@click.option("--trace", metavar="STEP FILE", nargs=2, help="Write a step as a Chrome trace (ui.perfetto.dev).")
@click.option("--trace-system", metavar="KEY", default="pool", show_default=True, help="Whose step --trace writes.")
@click.option("--trace-ranks", is_flag=True, help="A row per rank in the trace, in place of one per stage.")
@json_option
def command(**options: Any) -> None:
    """Simulate training steps on a described cluster, for our planner and for baselines on the same batches.

    Draws batches from length data and times each system's steps by the schedules that would run, with messages between
    stages, bridges and switches. The ladder goes from padding over fixed-length packing (the reference of speed-ups) to
    a choice of a strategy in every step; beside it stand systems rebuilt from their descriptions. Choices that a system
    makes once are made on calibration batches, which are not timed. Everything depends on the seed alone.

    \b
    Examples:
      hgraph simulate --pool benchmarks/pools/32b-64gpu.published.yaml --profile llama-32b.a800-80gb --batches 5
      hgraph simulate --pool benchmarks/pools/32b-64gpu.published.yaml --profile llama-32b.a800-80gb --batches 2 \\
          --system static --system pool --trace 0 step.json --figure ladder.svg
      hgraph simulate --pool benchmarks/pools/13b-32gpu.published.yaml --profile llama-13b.a800-80gb --tokens 100000 \\
          --lengths web-docs --longest 16384 --communication none --batches 2 --json
    """
    for path in (options["figure"], options["trace"][1] if options["trace"] else None):
        if path is not None:
            check_folder(Path(path).parent)
    trace_step = _trace_step(options["trace"], options["batches"])
    with working("loading"):
        simulation = _simulation(options)
    result = _run(simulation)
    written = []
    if options["figure"] is not None:
        written.append(_draw(options["figure"], result, _title(options, simulation)))
    if options["trace"]:
        written.append(_trace(simulation, trace_step, options))
    if options["as_json"]:
        print_json(_data(options, simulation, result))
        return
    _show(options, simulation, result)
    for path in written:
        click.echo(f"wrote {path}")


def _trace_step(trace: tuple[str, str] | None, batches: int) -> int:
    if not trace:
        return 0
    if not trace[0].isdigit() or int(trace[0]) >= batches:
        raise InvalidInput(f"--trace: expected a step from 0 to {batches - 1}, got {trace[0]!r}")
    return int(trace[0])


def _simulation(options: dict[str, Any]) -> Simulation:
    from hgraph.profile_file import read_profile_file
    from hgraph.strategy_file import load_pool
    from hgraph.topology_file import load_topology
    from strategies.length_data import read_lengths
    from strategies.options import PlannerOptions
    from strategies.simulation import Simulation, Workload

    workload = Workload(
        read_lengths(options["lengths"]),
        options["tokens"],
        options["longest"],
        options["batches"],
        options["calibration"],
        options["seed"],
    )
    return Simulation(
        read_profile_file(options["profile_path"]),
        load_pool(options["pool_path"]),
        load_topology(options["cluster"]),
        workload,
        None if options["published"] is None else load_pool(options["published"]),
        options["communication"],
        PlannerOptions(program=options["solver"]),
        options["keys"],
    )


def _run(simulation: Simulation) -> LadderResult:
    from tqdm import tqdm

    with tqdm(unit="step", disable=None, leave=False) as bar:

        def progress(title: str, done: int, count: int) -> None:
            bar.set_description(title)
            bar.total = count
            bar.n = done
            bar.refresh()

        return simulation.run(progress)


def _title(options: dict[str, Any], simulation: Simulation) -> str:
    return (
        f"{simulation.profile.name or options['profile_path']} on {simulation.pool.num_ranks:,} ranks, "
        f"{options['lengths']}, {options['tokens']:,} tokens a step, longest {options['longest']:,}"
    )


def _trace(simulation: Simulation, step: int, options: dict[str, Any]) -> str:
    from hgraph.step_trace import chrome_trace

    clock, parts = simulation.step(options["trace_system"], step)
    path = options["trace"][1]
    Path(path).write_text(json.dumps(chrome_trace(clock.trace(parts), per_rank=options["trace_ranks"])))
    return str(path)


def _draw(path: str, result: LadderResult, title: str) -> str:
    from runtime.simulation_figure import draw_ladder

    draw_ladder(path, result, title)
    return path


def _show(options: dict[str, Any], simulation: Simulation, result: LadderResult) -> None:
    from strategies.ladder_facts import rung_note

    click.echo(f"{_title(options, simulation)}; {options['batches']} steps, seed {options['seed']}")
    click.echo(f"communication: {_COMMUNICATION[options['communication']]}")
    console = out()
    rows = _rows(result, options["seed"])
    console.print(table("Systems", _HEADERS, rows, numbers=(3, 4, 5, 6, 7, 8, 9)))
    for one in result.systems:
        note = rung_note(result, one.key)
        if note:
            click.echo(f"{one.key}: {note}")


_COMMUNICATION = {
    "overlapped": "messages and switches in full, bridges hidden behind computation as far as order allows",
    "serial": "messages, switches and bridges in full",
    "none": "left out",
}


def _rows(result: LadderResult, seed: int) -> list[tuple[str, ...]]:
    from strategies.ladder import REFERENCE

    there = {one.key for one in result.systems}
    rows: list[tuple[str, ...]] = []
    for one in result.systems:
        mean, before = one.mean(seed), result.before(one.key)
        speed = result.speed_up(one.key, seed=seed) if REFERENCE in there else None
        rows.append(
            (
                one.key,
                one.title,
                one.layout,
                f"{mean.value:,.0f}",
                f"{mean.low:,.0f} to {mean.high:,.0f}",
                f"{sum(one.flow_ms) / len(one.flow_ms):,.0f}",
                f"{sum(one.compute_ms) / len(one.compute_ms):,.0f}",
                "-" if speed is None else f"{speed.value:.2f}",
                "-" if speed is None else f"{speed.low:.2f} to {speed.high:.2f}",
                "-" if before is None else f"{result.speed_up(one.key, before, seed).value:.3f}",
            )
        )
    return rows


def _data(options: dict[str, Any], simulation: Simulation, result: LadderResult) -> dict[str, Any]:
    from strategies.ladder import REFERENCE
    from strategies.simulation import result_data

    names = ("lengths", "cluster", "tokens", "longest", "batches", "calibration", "seed", "communication")
    return {
        "profile": simulation.profile.name or options["profile_path"],
        "pool": options["pool_path"],
        "num_ranks": simulation.pool.num_ranks,
        **{name: options[name] for name in names},
        "systems": result_data(result, REFERENCE, options["seed"]),
    }
