"""`hgraph dump`: what a pool compiles to, as text and pictures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hgraph.errors import InvalidInput
from hgraph.strategy import Pool, Scheme
from hgraph.yaml_report import nearest
from runtime.cli.options import (
    captured_model,
    check_folder,
    config_option,
    load_run_config,
    out,
    pool_option,
    read_pool,
    settings_argument,
    strategies_named,
    table,
    working,
)
from runtime.cli.tables import LIMIT_HEADERS, limit_rows

if TYPE_CHECKING:
    from torch import nn

    from hgraph.capture import Captured
    from passes.pipelines import CompiledScheme
    from runtime.config import RunConfig

__all__ = ["command"]

FORMATS = ("text", "dot", "svg")


@click.command(name="dump")
@config_option
@pool_option
@click.option("--out", "folder", metavar="FOLDER", help="Where the files go; made if needed.")
@click.option(
    "--strategy", "names", metavar="NAME", multiple=True, help="Only the schemes of this strategy; repeatable."
)
@click.option(
    "--dump-after", "passes", metavar="PASS", multiple=True, help="Only the text after this pass; repeatable."
)
@click.option("--format", "formats", metavar="LIST", default="text,dot,svg", show_default=True, help="What to write.")
@click.option(
    "--micro-batches", "num_micro_batches", metavar="N", default=4, show_default=True, help="For the schedule."
)
@click.option("--full", is_flag=True, help="Pictures with a node for every operator, not for every module.")
@settings_argument
def command(
    config_path: str | None,
    pool_path: str | None,
    folder: str | None,
    names: tuple[str, ...],
    passes: tuple[str, ...],
    formats: str,
    num_micro_batches: int,
    full: bool,
    settings: tuple[str, ...],
) -> None:
    """Write what the pool compiles to: graphs, local programs, schedules and the table of strategies.

    One folder per scheme: the annotated graph with its communication, forward and backward graphs of every stage, the
    source of the local programs, the schedule, and a summary with memory and communication. Pictures are drawn
    without Graphviz; open graph.svg in a browser. With --dump-after, only the text after a pass is written, or printed
    where there is no --out. The model is that of the configuration, by default the one of `hgraph train`.

    \b
    Examples:
      hgraph dump --pool examples/first_light/strategies.yaml --out dumps
      hgraph dump --pool examples/first_light/strategies.yaml --strategy tp2.pp2 --format svg --out dumps
      hgraph dump --pool examples/first_light/strategies.yaml --strategy tp4 --dump-after deduce
      hgraph dump --pool examples/first_light/strategies.yaml --strategy tp1x4 --full --out dumps model.hidden=64
    """
    wanted = _formats(formats)
    if num_micro_batches < 0:
        raise InvalidInput(f"--micro-batches: expected a number of 0 or more, got {num_micro_batches}")
    _check_passes(passes)
    if folder is None and not passes:
        raise InvalidInput("expected --out FOLDER for the files, or --dump-after PASS to print the text after a pass")
    if folder is not None:
        check_folder(folder)
    config = load_run_config(config_path, pool_path, settings)
    pool, schemes, model, captured = _inputs(config, names)
    if passes:
        _dump_after(passes, schemes, pool, model, captured, folder)
        return
    assert folder is not None
    _write_all(
        folder, _compiled(schemes, pool, model, captured), captured, pool, config, wanted, num_micro_batches, full
    )


def _formats(text: str) -> tuple[str, ...]:
    formats = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [part for part in formats if part not in FORMATS]
    if unknown or not formats:
        got = repr(unknown[0]) if unknown else "nothing"
        hint = nearest(unknown[0], FORMATS) if unknown else ""
        raise InvalidInput(f"--format: expected a list of {', '.join(FORMATS)}, got {got}{hint}")
    return formats


def _check_passes(names: Sequence[str]) -> None:
    if not names:
        return
    with working("loading"):
        from passes.pipelines import PASSES
    for name in names:
        if name not in PASSES:
            raise InvalidInput(
                f"--dump-after: no pass {name!r}; the passes are {', '.join(PASSES)}{nearest(name, PASSES)}"
            )


def _inputs(config: RunConfig, names: Sequence[str]) -> tuple[Pool, tuple[Scheme, ...], nn.Module, Captured]:
    """Returns the pool, the schemes to dump, and the model with its graph."""
    from runtime.facts import model_facts

    strategies_named(read_pool(config, None), names)  # what is wrong in the file is told before the model is traced
    model, captured = captured_model(config)
    pool = read_pool(config, model_facts(captured))
    chosen = Pool(pool.num_ranks, strategies_named(pool, names), pool.template, pool.optimizer_layout)
    return chosen, chosen.schemes, model, captured


def _compiled(
    schemes: Sequence[Scheme],
    pool: Pool,
    model: nn.Module,
    captured: Captured,
    dump: Callable[[str], Callable[[str, str], None]] | None = None,
) -> dict[str, CompiledScheme]:
    from passes.pipelines import compile_scheme, normalized
    from runtime.facts import leaf_template

    template = leaf_template(pool, model)
    start = normalized(captured, dump=None if dump is None else dump(""))
    with working(f"compiling {len(schemes)} schemes"):
        return {
            str(scheme): compile_scheme(start, scheme, template, dump=None if dump is None else dump(str(scheme)))
            for scheme in schemes
        }


def _dump_after(
    names: Sequence[str],
    schemes: Sequence[Scheme],
    pool: Pool,
    model: nn.Module,
    captured: Captured,
    folder: str | None,
) -> None:
    """Writes or prints the text after each of some passes; `normalize` runs once, before there are schemes."""
    from passes.pipelines import PASSES
    from runtime.dumps import folder_names

    texts: dict[tuple[str, str], list[str]] = defaultdict(list)

    def note(scheme: str) -> Callable[[str, str], None]:
        return lambda name, text: texts[scheme, name].append(text)

    _compiled(schemes, pool, model, captured, note)
    folders = folder_names(schemes)
    for number, name in enumerate(PASSES):
        if name not in names:
            continue
        for scheme in [""] if name == PASSES[0] else list(folders):
            text = "\n".join(texts.get((scheme, name), [f"{name} does not run: every stage has one rank\n"]))
            if folder is None:
                click.echo(f"# {scheme or 'all schemes'}, after {name}\n{text}")
                continue
            path = Path(folder, folders.get(scheme, ""), f"after-{number}-{name}.txt")
            _write(path, text)
            click.echo(f"wrote {path}")


def _write_all(
    folder: str,
    compiled: Mapping[str, CompiledScheme],
    captured: Captured,
    pool: Pool,
    config: RunConfig,
    formats: Collection[str],
    num_micro_batches: int,
    full: bool,
) -> None:
    from hgraph.pictures import table_svg
    from runtime.dumps import folder_names, scheme_files
    from runtime.dumps.summary import plain_table

    folders = folder_names(one.scheme for one in compiled.values())
    limits = _token_limits(compiled, captured, pool, config)
    rows = limit_rows(pool, limits)
    title = f"{len(pool.strategies)} strategies on {pool.num_ranks} ranks"
    if "text" in formats:
        _write(Path(folder, "strategies.txt"), f"{title}\n\n{plain_table(LIMIT_HEADERS, rows)}\n")
    if "svg" in formats:
        _write(Path(folder, "strategies.svg"), table_svg(LIMIT_HEADERS, rows, title))
    written = []
    for text, one in compiled.items():
        with working(f"drawing {text}"):
            files = scheme_files(
                one, captured, pool.num_ranks, formats=formats, num_micro_batches=num_micro_batches, full=full
            )
        for name, content in files.items():
            _write(Path(folder, folders[text], name), content)
        written.append((text, str(Path(folder, folders[text])), str(len(files)), str(one.num_programs)))
    console = out()
    console.print(table(title, LIMIT_HEADERS, rows))
    console.print(table("Written", ("scheme", "folder", "files", "programs"), written, numbers=(2, 3)))


def _token_limits(
    compiled: Mapping[str, CompiledScheme], captured: Captured, pool: Pool, config: RunConfig
) -> dict[str, int]:
    """Returns the largest micro-batch of each scheme in tokens: as configured, else what the memory budget leaves."""
    from runtime.memory import MIB, scheme_memory, token_limit

    limits = dict(config.memory.max_tokens)
    budget_mib = config.memory.budget_mib
    for text, one in compiled.items():
        stages = scheme_memory(one, captured, pool.num_ranks)
        if text not in limits and budget_mib is not None and all(stage.in_flight is not None for stage in stages):
            limits[text] = token_limit(stages, budget_mib * MIB)
    return limits


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
