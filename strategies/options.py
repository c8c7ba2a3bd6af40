"""Settings of the planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hgraph.errors import InvalidInput

__all__ = ["PlannerOptions"]


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """How hard to plan, and for what.

    `gap`: the integer program runs when the best plan is further than this from the pool's bound (0.005 = 0.5 %).
    `only`: name of the one strategy to plan for; None for the whole pool.
    `program`: whether the programs (of the bound and of the plan) may run; False gives the first checked plan.
    `max_nodes`: branch-and-bound nodes of one integer program; a limit in nodes keeps plans reproducible.
    `max_programs`: how many integer programs one step may run, fastest plan first.
    `reach`: no program for a strategy whose heuristic plan is slower than the best by more than this (0.02 = 2 %).
    `time_limit_s`: safety limit of one program; generous, so that it never decides in practice.
    `max_rounds`: moves and swaps that the local search of one strategy may make.
    `objective`: `simulated` packs and chooses by the time of the schedule in use, `flow` by the flow time.
    `flow_slack`: with `simulated`, a strategy's plan is not taken if its flow time exceeds the least one among the
    strategies by more than this (0.02 = 2 %); the two times differ only where pp > 1. inf: the simulated time alone.
    `require_all_ranks`: refuse strategies that leave ranks of the pool without a replica.
    """

    gap: float = 0.005
    only: str | None = None
    program: bool = True
    max_nodes: int = 20
    max_programs: int = 4
    reach: float = 0.02
    time_limit_s: float = 60.0
    max_rounds: int = 200
    objective: Literal["simulated", "flow"] = "simulated"
    flow_slack: float = 0.02
    require_all_ranks: bool = False

    def __post_init__(self) -> None:
        if not self.gap >= 0:
            raise InvalidInput(f"planner options: expected a gap of 0 or more, got {self.gap}")
        for name in ("max_nodes", "max_programs", "reach", "time_limit_s", "max_rounds", "flow_slack"):
            if not getattr(self, name) >= 0:
                raise InvalidInput(f"planner options: expected {name} of 0 or more, got {getattr(self, name)}")
        if self.objective not in ("simulated", "flow"):
            raise InvalidInput(f"planner options: expected the objective 'simulated' or 'flow', got {self.objective!r}")
