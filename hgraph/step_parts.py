"""What any system runs in a step, ours or a baseline: parts one after another, each of replicas with micro-batches.

A part is one strategy with its micro-batches. Most systems have one part; one that changes its layout in the middle of
a step has several. `StepClock` times a step on a cluster, communication included or left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hgraph.communication_costs import CommunicationCosts
from hgraph.errors import InvalidInput, PlanError
from hgraph.plan import StepPlan
from hgraph.profile import Profile
from hgraph.step_graph import simulate_step
from hgraph.step_times import Bridging, ReplicaWork, flow_ms, step_ms
from hgraph.step_trace import TracedPart
from hgraph.strategy import Strategy

__all__ = ["Communication", "MicroBatch", "Part", "StepClock", "check_parts", "planned_part"]

Communication: TypeAlias = Literal["none", "overlapped", "serial"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch of sequences (indices into the batch); `tokens` and `ms` (in one stage) include padding."""

    sequences: tuple[int, ...]
    tokens: int
    ms: float


@dataclass(frozen=True, slots=True)
class Part:
    """A strategy and what each of its replicas runs, in running order."""

    strategy: Strategy
    replicas: tuple[tuple[MicroBatch, ...], ...]

    def __post_init__(self) -> None:
        if len(self.replicas) != len(self.strategy.replicas):
            raise InvalidInput(
                f"part {self.strategy.name}: expected micro-batches of {len(self.strategy.replicas)} replicas, got "
                f"{len(self.replicas)}"
            )


def planned_part(plan: StepPlan, strategy: Strategy, profile: Profile, lengths: Sequence[int]) -> Part:
    """Returns what a step plan runs."""
    replicas = []
    for replica, planned in zip(strategy.replicas, plan.replicas, strict=True):
        cost = profile.cost(replica.scheme)
        own = [(sequences, [lengths[index] for index in sequences]) for sequences in planned.micro_batches]
        replicas.append(
            tuple(MicroBatch(sequences, sum(tokens), cost.micro_batch_ms(tokens)) for sequences, tokens in own)
        )
    return Part(strategy, tuple(replicas))


def check_parts(parts: Sequence[Part], profile: Profile, lengths: Sequence[int]) -> None:
    """Raises `PlanError` unless every sequence runs once and no micro-batch exceeds the limit of its scheme."""
    seen = [0] * len(lengths)
    for part in parts:
        for replica, own in zip(part.strategy.replicas, part.replicas, strict=True):
            limit = profile.cost(replica.scheme).max_tokens
            for micro_batch in own:
                if micro_batch.tokens > limit or sum(lengths[i] for i in micro_batch.sequences) > micro_batch.tokens:
                    raise PlanError(
                        f"{part.strategy.name}, {replica.scheme}: a micro-batch of {micro_batch.tokens:,} tokens does "
                        f"not hold its sequences within the limit of {limit:,}"
                    )
                for index in micro_batch.sequences:
                    seen[index] += 1
    wrong = [index for index, count in enumerate(seen) if count != 1]
    if wrong:
        raise PlanError(f"sequence {wrong[0]} runs {seen[wrong[0]]} times; expected exactly once")


@dataclass(frozen=True, slots=True)
class StepClock:
    """Times steps: on computation alone (`none`), or with messages, bridges and switches.

    Bridges hide behind computation as order allows (`overlapped`), or not at all (`serial`). A switch between parts
    hides behind nothing.
    """

    communication: Communication = "none"
    costs: CommunicationCosts | None = None

    def __post_init__(self) -> None:
        if self.communication != "none" and self.costs is None:
            raise InvalidInput(f"communication {self.communication!r}: expected the costs of a cluster, got none")

    def ms(self, parts: Sequence[Part]) -> float:
        """Returns the simulated time of a step; 0.0 for no part."""
        return sum(
            self.switch_ms(parts, number) + step_ms(self.works(part), self._bridging(parts, number))
            for number, part in enumerate(parts)
        )

    def flow_ms(self, parts: Sequence[Part]) -> float:
        """Returns the flow time: of each part that of its slowest replica, without communication."""
        return sum(max(map(flow_ms, StepClock().works(part)), default=0.0) for part in parts)

    def works(self, part: Part) -> list[ReplicaWork]:
        """Returns what each replica runs, with the times of its messages."""
        works = []
        for replica, own in zip(part.strategy.replicas, part.replicas, strict=True):
            transfers: tuple[tuple[float, ...], ...] = ()
            if self.costs is not None and self.communication != "none":
                transfers = self.costs.transfers_ms(replica, (micro_batch.tokens for micro_batch in own))
            times_ms = tuple(micro_batch.ms for micro_batch in own)
            works.append(ReplicaWork(replica.scheme.schedule, replica.scheme.pp, times_ms, transfers))
        return works

    def switch_ms(self, parts: Sequence[Part], number: int) -> float:
        """Returns the time of the switch before part `number`; none before the first."""
        if number == 0 or self.costs is None or self.communication == "none":
            return 0.0
        return self.costs.switch_ms(parts[number - 1].strategy, parts[number].strategy)

    def trace(self, parts: Sequence[Part]) -> list[TracedPart]:
        """Returns every task of a step, for `chrome_trace`."""
        traced, offset_ms = [], 0.0
        for number, part in enumerate(parts):
            switch_ms = self.switch_ms(parts, number)
            offset_ms += switch_ms
            tasks = simulate_step(self.works(part), self._bridging(parts, number))
            tokens = [[micro_batch.tokens for micro_batch in own] for own in part.replicas]
            traced.append(TracedPart(part.strategy, tasks, tokens, offset_ms, switch_ms))
            offset_ms += max((task.end_ms for task in tasks), default=0.0)
        return traced

    def _bridging(self, parts: Sequence[Part], number: int) -> Bridging:
        """Returns the bridges around a part: parameters before the first one, gradients after the last."""
        if self.costs is None or self.communication == "none":
            return Bridging()
        strategy = parts[number].strategy
        parameters_ms = self.costs.bridge_ms(strategy, "parameters") if number == 0 else 0.0
        gradients_ms = self.costs.bridge_ms(strategy, "gradients") if number == len(parts) - 1 else 0.0
        return Bridging(parameters_ms, gradients_ms, self.communication)
