"""The plan of one step in one call."""

from __future__ import annotations

from collections.abc import Sequence

from hgraph.plan import StepPlan
from hgraph.profile import Profile
from hgraph.strategy import Pool
from strategies.integer_program import SolveFunction, highs
from strategies.options import PlannerOptions
from strategies.planner import Planner

__all__ = ["plan_step"]


def plan_step(
    pool: Pool,
    profile: Profile,
    lengths: Sequence[int],
    *,
    step: int = 0,
    options: PlannerOptions | None = None,
    solve_with: SolveFunction = highs,
) -> StepPlan:
    """Returns the plan of `step` for a batch of `lengths` [tokens]: `Planner.plan`, with nothing kept between steps.

    `PlannerOptions(program=False)` gives the first plan, without a solver. Raises InvalidInput for a length below 1
    and for a sequence that no strategy can hold.
    """
    return Planner(pool, profile, options, solve_with).plan(lengths, step)
