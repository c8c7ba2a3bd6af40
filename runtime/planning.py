"""Planning for a program: plans made ahead on rank 0, in a process of their own, and given to every rank."""

from __future__ import annotations

import operator
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from hgraph.data.batches import GlobalBatch
from hgraph.errors import HydraulisError, InvalidInput, PlanError
from hgraph.plan import SequencedPlan, SolverRuns, StepPlan
from hgraph.profile import Profile
from hgraph.strategy import Pool
from runtime.cluster import Cluster
from strategies.ahead import PlanAhead, PlannedStep, PlanTimes
from strategies.anytime import AnytimePlanner, planned_step, within
from strategies.options import PlannerOptions
from strategies.service import PlanService

__all__ = ["PLAN_SHARE", "Planning"]

PLAN_SHARE = 0.5
"""Part of what ranks wait for each other (`Cluster.timeout_s`) that rank 0 waits for a plan.

It then answers, with the best plan so far or an error, while the other ranks still wait for it.
"""


class Planning:
    """Gives the plan of a batch, the same on every rank.

    `ahead` says how many steps are planned before they are needed, in processes that start on first use; a number is
    the depth. With depth 0 plans are made in the step.
    """

    def __init__(
        self, pool: Pool, profile: Profile, options: PlannerOptions, ahead: PlanAhead | int, cluster: Cluster
    ) -> None:
        self.pool, self.profile, self.options, self.cluster = pool, profile, options, cluster
        self.how_ahead = PlanAhead(ahead) if isinstance(ahead, int) else ahead
        self._service: PlanService | None = None
        self._planners: dict[PlannerOptions, AnytimePlanner] = {}
        self._number = 0
        self._submitted: dict[int, tuple[GlobalBatch, int]] = {}

    @property
    def depth(self) -> int:
        return self.how_ahead.depth

    @property
    def limit_s(self) -> float:
        """How long a step waits for its plan at most."""
        return PLAN_SHARE * self.cluster.timeout_s

    def plan(self, batch: GlobalBatch, step: int) -> tuple[StepPlan, PlanTimes]:
        """Returns the plan of `batch` and how it came about. Collective."""
        answer: PlannedStep | HydraulisError | None = None
        if 0 in self.cluster.local_ranks:
            answer = self._own_plan(batch, step)
        answer = self.cluster.broadcast(answer, what=f"the plan of step {step}")
        if isinstance(answer, HydraulisError):
            raise answer
        assert answer is not None
        return replace(answer.plan, step=step), answer.times

    def take_notes(self) -> list[str]:
        """Returns what happened to planner processes since this was last asked: on rank 0, nothing on others."""
        return self._service.take_notes() if self._service is not None else []

    def plan_parts(
        self, batch: GlobalBatch, step: int, parts: Sequence[tuple[str, Sequence[int]]]
    ) -> tuple[SequencedPlan, PlanTimes]:
        """Returns the plan that runs each part, (strategy, positions of its sequences), in turn. Collective."""
        parts = self._agreed_parts(parts, len(batch))
        plans, times = [], []
        for name, positions in parts:
            planned = self.plan_under(step, name, [batch.lengths[position] for position in positions])
            plans.append(planned.plan.renumbered(positions))
            times.append(planned.times)
        return SequencedPlan(tuple(plans)), sum_of(times)

    def _agreed_parts(self, parts: object, num_sequences: int) -> list[tuple[str, list[int]]]:
        """Returns the parts in plain types; raises on every rank where they are wrong, or not the same on all."""
        own: list[tuple[str, list[int]]] | InvalidInput
        try:
            own = _checked_parts(parts, num_sequences, [strategy.name for strategy in self.pool.strategies])
        except InvalidInput as error:
            own = error
        everyone = self.cluster.gather(own)
        for rank, other in enumerate(everyone):
            if isinstance(other, InvalidInput):
                raise other
            if other != everyone[0]:
                raise InvalidInput(
                    f"step in parts: expected the same parts on every rank, got {everyone[0]} on rank 0 and {other} on "
                    f"rank {rank}"
                )
        return list(everyone[0])

    def plan_under(self, step: int, name: str, lengths: Sequence[int]) -> PlannedStep:
        """Returns the plan of sequences of `lengths` under one strategy, made in the step. Collective."""
        answer: PlannedStep | HydraulisError | None = None
        if 0 in self.cluster.local_ranks:
            answer = self._guarded(step, lambda: self._here(lengths, step, replace(self.options, only=name)))
        answer = self.cluster.broadcast(answer, what=f"the plan of step {step} under {name}")
        if isinstance(answer, HydraulisError):
            raise answer
        assert answer is not None
        return answer

    def ahead(self, batches: Iterable[GlobalBatch], step: Callable[[], int]) -> Iterator[GlobalBatch]:
        """Yields the batches; those that follow are being planned while one is trained on."""
        queue: deque[GlobalBatch] = deque()
        for batch in batches:
            queue.append(batch)
            self._submit(batch, step)
            if len(queue) > self.depth:
                yield self._take(queue)
        while queue:
            yield self._take(queue)

    def close(self) -> None:
        if self._service is not None:
            self._service.close()
            self._service = None
        self._submitted.clear()

    def _take(self, queue: deque[GlobalBatch]) -> GlobalBatch:
        return queue.popleft()

    def _submit(self, batch: GlobalBatch, step: Callable[[], int]) -> None:
        if self.depth == 0 or 0 not in self.cluster.local_ranks:
            return
        if self._service is None:
            # One more than the depth: the step that is running has not been taken yet.
            ahead = replace(self.how_ahead, depth=self.depth + 1)
            self._service = PlanService(self.pool, self.profile, self.options, ahead)
        while len(self._submitted) > self.depth:
            # A batch that was skipped: its plan is of no use any more.
            _, number = self._submitted.pop(next(iter(self._submitted)))
            self._service.drop(number)
        self._number = max(self._number, step()) + 1
        self._service.submit(self._number, batch.lengths)
        self._submitted[id(batch)] = (batch, self._number)

    def _own_plan(self, batch: GlobalBatch, step: int) -> PlannedStep | HydraulisError:
        def made() -> PlannedStep:
            if id(batch) in self._submitted and self._service is not None:
                _, number = self._submitted.pop(id(batch))
                return self._service.result(number, self.limit_s)
            return self._here(batch.lengths, step, self.options)

        return self._guarded(step, made)

    def _guarded(self, step: int, made: Callable[[], PlannedStep]) -> PlannedStep | HydraulisError:
        """Returns the plan, or what went wrong: the other ranks wait for an answer."""
        try:
            return made()
        except HydraulisError as error:
            return error
        except Exception as error:
            problem = PlanError(f"plan of step {step}: {type(error).__name__}: {error}")
            problem.__cause__ = error
            return problem

    def _here(self, lengths: Sequence[int], step: int, options: PlannerOptions) -> PlannedStep:
        """Returns the plan made in this process, which waits for all of it, within the limit."""
        start_s = time.perf_counter()
        if options not in self._planners:
            self._planners[options] = AnytimePlanner(self.pool, self.profile, options)
        made = list(within(self._planners[options].answers(lengths, step), self.limit_s))
        return planned_step(made[0], made[-1], 1e3 * (time.perf_counter() - start_s))


def sum_of(times: Sequence[PlanTimes]) -> PlanTimes:
    """Returns how several plans came about that were made one after another."""
    return PlanTimes(
        waited_ms=sum(own.waited_ms for own in times),
        latency_ms=sum(own.latency_ms for own in times),
        total_ms=sum(own.total_ms for own in times),
        first_predicted_ms=sum(own.first_predicted_ms for own in times),
        runs=sum((own.runs for own in times), SolverRuns()),
    )


def _checked_parts(parts: object, num_sequences: int, names: Sequence[str]) -> list[tuple[str, list[int]]]:
    try:
        plain = [(name, [operator.index(position) for position in positions]) for name, positions in parts]  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"step in parts: expected pairs of a strategy's name and positions in the batch, such as "
            f'[("{names[0]}", [0, 2])], got {parts!r}'
        ) from error
    for name, positions in plain:
        if name not in names:
            raise InvalidInput(f"step in parts: strategy {name!r} is not in the pool; there are {', '.join(names)}")
        if not positions:
            raise InvalidInput(f"step in parts: the part of {name} has no sequence; leave it out")
    seen = Counter(position for _, positions in plain for position in positions)
    wrong = [index for index in {*seen, *range(num_sequences)} if seen[index] != 1 or not 0 <= index < num_sequences]
    if wrong:
        raise InvalidInput(
            f"step in parts: expected each of the {num_sequences} sequences of the batch in one part; not so: "
            f"{', '.join(map(str, sorted(wrong)))}"
        )
    return plain
