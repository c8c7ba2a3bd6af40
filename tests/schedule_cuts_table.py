"""Writes `strategies/schedule_cuts.json`: what 1F1B needs at least, whatever the micro-batches; run it by name.

For v micro-batches on P equal stages, the longest path through the schedule is at least any average of its paths, and
an average of paths is a weight per position: `T >= sum_m w_m t_m` (`docs/planner.md`). The best weights for a given
share of fixed cost and of one long micro-batch are the dual of a small linear program, solved here by HiGHS. Only three
numbers of a weight vector are kept, rounded down: the sum, the smallest, and that of the long micro-batch. The times
that are best are kept too, as `shape`.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import highspy
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from hgraph.simulate import FORWARD_SHARE

TABLE = Path(__file__).parent.parent / "strategies" / "schedule_cuts.json"
STAGES = (2, 3, 4, 6, 8)
MOST = 40
MOST_LONG = 24
MOST_SHAPE = 24
SHAPE_FIXED_SHARE = 0.1
DIGITS = 6
FIXED_SHARES = (0.0, 0.01, 0.03, 0.08, 0.2, 0.4, 0.7, 0.97)
LONG_FIXED_SHARES = ((0.02, 0.08, 0.2, 0.45, 0.8), (0.06, 0.25, 0.6))
LONG_SHARES = ((0.08, 0.16, 0.25, 0.35, 0.5, 0.7, 0.9), (0.12, 0.3, 0.6))

Floats = NDArray[np.float64]


class PathProgram:
    """The least time of 1F1B over all micro-batch times with a given sum; the duals are averages of paths."""

    def __init__(self, num_stages: int, num_micro_batches: int) -> None:
        self.v = num_micro_batches
        self.num = 1 + 2 * num_stages * num_micro_batches + num_micro_batches
        rows = list(self._waits(num_stages, num_micro_batches))
        entries: list[tuple[int, int, float]] = []
        for row, (end, before, micro_batch, share) in enumerate(rows):
            entries.append((row, end, -1.0))
            if before is not None:
                entries.append((row, before, 1.0))
            if micro_batch is not None:
                entries.append((row, self.num - self.v + micro_batch, share))
        self.share_RM = np.zeros((len(rows) + 1, self.v))
        for row, (_, _, micro_batch, share) in enumerate(rows):
            if micro_batch is not None:
                self.share_RM[row, micro_batch] = share
                entries.append((row, self.num, share))
        entries += [(len(rows), self.num - self.v + m, 1.0) for m in range(self.v)]
        self.solver = self._solver(entries, len(rows))
        self.long: int | None = None

    def _solver(self, entries: list[tuple[int, int, float]], num_waits: int) -> highspy.Highs:
        """Returns the solver: columns [end, task ends, works of micro-batches, fixed cost], the sum as last row."""
        row_index, column, value = zip(*entries, strict=True)
        matrix = csr_matrix((value, (row_index, column)), shape=(num_waits + 1, self.num + 1))
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = self.num + 1, num_waits + 1
        model.col_cost_ = np.eye(1, self.num + 1)[0]
        model.col_lower_, model.col_upper_ = np.zeros(self.num + 1), np.full(self.num + 1, highspy.kHighsInf)
        model.row_lower_ = np.append(np.full(num_waits, -highspy.kHighsInf), 1.0)
        model.row_upper_ = np.append(np.zeros(num_waits), 1.0)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_, model.a_matrix_.index_ = matrix.indptr, matrix.indices
        model.a_matrix_.value_ = matrix.data
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.passModel(model)
        return solver

    def _waits(self, num_stages: int, v: int):  # type: ignore[no-untyped-def]
        """Yields (task, task it waits for, micro-batch, share of its time); task 0 is the end of the step."""

        def task(kind: str, stage: int, m: int) -> int:
            return 1 + (stage * v + m) * 2 + (kind == "B")

        for stage in range(num_stages):
            warm = min(v, num_stages - stage)
            order = [("F", m) for m in range(warm)]
            for m in range(v):
                order.append(("B", m))
                order += [("F", warm + m)] if warm + m < v else []
            before = None
            for kind, m in order:
                share = FORWARD_SHARE if kind == "F" else 1.0 - FORWARD_SHARE
                neighbour = stage - 1 if kind == "F" else stage + 1
                yield task(kind, stage, m), before, m, share
                if 0 <= neighbour < num_stages:
                    yield task(kind, stage, m), task(kind, neighbour, m), m, share
                before = task(kind, stage, m)
        yield 0, task("B", 0, v - 1), None, 0.0

    def weights(self, fixed_share: float, long_share: float = 0.0, position: int = 0) -> Floats:
        """Returns the weights of the positions that are best for these shares of a step's work of 1."""
        fixed, work, first = fixed_share / self.v, 1.0 - fixed_share, self.num - self.v
        last_row = len(self.share_RM) - 1
        if self.long is not None:
            self.solver.changeColBounds(first + self.long, 0.0, highspy.kHighsInf)
        self.solver.changeColBounds(first + position, long_share * work, highspy.kHighsInf)
        self.long = position
        self.solver.changeColBounds(self.num, fixed, fixed)
        self.solver.changeRowBounds(last_row, work, work)
        self.solver.run()
        assert self.solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
        return np.asarray(-np.array(self.solver.getSolution().row_dual) @ self.share_RM)

    def times(self) -> Floats:
        """Returns the times of the micro-batches, fixed cost included, of the last solution."""
        values = np.array(self.solver.getSolution().col_value)
        return np.asarray(values[-1 - self.v : -1] + values[-1])


def down(value: float) -> float:
    return max(0.0, math.floor(value * 10**DIGITS - 1e-3) / 10**DIGITS)


def cut(weights: Floats, position: int | None = None) -> tuple[float, ...]:
    """Returns (sum, smallest) or (sum, smallest, long minus smallest), each rounded down."""
    least = down(float(weights.min()))
    if position is None:
        return down(float(weights.sum())), least
    return down(float(weights.sum())), least, max(0.0, down(float(weights[position]) - least))


def undominated(cuts: set[tuple[float, ...]]) -> list[tuple[float, ...]]:
    return sorted(
        one
        for one in cuts
        if not any(other != one and all(a >= b - 2e-6 for a, b in zip(other, one, strict=True)) for other in cuts)
    )


def short_cuts(num_stages: int, v: int) -> list[tuple[float, ...]]:
    program = PathProgram(num_stages, v)
    return undominated({cut(program.weights(share)) for share in FIXED_SHARES})


def long_cuts(program: PathProgram, position: int) -> list[tuple[float, ...]]:
    grid = 0 if program.v <= MOST_LONG // 2 else 1
    return undominated(
        {
            cut(program.weights(fixed, long, position), position)
            for fixed in LONG_FIXED_SHARES[grid]
            for long in LONG_SHARES[grid]
        }
    )


def shape(num_stages: int, v: int) -> list[float]:
    program = PathProgram(num_stages, v)
    program.weights(SHAPE_FIXED_SHARE)
    return [round(float(time), 4) for time in program.times()]


def all_long_cuts(num_stages: int, v: int) -> list[list[tuple[float, ...]]]:
    program = PathProgram(num_stages, v)
    return [long_cuts(program, position) for position in range(v)]


def table(
    stages: tuple[int, ...] = STAGES, most: int = MOST, most_long: int = MOST_LONG, most_shape: int = MOST_SHAPE
) -> dict[str, object]:
    return {
        str(num_stages): {
            "shape": [shape(num_stages, v) for v in range(2, most_shape + 1)],
            "short": [short_cuts(num_stages, v) for v in range(1, most + 1)],
            "long": [all_long_cuts(num_stages, v) for v in range(1, most_long + 1)],
        }
        for num_stages in stages
    }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(table((int(sys.argv[1]),))))
    else:
        TABLE.write_text(json.dumps(table(), separators=(",", ":")) + "\n", encoding="utf-8")
