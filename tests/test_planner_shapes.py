"""Bins in the shape that 1F1B runs fastest."""

from __future__ import annotations

import pytest

from hgraph.profile import SchemeCost
from hgraph.simulate import schedule_ms
from strategies.cost import ReplicaKind
from strategies.packing import Packer
from strategies.schedule_cuts import best_times, capacities_ms
from strategies.shapes import shaped_bins


def kind_of(pp: int, limit: int = 10_000, c: float = 20.0, schedule: str = "1f1b") -> ReplicaKind:
    return ReplicaKind(pp, schedule, SchemeCost(0.0, 1.0, c, limit))


@pytest.mark.parametrize("pp", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("v", [2, 5, 12, 24])
def test_shapes_are_shares_that_beat_equal_ones(pp: int, v: int) -> None:
    shape = best_times(kind_of(pp), v)
    assert shape is not None and sum(shape) == pytest.approx(1.0, abs=2e-3)
    taken = schedule_ms("1f1b", pp, shape)
    assert taken < schedule_ms("1f1b", pp, [1 / v] * v)
    assert taken <= 1.01 * sum(shape) * _least(pp, v, min(shape))


def _least(pp: int, v: int, fixed: float) -> float:
    """Returns the least time of v micro-batches of sum 1, each of at least `fixed`, by bisection on the capacity."""
    low, high = 1.0, float(pp + v)
    while high - low > 1e-6:
        middle = (low + high) / 2
        enough = capacities_ms(kind_of(pp, c=fixed), middle, v)[v - 1] >= 1.0 - v * fixed
        low, high = (low, middle) if enough else (middle, high)
    return high


def test_bins_follow_the_shape_and_hold_everything() -> None:
    lengths = [30] * 10 + [10] * 40
    bins = shaped_bins(kind_of(2, c=0.0), lengths, [float(length) for length in lengths], 4)
    assert bins is not None
    assert sorted(position for own in bins for position in own) == list(range(50))
    times = [sum(lengths[position] for position in own) for own in bins]
    shape = best_times(kind_of(2, c=0.0), 4)
    assert shape is not None
    assert times == pytest.approx([700 * share for share in shape], abs=15)


def test_bins_respect_the_limit_or_are_none() -> None:
    lengths = [60, 60, 40, 30]
    works = [float(length) for length in lengths]
    assert shaped_bins(kind_of(2, limit=60), lengths, works, 2) is None
    bins = shaped_bins(kind_of(2, limit=70), lengths, works, 4)
    assert bins is not None and all(sum(lengths[position] for position in own) <= 70 for own in bins)


@pytest.mark.parametrize("kind", [kind_of(1), kind_of(2, schedule="gpipe"), kind_of(5)])
def test_no_shape_where_equal_is_best_or_none_is_known(kind: ReplicaKind) -> None:
    assert shaped_bins(kind, [10, 10, 10], [10.0] * 3, 3) is None


def test_the_packer_comes_close_to_what_is_possible() -> None:
    """Sixty short sequences on two stages: within 1 % of the least time of any packing and order."""
    kind = kind_of(2)
    lengths = tuple(sorted((40 + 7 * (i % 13) for i in range(60)), reverse=True))
    packing = Packer().pack(kind, lengths)
    below = [v for v in range(1, 41) if capacities_ms(kind, packing.ms * 0.99, 40)[v - 1] >= sum(lengths)]
    assert below == []
