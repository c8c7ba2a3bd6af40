"""Annotations: one test per invariant of `hgraph/annotation.py`."""

from __future__ import annotations

import pytest
from hypothesis import given

from hgraph.annotation import Annotation, Subgroup, replicated, sharded
from hgraph.errors import InvalidAnnotation
from hgraph.placements import Partial, Replicate, Shard
from hgraph.shard_map import shard_map
from tests.annotations import Pair, annotation_pairs


@pytest.mark.parametrize(
    ("ranks", "mesh", "message"),
    [
        ((), (), "expected at least one rank, got none"),
        ((0, 1, 0), (3,), r"expected distinct ranks of 0 or more, got \(0, 1, 0\)"),
        ((0, -1), (2,), r"expected distinct ranks of 0 or more, got \(0, -1\)"),
        ((0, 1, 2), (2,), "expected a mesh of 3 ranks, got 2"),
        ((0, 1, 2), (2, 2), "expected a mesh of 3 ranks, got 2x2"),
        ((0,), (-1, -1), "expected a mesh of 1 ranks, got -1x-1"),
    ],
)
def test_a_subgroup_has_distinct_ranks_that_fill_its_mesh(
    ranks: tuple[int, ...], mesh: tuple[int, ...], message: str
) -> None:
    with pytest.raises(InvalidAnnotation, match=message):
        Subgroup(ranks, mesh, (Replicate(),) * len(mesh))


def test_ranks_have_a_limit() -> None:
    assert Annotation.parse("1048575[]").ranks == (1048575,)
    with pytest.raises(InvalidAnnotation, match=r"subgroup: expected ranks below 1048576 \(2\^20\), got rank 1048576"):
        Subgroup((0, 1048576), (2,), (Replicate(),))


def test_a_subgroup_has_one_placement_per_axis() -> None:
    with pytest.raises(InvalidAnnotation, match=r"one placement per axis of mesh \(2, 2\), got 1 placements"):
        Subgroup((0, 1, 2, 3), (2, 2), (Replicate(),))


def test_explicit_sizes_fit_the_axis() -> None:
    with pytest.raises(InvalidAnnotation, match=r"S\(0:3,2,2\) on an axis of 2 ranks; expected 2 sizes"):
        Subgroup((0, 1), (2,), (Shard(0, (3, 2, 2)),))
    with pytest.raises(InvalidAnnotation, match=r"hetero S\(0:3,2,2\) for 2 subgroups"):
        Annotation((Subgroup((0,)), Subgroup((1,))), Shard(0, (3, 2, 2)))


def test_axes_that_shard_one_dim_nest_in_mesh_order() -> None:
    nested = shard_map(Annotation.parse("0-5[2x3: S(0), S(0)]"), (7,))
    assert [piece.box for piece in nested.pieces] == [((0, 2),), ((2, 3),), ((3, 4),), ((4, 5),), ((5, 6),), ((6, 7),)]
    other = shard_map(Annotation.parse("0-5[3x2: S(0), S(0)]"), (7,))
    assert [piece.box for piece in other.pieces] == [((0, 2),), ((2, 3),), ((3, 4),), ((4, 5),), ((5, 6),), ((6, 7),)]
    uneven = shard_map(Annotation.parse("0-3[2x2: S(0:5,2), S(0)]"), (7,))
    assert [piece.box for piece in uneven.pieces] == [((0, 3),), ((3, 5),), ((5, 6),), ((6, 7),)]


def test_a_rank_appears_in_one_subgroup() -> None:
    with pytest.raises(InvalidAnnotation, match=r"rank 1 is in two subgroups, 0-1\[S\(0\)\] and 1\[\]"):
        Annotation((Subgroup((0, 1), (2,), (Shard(0),)), Subgroup((1,))), Shard(0))


def test_an_annotation_has_a_subgroup() -> None:
    with pytest.raises(InvalidAnnotation, match="expected at least one subgroup, got none"):
        Annotation(())


def test_a_union_of_one_has_no_hetero_placement() -> None:
    assert Annotation((Subgroup((0,)),), Partial()) == Annotation((Subgroup((0,)),), Replicate())
    assert not Annotation((Subgroup((0,)),), Partial()).is_partial


def test_all_partials_reduce_alike() -> None:
    with pytest.raises(InvalidAnnotation, match="expected one kind of partial, got both sum and max"):
        Annotation.parse("0-1[P] + 2[] @ P(max)")


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("0-3[1x4: S(0), S(1)]", "0-3[S(1)]"),
        ("0-3[2x2: R, R]", "0-3[R]"),
        ("0-3[2x2: P, P]", "0-3[P]"),
        ("0-7[2x1x4: R, S(0), R]", "0-7[R]"),
        ("0-3[2x2: S(0), S(0)]", "0-3[2x2: S(0), S(0)]"),
        ("0-7[2x2x2: R, S(0), R]", "0-7[2x2x2: R, S(0), R]"),
        ("0[1: S(0)]", "0[]"),
        ("0,1,2 [R]", "0-2[R]"),
    ],
)
def test_the_form_is_canonical(text: str, canonical: str) -> None:
    annotation = Annotation.parse(text)
    assert str(annotation) == canonical
    assert annotation == Annotation.parse(canonical)
    assert hash(annotation) == hash(Annotation.parse(canonical))


@given(annotation_pairs())
def test_the_text_parses_back(pair: Pair) -> None:
    assert Annotation.parse(str(pair.source)) == pair.source


@pytest.mark.parametrize(
    "text",
    ["0-3[S(0)]", "0,2,1,3[2x2: S(0), R]", "5[]", "0-1[S(1)] + 2[] @ S(0)", "4,0-2[S(0:3,2,1,1)] + 3[] @ P"],
)
def test_the_notation_is_written_as_read(text: str) -> None:
    assert str(Annotation.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-3", r"expected ranks\[placements\], as in 0-3\[S\(0\)\], got '0-3'"),
        ("0-1[S(0)] + 2[]", "a union needs a hetero placement, as in '... @ R'"),
        ("0-[S(0)]", "expected numbers and ranges such as 0-3,5, got '0-'"),
        ("0-3[2xb: R, R]", "expected a mesh such as 2x2, got '2xb'"),
        ("0-3[X]", "placement: expected R, "),
        ("0-1[]", r"subgroup: expected a mesh of 2 ranks, got no axis; write 0-1\[R\] where each holds the whole"),
        ("3,0[]", r"subgroup: expected a mesh of 2 ranks, got no axis; write 3,0\[R\] where"),
        ("0-99999999[S(0)]", r"ranks: expected ranks below 1048576 \(2\^20\), got rank 99999999"),
        ("99999999999999999999[]", r"ranks: expected ranks below 1048576 \(2\^20\), got rank 99999999999999999999"),
        ("1048576-5[R]", "ranks: expected ranks below 1048576"),
        ("0-1048575,0[R]", "ranks: expected distinct ranks, at most 1,048,576 of them, got more"),
    ],
)
def test_texts_that_are_no_annotation_are_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidAnnotation, match=message):
        Annotation.parse(text)


def test_what_an_annotation_says_of_itself() -> None:
    union = Annotation.parse("0-1[S(1)] + 2[] @ P(max)")
    assert (union.ranks, union.hsize, union.is_partial, union.reduce) == ((0, 1, 2), 2, True, "max")
    assert str(union.subgroup_of(1)) == "0-1[S(1)]"
    with pytest.raises(InvalidAnnotation, match="rank 7 is not in"):
        union.subgroup_of(7)
    assert str(union.relabel([5, 4, 3])) == "5,4[S(1)] + 3[] @ P(max)"
    assert str(union.map_placements(lambda _: Replicate())) == "0-1[R] + 2[] @ R"
    assert replicated((0, 1)).is_replicated and not sharded((0, 1), 0).is_replicated
    assert str(sharded((0, 1), 0, (3, 4))) == "0-1[S(0:3,4)]"


def test_simplify_drops_sizes_that_say_nothing() -> None:
    assert str(Annotation.parse("0-1[S(0:4,3)]").simplify((7,))) == "0-1[S(0)]"
    assert str(Annotation.parse("0-1[S(0:3,4)]").simplify((7,))) == "0-1[S(0:3,4)]"
