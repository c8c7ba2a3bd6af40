"""`hgraph verify`: every strategy of a pool against the untouched model."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from runtime.cli.options import (
    config_option,
    json_option,
    load_run_config,
    out,
    pool_option,
    print_json,
    settings_argument,
    table,
    working,
)

if TYPE_CHECKING:
    from runtime.config import ModelConfig, RunConfig
    from runtime.failure_channel import FailureChannel
    from runtime.verify import VerifyReport

__all__ = ["command", "tiny"]

_HEAD_SIZE = 4
_VOCABULARY = 67


@click.command("verify")
@config_option
@pool_option
@settings_argument
@click.option("--steps", type=click.IntRange(min=1), help="Batches per strategy; default: one of every kind.")
@click.option("--gloo", is_flag=True, help="Also over real processes on this machine, one per rank.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of weights, batches, dispatch.")
@click.option("--report", type=click.Path(), hidden=True, help="Write the report as JSON here, and print nothing.")
@json_option
def command(
    config_path: str | None,
    pool_path: str | None,
    settings: tuple[str, ...],
    steps: int | None,
    gloo: bool,
    seed: int,
    report: str | None,
    as_json: bool,
) -> None:
    """Compare every strategy of a pool, and a random walk over them, with the untouched model.

    A tiny model with the layers and heads of the real one trains in float64 on the virtual cluster and, beside it, in
    plain PyTorch on one device, sequence by sequence. After every step the loss, every gradient and every weight must
    be equal to 1e-10. Exit status 1 where they are not.

    \b
    Examples:
      hgraph verify --config examples/first_light/config.yaml
      hgraph verify --config examples/first_light/config.yaml --gloo
      hgraph verify --pool examples/first_light/strategies.yaml --steps 2 model.kv_heads=2
    """
    from runtime.launch import is_launched

    config = load_run_config(config_path, pool_path, settings)
    if is_launched():
        _verify_as_one_rank(config, steps, seed, report, as_json)
        return
    reports = [_verify_simulated(config, steps, seed, quiet=as_json)]
    if gloo and not reports[0].failure:
        options = [("--config", config_path), ("--pool", pool_path), ("--steps", steps), ("--seed", seed)]
        given = [text for option, value in options if value is not None for text in (option, str(value))]
        reports.append(_verify_over_processes(reports[0].num_ranks, [*given, *settings], quiet=as_json))
    if as_json:
        print_json([asdict(one) for one in reports])
    if any(one.failure for one in reports):
        sys.exit(1)


def _verify_simulated(config: RunConfig, steps: int | None, seed: int, *, quiet: bool) -> VerifyReport:
    with working("verifying on the virtual cluster"):
        report = _verify(config, steps, seed, None)
    if not quiet:
        _show(report)
    return report


def _verify_over_processes(num_ranks: int, arguments: Sequence[str], *, quiet: bool) -> VerifyReport:
    """Runs this command in one process per rank; they say themselves what went wrong where they cannot verify."""
    from runtime.interrupts import raise_if_interrupted
    from runtime.launch import launch
    from runtime.verify import VerifyReport

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        with working(f"verifying over {num_ranks} processes"):
            code = launch(num_ranks, "runtime.cli", ["verify", *arguments, "--report", str(path)])
        raise_if_interrupted(code)
        if not path.exists():
            sys.exit(code or 1)
        report = VerifyReport.from_json(path.read_text())
    if not quiet:
        _show(report)
    return report


def _verify_as_one_rank(config: RunConfig, steps: int | None, seed: int, path: str | None, as_json: bool) -> None:
    """What each process of a job does; rank 0 writes or prints the report."""
    import torch.distributed as dist

    from runtime.failure_channel import FailureChannel, rank_guard
    from runtime.process_groups import init_process_group_from_env

    rank, _ = init_process_group_from_env("gloo", config.timeout_s)
    channel = FailureChannel.on_default_store()
    with rank_guard(channel):
        report = _verify(config, steps, seed, channel)
        dist.destroy_process_group()
    if rank == 0:
        _tell(report, path, as_json)
    if report.failure and path is None:
        sys.exit(1)


def _tell(report: VerifyReport, path: str | None, as_json: bool) -> None:
    if path is not None:
        Path(path).write_text(report.to_json())
    elif as_json:
        print_json([asdict(report)])
    else:
        _show(report)


def _verify(config: RunConfig, steps: int | None, seed: int, channel: FailureChannel | None) -> VerifyReport:
    import torch

    from runtime.models.build import build_model, loss_of
    from runtime.verifier import Verifier
    from runtime.verify import run_verification
    from runtime.verify_batches import KINDS

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = build_model(tiny(config.model))
    verifier = Verifier(model, loss_of(model), config.pool, seed=seed, timeout_s=config.timeout_s, channel=channel)
    return run_verification(verifier, steps=len(KINDS) if steps is None else steps, seed=seed)


def tiny(model: ModelConfig) -> ModelConfig:
    """Returns the model with the same layers and heads, but small: heads of 4, and a vocabulary and a feed-forward size
    that few numbers of ranks divide. What the user's own factory makes is left as it is.
    """
    if model.factory is not None:
        return model
    hidden = model.heads * _HEAD_SIZE
    return replace(model, hidden=hidden, ffn=hidden + 5, vocab_size=_VOCABULARY)


def _show(report: VerifyReport) -> None:
    """Prints one row per strategy: how far its worst loss, gradient and weight are from the untouched model's."""
    headers = ("strategy", "steps", "tokens", "messages", "loss", "gradient", "weight", "worst tensor")
    number: Callable[[float], str] = "{:.0e}".format
    rows = [
        (
            result.name,
            str(result.steps),
            f"{result.tokens:,}",
            f"{result.num_messages:,}",
            *(number(one.error) for one in (result.loss, result.gradient, result.weight)),
            result.worst.tensor,
        )
        for result in report.results
    ]
    place = f"{report.num_ranks} ranks, {report.cluster}"
    title = f"difference from the untouched model, of the tensor's greatest value ({place})"
    out().print(table(title, headers, rows, numbers=range(1, 7)))
    if report.failure:
        out().print(f"NOT EQUAL: {report.failure}", markup=False)
    else:
        out().print(f"equal: nothing differs by more than {number(report.tolerance)}")
