"""The command line `hgraph`: one group whose commands are imported when they are used, so that `--help` is quick."""

from __future__ import annotations

import errno
import importlib
import os
from typing import Any

import click

from hgraph.errors import HydraulisError
from hgraph.installation import check_installation
from runtime.interrupts import INTERRUPTED, TERMINATED, Terminated, ends_when_interrupted, heeds_sigterm
from runtime.launch import is_launched, is_launched_here

__all__ = ["main"]

COMMANDS = {
    "train": "Train a model over several processes.",
    "verify": "Compare every strategy of a pool with the untouched model.",
    "profile": "Measure what every scheme costs on this machine.",
    "plan": "Show what would happen to sequences of given lengths, and why.",
    "analyze": "Show how long sequences are, and how batches of them differ.",
    "propose": "Propose a pool of strategies, from costs and lengths.",
    "check": "Report everything that is wrong with a strategy file.",
    "dump": "Write what a pool compiles to, as text and pictures.",
    "simulate": "Time steps on a described cluster, beside other systems.",
    "switch": "Show what a change of layout moves, beside the least possible.",
    "reshard": "Show how one tensor gets from one annotation to another.",
}
"""Name -> what it does. Each is `command` of the module `runtime.cli.<name>`."""


class _Commands(click.Group):
    """Looks commands up in the table; turns our errors into one message."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"runtime.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            from hgraph.yaml_report import nearest

            known = f"; the commands are {', '.join(COMMANDS)}{nearest(args[0], COMMANDS)}"
            ctx.fail(f"no command {args[0]!r}{known}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        with ends_when_interrupted(_say_interrupted) if is_launched() else heeds_sigterm():
            try:
                return self._invoke(ctx)
            except Terminated:
                click.echo("terminated", err=True)
                ctx.exit(TERMINATED)
            except KeyboardInterrupt:
                _say_interrupted()
                ctx.exit(INTERRUPTED)

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            check_installation()
            return super().invoke(ctx)
        except HydraulisError as error:
            if ctx.params["debug"]:
                raise
            raise click.ClickException(str(error)) from None
        except OSError as error:
            if ctx.params["debug"] or error.filename is None or error.errno == errno.EPIPE:
                raise
            raise click.ClickException(f"{error.filename}: {error.strerror}") from None


def _say_interrupted() -> None:
    """Says so in one process of the job: the one that was asked or, under torchrun, the first of this machine."""
    if not is_launched() or (not is_launched_here() and os.environ.get("LOCAL_RANK", "0") == "0"):
        click.echo("interrupted", err=True)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="hydraulis", prog_name="hgraph")
@click.option("--debug", is_flag=True, help="Show the traceback of an error, too.")
def main(debug: bool) -> None:
    """Train Transformers on sequences of varying length over unequal model replicas.

    \b
    Examples:
      hgraph check examples/first_light/strategies.yaml
      hgraph plan --pool examples/first_light/strategies.yaml --lengths 100,2000,20x300
      hgraph dump --pool examples/first_light/strategies.yaml --strategy tp2.pp2 --out dumps
      hgraph reshard "0-3[S(0)]" "0-3[S(1)]" --shape 8x6

    `hgraph COMMAND --help` shows the options of a command, with examples.
    """
