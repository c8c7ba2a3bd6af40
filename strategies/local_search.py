"""Moves and swaps that relieve the slowest replica, judged by the closed form of a load plus a correction per replica.

One round looks at every sequence of the slowest replica and at every replica and sequence elsewhere, and takes the move
or swap after which the slower of the two replicas is fastest. Where none helps, pairs of sequences are exchanged with
the replicas that are done first. The times of the replicas, sorted, fall with every step, so the search ends.

Symbols: I sequences of the slowest replica (one for each length); J sequences of the other replicas, then "nothing" of
each of them; A, B groups of up to two sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strategies.fleet import Fleet, Floats, Ints, loads_ms

__all__ = ["Exchange", "Loads", "exchanges", "relieve"]

IMPROVEMENT = 1.0 - 1e-9
MAX_GROUP_MEMBERS = 14
BALANCED = 1e-4
MAX_OTHERS = 32
MAX_OWN = 48
MAX_THEIRS = 512
MAX_PARTNERS = 4
NOTHING = -1
MAX_PAIR_ROUNDS = 24


@dataclass(frozen=True, slots=True)
class Exchange:
    """`giver` gives sequences to `taker` and takes others back; the slower of the two then takes `worse_ms`."""

    worse_ms: float
    giver: int
    given: tuple[int, ...]
    taker: int
    taken: tuple[int, ...]


class Loads:
    """Who runs what, and the replicas' totals: `correction_R` is added to the closed form's time of a busy replica."""

    def __init__(self, fleet: Fleet, replica_M: Ints, correction_R: Floats | None = None) -> None:
        self.fleet = fleet
        self.replica_M = replica_M.copy()
        num = fleet.num_replicas
        own_M = fleet.work_TM[fleet.kind_R[replica_M], np.arange(len(replica_M))]
        self.work_R = np.bincount(replica_M, weights=own_M, minlength=num)
        self.tokens_R = np.bincount(replica_M, weights=fleet.length_M, minlength=num)
        self.correction_R = np.zeros(num) if correction_R is None else correction_R
        self.longest_2R = np.zeros((2, num))
        self.first_R = np.full(num, -1)
        if fleet.is_pipelined:
            self._find_all_longest(own_M)
        self.ms_R = self._times()

    def members(self, replica: int) -> Ints:
        """Returns the sequences of a replica, longest first."""
        return np.flatnonzero(self.replica_M == replica)

    def _find_all_longest(self, own_M: Floats) -> None:
        """Sets the longest two sequences of every replica; lengths fall, so they are the first two of each."""
        replicas, first = np.unique(self.replica_M, return_index=True)
        self.first_R[replicas] = first
        self.longest_2R[0, replicas] = own_M[first]
        rest = np.delete(np.arange(len(self.replica_M)), first)
        replicas, second = np.unique(self.replica_M[rest], return_index=True)
        self.longest_2R[1, replicas] = own_M[rest[second]]

    def _find_longest(self, replica: int) -> None:
        own = self.members(replica)[:2]
        self.longest_2R[:, replica] = 0.0
        self.longest_2R[: len(own), replica] = self.fleet.work_TM[self.fleet.kind_R[replica], own]
        self.first_R[replica] = own[0] if len(own) else -1

    def _times(self) -> Floats:
        fleet = self.fleet
        longest_R = self.longest_2R[0] if fleet.is_pipelined else None
        times = loads_ms(fleet.fixed_R, fleet.ramp_R, fleet.limit_R, self.work_R, self.tokens_R, longest_R)
        return np.asarray(times + np.where(self.tokens_R > 0, self.correction_R, 0.0))

    def after_ms(self, replicas: Ints | int, work: Floats, tokens: Floats, longest: Floats | None) -> Floats:
        """Returns the times in ms that loads would have on `replicas`, corrections included."""
        fleet = self.fleet
        parts = (values[replicas] for values in (fleet.fixed_R, fleet.ramp_R, fleet.limit_R))
        times = loads_ms(*parts, work, tokens, longest) + self.correction_R[replicas]
        return np.asarray(np.where(tokens > 0, times, 0.0))

    def exchange(self, exchange: Exchange) -> None:
        """Carries out an exchange."""
        fleet, given, taken = self.fleet, list(exchange.given), list(exchange.taken)
        self.replica_M[given] = exchange.taker
        self.replica_M[taken] = exchange.giver
        for replica, gained, lost in ((exchange.giver, taken, given), (exchange.taker, given, taken)):
            work_M = fleet.work_TM[fleet.kind_R[replica]]
            self.work_R[replica] += work_M[gained].sum() - work_M[lost].sum()
            self.tokens_R[replica] += fleet.length_M[gained].sum() - fleet.length_M[lost].sum()
            if fleet.is_pipelined:
                self._find_longest(replica)
        self.ms_R = self._times()


def relieve(loads: Loads, max_rounds: int, enough_ms: float = 0.0) -> None:
    """Improves `loads` in place for at most `max_rounds` steps.

    Ends when the slowest replica takes at most `enough_ms`, when all take the same time, or when nothing helps.
    """
    pair_rounds = 0
    for _ in range(max_rounds):
        slowest = int(loads.ms_R.argmax())
        if loads.ms_R[slowest] <= max(enough_ms, float(loads.ms_R.mean()) * (1.0 + BALANCED)):
            return
        found = next(iter(exchanges(loads, slowest, 1)), None)
        if found is None and pair_rounds < MAX_PAIR_ROUNDS:
            found = _group_exchange(loads, slowest)
            pair_rounds += 1
        if found is None:
            return
        loads.exchange(found)


def _one_per_length(length_M: Floats, own: Ints) -> Ints:
    keep = np.ones(len(own), dtype=bool)
    keep[1:] = length_M[own[1:]] != length_M[own[:-1]]
    return np.asarray(own[keep])


def _spread(values: Ints, count: int) -> Ints:
    """Returns `values`, or `count` of them, evenly spread."""
    if len(values) <= count:
        return values
    return np.asarray(values[np.linspace(0, len(values) - 1, count).astype(np.int64)])


def exchanges(loads: Loads, slowest: int, count: int) -> list[Exchange]:
    """Returns up to `count` moves and swaps of single sequences that relieve the slowest replica, the best first.

    The other replica is one of the `MAX_OTHERS` that are done first; of very many sequences, some of all lengths.
    """
    fleet = loads.fleet
    own_I = _spread(_one_per_length(fleet.length_M, loads.members(slowest)), MAX_OWN)
    others = _done_first(loads, slowest, MAX_OTHERS)
    if not len(others):
        return []
    is_other = np.zeros(fleet.num_replicas, dtype=bool)
    is_other[others] = True
    theirs = _spread(np.flatnonzero(is_other[loads.replica_M]), MAX_THEIRS)
    taken_J = np.append(theirs, np.full(len(others), NOTHING))
    other_J = np.concatenate([loads.replica_M[theirs], others])
    worse_IJ = _worse_after_swap(loads, slowest, own_I, other_J, taken_J)
    flat = worse_IJ.ravel()
    best = [int(flat.argmin())] if count == 1 else np.argsort(flat, kind="stable")[:count].tolist()
    found = []
    for row, column in (divmod(at, len(other_J)) for at in best if flat[at] < loads.ms_R[slowest] * IMPROVEMENT):
        taken = (int(taken_J[column]),) if taken_J[column] != NOTHING else ()
        found.append(Exchange(float(worse_IJ[row, column]), slowest, (int(own_I[row]),), int(other_J[column]), taken))
    return found


def _done_first(loads: Loads, slowest: int, count: int) -> Ints:
    """Returns up to `count` replicas other than the slowest, in order of their times."""
    order = np.argsort(loads.ms_R, kind="stable")
    return np.asarray(order[order != slowest][:count])


def _worse_after_swap(loads: Loads, slowest: int, own_I: Ints, other_J: Ints, taken_J: Ints) -> Floats:
    """Returns the time in ms of the slower replica after `own_I` goes to `other_J` for `taken_J`; inf where unfit."""
    fleet = loads.fleet
    is_real_J = taken_J != NOTHING
    length_I, length_J = fleet.length_M[own_I], np.where(is_real_J, fleet.length_M[taken_J], 0.0)
    here_M, kind_J = fleet.work_TM[fleet.kind_R[slowest]], fleet.kind_R[other_J]
    taken_here_J = np.where(is_real_J, here_M[taken_J], 0.0)
    taken_there_J = np.where(is_real_J, fleet.work_TM[kind_J, taken_J], 0.0)
    given_there_IJ = fleet.work_TM[:, own_I].T[:, kind_J]
    my_longest_IJ = their_longest_IJ = None
    if fleet.is_pipelined:
        first, second = loads.longest_2R
        rest_I = np.where(own_I == loads.first_R[slowest], second[slowest], first[slowest])
        rest_J = np.where(is_real_J & (loads.first_R[other_J] == taken_J), second[other_J], first[other_J])
        my_longest_IJ = np.maximum(rest_I[:, None], taken_here_J)
        their_longest_IJ = np.maximum(rest_J, given_there_IJ)
    difference_IJ = length_J - length_I[:, None]
    my_work_IJ = loads.work_R[slowest] + (taken_here_J - here_M[own_I][:, None])
    their_work_IJ = (loads.work_R[other_J] - taken_there_J) + given_there_IJ
    mine_IJ = loads.after_ms(slowest, my_work_IJ, loads.tokens_R[slowest] + difference_IJ, my_longest_IJ)
    theirs_IJ = loads.after_ms(other_J, their_work_IJ, loads.tokens_R[other_J] - difference_IJ, their_longest_IJ)
    worse_IJ = np.maximum(mine_IJ, theirs_IJ)
    worse_IJ[:, length_J > fleet.limit_R[slowest]] = np.inf
    worse_IJ[length_I[:, None] > fleet.limit_R[other_J]] = np.inf
    return worse_IJ


def _groups(length_M: Floats, own: Ints) -> Ints:
    """Returns rows: nothing, single sequences and pairs, M standing for nothing; of lengths spread over `own`."""
    nothing = len(length_M)
    own = np.append(_spread(_one_per_length(length_M, own), MAX_GROUP_MEMBERS), nothing)
    first, second = np.triu_indices(len(own), 1)
    return np.concatenate([[[nothing, nothing]], np.stack([own[first], own[second]], axis=1)])


def _group_exchange(loads: Loads, slowest: int) -> Exchange | None:
    """Returns the best exchange of two groups with one of the replicas done first, None where none relieves."""
    length_M = loads.fleet.length_M
    group_A = _groups(length_M, loads.members(slowest))
    limit_ms = loads.ms_R[slowest] * IMPROVEMENT
    best: Exchange | None = None
    for other in _done_first(loads, slowest, MAX_PARTNERS).tolist():
        group_B = _groups(length_M, loads.members(other))
        worse_AB = _worse_after(loads, slowest, group_A, other, group_B)
        at = int(worse_AB.argmin())
        if worse_AB.flat[at] < limit_ms:
            limit_ms = float(worse_AB.flat[at])
            row, column = divmod(at, len(group_B))
            given, taken = (
                tuple(int(index) for index in group if index < len(length_M))
                for group in (group_A[row], group_B[column])
            )
            best = Exchange(limit_ms, slowest, given, other, taken)
    return best


def _worse_after(loads: Loads, slowest: int, group_A: Ints, other: int, group_B: Ints) -> Floats:
    """Returns the time in ms of the slower of two replicas after each exchange of a group; inf where one cannot fit."""
    fleet = loads.fleet
    here_M = np.append(fleet.work_TM[fleet.kind_R[slowest]], 0.0)
    there_M = np.append(fleet.work_TM[fleet.kind_R[other]], 0.0)
    length_M = np.append(fleet.length_M, 0.0)
    longest_here = longest_there = None
    if fleet.is_pipelined:
        # An upper estimate: what leaves may have been the longest.
        longest_here = np.maximum(loads.longest_2R[0, slowest], here_M[group_B].max(axis=1))[None, :]
        longest_there = np.maximum(loads.longest_2R[0, other], there_M[group_A].max(axis=1))[:, None]
    given_A, taken_B = length_M[group_A], length_M[group_B]
    moved_AB = taken_B.sum(axis=1) - given_A.sum(axis=1)[:, None]
    mine_AB = loads.after_ms(
        slowest,
        loads.work_R[slowest] + (here_M[group_B].sum(axis=1) - here_M[group_A].sum(axis=1)[:, None]),
        loads.tokens_R[slowest] + moved_AB,
        longest_here,
    )
    theirs_AB = loads.after_ms(
        other,
        loads.work_R[other] - (there_M[group_B].sum(axis=1) - there_M[group_A].sum(axis=1)[:, None]),
        loads.tokens_R[other] - moved_AB,
        longest_there,
    )
    worse_AB = np.maximum(mine_AB, theirs_AB)
    worse_AB[given_A.max(axis=1) > fleet.limit_R[other], :] = np.inf
    worse_AB[:, taken_B.max(axis=1) > fleet.limit_R[slowest]] = np.inf
    return worse_AB
