"""The one place that calls HiGHS, through cvxpy: quiet, on one thread, with a fixed seed.

Importing cvxpy takes longer than most steps take to plan, and most steps need no program. So it is imported inside the
functions that build or solve one, here and in the other files with programs; `warm_up` does it ahead of need.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import cvxpy as cp

__all__ = ["FEASIBLE_POINT", "solve_with_highs", "warm_up"]

# `HighsSolutionStatus::kSolutionStatusFeasible`: the point that a limit left behind satisfies the constraints.
FEASIBLE_POINT = 2


def solve_with_highs(problem: cp.Problem, **highs_options: object) -> None:
    """Solves `problem` in place, without a starting point, on one thread; raises what cvxpy raises.

    `problem.status` is for the caller to check. cvxpy's warning about inexact answers is dropped for that reason.
    """
    import cvxpy as cp
    import highspy

    with _no_standard_output():
        highspy.Highs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problem.solve(solver=cp.HIGHS, warm_start=False, threads=1, random_seed=0, **highs_options)


def warm_up() -> None:
    """Imports cvxpy and solves a program of one variable, so that the first real one does not wait for all that."""
    import cvxpy as cp

    number = cp.Variable(integer=True)
    solve_with_highs(cp.Problem(cp.Minimize(number), [number >= 1]))


@contextmanager
def _no_standard_output() -> Iterator[None]:
    """Discards what C code writes to standard output inside the block.

    The first HiGHS object of a process prints a banner before any option can turn it off, which would end up in the
    JSON that the command line prints.
    """
    flush = ctypes.CDLL(None).fflush if os.name == "posix" else lambda stream: 0
    try:
        saved = os.dup(1)
    except OSError:
        yield
        return
    flush(None)
    with open(os.devnull, "wb") as sink:
        os.dup2(sink.fileno(), 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(saved, 1)
        os.close(saved)
