"""What `verify` trains on: batches that reach the corners of a step, and who runs what of them.

Drawn from a seed alone, so every process draws the same.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hgraph.data.batches import GlobalBatch, make_batch
from hgraph.data.packed import IGNORED_LABEL
from hgraph.plan import ReplicaPlan, StepPlan
from hgraph.profile import Profile
from hgraph.simulate import flow_ms, schedule_ms
from hgraph.strategy import Strategy

__all__ = ["KINDS", "Assignment", "Trial", "draw_trial", "plan_of", "random_assignment"]

Assignment: TypeAlias = tuple[tuple[tuple[int, ...], ...], ...]
"""For each replica of a strategy its micro-batches, each a tuple of indices into the batch."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One step to compare; `assignment` None: as the planner dispatches it."""

    kind: str
    batch: GlobalBatch
    assignment: Assignment | None


def draw_trial(kind: str, strategy: Strategy, vocab_size: int, generator: random.Random) -> Trial:
    """Returns a batch of `kind`, a key of `KINDS`, and its assignment to the replicas of `strategy`."""
    lengths, assignment, labels = KINDS[kind](strategy, generator)
    sequences = [[generator.randrange(vocab_size) for _ in range(length)] for length in lengths]
    return Trial(kind, make_batch(sequences, labels), assignment)


def random_assignment(strategy: Strategy, count: int, generator: random.Random) -> Assignment:
    """Returns sequences 0 to `count` - 1 dealt to a random choice of the replicas, in random micro-batches."""
    replicas = range(len(strategy.replicas))
    used = generator.sample(replicas, generator.randint(1, len(replicas)))
    held: list[list[int]] = [[] for _ in replicas]
    for index in generator.sample(range(count), count):
        held[generator.choice(used)].append(index)
    return tuple(_cut(own, generator) for own in held)


def plan_of(
    assignment: Assignment, strategy: Strategy, profile: Profile, lengths: Sequence[int], step: int
) -> StepPlan:
    """Returns the plan that runs `assignment`; its predicted time is its bound, for no other is considered."""
    replicas, flows_ms = [], []
    for replica, micro_batches in zip(strategy.replicas, assignment, strict=True):
        cost = profile.cost(replica.scheme)
        times_ms = [cost.micro_batch_ms([lengths[index] for index in own]) for own in micro_batches]
        flows_ms.append(flow_ms(replica.scheme.pp, times_ms))
        replicas.append(ReplicaPlan(micro_batches, schedule_ms(replica.scheme.schedule, replica.scheme.pp, times_ms)))
    predicted_ms = max(replica.predicted_ms for replica in replicas) + profile.bridge_ms.get(strategy.name, 0.0)
    return StepPlan(
        step, strategy.name, tuple(replicas), predicted_ms, predicted_ms, 0.0, "given", flow_ms=max(flows_ms)
    )


def _cut(indices: Sequence[int], generator: random.Random) -> tuple[tuple[int, ...], ...]:
    """The indices in order, cut at random places."""
    borders = [0, *(place for place in range(1, len(indices)) if generator.random() < 0.5), len(indices)]
    return tuple(tuple(indices[begin:end]) for begin, end in itertools.pairwise(borders) if begin < end)


_Drawn: TypeAlias = tuple[list[int], Assignment | None, list[list[int] | None] | None]


def _mixed_lengths(generator: random.Random) -> list[int]:
    """A few sequences of 1 to 12 tokens and one of 20 to 40."""
    return [*(generator.randint(1, 12) for _ in range(generator.randint(4, 7))), generator.randint(20, 40)]


def _planned(strategy: Strategy, generator: random.Random) -> _Drawn:
    del strategy
    return _mixed_lengths(generator), None, None


def _random(strategy: Strategy, generator: random.Random) -> _Drawn:
    lengths = _mixed_lengths(generator)
    return lengths, random_assignment(strategy, len(lengths), generator), None


def _one_sequence(strategy: Strategy, generator: random.Random) -> _Drawn:
    return [generator.randint(2, 30)], random_assignment(strategy, 1, generator), None


def _one_token_each(strategy: Strategy, generator: random.Random) -> _Drawn:
    """Sequences of one token, which predict something because they carry a label of their own."""
    count = generator.randint(3, 6)
    labels: list[list[int] | None] = [[generator.randrange(2)] for _ in range(count)]
    return [1] * count, random_assignment(strategy, count, generator), labels


def _one_masked(strategy: Strategy, generator: random.Random) -> _Drawn:
    """Everything that one of the replicas runs is without labels."""
    lengths = [*_mixed_lengths(generator), 3]
    assignment = random_assignment(strategy, len(lengths), generator)
    used = [index for index, micro_batches in enumerate(assignment) if micro_batches]
    masked = {index for own in assignment[generator.choice(used)] for index in own}
    if len(masked) == len(lengths):
        masked = {0}
    labels = [[IGNORED_LABEL] * length if index in masked else None for index, length in enumerate(lengths)]
    return lengths, assignment, labels  # type: ignore[return-value]


def _all_masked(strategy: Strategy, generator: random.Random) -> _Drawn:
    lengths = _mixed_lengths(generator)
    return lengths, random_assignment(strategy, len(lengths), generator), [[IGNORED_LABEL] * n for n in lengths]


KINDS: Mapping[str, Callable[[Strategy, random.Random], _Drawn]] = {
    "planned": _planned,
    "random dispatch": _random,
    "one sequence": _one_sequence,
    "one replica masked": _one_masked,
    "sequences of one token": _one_token_each,
    "all masked": _all_masked,
}
"""Kinds of batches, in the order in which `verify` takes them."""
