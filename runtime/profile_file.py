"""Profiles as JSON files: read with every fault in one report, written by renaming, so that no half file is ever seen.

{"version": 1,
 "schemes": {"tp2": {"a": 1.2e-05, "b": 0.03, "c": 4.1, "max_tokens": 2048}},
 "bridge_ms": {"tp2x2": 35.0}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from hgraph.errors import FileErrors, InvalidInput, Problem
from hgraph.profile import Profile, SchemeCost
from hgraph.yaml_report import describe, read_text

__all__ = ["read_profile", "write_profile"]

_VERSION = 1
_COST_KEYS = tuple(item.name for item in fields(SchemeCost))


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Returns the profile in the file at `path`; raises `FileErrors` with all faults, `InvalidInput` without a file."""
    name = os.fspath(path)
    text = read_text(name)
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        what = f"JSON syntax, column {error.colno}: {error.msg}" if text.strip() else "expected JSON, got an empty file"
        raise FileErrors(name, [Problem(error.lineno, "", what)]) from None
    problems: list[Problem] = []
    if not isinstance(data, Mapping):
        raise FileErrors(name, [Problem(1, "", f"expected a mapping, got {describe(data)}")])
    if data.get("version", _VERSION) != _VERSION:
        problems.append(Problem(0, "version", f"expected {_VERSION}, got {describe(data['version'])}"))
    costs = _costs(data.get("schemes"), problems)
    bridges = _bridges(data.get("bridge_ms", {}), problems)
    if problems:
        raise FileErrors(name, problems)
    return Profile(costs, bridges)


def write_profile(path: str | os.PathLike[str], profile: Profile) -> None:
    """Writes `profile` to `path`; folders are made as needed."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "version": _VERSION,
        "schemes": {name: asdict(cost) for name, cost in profile.schemes.items()},
        "bridge_ms": dict(profile.bridge_ms),
    }
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(data, indent=2) + "\n")
    temporary.replace(target)


def _costs(data: Any, problems: list[Problem]) -> dict[str, SchemeCost]:
    if not isinstance(data, Mapping) or not data:
        problems.append(Problem(0, "schemes", f"expected costs by scheme, got {describe(data)}"))
        return {}
    costs = {}
    for name, entry in data.items():
        key = f"schemes.{name}"
        if not isinstance(entry, Mapping) or set(entry) != set(_COST_KEYS):
            got = ", ".join(map(str, entry)) if isinstance(entry, Mapping) else describe(entry)
            problems.append(Problem(0, key, f"expected the keys {', '.join(_COST_KEYS)}, got {got or 'none'}"))
            continue
        wrong = [f"{part}: {describe(value)}" for part, value in entry.items() if not _is_number(value)]
        if wrong or not isinstance(entry["max_tokens"], int):
            problems.append(
                Problem(0, key, f"expected numbers, max_tokens an integer, got {', '.join(wrong) or entry}")
            )
            continue
        try:
            costs[name] = SchemeCost(**entry)
        except InvalidInput as error:
            problems.append(Problem(0, key, str(error)))
    return costs


def _bridges(data: Any, problems: list[Problem]) -> dict[str, float]:
    if not isinstance(data, Mapping):
        problems.append(Problem(0, "bridge_ms", f"expected ms by strategy, got {describe(data)}"))
        return {}
    for name, value in data.items():
        if not _is_number(value) or value < 0:
            problems.append(Problem(0, f"bridge_ms.{name}", f"expected ms of 0 or more, got {describe(value)}"))
    return dict(data)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
