"""The write of a checkpoint that goes on in a thread while training does."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

__all__ = ["BackgroundWrite"]


class BackgroundWrite:
    """At most one write at a time. What goes wrong in it is returned by `finish`, or told when the program ends."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._faults: list[str] = []
        weakref.finalize(self, _tell, self._faults)

    @property
    def is_pending(self) -> bool:
        """Whether a write was started of which `finish` has not told yet how it ended."""
        return self._thread is not None

    def start(self, target: Path, write: Callable[[], None]) -> None:
        """Starts a thread that writes `target`; `write` touches nothing that training changes or communicates by."""
        assert self._thread is None, "the write before is finished first"
        arguments = (target, write, self._faults)
        # No daemon: the interpreter does not end before it.
        self._thread = threading.Thread(target=_run, args=arguments, name=f"save to {target}", daemon=False)
        self._thread.start()

    def finish(self) -> str:
        """Waits for the write, if any, to end, and returns what went wrong in it, once."""
        if self._thread is None:
            return ""
        self._thread.join()
        self._thread = None
        return self._faults.pop() if self._faults else ""


def _run(target: Path, write: Callable[[], None], faults: list[str]) -> None:
    try:
        write()
    except BaseException as error:  # whatever it is: nobody else would hear of it
        faults.append(f"{target} was not saved (in the background): {type(error).__name__}: {error}")


def _tell(faults: list[str]) -> None:
    """Runs when the program is gone or the interpreter ends: nobody has asked how the write went."""
    for fault in faults:
        sys.stderr.write(fault + "\n")
