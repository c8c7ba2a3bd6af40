"""A good plan of one strategy in milliseconds: longest-first dispatch, packing, then moves and swaps.

Dispatch and search judge a replica by a closed estimate of its time; what is kept is decided by the packed and
simulated time. Everything is deterministic: sequences in order of falling length, then rising index; the first of equal
choices is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from strategies.cost import ReplicaKind
from strategies.packing import Packer, Packing, refine

__all__ = ["Assignment", "by_length", "heuristic_assignment", "pack_assignment", "refine_slowest"]

Floats: TypeAlias = NDArray[np.float64]

TRIALS = 4
IMPROVEMENT = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class Assignment:
    """Per replica the indices it runs, in order of falling length, and their packing."""

    indices: tuple[tuple[int, ...], ...]
    packings: tuple[Packing, ...]

    @property
    def ms(self) -> float:
        """The slowest replica's time."""
        return max(packing.ms for packing in self.packings)

    def micro_batches(self, replica: int) -> tuple[tuple[int, ...], ...]:
        """Returns the micro-batches of a replica as indices into the batch, rising within each."""
        own = self.indices[replica]
        return tuple(tuple(sorted(own[position] for position in group)) for group in self.packings[replica].groups)


def by_length(indices: Sequence[int], lengths: Sequence[int]) -> tuple[int, ...]:
    """Returns `indices` in order of falling length, equal lengths in order of rising index."""
    return tuple(sorted(indices, key=lambda index: (-lengths[index], index)))


def heuristic_assignment(
    kinds: Sequence[ReplicaKind], lengths: Sequence[int], packer: Packer, max_rounds: int
) -> Assignment:
    """Returns the assignment of every sequence to one of `kinds`; each sequence must fit some kind."""
    assignment = pack_assignment(kinds, _dispatch(kinds, lengths), lengths, packer)
    return refine_slowest(kinds, lengths, _search(kinds, lengths, assignment, packer, max_rounds))


def pack_assignment(
    kinds: Sequence[ReplicaKind], replicas: Sequence[Sequence[int]], lengths: Sequence[int], packer: Packer
) -> Assignment:
    """Returns the packed assignment of index lists, one per replica."""
    indices = tuple(by_length(own, lengths) for own in replicas)
    packings = tuple(
        packer.pack(kind, tuple(lengths[index] for index in own)) for kind, own in zip(kinds, indices, strict=True)
    )
    return Assignment(indices, packings)


def refine_slowest(kinds: Sequence[ReplicaKind], lengths: Sequence[int], assignment: Assignment) -> Assignment:
    """Returns the assignment with the slowest replica's packing refined, for as long as that helps."""
    packings = list(assignment.packings)
    for _ in packings:
        slowest = max(range(len(packings)), key=lambda replica: packings[replica].ms)
        own = [lengths[index] for index in assignment.indices[slowest]]
        better = refine(kinds[slowest], own, packings[slowest])
        if better.ms >= packings[slowest].ms:
            break
        packings[slowest] = better
    return Assignment(assignment.indices, tuple(packings))


def _estimate_ms(kind: ReplicaKind, work_ms: float, tokens: float, longest_ms: float) -> float:
    """Returns an estimate of a non-empty replica's time: micro-batches of equal work, in the best number tokens allow.

    With pp > 1 the ramp costs (pp - 1) of the largest micro-batch, at least the longest sequence.
    """
    c = kind.cost.c
    fewest = max(1, ceil(tokens / kind.max_tokens))
    if kind.pp == 1:
        return work_ms + c * fewest
    ideal = sqrt((kind.pp - 1) * work_ms / c) if c > 0 else work_ms / longest_ms if longest_ms > 0 else 1.0
    most = work_ms / longest_ms if longest_ms > 0 else ideal
    num = max(float(fewest), min(ideal, most))
    return work_ms + c * num + (kind.pp - 1) * (max(work_ms / num, longest_ms) + c)


def _dispatch(kinds: Sequence[ReplicaKind], lengths: Sequence[int]) -> list[list[int]]:
    """Returns index lists: each sequence, longest first, to the replica whose estimate is then the least."""
    replicas: list[list[int]] = [[] for _ in kinds]
    work_ms, tokens, longest_ms = [0.0] * len(kinds), [0] * len(kinds), [0.0] * len(kinds)
    for index in by_length(range(len(lengths)), lengths):
        length = lengths[index]
        chosen, chosen_ms = -1, float("inf")
        for replica, kind in enumerate(kinds):
            if length > kind.max_tokens:
                continue
            own_ms = kind.cost.sequence_ms(length)
            ms = _estimate_ms(
                kind, work_ms[replica] + own_ms, tokens[replica] + length, max(longest_ms[replica], own_ms)
            )
            if ms < chosen_ms:
                chosen, chosen_ms = replica, ms
        replicas[chosen].append(index)
        own_ms = kinds[chosen].cost.sequence_ms(length)
        work_ms[chosen] += own_ms
        tokens[chosen] += length
        longest_ms[chosen] = max(longest_ms[chosen], own_ms)
    return replicas


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Give `given` to replica `other`, take `taken` (None: a plain move); `estimate_ms` of the slower one after it."""

    estimate_ms: float
    other: int
    given: int
    taken: int | None


def _search(
    kinds: Sequence[ReplicaKind], lengths: Sequence[int], assignment: Assignment, packer: Packer, max_rounds: int
) -> Assignment:
    """Returns the assignment after moves and swaps that relieve the slowest replica, until none does."""
    for _ in range(max_rounds):
        times_ms = [packing.ms for packing in assignment.packings]
        slowest = max(range(len(kinds)), key=times_ms.__getitem__)
        better = _first_improvement(kinds, lengths, assignment, packer, slowest)
        if better is None:
            return assignment
        assignment = better
    return assignment


def _first_improvement(
    kinds: Sequence[ReplicaKind], lengths: Sequence[int], assignment: Assignment, packer: Packer, slowest: int
) -> Assignment | None:
    exchanges = [
        exchange
        for other in _distinct_others(kinds, lengths, assignment, slowest)
        for exchange in _exchanges(kinds, lengths, assignment, slowest, other)
    ]
    limit_ms = assignment.packings[slowest].ms * IMPROVEMENT
    for exchange in sorted(exchanges, key=lambda exchange: exchange.estimate_ms)[:TRIALS]:
        own = [index for index in assignment.indices[slowest] if index != exchange.given]
        others = [index for index in assignment.indices[exchange.other] if index != exchange.taken]
        others.append(exchange.given)
        own += [] if exchange.taken is None else [exchange.taken]
        pair = [kinds[slowest], kinds[exchange.other]]
        packed = pack_assignment(pair, [own, others], lengths, packer)
        if packed.ms < limit_ms:
            return _replaced(assignment, (slowest, exchange.other), packed)
    return None


def _replaced(assignment: Assignment, replicas: tuple[int, int], packed: Assignment) -> Assignment:
    indices, packings = list(assignment.indices), list(assignment.packings)
    for position, replica in enumerate(replicas):
        indices[replica], packings[replica] = packed.indices[position], packed.packings[position]
    return Assignment(tuple(indices), tuple(packings))


def _distinct_others(
    kinds: Sequence[ReplicaKind], lengths: Sequence[int], assignment: Assignment, slowest: int
) -> list[int]:
    """Returns one replica for each combination of kind and lengths that is not the slowest's own."""
    seen: dict[tuple[ReplicaKind, tuple[int, ...]], int] = {}
    for replica, kind in enumerate(kinds):
        if replica != slowest:
            seen.setdefault((kind, tuple(lengths[index] for index in assignment.indices[replica])), replica)
    return list(seen.values())


@dataclass(frozen=True, slots=True)
class _Load:
    """One replica's distinct lengths with the first index of each, and its totals."""

    kind: ReplicaKind
    index: NDArray[np.int64]
    length: Floats
    rest_ms: Floats
    work_ms: float
    tokens: int
    slack_ms: float

    def after_ms(self, added: Floats, removed: Floats, longest_ms: Floats) -> Floats:
        """Returns the estimates with a length added and one removed, the error of today's estimate kept; in ms.

        `longest_ms` is the longest work that stays after the removal.
        """
        cost = self.kind.cost
        own_ms = (cost.a * added + cost.b) * added
        work = self.work_ms + own_ms - (cost.a * removed + cost.b) * removed
        tokens = self.tokens + added - removed
        estimates_ms = _estimates_ms(self.kind, work, tokens, np.maximum(longest_ms, own_ms))
        return np.asarray(self.slack_ms + np.where(tokens > 0, estimates_ms, 0.0))


def _load(kind: ReplicaKind, own: Sequence[int], lengths: Sequence[int], packed_ms: float) -> _Load:
    first: dict[int, int] = {}
    for index in own:
        first.setdefault(lengths[index], index)
    all_ms = [kind.cost.sequence_ms(lengths[index]) for index in own]
    tokens = sum(lengths[index] for index in own)
    # Longest work that stays when one sequence of each distinct length leaves: the second longest for the longest.
    second = all_ms[1] if len(all_ms) > 1 else 0.0
    top = all_ms[0] if all_ms else 0.0
    rest = [second if position == 0 else top for position in range(len(first))]
    estimate = _estimate_ms(kind, sum(all_ms), tokens, top) if own else 0.0
    return _Load(
        kind,
        np.array(list(first.values()), dtype=np.int64),
        np.array(list(first), dtype=np.float64),
        np.array(rest),
        sum(all_ms),
        tokens,
        packed_ms - estimate,
    )


def _estimates_ms(kind: ReplicaKind, work_ms: Floats, tokens: Floats, longest_ms: Floats) -> Floats:
    """Returns `_estimate_ms` of many loads at once."""
    c = kind.cost.c
    fewest = np.maximum(1.0, np.ceil(tokens / kind.max_tokens))
    if kind.pp == 1:
        return np.asarray(work_ms + c * fewest)
    work_ms = np.maximum(work_ms, 0.0)
    most = work_ms / np.maximum(longest_ms, 1e-300)
    ideal = np.sqrt((kind.pp - 1) * work_ms / c) if c > 0 else most
    num = np.maximum(fewest, np.minimum(ideal, most))
    return np.asarray(work_ms + c * num + (kind.pp - 1) * (np.maximum(work_ms / num, longest_ms) + c))


def _exchanges(
    kinds: Sequence[ReplicaKind], lengths: Sequence[int], assignment: Assignment, slowest: int, other: int
) -> list[_Exchange]:
    """Returns the best few moves and swaps between two replicas by estimate."""
    mine = _load(kinds[slowest], assignment.indices[slowest], lengths, assignment.packings[slowest].ms)
    theirs = _load(kinds[other], assignment.indices[other], lengths, assignment.packings[other].ms)
    given_C = np.flatnonzero(mine.length <= theirs.kind.max_tokens)
    if not len(given_C):
        return []
    taken_length = np.concatenate([[0.0], theirs.length])
    their_longest_ms = theirs.kind.cost.sequence_ms(int(theirs.length[0])) if len(theirs.length) else 0.0
    taken_rest = np.concatenate([[their_longest_ms], theirs.rest_ms])
    given = mine.length[given_C][:, None]
    taken = taken_length[None, :]
    my_ms = mine.after_ms(taken, given, mine.rest_ms[given_C][:, None])
    their_ms = theirs.after_ms(given, taken, taken_rest[None, :])
    worst = np.where((taken > mine.kind.max_tokens) | (taken == given), np.inf, np.maximum(my_ms, their_ms))
    flat = np.argsort(worst, axis=None, kind="stable")[:TRIALS]
    return [
        _Exchange(
            float(worst[row, column]),
            other,
            int(mine.index[given_C[row]]),
            None if column == 0 else int(theirs.index[column - 1]),
        )
        for row, column in zip(*np.unravel_index(flat, worst.shape), strict=True)
        if np.isfinite(worst[row, column])
    ]
