"""Runs the command line as a stranger does, in this process; what several of its tests use."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from runtime.cli import main

__all__ = ["POOL", "ROOT", "TINY", "TWO_NODES", "answer", "hgraph", "message"]

ROOT = Path(__file__).parent.parent
POOL = """\
version: 1
ranks: 4
strategies:
  - name: large
    replicas: [{tp: 2, pp: 2}]
  - name: mixed
    replicas: [{tp: 2}, {tp: 1, count: 2}]
  - name: small
    replicas: [{tp: 1, count: 3}]
"""
TWO_NODES = """\
version: 1
name: two by two
nodes: 2
ranks_per_node: 2
local: {bandwidth_gb_s: 10, latency_us: 10}
network: {bandwidth_gb_s: 1, latency_us: 50}
"""
TINY = [
    "model.layers=2",
    "model.hidden=16",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn=24",
    "model.vocab_size=300",
    "data.vocab_size=300",
]


def hgraph(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="hgraph")


def answer(*arguments: str) -> str:
    """Returns what a command says where it succeeds."""
    result = hgraph(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def message(*arguments: str) -> str:
    """Returns what a command says on stderr when it fails; nothing goes to stdout, and there is no traceback."""
    result = hgraph(*arguments)
    assert result.exit_code in (1, 2), result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.stdout == ""
    return result.stderr
