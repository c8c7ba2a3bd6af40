"""Lengths of sequences as `hgraph plan` takes them: a list on the command line, a file of one batch, a file of many."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hgraph.errors import FileErrors, InvalidInput, Problem
from hgraph.profile import Profile
from hgraph.strategy import Pool
from hgraph.yaml_report import describe
from runtime.cli.options import read_json

__all__ = ["check_limits", "read_batches", "read_lengths"]

_BATCHES = "expected a list of batches, each a list of lengths, such as [[100, 2000], [300]]"


def read_lengths(text: str | None, path: str | None) -> list[int]:
    """Returns the lengths of one batch, given as text or as the path of a file."""
    if (text is None) == (path is None):
        raise InvalidInput("expected the lengths of the sequences: --lengths 100,2000,20x300 or --lengths-file F.json")
    return _lengths_of_text(text) if text is not None else _lengths_of_file(str(path))


def read_batches(path: str) -> list[list[int]]:
    """Returns the batches in a JSON file; raises `FileErrors` with every fault."""
    data = read_json(path)
    if not isinstance(data, list) or not data:
        raise FileErrors(path, [Problem(0, "", f"{_BATCHES}, got {describe(data)}")])
    problems = [problem for number, batch in enumerate(data) for problem in _faults(number, batch)]
    if problems:
        raise FileErrors(path, problems)
    return data


def check_limits(path: str, batches: Sequence[Sequence[int]], pool: Pool, profile: Profile, only: str | None) -> None:
    """Raises `FileErrors` with every sequence that no strategy (or not the `only` one) can hold."""
    strategies = pool.strategies if only is None else (pool[only],)
    limits = {
        strategy.name: max(profile.cost(replica.scheme).max_tokens for replica in strategy.replicas)
        for strategy in strategies
    }
    holder = max(limits, key=lambda name: limits[name])
    problems = []
    for number, batch in enumerate(batches):
        for index, length in enumerate(batch):
            if length > limits[holder]:
                problems.append(
                    Problem(
                        0,
                        f"batch {number}, sequence {index}",
                        f"{length:,} tokens; the largest limit of {'the pool' if only is None else only} is "
                        f"{limits[holder]:,} tokens per micro-batch (strategy {holder}). Cut long sequences, or add a "
                        "strategy with a larger limit",
                    )
                )
    if problems:
        raise FileErrors(path, problems)


def _faults(number: int, batch: Any) -> list[Problem]:
    """Returns what is wrong with one batch; batches and sequences count from 0, as plans do."""
    if not isinstance(batch, list):
        return [Problem(0, f"batch {number}", f"expected a list of lengths, got {describe(batch)}")]
    return [
        Problem(0, f"batch {number}, sequence {index}", f"expected a length of 1 token or more, got {describe(value)}")
        for index, value in enumerate(batch)
        if not _is_length(value)
    ]


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _lengths_of_text(text: str) -> list[int]:
    numbers: list[int] = []
    for position, part in enumerate(text.split(","), start=1):
        match = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\d+)\s*", part)
        if match is None or int(match[2]) < 1:
            raise InvalidInput(
                f"--lengths: item {position}: expected a length of 1 token or more, or COUNTxLENGTH, "
                f"got {part.strip()!r}"
            )
        numbers += [int(match[2])] * int(match[1] or 1)
    if not numbers:
        raise InvalidInput(f"--lengths: expected at least one sequence, got {text!r}")
    return numbers


def _lengths_of_file(path: str) -> list[int]:
    data = read_json(path)
    if isinstance(data, dict) and "lengths" in data:
        data = data["lengths"]
    if not isinstance(data, list) or not data:
        raise InvalidInput(f'{path}: expected a list of lengths such as [100, 2000], or {{"lengths": [100, 2000]}}')
    for position, value in enumerate(data, start=1):
        if not _is_length(value):
            raise InvalidInput(f"{path}: item {position}: expected a length of 1 token or more, got {value!r}")
    return data
