"""What several commands share: options, reading the configuration, building the model, printing.

Nothing here imports torch when it is imported: commands that need none start in no time.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hgraph.errors import FileErrors, InvalidInput
from hgraph.strategy import Pool, Strategy
from hgraph.yaml_report import nearest

if TYPE_CHECKING:
    from torch import nn

    from hgraph.capture import Captured
    from hgraph.model_facts import ModelFacts
    from hgraph.topology import Topology
    from runtime.config import RunConfig

__all__ = [
    "captured_model",
    "check_folder",
    "cluster_option",
    "config_option",
    "json_option",
    "load_cluster",
    "load_run_config",
    "make_model",
    "out",
    "picture_option",
    "pool_option",
    "print_json",
    "read_json",
    "read_pool",
    "settings_argument",
    "shown_path",
    "strategies_named",
    "table",
    "working",
]

Function = TypeVar("Function", bound=Callable[..., Any])

PIPE_WIDTH = 140
"""Columns of tables that do not go to a terminal."""


def config_option(function: Function) -> Function:
    """Adds `--config RUN.yaml`."""
    text = "Configuration of the run: model, memory, planner (docs/configuration.md)."
    return click.option("--config", "config_path", metavar="RUN.yaml", help=text)(function)


def pool_option(function: Function) -> Function:
    """Adds `--pool FILE`."""
    text = "Strategy file, in place of the one that the configuration names."
    return click.option("--pool", "pool_path", metavar="FILE", help=text)(function)


def json_option(function: Function) -> Function:
    """Adds `--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")(function)


def cluster_option(function: Function) -> Function:
    """Adds `--cluster NAME|FILE`."""
    text = "Nodes and links: a cluster file, or a name such as 8x8-a800 (docs/clusters.md)."
    return click.option("--cluster", "cluster", metavar="NAME|FILE", help=text)(function)


def picture_option(function: Function) -> Function:
    """Adds `--picture FILE.svg`."""
    text = "Draw who sends how much to whom as a heat map."
    return click.option("--picture", "picture", metavar="FILE.svg", help=text)(function)


def settings_argument(function: Function) -> Function:
    """Adds `[KEY=VALUE]...`, settings over those of the configuration."""
    return click.argument("settings", metavar="[KEY=VALUE]...", nargs=-1)(function)


def load_run_config(config_path: str | None, pool_path: str | None, settings: Sequence[str]) -> RunConfig:
    """Returns the configuration of a command; without a file, the defaults changed by `settings`.

    `pool_path` replaces the pool that the configuration names. Raises `InvalidInput` where neither is given.
    """
    if config_path is None and pool_path is None:
        raise InvalidInput(
            "expected --config RUN.yaml or --pool FILE; a run or a pool is needed to know the strategies"
        )
    with working("loading"):
        from runtime.config import load_config, parse_config
    overrides = list(settings)
    if pool_path is not None:
        overrides.append(f"pool={json.dumps(pool_path)}")
    if config_path is not None:
        return load_config(config_path, overrides)
    return parse_config("{}", "defaults", overrides, folder=Path.cwd())


def load_cluster(path_or_name: str, num_ranks: int) -> Topology:
    """Returns the cluster of a file or name; raises `InvalidInput` where it has fewer than `num_ranks` ranks."""
    from hgraph.topology_file import load_topology

    topology = load_topology(path_or_name)
    if topology.num_ranks < num_ranks:
        raise InvalidInput(
            f"--cluster {path_or_name}: expected {num_ranks} ranks or more, for ranks 0 to {num_ranks - 1} take part; "
            f"got {topology.num_ranks}"
        )
    return topology


def make_model(config: RunConfig, *, on_meta: bool = False) -> nn.Module:
    """Returns the model of a configuration in its dtype; `on_meta` leaves out the weights where possible."""
    import torch

    from runtime.models.build import build_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return build_model(config.model, on_meta=on_meta).to(getattr(torch, config.dtype))


def captured_model(config: RunConfig) -> tuple[nn.Module, Captured]:
    """Returns the model of a configuration, without weights where possible, and its graph as captured."""
    with working("tracing the model"):
        from hgraph.capture import capture
        from runtime.models.build import loss_of

        model = make_model(config, on_meta=True)
        return model, capture(model, loss_of(model))


def read_pool(config: RunConfig, facts: ModelFacts | None) -> Pool:
    """Returns the pool of a configuration, checked against the model; raises `FileErrors` with all its faults."""
    from hgraph.strategy_file import load_pool

    return load_pool(shown_path(config.pool), model=facts, trainable=True)


def strategies_named(pool: Pool, names: Sequence[str]) -> tuple[Strategy, ...]:
    """Returns the strategies of these names (all where none is given); an error names the nearest."""
    known = [strategy.name for strategy in pool.strategies]
    for name in names:
        if name not in known:
            hint = nearest(name, known)
            raise InvalidInput(f"no strategy {name!r} in the pool; there are {', '.join(known)}{hint}")
    return tuple(strategy for strategy in pool.strategies if not names or strategy.name in names)


def check_folder(path: str | os.PathLike[str]) -> None:
    """Raises `InvalidInput` unless files can be written into the folder `path`, which may have to be made yet.

    Asked before the work begins, so that none is lost.
    """
    there = next(parent for parent in (Path(path).resolve(), *Path(path).resolve().parents) if parent.exists())
    if not there.is_dir():
        raise InvalidInput(f"{os.fspath(path)}: expected a folder to write to, but {shown_path(there)} is a file")
    if not os.access(there, os.W_OK):
        raise InvalidInput(f"{os.fspath(path)}: expected a folder to write to, but {shown_path(there)} is read-only")


def shown_path(path: str | os.PathLike[str]) -> str:
    """Returns a path as people would write it: from the current folder where it lies below."""
    absolute = Path(path).resolve()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def read_json(path: str) -> Any:
    """Returns the data of a JSON file; raises `InvalidInput` or `FileErrors` with the line of a syntax error."""
    from hgraph.errors import Problem
    from hgraph.yaml_report import read_text

    text = read_text(path)
    if not text.strip():
        raise FileErrors(path, [Problem(1, "", "expected JSON, got an empty file")])
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise FileErrors(path, [Problem(error.lineno, "", f"JSON syntax, column {error.colno}: {error.msg}")]) from None


def out() -> Console:
    """Returns the console for answers, on stdout. Tables keep one width where it is no terminal."""
    console = Console(file=sys.stdout, highlight=False)
    return console if console.is_terminal else Console(file=sys.stdout, highlight=False, width=PIPE_WIDTH)


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Shows on a terminal that something is being done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(f"{what} ..."):
        yield


def table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> Table:
    """Returns a table of plain texts; columns whose index is in `numbers` stand to the right."""
    result = Table(title=escape(title), title_justify="left", title_style="bold", header_style="bold")
    for index, header in enumerate(headers):
        result.add_column(escape(header), justify="right" if index in numbers else "left", overflow="fold")
    for row in rows:
        result.add_row(*(escape(cell) for cell in row))
    return result


def print_json(value: object) -> None:
    """Prints a value as JSON on stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))
