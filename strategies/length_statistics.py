"""What lengths are like: of the sequences of a data set, and of batches sampled from it.

Attention works in proportion to the square of each length: *quadratic work* is the sum of squares. Classes are powers
of two: class n holds the lengths above 2^(n-1) up to 2^n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hgraph.errors import InvalidInput

__all__ = ["BatchStatistics", "LengthClass", "LengthStatistics", "Spread", "batch_statistics", "length_statistics"]

PERCENTILES = (1, 10, 25, 50, 75, 90, 95, 99, 99.9)


@dataclass(frozen=True, slots=True)
class LengthClass:
    """The sequences above `above` tokens and up to `up_to`, with their shares of all tokens and of quadratic work."""

    above: int
    up_to: int
    num_sequences: int
    token_share: float
    quadratic_share: float


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Of a data set: counts, percentiles of the length in tokens, and classes from the shortest to the longest."""

    num_sequences: int
    num_tokens: int
    mean: float
    longest: int
    percentiles: tuple[tuple[float, int], ...]
    classes: tuple[LengthClass, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """Least, 10th percentile, median, 90th percentile, greatest and mean of one figure per batch."""

    least: float
    low: float
    median: float
    high: float
    greatest: float
    mean: float


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Of sampled batches of `tokens` tokens each.

    `longest` and `num_sequences` are per batch; `quadratic` is the batch's sum of squares over the mean of all batches.
    `longest_classes`: (2^n, share of the batches whose longest sequence is in class n).
    """

    num_batches: int
    tokens: int
    num_sequences: Spread
    longest: Spread
    quadratic: Spread
    longest_classes: tuple[tuple[int, float], ...]


def length_statistics(lengths: NDArray[np.int64]) -> LengthStatistics:
    """Returns what a data set's lengths are like; raises `InvalidInput` for none."""
    if not lengths.size:
        raise InvalidInput("lengths: expected at least one sequence, got none")
    values = np.percentile(lengths, PERCENTILES, method="nearest").tolist()
    return LengthStatistics(
        num_sequences=int(lengths.size),
        num_tokens=int(lengths.sum()),
        mean=float(lengths.mean()),
        longest=int(lengths.max()),
        percentiles=tuple((float(at), int(value)) for at, value in zip(PERCENTILES, values, strict=True)),
        classes=_classes(lengths),
    )


def _class_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns n with 2^(n-1) < length <= 2^n."""
    exact = lengths.astype(np.int64)
    return np.array([int(length - 1).bit_length() for length in exact.tolist()], dtype=np.int64)


def _classes(lengths: NDArray[np.int64]) -> tuple[LengthClass, ...]:
    numbers = _class_of(lengths)
    squares = lengths.astype(np.float64) ** 2
    tokens, quadratic = float(lengths.sum()), float(squares.sum())
    return tuple(
        LengthClass(
            above=2 ** (number - 1) if number else 0,
            up_to=2**number,
            num_sequences=int((numbers == number).sum()),
            token_share=float(lengths[numbers == number].sum() / tokens),
            quadratic_share=float(squares[numbers == number].sum() / quadratic),
        )
        for number in range(int(numbers.min()), int(numbers.max()) + 1)
    )


def batch_statistics(batches: Sequence[Sequence[int]]) -> BatchStatistics:
    """Returns how batches differ from one another; raises `InvalidInput` for none."""
    if not batches:
        raise InvalidInput("lengths: expected at least one batch, got none")
    longest = np.array([max(batch) for batch in batches], dtype=np.int64)
    quadratic = np.array([float((np.asarray(batch, dtype=np.float64) ** 2).sum()) for batch in batches])
    numbers = _class_of(longest).tolist()
    return BatchStatistics(
        num_batches=len(batches),
        tokens=sum(batches[0]),
        num_sequences=_spread(np.array([len(batch) for batch in batches], dtype=np.float64)),
        longest=_spread(longest.astype(np.float64)),
        quadratic=_spread(quadratic / quadratic.mean()),
        longest_classes=tuple((2**number, numbers.count(number) / len(numbers)) for number in sorted(set(numbers))),
    )


def _spread(values: NDArray[np.float64]) -> Spread:
    least, low, median, high, greatest = np.percentile(values, (0, 10, 50, 90, 100)).tolist()
    return Spread(least, low, median, high, greatest, float(values.mean()))
