"""The linear program of the lower bound, in cvxpy; the mathematics stands in `strategies/bound.py`.

x_KT, time  -> `assigned_KT`, `time`        n_k [eligible]  -> parameter `upper_KT`
M_t (o_t + [g = one] c_t) -> parameter `constant_GT`        rows g of kind t -> `rows`, whose duals are the weights w_tg
"""

from __future__ import annotations

import cvxpy as cp
import numpy as np

from strategies.bound import NUM_ROWS, Bools, BoundProblem, certificate, closed_form_ms, least_time_ms
from strategies.solver import solve_with_highs

__all__ = ["BoundProgram", "program_bound_ms"]


class BoundProgram:
    """The program of one strategy and batch, canonicalised once and solved for several eligibilities."""

    def __init__(self, problem: BoundProblem) -> None:
        num_classes, num_kinds = problem.threshold_KT.shape
        self.time = cp.Variable()
        self.assigned_KT = cp.Variable((num_classes, num_kinds), nonneg=True)
        self.upper_KT = cp.Parameter((num_classes, num_kinds), nonneg=True)
        self.constant_GT = cp.Parameter((NUM_ROWS, num_kinds), nonneg=True)
        self.rows = [
            cp.sum(cp.multiply(problem.cost_GKT[row], self.assigned_KT), axis=0) + self.constant_GT[row]
            <= self.time * problem.replicas_T
            for row in range(NUM_ROWS)
        ]
        somewhere = cp.sum(self.assigned_KT, axis=1) == problem.counts_K
        self.program = cp.Problem(cp.Minimize(self.time), [somewhere, self.assigned_KT <= self.upper_KT, *self.rows])

    def bound_ms(self, problem: BoundProblem, eligible_KT: Bools) -> float:
        """Returns the optimum in ms under an eligibility, as a certificate from the duals; never below the closed form.

        inf where a class is eligible nowhere. A solver that fails leaves the closed form.
        """
        closed_ms = closed_form_ms(problem, eligible_KT)
        if not np.isfinite(closed_ms):
            return closed_ms
        self.upper_KT.value = problem.counts_K[:, None] * eligible_KT
        self.constant_GT.value = problem.replicas_T * problem.active_constant_GT(eligible_KT)
        try:
            solve_with_highs(self.program)
        except (cp.error.SolverError, ValueError, ArithmeticError):
            return closed_ms
        if self.program.status not in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE):
            return closed_ms
        weight_GT = np.array([row.dual_value for row in self.rows], dtype=np.float64)
        return max(closed_ms, certificate(problem, np.nan_to_num(weight_GT), eligible_KT))


def program_bound_ms(problem: BoundProblem) -> float:
    """Returns the lower bound in ms of one strategy and batch; inf where no plan exists."""
    return least_time_ms(problem, BoundProgram(problem).bound_ms)
