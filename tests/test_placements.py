"""Placements: one test per invariant of `hgraph/placements.py`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hgraph.errors import InvalidAnnotation
from hgraph.placements import Partial, Placement, Replicate, Shard, balanced_sizes, parse_placement


def placements() -> st.SearchStrategy[Placement]:
    sizes = st.one_of(st.none(), st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple))
    shards = st.builds(Shard, st.integers(0, 12), sizes)
    return st.one_of(st.just(Replicate()), st.builds(Partial, st.sampled_from(["sum", "max"])), shards)


def test_a_dim_is_not_negative() -> None:
    with pytest.raises(InvalidAnnotation, match=r"expected a dim of 0 or more, got -1; count dims from the front"):
        Shard(-1)


def test_explicit_sizes_are_not_negative() -> None:
    with pytest.raises(InvalidAnnotation, match=r"Shard\(0\): expected sizes of 0 or more, got \(3, -1\)"):
        Shard(0, (3, -1))


@given(placements())
def test_the_text_parses_back(placement: Placement) -> None:
    assert parse_placement(str(placement)) == placement


@pytest.mark.parametrize(
    ("text", "placement"),
    [
        ("R", Replicate()),
        ("S(0)", Shard(0)),
        ("S(1:3,2,2)", Shard(1, (3, 2, 2))),
        ("P", Partial()),
        ("P(sum)", Partial("sum")),
        ("P(max)", Partial("max")),
    ],
)
def test_the_notation(text: str, placement: Placement) -> None:
    assert parse_placement(text) == placement


@pytest.mark.parametrize("text", ["", "S", "S()", "S(-1)", "S(0:)", "S(0:a)", "P(mean)", "r", "R R"])
def test_what_is_no_placement_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(InvalidAnnotation, match=r"expected R, S\(dim\), S\(dim:sizes\), P or P\(max\), got "):
        parse_placement(text)


def test_a_reduction_is_sum_or_max() -> None:
    with pytest.raises(InvalidAnnotation, match="expected a reduction 'sum' or 'max', got 'mean'"):
        Partial("mean")  # type: ignore[arg-type]


def test_lists_of_sizes_are_equal_to_tuples() -> None:
    assert Shard(0, [3, 2]) == Shard(0, (3, 2))  # type: ignore[arg-type]
    assert hash(Shard(0, [3, 2])) == hash(Shard(0, (3, 2)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("length", "parts", "sizes"),
    [(6, 4, (2, 2, 1, 1)), (7, 4, (2, 2, 2, 1)), (2, 4, (1, 1, 0, 0)), (0, 3, (0, 0, 0)), (8, 1, (8,))],
)
def test_a_balanced_split_gives_the_first_parts_one_more(length: int, parts: int, sizes: tuple[int, ...]) -> None:
    assert balanced_sizes(length, parts) == sizes
    assert Shard(0).split(length, parts) == sizes


def test_explicit_sizes_must_fit_what_they_split() -> None:
    assert Shard(0, (5, 2)).split(7, 2) == (5, 2)
    with pytest.raises(InvalidAnnotation, match="expected 2 sizes that sum to 8, got 2 sizes that sum to 7"):
        Shard(0, (5, 2)).split(8, 2)
    with pytest.raises(InvalidAnnotation, match="expected 3 sizes that sum to 7, got 2 sizes that sum to 7"):
        Shard(0, (5, 2)).split(7, 3)
