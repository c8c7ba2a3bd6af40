"""Files made once and kept: named by what they were made from, written whole or not at all, one process at a time."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hgraph.errors import HydraulisError

__all__ = ["content_key", "files_key", "locked", "written_file", "written_folder"]

POLL_S = 0.05


def content_key(parts: Iterable[str | bytes]) -> str:
    """Returns 16 hexadecimal digits that differ where any part, or the border between two parts, differs."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def files_key(files: Iterable[Path]) -> str:
    """Returns the `content_key` of the bytes of these files, in this order."""
    return content_key(file.read_bytes() for file in files)


@contextmanager
def locked(path: Path, *, timeout_s: float = 600.0) -> Iterator[None]:
    """Holds what will be made at `path` for this process; others wait, at most `timeout_s`, and then fail by its name.

    The lock goes with the process, so one that died leaves none behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    give_up_at = time.monotonic() + timeout_s
    with path.with_name(f"{path.name}.lock").open("w") as stream:
        while not _try_lock(stream.fileno()):
            if time.monotonic() > give_up_at:
                raise HydraulisError(f"waited {timeout_s:g} s for another process to finish {path}; is it stuck?")
            time.sleep(POLL_S)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def written_file(path: Path) -> Iterator[Path]:
    """Gives a temporary path to write to, which becomes `path` at the end; after an error nothing is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def written_folder(path: Path) -> Iterator[Path]:
    """Gives a temporary folder to fill, which becomes `path` at the end; after an error nothing is left.

    A folder that another process put there in the meantime is kept: it was made from the same things.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if not path.exists():
            temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
