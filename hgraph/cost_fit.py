"""Fits of times: coefficients of 0 or more, by relative errors, so that a few wild points do not decide."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["fit_nonnegative", "relative_errors"]

Floats = NDArray[np.float64]

_ROUNDS = 30
_SMALLEST = 1e-3
"""Relative errors below this weigh as this much: they are noise."""


def fit_nonnegative(rows: Floats, values: Floats) -> Floats:
    """Returns x of 0 or more that makes sum |rows x / values - 1| small; columns of zeros get 0.

    Least absolute relative errors, by least squares that are weighed anew (Schlossmacher, JASA 1973), each solved by
    Lawson and Hanson's method. `values` are above 0.
    """
    from scipy.optimize import nnls

    assert rows.ndim == 2 and len(rows) == len(values) and np.all(values > 0)
    relative = rows / values[:, None]
    scale = np.abs(relative).max(axis=0, initial=0.0)
    used = scale > 0
    found = np.zeros(rows.shape[1])
    if not used.any():
        return found
    matrix, weights = relative[:, used] / scale[used], np.ones(len(values))
    solution = np.zeros(int(used.sum()))
    for _ in range(_ROUNDS):
        solution, _ = nnls(matrix * weights[:, None], weights)
        weights = 1.0 / np.sqrt(np.maximum(np.abs(matrix @ solution - 1.0), _SMALLEST))
    found[used] = solution / scale[used]
    return found


def relative_errors(predicted: Floats, measured: Floats) -> Floats:
    """Returns |predicted / measured - 1|, point by point."""
    return np.abs(predicted / measured - 1.0)
