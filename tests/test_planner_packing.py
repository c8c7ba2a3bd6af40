"""Packing: micro-batches under the token limit, as few as needed or as many as the pipeline wants, well ordered."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hgraph.profile import SchemeCost
from strategies.cost import ReplicaKind
from strategies.packing import Packer, evened, fewest_bins, fewest_bins_bound, refine
from tests.planner_reference import best_replica_ms, event_driven_ms, partitions, random_kind


def kind_of(
    pp: int = 1, schedule: str = "1f1b", a: float = 0.0, b: float = 1.0, c: float = 1.0, limit: int = 100
) -> ReplicaKind:
    return ReplicaKind(pp, schedule, SchemeCost(a, b, c, limit))


@pytest.mark.case(32)
@pytest.mark.parametrize(("limit", "expected"), [(9, 4), (8, 4), (16, 2)])
def test_two_fours_share_a_bin_whatever_the_limit(limit: int, expected: int) -> None:
    assert len(fewest_bins([4] * 8, limit)) == expected


@pytest.mark.case(46)
def test_no_bin_exceeds_the_limit_though_the_token_bound_would_allow_fewer() -> None:
    assert fewest_bins([7] * 8, 8) == tuple((position,) for position in range(8))
    assert fewest_bins_bound([7] * 8, 8) == 8


@pytest.mark.case(48)
def test_a_sequence_as_long_as_the_limit_is_one_micro_batch() -> None:
    assert Packer().pack(kind_of(limit=20), (20,)).groups == ((0,),)


def test_exact_subset_sums_beat_best_fit_where_it_wastes_room() -> None:
    assert len(fewest_bins([6, 5, 5, 4, 4, 3, 3], 15)) == 2
    assert len(fewest_bins([44, 24, 24, 22, 21, 17, 8, 8, 6, 6], 60)) == 3


@pytest.mark.parametrize("seed", range(40))
def test_the_number_of_bins_is_the_least_or_one_more(seed: int) -> None:
    random = Random(seed)
    limit = random.randint(10, 40)
    lengths = sorted((random.randint(1, limit) for _ in range(random.randint(1, 7))), reverse=True)
    groups = fewest_bins(lengths, limit)
    least = min(
        len(p) for p in partitions(range(len(lengths))) if all(sum(lengths[i] for i in group) <= limit for group in p)
    )
    assert fewest_bins_bound(lengths, limit) <= least <= len(groups) <= least + 1


@given(
    st.lists(st.integers(1, 200), max_size=60),
    st.integers(1, 4),
    st.sampled_from(["1f1b", "gpipe"]),
    st.sampled_from([0.0, 3.0, 90.0]),
)
def test_a_packing_holds_every_sequence_once_within_the_limit(
    lengths: list[int], pp: int, schedule: str, c: float
) -> None:
    lengths.sort(reverse=True)
    kind = kind_of(pp, schedule, a=1e-3, c=c, limit=200)
    packing = Packer().pack(kind, tuple(lengths))
    packing = evened(kind, lengths, refine(kind, lengths, packing))
    assert sorted(position for group in packing.groups for position in group) == list(range(len(lengths)))
    assert all(group and sum(lengths[position] for position in group) <= 200 for group in packing.groups)
    times_ms = [kind.cost.micro_batch_ms([lengths[position] for position in group]) for group in packing.groups]
    assert packing.ms == pytest.approx(event_driven_ms(schedule, pp, times_ms), rel=1e-9, abs=1e-9)


def test_micro_batches_of_one_stage_are_evened_out_with_the_longest_at_the_ends() -> None:
    """Best fit leaves a micro-batch of 10 tokens at the end, behind which no gradient would hide."""
    kind = kind_of(pp=1, a=0.0, c=3.0, limit=200)
    lengths = (90, 60, 50, 50, 50, 50, 30, 20, 10)
    packed = Packer().pack(kind, lengths)
    packing = evened(kind, lengths, packed)
    tokens = [sum(lengths[position] for position in group) for group in packing.groups]
    assert len(packing.groups) == len(packed.groups) == 3
    assert max(tokens) - min(tokens) <= 20
    assert tokens[1] == min(tokens) and tokens[2] == max(tokens)
    assert (packing.ms, packing.flow_ms) == (packed.ms, packed.flow_ms)
    staged = Packer().pack(kind_of(pp=2, a=0.0, c=3.0, limit=200), lengths)
    assert evened(kind_of(pp=2, a=0.0, c=3.0, limit=200), lengths, staged) is staged


def test_no_sequence_is_no_micro_batch() -> None:
    packing = Packer().pack(kind_of(pp=3), ())
    assert packing.groups == () and packing.ms == 0.0


@pytest.mark.parametrize("seed", range(30))
def test_packing_is_close_to_the_best_over_all_packings_and_orders(seed: int) -> None:
    random = Random(seed)
    kind = random_kind(random)
    most = 5 if kind.pp > 1 else 7
    lengths = sorted((random.randint(1, kind.max_tokens) for _ in range(random.randint(1, most))), reverse=True)
    packing = refine(kind, lengths, Packer().pack(kind, tuple(lengths)))
    best_ms = best_replica_ms(kind, lengths, simulated=True)
    assert best_ms <= packing.ms * (1 + 1e-9)
    assert packing.ms <= best_ms * 1.05 + kind.cost.c


def test_more_micro_batches_when_the_ramp_costs_more_than_they_do() -> None:
    cheap, dear = kind_of(pp=4, c=0.1, limit=1000), kind_of(pp=4, c=5000.0, limit=1000)
    lengths = (50,) * 16
    assert len(Packer().pack(cheap, lengths).groups) > 4
    assert len(Packer().pack(dear, lengths).groups) == 1


def test_a_packer_remembers() -> None:
    packer, kind = Packer(), kind_of(pp=2)
    assert packer.pack(kind, (30, 20, 10)) is packer.pack(kind_of(pp=2), (30, 20, 10))
