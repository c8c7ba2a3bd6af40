"""`hgraph verify`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from runtime.config import ModelConfig
    from runtime.verify import VerifyReport

__all__ = ["command", "report_json", "show_report", "tiny"]

_HEAD_SIZE = 4
_VOCAB_SIZE = 67


@click.command("verify")
@click.option("--config", type=click.Path(), help="Run configuration: its pool, and its model's layers and heads.")
@click.option("--pool", type=click.Path(), help="Strategy file; default: that of --config.")
@click.option("--steps", type=click.IntRange(min=1), help="Batches per strategy; default: one of every kind.")
@click.option("--gloo", is_flag=True, help="Also over real processes, one per rank, on this machine.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of weights, batches, dispatch.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per cluster instead of a table.")
def command(config: str | None, pool: str | None, steps: int | None, gloo: bool, seed: int, as_json: bool) -> None:
    """Compare every strategy of a pool, and a random walk over them, with the untouched model.

    A tiny model in float64, with as many layers and heads as the real one, trains on the virtual cluster and beside it,
    by plain PyTorch, sequence by sequence on one device. Loss, every gradient and every weight must be equal to 1e-10.
    Exit status 1 where they are not.

    \b
    Examples:
      hgraph verify --config examples/first_light/config.yaml
      hgraph verify --config examples/first_light/config.yaml --gloo
      hgraph verify --pool examples/first_light/strategies.yaml --steps 2 --json
    """
    from runtime.launch import is_launched, launch

    if config is None and pool is None:
        raise click.UsageError("say what to verify: --config RUN.yaml, --pool STRATEGIES.yaml, or both")
    sound, num_ranks = _verify(config, pool, steps, seed, as_json)
    if not sound:
        sys.exit(1)
    if not gloo or is_launched() or num_ranks == 1:
        return
    arguments = ["verify", "--seed", str(seed)]
    for option, value in (("--config", config), ("--pool", pool), ("--steps", steps)):
        arguments += [option, str(value)] if value is not None else []
    arguments += ["--json"] if as_json else []
    sys.exit(launch(num_ranks, "runtime.cli", arguments))


def _verify(config: str | None, pool: str | None, steps: int | None, seed: int, as_json: bool) -> tuple[bool, int]:
    """Verifies where this process is: on the virtual cluster, or as one rank of a job. Returns whether all is equal,
    and the number of ranks.
    """
    import torch
    import torch.distributed as dist

    from runtime.config import RunConfig, load_config
    from runtime.failure_channel import FailureChannel, rank_guard
    from runtime.launch import is_launched
    from runtime.process_groups import init_process_group_from_env

    torch.set_num_threads(1)
    loaded = RunConfig() if config is None else load_config(config)
    path = loaded.pool if pool is None else pool
    if not is_launched():
        report = _run(loaded.model, path, steps, seed, loaded.timeout_s, None, _progress(as_json))
        _print(report, as_json)
        return not report.failure, report.num_ranks
    rank, num_ranks = init_process_group_from_env("gloo", loaded.timeout_s)
    channel = FailureChannel.on_default_store()
    with rank_guard(channel):
        progress = _progress(as_json) if rank == 0 else None
        report = _run(loaded.model, path, steps, seed, loaded.timeout_s, channel, progress)
        dist.destroy_process_group()
    if rank == 0:
        _print(report, as_json)
    return not report.failure, num_ranks


def _run(
    model: ModelConfig,
    path: str,
    steps: int | None,
    seed: int,
    timeout_s: float,
    channel: object,
    progress: Callable[[str], None] | None,
) -> VerifyReport:
    import torch

    from runtime.failure_channel import FailureChannel
    from runtime.models.build import build_model, loss_of
    from runtime.verifier import Verifier
    from runtime.verify import run_verification
    from runtime.verify_batches import KINDS

    assert channel is None or isinstance(channel, FailureChannel)
    torch.manual_seed(seed)
    built = build_model(tiny(model))
    verifier = Verifier(built, loss_of(built), path, seed=seed, timeout_s=timeout_s, channel=channel)
    return run_verification(verifier, steps=len(KINDS) if steps is None else steps, seed=seed, progress=progress)


def tiny(model: ModelConfig) -> ModelConfig:
    """Returns the model with the same layers and heads, but small: heads of 4, and a vocabulary and a feed-forward size
    that no number of ranks divides. What the user's own factory makes is left as it is.
    """
    from dataclasses import replace

    if model.factory is not None:
        return model
    hidden = model.heads * _HEAD_SIZE
    return replace(model, hidden=hidden, ffn=hidden + 5, vocab_size=_VOCAB_SIZE)


def report_json(report: VerifyReport) -> str:
    """Returns one line of JSON."""
    return json.dumps(asdict(report))


def show_report(report: VerifyReport) -> None:
    """Prints one row per strategy: how far the worst loss, gradient and weight are from the reference."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left", pad_edge=False)
    table.title = f"Difference from the untouched module: {report.num_ranks} ranks, {report.cluster}"
    table.caption = f"Relative to the greatest value of the tensor; equal means at most {report.tolerance:.0e}."
    table.add_column("strategy", no_wrap=True)
    for name in ("steps", "tokens", "messages", "loss", "gradient", "weight"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("worst tensor", overflow="fold")
    for result in report.results:
        counts = [str(count) for count in (result.steps, result.tokens, result.num_messages)]
        errors = [f"{one.error:.0e}" for one in (result.loss, result.gradient, result.weight)]
        style = None if result.worst.error <= report.tolerance else "red"
        table.add_row(result.name, *counts, *errors, result.worst.tensor, style=style)
    console = Console()
    console.print(table)
    if report.failure:
        console.print(f"not equal: {report.failure}", style="red", highlight=False)


def _print(report: VerifyReport, as_json: bool) -> None:
    if as_json:
        click.echo(report_json(report))
    else:
        show_report(report)


def _progress(as_json: bool) -> Callable[[str], None] | None:
    if as_json or not sys.stderr.isatty():
        return None
    return lambda name: click.echo(f"verifying {name}", err=True)
