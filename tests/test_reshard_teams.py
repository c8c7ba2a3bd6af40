"""Teams: who can serve itself by one collective; what several teams divide."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from hgraph.annotation import Annotation
from hgraph.reshard_needs import Need, find_needs, merge_boxes
from hgraph.reshard_teams import boxes_within, cut_boxes, first_received, teams_of_terms, tiling_teams
from hgraph.shard_map import Box, box_numel, shard_map


def plan_needs(source: str, target: str, shape: tuple[int, ...]) -> tuple[Need, ...]:
    return find_needs(*(shard_map(Annotation.parse(text), shape) for text in (source, target)))


def test_large_parts_make_teams_first_and_none_is_used_twice() -> None:
    halves, thirds = {3: 0b000111, 4: 0b111000}, {0: 0b000011, 1: 0b001100, 2: 0b110000}
    assert tiling_teams({**thirds, **halves}, 0b111111, {}) == [(3, 4), (0, 1, 2)]


def test_copies_make_a_team_each_and_the_rest_stays() -> None:
    parts = {5: 0b01, 0: 0b10, 2: 0b01, 7: 0b10, 1: 0b01, 4: 0b11, 6: 0}
    assert tiling_teams(parts, 0b11, {}) == [(0, 1), (2, 7)], "4 has all, 5 finds no other half, 6 has nothing"


def test_a_part_that_fits_nowhere_is_left_out() -> None:
    parts = {0: 0b0111, 1: 0b0011, 2: 0b1100}
    assert tiling_teams(parts, 0b1111, {}) == [(1, 2)]
    assert tiling_teams({0: 0b0111, 1: 0b1100}, 0b1111, {}) == []


def test_a_search_for_a_team_ends() -> None:
    parts = {rank: 0b11 << bit for rank, bit in enumerate(list(range(0, 60, 2)) * 2 + list(range(1, 60)))}
    whole = (1 << 61) - 1
    assert tiling_teams(parts, whole, {}) == [], "pairs cannot make up an odd number"


@settings(max_examples=100)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_teams_make_up_the_whole(degrees: list[int], order: random.Random) -> None:
    """Subgroups of any degrees that split 60 parts each: one team per subgroup of two or more."""
    ranks = order.sample(range(100), sum(degrees))
    parts: dict[int, int] = {}
    for degree in degrees:
        size = 60 // degree
        parts.update({ranks.pop(): ((1 << size) - 1) << (size * position) for position in range(degree)})
    teams = tiling_teams(parts, (1 << 60) - 1, {})
    assert sorted(map(len, teams)) == sorted(degree for degree in degrees if degree > 1)
    for team in teams:
        assert sum(parts[rank] for rank in team) == (1 << 60) - 1


def test_teams_of_terms_go_by_what_their_ranks_receive() -> None:
    first, second = ((0, 2),), ((2, 4),)
    assert teams_of_terms(((0, 2), (1, 3)), {}) == [(0, 1), (2, 3)]
    assert teams_of_terms(((0, 2), (1, 3)), {0: first, 3: first, 1: second, 2: second}) == [(0, 3), (1, 2)]
    assert teams_of_terms(((0, 1, 2), (3,)), {2: first}) == [(2, 3)], "receivers first"
    assert first_received(plan_needs("0[]", "1-2[S(0)]", (4,))) == {1: first, 2: second}


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=3),
    st.integers(1, 5),
    st.sets(st.integers(0, 2)),
)
def test_slabs_hold_everything_once(ends: list[tuple[int, int]], count: int, free_dims: set[int]) -> None:
    box: Box = tuple((start, start + length) for start, length in ends)
    slabs = cut_boxes([box], count, sorted(free_dims))
    assert len(slabs) <= count
    assert merge_boxes(slabs) == (box,) and sum(map(box_numel, slabs)) == box_numel(box)
    assert all(slab[dim] == box[dim] for slab in slabs for dim in free_dims if dim < len(box))


def test_slabs_cut_the_first_dim_that_is_whole_and_long_enough() -> None:
    left, right = ((0, 4), (0, 4), (0, 4)), ((4, 8), (0, 4), (0, 4))
    assert cut_boxes([left, right], 2, ()) == [((0, 8), (0, 2), (0, 4)), ((0, 8), (2, 4), (0, 4))]
    assert cut_boxes([left, right], 2, (1,)) == [((0, 8), (0, 4), (0, 2)), ((0, 8), (0, 4), (2, 4))]
    assert cut_boxes([left, right], 8, ()) == [((row, row + 1), (0, 4), (0, 4)) for row in range(8)]
    assert len(cut_boxes([left, right], 9, ())) == 8
    assert boxes_within([left, right], ((3, 5), (0, 4), (1, 2))) == (((3, 5), (0, 4), (1, 2)),)
