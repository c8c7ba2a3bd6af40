"""The processes below a process, and how to end them whatever they do."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "descendants", "kill"]

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """One process; the time it started at, in ticks, tells it from a later one with the same number."""

    pid: int
    started: int


def descendants(pid: int) -> set[Process]:
    """Returns the processes that are alive below `pid`: children, their children, and so on, of whatever session.

    One whose parent has ended is nobody's: ask before anything ends. Empty where the system has no /proc.
    """
    children: dict[int, set[Process]] = {}
    for entry in _PROC.glob("[0-9]*"):
        seen = _look(int(entry.name))
        if seen is not None:
            children.setdefault(seen[1], set()).add(seen[0])
    found: set[Process] = set()
    level = children.get(pid, set())
    while level:
        found |= level
        level = {child for parent in level for child in children.get(parent.pid, set())} - found
    return found


def kill(processes: Iterable[Process]) -> None:
    """Sends SIGKILL to those that are still alive."""
    for process in processes:
        seen = _look(process.pid)
        if seen is None or seen[0] != process:
            continue
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _look(pid: int) -> tuple[Process, int] | None:
    """Returns a process and its parent; None where it has ended, whether or not its parent has noticed."""
    try:
        # The name stands in brackets and may hold anything: what follows its end is numbers.
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else (Process(pid, int(fields[19])), int(fields[1]))
    except (OSError, IndexError):
        return None
