"""Jobs of several processes under test: which processes belong to one, and which of them are alive."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

__all__ = ["alive", "gone_within", "members_of"]


def members_of(pid: int) -> list[int]:
    """Returns the processes below `pid`, however deep."""
    found: list[int] = []
    parents = {pid}
    while parents:
        entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        children = {int(entry.name) for entry in entries if _field(entry, 1) in {str(parent) for parent in parents}}
        parents = children - set(found)
        found += sorted(parents)
    return found


def alive(pids: Iterable[int]) -> list[int]:
    """Returns those that have not ended, zombies left out: whoever adopted them may be slow to notice."""
    return [pid for pid in pids if _field(Path("/proc", str(pid)), 0) not in ("", "Z", "X")]


def gone_within(limit_s: float, pids: Iterable[int]) -> bool:
    """Waits until none is alive; False if some still are after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while alive(pids):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def _field(entry: Path, number: int) -> str:
    """A field of /proc/PID/stat behind the name: 0 is the state, 1 the parent."""
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()[number]
    except (OSError, IndexError):
        return ""
