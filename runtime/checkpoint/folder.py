"""Folders of checkpoints: one is there whole or not at all.

    checkpoints/step-000003/.metadata, __0_0.distcp, ...   written by torch.distributed.checkpoint
                            checkpoint.json                 everything else, and the size of every file
    checkpoints/step-000006.tmp/                            being written, or left half-written: never loaded

A checkpoint is written under a name that ends in `.tmp`, synced, and renamed. It is removed the other way round.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from hgraph.errors import InvalidInput
from hgraph.yaml_report import describe

__all__ = [
    "FACTS_FILE",
    "VERSION",
    "begin",
    "checkpoints_in",
    "complete",
    "find_checkpoint",
    "keep_last",
    "publish",
    "read_facts",
    "temporary",
]

FACTS_FILE = "checkpoint.json"
VERSION = 1
"""Of the format; a checkpoint of another one is found, and refused by whoever loads it."""
_TEMPORARY = ".tmp"
_NAME = re.compile(r"step-(\d{6,})")
_INTEGERS = ("step_count", "optimizer_steps", "seed")
_MAPPINGS = ("next_batch", "optimizer", "model")


def complete(folder: Path, step: int) -> Path:
    """Returns where the checkpoint after `step` steps lies in `folder`."""
    return folder / f"step-{step:06d}"


def temporary(target: Path) -> Path:
    """Returns where `target` is written before it is complete."""
    return target.with_name(target.name + _TEMPORARY)


def checkpoints_in(folder: Path) -> list[Path]:
    """Returns the complete checkpoints in `folder`, the oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and not _fault(path)]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def find_checkpoint(folder: Path) -> Path:
    """Returns `folder` where it is a checkpoint, else the last complete one in it.

    Raises `InvalidInput` where there is none, or `folder` is one that is not complete.
    """
    if (folder / FACTS_FILE).exists() or _NAME.fullmatch(folder.name.removesuffix(_TEMPORARY)):
        fault = "it was not written to its end" if folder.name.endswith(_TEMPORARY) else _fault(folder)
        if fault:
            raise InvalidInput(f"{folder} is not a complete checkpoint: {fault}; name another one, or their folder")
        return folder
    found = checkpoints_in(folder)
    if not found:
        there = "is no folder" if not folder.is_dir() else "holds none"
        message = f"expected a checkpoint (step-NNNNNN) or a folder of some, but {folder} {there}"
        raise InvalidInput("\n  ".join([message, *_passed_over(folder)]))
    return found[-1]


def _passed_over(folder: Path) -> list[str]:
    """Returns the names of a checkpoint's kind in `folder` that are none, each with its reason."""
    named = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return [f"{path.name} is not complete: {fault}" for path in sorted(named) if (fault := _fault(path))]


def begin(target: Path) -> None:
    """Makes the empty folder that `target` is written in.

    Raises `InvalidInput` where `target` is there already.
    """
    if target.exists():
        raise InvalidInput(f"{target} is there already; save into another folder, or remove it")
    if temporary(target).exists():
        shutil.rmtree(temporary(target))
    temporary(target).mkdir(parents=True)


def publish(target: Path, facts: Mapping[str, Any]) -> None:
    """Completes `target`: `facts` and the sizes of all files beside the boxes, synced, then renamed."""
    folder = temporary(target)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    with (folder / FACTS_FILE).open("w") as file:
        json.dump({**facts, "files": sizes}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)
    folder.rename(target)
    _sync(target.parent)


def keep_last(folder: Path, count: int) -> list[Path]:
    """Removes all but the last `count` complete checkpoints of `folder`; returns those removed."""
    old = checkpoints_in(folder)[:-count]
    for path in old:
        # Renamed first: whatever interrupts the removal, no part of it is ever taken for a checkpoint.
        shutil.rmtree(path.rename(temporary(path)))
    return old


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """Returns what `checkpoint.json` says, of a checkpoint that was found complete."""
    return json.loads((checkpoint / FACTS_FILE).read_text())


def _fault(checkpoint: Path) -> str:
    """What keeps the folder from being complete; empty if nothing does."""
    try:
        facts: object = read_facts(checkpoint)
    except (OSError, ValueError, RecursionError):
        return f"there is no sound {FACTS_FILE}"
    fault = _fault_of_facts(facts)
    if fault:
        return f"{FACTS_FILE}: {fault}"
    assert isinstance(facts, dict)
    for name, size in facts["files"].items():
        got = _size_of(checkpoint / name)
        if got != size:
            return f"{name}: expected {size} bytes, {'it is missing' if got is None else f'got {got}'}"
    return ""


def _fault_of_facts(facts: object) -> str:
    """What keeps sound JSON from being that of a checkpoint; empty if nothing does."""
    if not isinstance(facts, dict):
        return f"expected a mapping, got {describe(facts)}"
    files = facts.get("files")
    if not isinstance(files, dict):
        return f"files: expected a mapping of names to sizes in bytes, got {describe(files)}"
    wrong = [name for name, size in files.items() if type(size) is not int or size < 0]
    if wrong:
        return f"files: {wrong[0]}: expected a size in bytes, got {describe(files[wrong[0]])}"
    if not files:
        return "files: expected the files of the checkpoint, got none"
    integers = ("version", *_INTEGERS) if facts.get("version") == VERSION else ("version", "step_count")
    for name in integers:
        if type(facts.get(name)) is not int:
            return f"{name}: expected an integer, got {describe(facts.get(name))}"
    for name in _MAPPINGS if facts["version"] == VERSION else ():
        if not isinstance(facts.get(name), dict):
            return f"{name}: expected a mapping, got {describe(facts.get(name))}"
    if not isinstance(facts.get("data"), (dict, NoneType)):
        return f"data: expected a mapping or null, got {describe(facts['data'])}"
    return ""


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except (OSError, ValueError):  # a name that no file can have is that of a missing one
        return None


def _sync(folder: Path) -> None:
    """Makes the entries of a folder last (POSIX; elsewhere a folder cannot be opened)."""
    try:
        number = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(number)
    finally:
        os.close(number)
