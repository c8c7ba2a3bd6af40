"""A good plan of one strategy in milliseconds: longest-first dispatch, local search, packing, and search again.

Dispatch and local search judge a replica by the closed form of its time; what is kept is decided by the packed time
(simulated, or flow where that is asked for). Where packing gives another time than the closed form, the difference goes
into the search as the replica's correction. Everything is deterministic: sequences in order of falling length, then
rising index; the first of equal choices is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strategies.cost import ReplicaKind
from strategies.dispatch import dispatch
from strategies.fleet import Fleet, Ints
from strategies.local_search import Exchange, Loads, exchanges, relieve
from strategies.packing import Packer, Packing, refine

__all__ = [
    "Assignment",
    "Start",
    "by_length",
    "heuristic_assignment",
    "pack_assignment",
    "refine_slowest",
    "searched",
    "value_ms",
]

CORRECTIONS = 3
TRIALS = 4
MAX_EXACT_ROUNDS = 12
MAX_EXACT_SEQUENCES = 1_000
IMPROVEMENT = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class Assignment:
    """Per replica the indices it runs, in order of falling length, and their packing."""

    indices: tuple[tuple[int, ...], ...]
    packings: tuple[Packing, ...]

    @property
    def ms(self) -> float:
        """The slowest replica's simulated time."""
        return max(packing.ms for packing in self.packings)

    @property
    def flow_ms(self) -> float:
        """The slowest replica's flow time."""
        return max(packing.flow_ms for packing in self.packings)

    def micro_batches(self, replica: int) -> tuple[tuple[int, ...], ...]:
        """Returns the micro-batches of a replica as indices into the batch, rising within each."""
        own = self.indices[replica]
        return tuple(tuple(sorted(own[position] for position in group)) for group in self.packings[replica].groups)


def by_length(indices: Sequence[int], lengths: Sequence[int]) -> tuple[int, ...]:
    """Returns `indices` in order of falling length, equal lengths in order of rising index."""
    return tuple(sorted(indices, key=lambda index: (-lengths[index], index)))


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """One strategy after longest-first dispatch: `order[p]` is the index of the p-th longest sequence.

    `ms` is the slowest replica's time by the closed form.
    """

    fleet: Fleet
    order: tuple[int, ...]
    replica_M: Ints
    ms: float

    @staticmethod
    def of(kinds: Sequence[ReplicaKind], lengths: Sequence[int]) -> Start:
        """Returns the dispatch of every sequence to one of `kinds`; each sequence must fit some kind."""
        order = by_length(range(len(lengths)), lengths)
        fleet = Fleet.of(kinds, [lengths[index] for index in order])
        replica_M = np.array(dispatch(fleet), dtype=np.int64)
        return Start(fleet, order, replica_M, float(Loads(fleet, replica_M).ms_R.max()))


def heuristic_assignment(
    kinds: Sequence[ReplicaKind], lengths: Sequence[int], packer: Packer, max_rounds: int
) -> Assignment:
    """Returns the assignment of every sequence to one of `kinds`; each sequence must fit some kind."""
    return searched(Start.of(kinds, lengths), lengths, packer, max_rounds)


def searched(
    start: Start, lengths: Sequence[int], packer: Packer, max_rounds: int, enough_ms: float = 0.0
) -> Assignment:
    """Returns the packed assignment after at most `max_rounds` steps of local search, which stops at `enough_ms`."""
    loads = Loads(start.fleet, start.replica_M)
    best: Assignment | None = None
    for _ in range(CORRECTIONS):
        relieve(loads, max_rounds, enough_ms)
        own = _packed(loads, start.order, lengths, packer)
        expected_ms, loads = loads.ms_R.max(), _corrected(loads, own, packer)
        if best is None or value_ms(own, packer) < value_ms(best, packer) * IMPROVEMENT:
            best = own
        if max_rounds == 0 or loads.ms_R.max() <= expected_ms * (1 + 1e-9):
            break
    assert best is not None
    if not start.fleet.is_pipelined or len(lengths) > MAX_EXACT_SEQUENCES:
        return best
    return _exact_search(start.fleet, start.order, lengths, best, packer, min(max_rounds, MAX_EXACT_ROUNDS))


def value_ms(assignment: Assignment, packer: Packer) -> float:
    """Returns the time in ms that assignments are compared by."""
    return max(packer.value_ms(packing) for packing in assignment.packings)


def pack_assignment(
    kinds: Sequence[ReplicaKind], replicas: Sequence[Sequence[int]], lengths: Sequence[int], packer: Packer
) -> Assignment:
    """Returns the packed assignment of index lists, one per replica."""
    indices = tuple(by_length(own, lengths) for own in replicas)
    packings = tuple(
        packer.pack(kind, tuple(lengths[index] for index in own)) for kind, own in zip(kinds, indices, strict=True)
    )
    return Assignment(indices, packings)


def refine_slowest(
    kinds: Sequence[ReplicaKind], lengths: Sequence[int], assignment: Assignment, packer: Packer
) -> Assignment:
    """Returns the assignment with the slowest replica's packing refined, for as long as that helps."""
    if packer.by_flow:
        return assignment
    packings = list(assignment.packings)
    for _ in packings:
        slowest = max(range(len(packings)), key=lambda replica: packings[replica].ms)
        own = [lengths[index] for index in assignment.indices[slowest]]
        better = refine(kinds[slowest], own, packings[slowest])
        if better.ms >= packings[slowest].ms:
            break
        packings[slowest] = better
    return Assignment(assignment.indices, tuple(packings))


def _packed(loads: Loads, order: Sequence[int], lengths: Sequence[int], packer: Packer) -> Assignment:
    replicas: list[list[int]] = [[] for _ in range(loads.fleet.num_replicas)]
    for position, replica in enumerate(loads.replica_M.tolist()):
        replicas[replica].append(order[position])
    packings = tuple(
        packer.pack(loads.fleet.kind_of(replica), tuple(lengths[index] for index in own))
        for replica, own in enumerate(replicas)
    )
    return Assignment(tuple(map(tuple, replicas)), packings)


def _corrected(loads: Loads, assignment: Assignment, packer: Packer) -> Loads:
    """Returns the loads with corrections that make each replica's time the packed one."""
    packed_R = np.array([packer.value_ms(packing) for packing in assignment.packings])
    return Loads(loads.fleet, loads.replica_M, loads.correction_R + packed_R - loads.ms_R)


def _exact_search(
    fleet: Fleet, order: Sequence[int], lengths: Sequence[int], start: Assignment, packer: Packer, max_rounds: int
) -> Assignment:
    """Returns `start` after moves and swaps, the likeliest first, each tried by packing both replicas."""
    position = {index: at for at, index in enumerate(order)}
    replica_M = np.zeros(len(order), dtype=np.int64)
    for replica, own in enumerate(start.indices):
        replica_M[[position[index] for index in own]] = replica
    loads = _corrected(Loads(fleet, replica_M), start, packer)
    best = start
    for _ in range(max_rounds):
        slowest = int(loads.ms_R.argmax())
        limit_ms = packer.value_ms(best.packings[slowest]) * IMPROVEMENT
        for exchange in exchanges(loads, slowest, TRIALS):
            tried = _after(fleet, order, lengths, best, exchange, packer)
            if max(packer.value_ms(tried.packings[replica]) for replica in (slowest, exchange.taker)) < limit_ms:
                break
        else:
            return best
        best = tried
        loads.exchange(exchange)
        loads = _corrected(loads, best, packer)
    return best


def _after(
    fleet: Fleet,
    order: Sequence[int],
    lengths: Sequence[int],
    assignment: Assignment,
    exchange: Exchange,
    packer: Packer,
) -> Assignment:
    indices, packings = list(assignment.indices), list(assignment.packings)
    given, taken = ({order[position] for position in own} for own in (exchange.given, exchange.taken))
    for replica, gained, lost in ((exchange.giver, taken, given), (exchange.taker, given, taken)):
        indices[replica] = by_length([*(set(indices[replica]) - lost), *gained], lengths)
        packings[replica] = packer.pack(fleet.kind_of(replica), tuple(lengths[index] for index in indices[replica]))
    return Assignment(tuple(indices), tuple(packings))
