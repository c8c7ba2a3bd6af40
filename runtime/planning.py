"""Planning for a program: plans made ahead on rank 0, in a process of their own, and given to every rank."""

from __future__ import annotations

import operator
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from hgraph.data.batches import GlobalBatch
from hgraph.errors import HydraulisError, InvalidInput, PlanError
from hgraph.plan import SequencedPlan, StepPlan
from hgraph.profile import Profile
from hgraph.strategy import Pool
from runtime.cluster import Cluster
from strategies.options import PlannerOptions
from strategies.select import plan_step
from strategies.service import PlanService

__all__ = ["Planning"]


class Planning:
    """Gives the plan of a batch, the same on every rank.

    With `depth` 0 plans are made in the step; otherwise up to `depth` steps ahead, in a process that starts on
    first use.
    """

    def __init__(self, pool: Pool, profile: Profile, options: PlannerOptions, depth: int, cluster: Cluster) -> None:
        self.pool, self.profile, self.options, self.depth, self.cluster = pool, profile, options, depth, cluster
        self._service: PlanService | None = None
        self._number = 0
        self._submitted: dict[int, tuple[GlobalBatch, int]] = {}

    def plan(self, batch: GlobalBatch, step: int) -> tuple[StepPlan, float]:
        """Returns the plan of `batch` and how long this waited for it, in ms. Collective."""
        answer: StepPlan | HydraulisError | None = None
        start_s = time.perf_counter()
        if 0 in self.cluster.local_ranks:
            answer = self._own_plan(batch, step)
        waited_ms = 1e3 * (time.perf_counter() - start_s)
        answer, waited_ms = self.cluster.broadcast((answer, waited_ms))
        if isinstance(answer, HydraulisError):
            raise answer
        assert answer is not None
        return replace(answer, step=step), waited_ms

    def plan_parts(
        self, batch: GlobalBatch, step: int, parts: Sequence[tuple[str, Sequence[int]]]
    ) -> tuple[SequencedPlan, float]:
        """Returns the plan that runs each part, (strategy, positions of its sequences), in turn. Collective."""
        parts = self._agreed_parts(parts, len(batch))
        plans, waited_ms = [], 0.0
        for name, positions in parts:
            plan = self._part(step, name, [batch.lengths[position] for position in positions])
            plans.append(plan.renumbered(positions))
            waited_ms += plan.plan_ms
        return SequencedPlan(tuple(plans)), waited_ms

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

    def _part(self, step: int, name: str, lengths: Sequence[int]) -> StepPlan:
        """Returns the plan of sequences of `lengths` under one strategy."""
        answer: StepPlan | HydraulisError | None = None
        if 0 in self.cluster.local_ranks:
            answer = self._guarded(step, lambda: self._here(lengths, step, replace(self.options, only=name)))
        answer = self.cluster.broadcast(answer)
        if isinstance(answer, HydraulisError):
            raise answer
        assert answer is not None
        return answer

    def ahead(self, batches: Iterable[GlobalBatch], step: Callable[[], int]) -> Iterator[GlobalBatch]:
        """Yields the batches; those that follow are being planned while one is trained on."""
        queue: deque[GlobalBatch] = deque()
        for batch in batches:
            queue.append(batch)
            self._submit(batch)
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

    def _submit(self, batch: GlobalBatch) -> None:
        if self.depth == 0 or 0 not in self.cluster.local_ranks:
            return
        if self._service is None:
            # One more than the depth: the step that is running has not been taken yet.
            self._service = PlanService(self.pool, self.profile, self.options, self.depth + 1)
        while len(self._submitted) > self.depth:
            # A batch that was skipped: its plan is of no use any more.
            _, number = self._submitted.pop(next(iter(self._submitted)))
            self._service.result(number)
        self._service.submit(self._number, batch.lengths)
        self._submitted[id(batch)] = (batch, self._number)
        self._number += 1

    def _own_plan(self, batch: GlobalBatch, step: int) -> StepPlan | HydraulisError:
        def made() -> StepPlan:
            if id(batch) in self._submitted and self._service is not None:
                _, number = self._submitted.pop(id(batch))
                return self._service.result(number)
            return self._here(batch.lengths, step, self.options)

        return self._guarded(step, made)

    def _guarded(self, step: int, made: Callable[[], StepPlan]) -> StepPlan | HydraulisError:
        """Returns the plan, or what went wrong: the other ranks wait for an answer."""
        try:
            return made()
        except HydraulisError as error:
            return error
        except Exception as error:
            problem = PlanError(f"plan of step {step}: {type(error).__name__}: {error}")
            problem.__cause__ = error
            return problem

    def _here(self, lengths: Sequence[int], step: int, options: PlannerOptions) -> StepPlan:
        start_s = time.perf_counter()
        plan = plan_step(self.pool, self.profile, lengths, step=step, options=options)
        return replace(plan, plan_ms=1e3 * (time.perf_counter() - start_s))


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
