"""`hgraph train`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from runtime.config import RunConfig

__all__ = ["command"]

_LAST = "(last)"


def check_pool(config: RunConfig) -> None:
    """Raises what is wrong with the pool before any process is started."""
    from hgraph.errors import InvalidInput
    from hgraph.strategy_file import load_pool

    pool = load_pool(config.pool, trainable=True)
    names = [strategy.name for strategy in pool.strategies]
    if config.planner.only is not None and config.planner.only not in names:
        raise InvalidInput(
            f"planner.only: no strategy {config.planner.only!r} in {config.pool}; it has {', '.join(names)}"
        )
    if pool.num_ranks != config.num_processes:
        raise InvalidInput(
            f"{config.pool} is for {pool.num_ranks} ranks, but num_processes is {config.num_processes}; use "
            f"num_processes={pool.num_ranks}, or change `ranks` in the file"
        )


def _folder(resume: str | None, config: RunConfig) -> Path | None:
    """The checkpoint, or the folder of some, that `--resume` means."""
    from hgraph.errors import InvalidInput

    if resume is None or resume == _LAST:
        return None if resume is None else config.checkpoints
    if "=" in resume and not Path(resume).exists():
        raise InvalidInput(f"--resume: expected a folder, got {resume!r}; put --resume last, or write --resume=FOLDER")
    return Path(resume)


def _check_replay(replay: str | None, config: RunConfig) -> None:
    """Raises what is wrong with the plans before any process is started."""
    if replay is None:
        return
    from hgraph.errors import InvalidInput
    from hgraph.strategy_file import load_pool
    from runtime.saved_plans import read_plans

    if Path(replay).resolve() == (config.folder / "plans.jsonl").resolve():
        raise InvalidInput(f"--replay: {replay} is what this run would write; give the run another --name")
    read_plans(replay).check_pool(load_pool(config.pool))


@click.command("train", context_settings={"ignore_unknown_options": False})
@click.argument("config", type=click.Path())
@click.argument("settings", nargs=-1)
@click.option("--nproc", type=click.IntRange(min=1), help="Processes to start; default: num_processes of the file.")
@click.option("--name", help="Name of the run, its folder under `output`; default: that of the file.")
@click.option(
    "--resume",
    is_flag=False,
    flag_value=_LAST,
    metavar="[FOLDER]",
    help="Go on after a checkpoint, or after the last one in a folder; default: the last one of this run.",
)
@click.option("--replay", metavar="PLANS.jsonl", help="Run these plans, which an earlier run left in its folder.")
def command(
    config: str,
    settings: tuple[str, ...],
    nproc: int | None,
    name: str | None,
    resume: str | None,
    replay: str | None,
) -> None:
    """Train a model as the file CONFIG says, changed by SETTINGS such as optimizer.lr=1e-3.

    Starts one process per rank on this machine, unless torchrun has started this one already. Writes metrics.jsonl,
    plans.jsonl and the resolved configuration to <output>/<name>/, and checkpoints where checkpoint.every is set.

    With --replay nothing is planned: every step runs the plan that the file has for it. Data, seed and pool must be
    those of the run that wrote it; what differs is named.

    \b
    Examples:
      hgraph train examples/first_light/config.yaml
      hgraph train examples/first_light/config.yaml --name longer steps=80 optimizer.lr=5e-4
      hgraph train examples/first_light/config.yaml checkpoint.every=10 --resume
      hgraph train examples/first_light/config.yaml --name again --replay runs/first-light/plans.jsonl
      torchrun --nproc-per-node 4 -m runtime.cli train examples/first_light/config.yaml
    """
    from runtime.checkpoint.resume import start_of
    from runtime.config import load_config
    from runtime.interrupts import raise_if_interrupted
    from runtime.launch import is_launched, launch

    overrides = list(settings)
    overrides += [f"num_processes={nproc}"] if nproc is not None else []
    overrides += [f"name={name}"] if name is not None else []
    loaded = load_config(config, overrides)
    folder = _folder(resume, loaded)
    _check_replay(replay, loaded)
    if loaded.num_processes > 1 and not is_launched():
        check_pool(loaded)
        start_of(loaded, folder)
        again = [] if folder is None else [f"--resume={folder}"]
        again += [] if replay is None else [f"--replay={replay}"]
        code = launch(loaded.num_processes, "runtime.cli", ["train", config, *overrides, *again])
        raise_if_interrupted(code)
        sys.exit(code)
    from runtime.train import train

    train(loaded, folder, None if replay is None else Path(replay))
