"""Pausing the collector of cyclic garbage while many objects are made that stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collector_paused"]


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Within it nothing looks for cyclic garbage; as a decorator, within each call.

    Tracing and the passes make millions of objects, nearly all of which stay to the end, so that looking through them
    again and again takes a sixth of the time and finds next to nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
