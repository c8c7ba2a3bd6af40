"""Settings of the planner."""

from __future__ import annotations

from dataclasses import dataclass

from hgraph.errors import InvalidInput

__all__ = ["PlannerOptions"]


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """How hard to plan.

    `gap`: the integer program runs when the best plan is further than this from the pool's bound (0.005 = 0.5 %).
    `only`: name of the one strategy to plan for; None for the whole pool.
    `program`: whether the integer program may run at all.
    `max_nodes`: branch-and-bound nodes of one integer program; a limit in nodes keeps plans reproducible.
    `max_programs`: how many integer programs one step may run, fastest heuristic plan first.
    `reach`: no program for a strategy whose heuristic plan is slower than the best by more than this (0.02 = 2 %).
    `time_limit_s`: safety limit of one program; generous, so that it never decides in practice.
    `max_rounds`: moves and swaps that the local search of one strategy may make.
    """

    gap: float = 0.005
    only: str | None = None
    program: bool = True
    max_nodes: int = 20
    max_programs: int = 2
    reach: float = 0.02
    time_limit_s: float = 60.0
    max_rounds: int = 100

    def __post_init__(self) -> None:
        if not self.gap >= 0:
            raise InvalidInput(f"planner options: expected a gap of 0 or more, got {self.gap}")
        for name in ("max_nodes", "max_programs", "reach", "time_limit_s", "max_rounds"):
            if not getattr(self, name) >= 0:
                raise InvalidInput(f"planner options: expected {name} of 0 or more, got {getattr(self, name)}")
