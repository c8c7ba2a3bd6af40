"""Dispatch and local search: what the arrays say is what is so, and no step makes the slowest replica slower."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from hgraph.profile import SchemeCost
from strategies.cost import ReplicaKind
from strategies.dispatch import dispatch
from strategies.fleet import Fleet, load_ms
from strategies.local_search import Loads, exchanges, relieve
from tests.planner_reference import random_kind


def drawn(seed: int, pipelines: tuple[int, ...] = (1, 2, 3)) -> tuple[list[ReplicaKind], Fleet]:
    """Returns up to six replicas of up to three kinds, and their arrays for up to 40 sequences that fit some."""
    random = Random(seed)
    distinct = [random_kind(random, pipelines) for _ in range(random.randint(1, 3))]
    kinds = random.choices(distinct, k=random.randint(2, 6))
    limit = max(kind.max_tokens for kind in kinds)
    lengths = sorted((min(limit, random.randint(1, 400)) for _ in range(random.randint(1, 40))), reverse=True)
    return kinds, Fleet.of(kinds, lengths)


def times_of(kinds: list[ReplicaKind], fleet: Fleet, replica_M: list[int]) -> list[float]:
    """Returns the closed form of every replica's time, worked out one by one."""
    times = []
    for replica, kind in enumerate(kinds):
        own = [length for length, other in zip(fleet.lengths, replica_M, strict=True) if other == replica]
        work = [kind.cost.sequence_ms(length) for length in own]
        times.append(load_ms(kind, sum(work), sum(own), max(work)) if own else 0.0)
    return times


@pytest.mark.parametrize("seed", range(40))
def test_the_arrays_follow_every_exchange(seed: int) -> None:
    kinds, fleet = drawn(seed)
    loads = Loads(fleet, np.array(dispatch(fleet)))
    before_ms = loads.ms_R.max()
    for _ in range(12):
        relieve(loads, 1)
        assert loads.ms_R == pytest.approx(times_of(kinds, fleet, loads.replica_M.tolist()), rel=1e-9, abs=1e-9)
        assert loads.ms_R.max() <= before_ms * (1 + 1e-12)
        before_ms = loads.ms_R.max()
    held = [fleet.lengths[index] <= kinds[replica].max_tokens for index, replica in enumerate(loads.replica_M.tolist())]
    assert all(held)


@pytest.mark.parametrize("seed", range(40))
def test_an_exchange_is_worth_what_it_says(seed: int) -> None:
    _, fleet = drawn(seed)
    loads = Loads(fleet, np.array(dispatch(fleet)))
    slowest = int(loads.ms_R.argmax())
    for exchange in exchanges(loads, slowest, 3):
        after = Loads(fleet, loads.replica_M)
        after.exchange(exchange)
        worse_ms = max(after.ms_R[slowest], after.ms_R[exchange.taker])
        assert worse_ms == pytest.approx(exchange.worse_ms, rel=1e-9)
        assert worse_ms < loads.ms_R[slowest]


@pytest.mark.parametrize("seed", range(40))
def test_no_single_move_or_swap_is_left_that_helps(seed: int) -> None:
    kinds, fleet = drawn(seed, pipelines=(1,))
    loads = Loads(fleet, np.array(dispatch(fleet)))
    relieve(loads, 1_000)
    times_ms = times_of(kinds, fleet, loads.replica_M.tolist())
    slowest = times_ms.index(max(times_ms))
    own = [index for index, replica in enumerate(loads.replica_M.tolist()) if replica == slowest]
    for index in own:
        for other in range(len(kinds)):
            if other == slowest or fleet.lengths[index] > kinds[other].max_tokens:
                continue
            moved = loads.replica_M.tolist()
            moved[index] = other
            after_ms = times_of(kinds, fleet, moved)
            assert max(after_ms[slowest], after_ms[other]) >= times_ms[slowest] * (1 - 1e-6)


def test_dispatch_gives_each_sequence_to_the_replica_that_is_done_first() -> None:
    random = Random(1)
    kinds = [random_kind(random, (1,)) for _ in range(2)] * 3
    lengths = sorted((random.randint(1, min(kind.max_tokens for kind in kinds)) for _ in range(60)), reverse=True)
    fleet = Fleet.of(kinds, lengths)
    chosen = dispatch(fleet)
    for index, replica in enumerate(chosen):
        before = times_of(kinds, Fleet.of(kinds, lengths[: index + 1]), [*chosen[:index], -1])
        same = [other for other, kind in enumerate(kinds) if kind == kinds[replica]]
        assert before[replica] == min(before[other] for other in same)


def test_pairs_are_exchanged_where_single_sequences_do_not_help() -> None:
    kind = ReplicaKind(1, "1f1b", SchemeCost(0.0, 1.0, 0.0, 1_000))
    fleet = Fleet.of([kind] * 2, [30, 20, 14, 8, 8, 2])
    loads = Loads(fleet, np.array([0, 1, 0, 1, 1, 1]))
    assert loads.ms_R.tolist() == [44.0, 38.0] and exchanges(loads, 0, 1) == []
    relieve(loads, 50)
    assert loads.ms_R.max() < 44.0


def test_many_sequences_are_searched_by_some_of_them() -> None:
    """More than a round looks at: it still ends, and balances."""
    kind = ReplicaKind(1, "1f1b", SchemeCost(1e-6, 1.0, 2.0, 10_000))
    lengths = sorted((Random(3).randint(1, 2_000) for _ in range(3_000)), reverse=True)
    loads = Loads(Fleet.of([kind] * 40, lengths), np.arange(3_000) % 40)
    relieve(loads, 100)
    assert loads.ms_R.max() < 1.02 * loads.ms_R.mean()
