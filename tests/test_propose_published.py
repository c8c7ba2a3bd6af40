"""The published dynamic program: against brute force, and the results that were published."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from hgraph.errors import InvalidInput
from hgraph.profile_file import read_profile_file
from hgraph.scheme_text import parse_scheme
from strategies.propose_published import published_layouts
from strategies.scheme_table import SchemeLimits, SchemeTable, scheme_table
from tests.proposals import small_table

LENGTHS = np.array([5, 9, 30, 120, 150, 180, 260, 290, 420, 700, 1100], dtype=np.int64)


def cost_ms(table: SchemeTable, scheme: int, lengths: list[int]) -> float:
    def one(length: int) -> float:
        return float((table.a_T[scheme] * length + table.b_T[scheme]) * length + table.c_T[scheme])

    return sum(map(one, lengths)) + float(table.pp_T[scheme] - 1) * one(max(lengths, default=0))


def brute_force_ms(table: SchemeTable, num_ranks: int, longest: int, step: int) -> float:
    """Returns the least time over all ways to cut the lengths into bands, each with replicas of one scheme."""
    classes = list(range(step, longest + 1, step))
    best_ms = float("inf")
    for num_bands in range(1, 4):
        for cuts in combinations(classes[:-1], num_bands - 1):
            bounds = [0, *cuts, longest]
            for schemes in product(range(len(table)), repeat=num_bands):
                if any(table.limit_T[scheme] < above for scheme, above in zip(schemes, bounds[1:], strict=True)):
                    continue
                costs = [
                    cost_ms(table, scheme, [s for s in LENGTHS.tolist() if low < s <= high])
                    for scheme, low, high in zip(schemes, bounds, bounds[1:], strict=False)
                ]
                for counts in product(*(range(1, num_ranks // int(table.size_T[scheme]) + 1) for scheme in schemes)):
                    if sum(n * table.size_T[scheme] for n, scheme in zip(counts, schemes, strict=True)) <= num_ranks:
                        best_ms = min(best_ms, max(c / n for c, n in zip(costs, counts, strict=True)))
    return best_ms


@pytest.mark.parametrize("num_ranks", [4, 6])
def test_dynamic_programming_equals_brute_force(num_ranks: int) -> None:
    """At most three bands: the tables are too small for a fourth to help."""
    table = small_table(num_ranks)
    plans = published_layouts(table, num_ranks, LENGTHS, longest=1200, length_step=100)
    for plan in plans[::3]:
        assert plan.total_ms == pytest.approx(brute_force_ms(table, num_ranks, plan.longest, 100))
        assert sum(plan.layout * table.size_T) <= num_ranks
        assert table.holds(plan.layout) >= plan.longest


def test_times_rise_with_the_longest_sequence() -> None:
    plans = published_layouts(small_table(), 8, LENGTHS, longest=1200, length_step=50)
    assert [plan.longest for plan in plans] == list(range(50, 1201, 50))
    times = [plan.total_ms for plan in plans]
    assert times == sorted(times)


def test_nothing_holds_the_longest() -> None:
    with pytest.raises(InvalidInput, match="no layout holds a sequence of 2,100 tokens"):
        published_layouts(small_table(), 8, LENGTHS, longest=2100, length_step=100)


@pytest.mark.long
def test_published_results() -> None:
    """32B on 64 GPUs, lengths shipped with this package (a tenth of the published set): same layouts where it counts.

    The published objective over 50,000 lengths is 937,275.66 ms; a sample of 5,000 gives a tenth of it.
    """
    profile = read_profile_file("llama-32b.a800-80gb").profile(64)
    table, _ = scheme_table({parse_scheme(n): c for n, c in profile.schemes.items()}, 64, SchemeLimits())
    from strategies.length_data import read_lengths

    plans = published_layouts(table, 64, read_lengths("commoncrawl-like").lengths, longest=32_768)
    assert plans[-1].total_ms == pytest.approx(93_727.566, rel=0.02)
    assert len({plan.layout for plan in plans}) == pytest.approx(27, abs=4)
