"""Shard maps: one test per invariant of `hgraph/shard_map.py`, and what annotations mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from hgraph.annotation import Annotation
from hgraph.check_reshard import check_shard_map
from hgraph.errors import InvalidAnnotation
from hgraph.shard_map import Box, Piece, ShardMap, box_numel, box_shape, intersect, relative, same_map, shard_map
from tests.annotations import Pair, annotation_pairs


def boxes(text: str, shape: tuple[int, ...]) -> list[Box]:
    return [piece.box for piece in shard_map(Annotation.parse(text), shape).pieces]


@given(annotation_pairs())
def test_every_shard_map_keeps_its_invariants(pair: Pair) -> None:
    check_shard_map(shard_map(pair.source, pair.shape))


def test_every_element_is_covered() -> None:
    pieces = shard_map(Annotation.parse("0-1[S(0)]"), (5,))
    broken = replace(pieces, pieces=(pieces.pieces[0], replace(pieces.pieces[1], box=((4, 5),))))
    with pytest.raises(InvalidAnnotation, match=r"expected every element to be held, got none of \(\(3, 4\),\)"):
        check_shard_map(broken)


def test_a_family_covers_its_region_with_every_term() -> None:
    pieces = shard_map(Annotation.parse("0-1[P] + 2[] @ R"), (5,))
    broken = replace(pieces, pieces=(replace(pieces.pieces[0], box=((0, 4),)), *pieces.pieces[1:]))
    with pytest.raises(InvalidAnnotation, match=r"expected terms \[1, 2\] of family 1 at \(\(4, 5\),\), got \[2\]"):
        check_shard_map(broken)


def test_each_rank_has_one_piece() -> None:
    with pytest.raises(InvalidAnnotation, match=r"one piece per rank in ascending order, got ranks \[0, 0\]"):
        check_shard_map(ShardMap((2,), (Piece(0, ((0, 1),)), Piece(0, ((1, 2),)))))


@pytest.mark.parametrize("box", [((0, 3),), ((-1, 2),), ((2, 1),), ((0, 2), (0, 1))])
def test_boxes_lie_inside_the_shape(box: Box) -> None:
    with pytest.raises(InvalidAnnotation, match=r"expected a box inside \(2,\) on rank 0"):
        check_shard_map(ShardMap((2,), (Piece(0, box),)))


def test_uneven_and_empty_boxes_are_legal() -> None:
    assert boxes("0-3[S(0)]", (7,)) == [((0, 2),), ((2, 4),), ((4, 6),), ((6, 7),)]
    assert boxes("0-3[S(0)]", (2,)) == [((0, 1),), ((1, 2),), ((2, 2),), ((2, 2),)]
    assert boxes("0-1[S(0)]", (50257, 8)) == [((0, 25129), (0, 8)), ((25129, 50257), (0, 8))]
    assert boxes("0-1[R]", ()) == [(), ()]


def test_the_hetero_split_comes_first() -> None:
    assert boxes("0-1[S(1)] + 2[] @ S(0)", (3, 5)) == [
        ((0, 2), (0, 3)),
        ((0, 2), (3, 5)),
        ((2, 3), (0, 5)),
    ]
    assert boxes("2,0[S(0)] + 1[] @ S(0:1,5)", (6,)) == [((1, 1),), ((1, 6),), ((0, 1),)]


def test_ranks_follow_their_order_in_the_group() -> None:
    assert boxes("3,1,2,0[2x2: S(0), S(1)]", (2, 2)) == [
        ((1, 2), (1, 2)),
        ((0, 1), (1, 2)),
        ((1, 2), (0, 1)),
        ((0, 1), (0, 1)),
    ]


@pytest.mark.parametrize(
    ("text", "families"),
    [
        ("0-1[S(0)]", [(0, 0), (0, 0)]),
        ("0-1[P]", [(1, 1), (1, 2)]),
        ("0-3[2x2: R, P]", [(1, 1), (1, 2), (1, 1), (1, 2)]),
        ("0-3[2x2: P, S(0)]", [(1, 1), (1, 1), (1, 3), (1, 3)]),
        ("0-1[P] + 2-3[P] @ R", [(1, 1), (1, 2), (3, 3), (3, 4)]),
        ("0-1[S(0)] + 2-3[P] @ R", [(0, 0), (0, 0), (3, 3), (3, 4)]),
        ("0-1[P] + 2-3[S(0)] @ P", [(0, 1), (0, 2), (0, 3), (0, 3)]),
    ],
)
def test_families_and_terms(text: str, families: list[tuple[int, int]]) -> None:
    pieces = shard_map(Annotation.parse(text), (4, 4)).pieces
    assert [(piece.family, piece.term) for piece in pieces] == families


def test_same_map_compares_meanings() -> None:
    nested, flat = Annotation.parse("0-3[2x2: S(0), S(0)]"), Annotation.parse("0-3[S(0)]")
    assert nested != flat
    assert same_map(nested, flat, (8,))
    assert not same_map(nested, flat, (6,))
    assert same_map(Annotation.parse("0-1[S(0:3,2)]"), Annotation.parse("0-1[S(0)]"), (5,))


def test_what_does_not_fit_a_shape_is_refused() -> None:
    with pytest.raises(InvalidAnnotation, match=r"S\(2\) on a tensor of 2 dims; expected a dim below 2"):
        shard_map(Annotation.parse("0-1[S(2)]"), (3, 3))
    with pytest.raises(InvalidAnnotation, match="expected 2 sizes that sum to 6, got 2 sizes that sum to 5"):
        shard_map(Annotation.parse("0-1[S(0:3,2)]"), (6,))


def test_a_map_is_asked_by_rank() -> None:
    pieces = shard_map(Annotation.parse("4-5[S(0)]"), (5, 3))
    assert pieces.local_shape(4) == (3, 3)
    with pytest.raises(InvalidAnnotation, match=r"rank 0 holds nothing; ranks are \[4, 5\]"):
        pieces.piece(0)


def test_boxes() -> None:
    assert box_shape(((1, 3), (2, 2))) == (2, 0)
    assert box_numel(((1, 3), (2, 5))) == 6
    assert box_numel(()) == 1
    assert intersect(((0, 3), (0, 3)), ((2, 5), (1, 2))) == ((2, 3), (1, 2))
    assert intersect(((0, 3),), ((3, 5),)) is None
    assert relative(((2, 4),), ((1, 6),)) == (slice(1, 3),)


@pytest.mark.case(85)
def test_six_rows_over_four_ranks_are_two_two_one_one() -> None:
    assert boxes("0-3[S(0)]", (6, 256)) == [((a, b), (0, 256)) for a, b in [(0, 2), (2, 4), (4, 5), (5, 6)]]
    assert boxes("0-3[S(0:2,2,2,0)]", (6, 256))[3] == ((6, 6), (0, 256))


@pytest.mark.case(87)
@pytest.mark.parametrize("text", ["0-7[2x4: S(0), S(0)]", "0-7[4x2: S(0), S(0)]", "0-7[S(0)]", "0-7[2x4: R, S(0)]"])
def test_two_elements_over_eight_ranks_are_covered_once(text: str) -> None:
    found = boxes(text, (2,))
    count = np.zeros(2, dtype=int)
    for ((start, stop),) in found:
        count[start:stop] += 1
    copies = 2 if "R" in text else 1
    assert count.tolist() == [copies, copies]
    assert sum(stop == start for ((start, stop),) in found) == 8 - 2 * copies
