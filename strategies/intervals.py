"""Means and ratios of means with 95 % intervals, by a seeded bootstrap over batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hgraph.errors import InvalidInput

__all__ = ["Interval", "mean_interval", "ratio_interval"]

RESAMPLES = 2000
TAILS = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def mean_interval(values: Sequence[float], seed: int = 0) -> Interval:
    """Returns the mean of `values` with its percentile bootstrap interval (Efron 1979)."""
    own = np.array(values, dtype=np.float64)
    means = own[_rows(len(own), seed)].mean(axis=1)
    return _interval(float(own.mean()), means)


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float], seed: int = 0) -> Interval:
    """Returns mean(numerators) / mean(denominators); entries of one index are one batch and are drawn together."""
    if len(numerators) != len(denominators):
        raise InvalidInput(f"ratio: expected as many of both, got {len(numerators)} and {len(denominators)}")
    upper, lower = (np.array(values, dtype=np.float64) for values in (numerators, denominators))
    rows = _rows(len(upper), seed)
    ratios = upper[rows].mean(axis=1) / lower[rows].mean(axis=1)
    return _interval(float(upper.mean() / lower.mean()), ratios)


def _rows(count: int, seed: int) -> NDArray[np.int64]:
    if not count:
        raise InvalidInput("interval: expected at least one value, got none")
    return np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))


def _interval(value: float, resampled: NDArray[np.float64]) -> Interval:
    low, high = np.percentile(resampled, TAILS)
    return Interval(value, float(low), float(high))
