"""Plans as runs leave them in `plans.jsonl`, one a line, with what they were made for; read again to be replayed.

{"version": 1, "step": 3, "lengths": [512, 40], "layout": {"tp2+tp1": ["tp2 0-1", "tp1 2"]}, "plan": {...}}

`layout` has the replicas of each strategy of the plan, scheme and ranks, so that a pool of the same names and other
replicas is noticed. A last line that is not whole, as an interrupted run may leave it, is no plan.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from hgraph.annotation import ranks_text
from hgraph.errors import FileErrors, InvalidInput, Problem
from hgraph.plan import SequencedPlan, StepPlan
from hgraph.profile import Profile
from hgraph.strategy import Pool, Strategy
from hgraph.yaml_report import key_text, problems_of, read_text
from strategies.pricing import priced

if TYPE_CHECKING:
    from hgraph.data.batches import GlobalBatch

__all__ = ["SavedPlan", "SavedPlans", "read_plans", "saved_plan"]

VERSION = 1


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """A plan, the lengths it was made for, and the replicas of its strategies as text."""

    version: int
    step: int
    lengths: tuple[int, ...]
    layout: dict[str, tuple[str, ...]]
    plan: StepPlan | SequencedPlan

    def to_json(self) -> str:
        """Returns one line of JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class SavedPlans:
    """The plans of a file by step."""

    path: str
    steps: Mapping[int, SavedPlan]

    def plan(self, step: int, batch: GlobalBatch, pool: Pool, profile: Profile) -> StepPlan | SequencedPlan:
        """Returns the plan of a step as it was saved, with its times under the costs of this run.

        Raises `InvalidInput` naming the step and what differs where the file has no plan of the step, or the batch or
        the pool is not what it was made for.
        """
        where = f"{self.path}: step {step}"
        saved = self.steps.get(step)
        if saved is None:
            raise InvalidInput(f"{where}: expected a plan to replay, got none; the file has {_span(list(self.steps))}")
        _check_lengths(saved.lengths, batch.lengths, where)
        _check_layout(saved.layout, pool, where)
        parts = [_replayed(part, pool, profile, batch.lengths) for part in saved.plan.parts]
        return SequencedPlan(tuple(parts)) if isinstance(saved.plan, SequencedPlan) else parts[0]

    def check_pool(self, pool: Pool) -> None:
        """Raises `InvalidInput` for the first step whose strategy the pool does not have as it was."""
        for step, saved in self.steps.items():
            _check_layout(saved.layout, pool, f"{self.path}: step {step}")


def saved_plan(plan: StepPlan | SequencedPlan, pool: Pool, lengths: Sequence[int], step: int) -> SavedPlan:
    """Returns what is kept of the plan of a step."""
    layout = {part.strategy: _layout(pool[part.strategy]) for part in plan.parts}
    return SavedPlan(VERSION, step, tuple(lengths), layout, plan)


def read_plans(path: str | os.PathLike[str]) -> SavedPlans:
    """Returns the plans in a file; raises `FileErrors` with every fault, `InvalidInput` where there is no file."""
    name = os.fspath(path)
    problems: list[Problem] = []
    steps: dict[int, SavedPlan] = {}
    for number, line in enumerate(read_text(name).splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            continue
        saved = _read_line(line, number, problems)
        if saved is None:
            continue
        if saved.step in steps:
            problems.append(Problem(number, "step", f"step {saved.step} has a plan already"))
        steps[saved.step] = saved
    if not steps and not problems:
        problems.append(Problem(1, "", "expected a plan a line, as a run leaves them in plans.jsonl, got none"))
    if problems:
        raise FileErrors(name, problems)
    return SavedPlans(name, steps)


@cache
def _adapter() -> TypeAdapter[SavedPlan]:
    return TypeAdapter(SavedPlan)


def _read_line(line: str, number: int, problems: list[Problem]) -> SavedPlan | None:
    try:
        saved = _adapter().validate_json(line, strict=True)
    except ValidationError as error:
        problems += [Problem(number, key_text(key), text) for key, text in problems_of(error, SavedPlan)]
        return None
    if saved.version != VERSION:
        problems.append(Problem(number, "version", f"expected {VERSION}, got {saved.version}"))
        return None
    return saved


def _replayed(plan: StepPlan, pool: Pool, profile: Profile, lengths: Sequence[int]) -> StepPlan:
    return replace(priced(plan, pool, profile, lengths), solver=f"replayed ({plan.solver})")


def _layout(strategy: Strategy) -> tuple[str, ...]:
    ranks = [ranks_text(replica.ranks) for replica in strategy.replicas]
    return tuple(f"{replica.scheme} {own}" for replica, own in zip(strategy.replicas, ranks, strict=True))


def _check_lengths(planned: Sequence[int], lengths: Sequence[int], where: str) -> None:
    if tuple(planned) == tuple(lengths):
        return
    where = f"{where}: the batch is not that of the plan:"
    if len(planned) != len(lengths):
        raise InvalidInput(
            f"{where} expected {len(planned)} sequences, got {len(lengths)}; are data and seed the same?"
        )
    different = [index for index, (a, b) in enumerate(zip(planned, lengths, strict=True)) if a != b]
    first = different[0]
    raise InvalidInput(
        f"{where} expected sequence {first} to have {planned[first]:,} tokens, got {lengths[first]:,}; "
        f"{len(different)} of {len(lengths)} lengths differ; are data and seed the same?"
    )


def _check_layout(layout: Mapping[str, tuple[str, ...]], pool: Pool, where: str) -> None:
    names = [strategy.name for strategy in pool.strategies]
    for name, replicas in layout.items():
        if name not in names:
            raise InvalidInput(f"{where}: strategy {name!r} is not in the pool; there are {', '.join(names)}")
        own = _layout(pool[name])
        if own != replicas:
            raise InvalidInput(
                f"{where}: strategy {name} is not as it was: expected the replicas {', '.join(replicas)}, the pool has "
                f"{', '.join(own)}"
            )


def _span(steps: list[int]) -> str:
    if len(steps) > 1 and steps == list(range(steps[0], steps[-1] + 1)):
        return f"steps {steps[0]} to {steps[-1]}"
    return f"step{'s' if len(steps) != 1 else ''} {', '.join(map(str, steps))}"
