"""Sequence lengths of a data set, and batches sampled from them.

A length file is JSON: a list of lengths, or an object with `lengths` and, where known, `source`. Four samples come with
this package and are read by name (`known_lengths`); each keeps 5,000 lengths of a larger set, one from each of 5,000
equal parts of its sorted list, so that percentiles and sums of squares survive.

A batch is drawn with replacement until it holds the tokens asked for. Two things are cut, never dropped: what exceeds
`longest` (`above_longest` counts it), and the last sequence of a batch, so that every batch has as many tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hgraph.errors import FileErrors, InvalidInput, Problem
from hgraph.shipped import read_named, shipped_names
from hgraph.yaml_report import describe

__all__ = ["AboveLongest", "LengthData", "above_longest", "known_lengths", "read_lengths", "sample_batches"]

Lengths: TypeAlias = NDArray[np.int64]

MAX_PROBLEMS = 20
CHUNK = 1024


@dataclass(frozen=True, slots=True, eq=False)
class LengthData:
    """Lengths in tokens, each 1 or more, and where they are from."""

    lengths: Lengths
    source: str

    def __post_init__(self) -> None:
        lengths = np.array(self.lengths, dtype=np.int64)
        if lengths.ndim != 1 or not lengths.size:
            raise InvalidInput("length data: expected a list of at least one length, got none")
        if lengths.min() < 1:
            position = int(lengths.argmin())
            raise InvalidInput(
                f"length data: expected lengths of 1 token or more, got {lengths[position]} at position {position}"
            )
        lengths.flags.writeable = False
        object.__setattr__(self, "lengths", lengths)

    def __len__(self) -> int:
        return int(self.lengths.size)


@dataclass(frozen=True, slots=True)
class AboveLongest:
    """What cutting at `longest` tokens does to a data set."""

    longest: int
    num_sequences: int
    num_above: int
    num_tokens: int
    num_tokens_lost: int

    def __str__(self) -> str:
        if not self.num_above:
            return f"none of {self.num_sequences:,} sequences exceeds {self.longest:,} tokens"
        return (
            f"{self.num_above:,} of {self.num_sequences:,} sequences exceed {self.longest:,} tokens and are cut there: "
            f"{self.num_tokens_lost:,} of {self.num_tokens:,} tokens lost"
        )


def known_lengths() -> tuple[str, ...]:
    """Returns the names of the length samples that come with this package."""
    return shipped_names("lengths", ".json")


def read_lengths(path_or_name: str | os.PathLike[str]) -> LengthData:
    """Returns the lengths in the JSON file at a path, or those that come with this package, by name (`web-docs`).

    What has a folder or an ending is a path. Raises `FileErrors` with the faults of the file (at most 20),
    `InvalidInput` where there is neither such a file nor such a name.
    """
    text, _ = read_named(path_or_name, "lengths", ".json", "lengths")
    return _parsed(text, os.fspath(path_or_name))


def _parsed(text: str, name: str) -> LengthData:
    if not text.strip():
        raise FileErrors(name, [Problem(1, "", "expected JSON, got an empty file")])
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise FileErrors(name, [Problem(error.lineno, "", f"JSON syntax, column {error.colno}: {error.msg}")]) from None
    source = name
    if isinstance(data, Mapping):
        source = str(data.get("source", name))
        data = data.get("lengths")
    if not isinstance(data, list) or not data:
        got = "an empty list" if isinstance(data, list) else describe(data)
        wanted = 'expected a list of lengths such as [100, 2000], or {"lengths": [100, 2000]}'
        raise FileErrors(name, [Problem(0, "lengths", f"{wanted}; got {got}")])
    problems = _wrong_items(data)
    if problems:
        raise FileErrors(name, problems)
    return LengthData(np.array(data, dtype=np.int64), source)


def _wrong_items(items: list[Any]) -> list[Problem]:
    """Returns the first faults among the lengths, the last of them with the number of all."""
    wrong = [
        (position, item)
        for position, item in enumerate(items)
        if not isinstance(item, int) or isinstance(item, bool) or not 1 <= item < 2**40
    ]
    problems = [
        Problem(0, f"lengths[{position}]", f"expected a length of 1 token or more, got {describe(item)}")
        for position, item in wrong[:MAX_PROBLEMS]
    ]
    if len(wrong) > MAX_PROBLEMS:
        problems.append(Problem(0, "lengths", f"{len(wrong):,} lengths are wrong; the first {MAX_PROBLEMS} are shown"))
    return problems


def above_longest(data: LengthData, longest: int) -> AboveLongest:
    """Returns how many sequences and tokens of `data` lie above `longest` tokens."""
    over = data.lengths[data.lengths > longest]
    lost = int(over.sum()) - longest * int(over.size)
    return AboveLongest(longest, len(data), int(over.size), int(data.lengths.sum()), lost)


def sample_batches(data: LengthData, *, tokens: int, longest: int, count: int, seed: int) -> list[tuple[int, ...]]:
    """Returns `count` batches of exactly `tokens` tokens, drawn with replacement; a function of the arguments alone.

    Sequences above `longest` are cut to it, and the last of a batch to what is missing. Batches follow one another in
    one stream of draws, so that the first of 10 batches are the same as those of a call for fewer.
    """
    for name, value, least in (("tokens", tokens, 1), ("longest", longest, 1), ("count", count, 0), ("seed", seed, 0)):
        if value < least:
            raise InvalidInput(f"sample batches: expected {name} of {least} or more, got {value}")
    lengths = np.minimum(data.lengths, longest)
    stream = _draws(lengths, np.random.default_rng(seed))
    return [_batch(stream, tokens) for _ in range(count)]


def _draws(lengths: Lengths, generator: np.random.Generator) -> Iterator[int]:
    while True:
        yield from lengths[generator.integers(len(lengths), size=CHUNK)].tolist()


def _batch(stream: Iterator[int], tokens: int) -> tuple[int, ...]:
    batch: list[int] = []
    missing = tokens
    while missing > 0:
        batch.append(min(next(stream), missing))
        missing -= batch[-1]
    return tuple(batch)
