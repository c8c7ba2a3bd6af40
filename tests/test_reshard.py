"""Resharding: the planner against the checker and against plain numpy; what is recognised; bytes; free dims."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hgraph.annotation import Annotation
from hgraph.check_reshard import check_reshard
from hgraph.errors import InvalidAnnotation, InvalidInput
from hgraph.placements import Shard
from hgraph.reshard import lower_bound_elements, plan_reshard, reshard_bytes
from hgraph.reshard_plan import Collective, Move, Operation, ReshardPlan
from hgraph.shard_map import Box, relative, shard_map
from tests.annotations import Pair, annotation_pairs
from tests.bridge_samples import nodes
from tests.reshard_reference import is_right, run, scatter


def plan_of(source: str, target: str, shape: tuple[int, ...], **options) -> ReshardPlan:
    return plan_reshard(Annotation.parse(source), Annotation.parse(target), shape, **options)


def kinds(plan: ReshardPlan) -> list[list[str]]:
    """Returns the kinds of operation of each phase; a move is `local` or `send`."""

    def kind(operation: Operation) -> str:
        if isinstance(operation, Collective):
            return operation.kind
        return "local" if operation.sender == operation.receiver else "send"

    return [sorted(map(kind, phase)) for phase in plan.phases]


# Every pair has a plan


def check_pair(pair: Pair, collectives: bool, seed: int) -> ReshardPlan:
    """Proves the plan of a pair, runs it on numbers, and compares what it moves with the lower bound."""
    plan = plan_reshard(pair.source, pair.target, pair.shape, collectives=collectives)
    check_reshard(plan)
    assert is_right(plan, seed)
    assert sum(reshard_bytes(plan, 1).values()) >= lower_bound_elements(pair.source, pair.target, pair.shape)
    return plan


@settings(max_examples=300)
@given(annotation_pairs(), st.integers(0, 99))
def test_every_pair_has_a_plan(pair: Pair, seed: int) -> None:
    check_pair(pair, True, seed)


@settings(max_examples=200)
@given(annotation_pairs(), st.integers(0, 99))
def test_every_pair_has_a_plan_of_one_phase_of_moves(pair: Pair, seed: int) -> None:
    plan = check_pair(pair, False, seed)
    assert len(plan.phases) <= 1
    for operation in (operation for phase in plan.phases for operation in phase):
        assert isinstance(operation, Move) and operation.origin == "source"


@pytest.mark.long
@settings(max_examples=5000, suppress_health_check=list(HealthCheck))
@given(annotation_pairs(), st.integers(0, 99), st.booleans())
def test_five_thousand_pairs(pair: Pair, seed: int, collectives: bool) -> None:
    check_pair(pair, collectives, seed)


@settings(max_examples=100)
@given(annotation_pairs())
def test_plans_are_reproducible(pair: Pair) -> None:
    first, second = (plan_reshard(pair.source, pair.target, pair.shape) for _ in range(2))
    assert first == second and hash(first) == hash(second)


def test_an_annotation_that_does_not_fit_the_shape_is_refused() -> None:
    with pytest.raises(InvalidAnnotation, match=r"S\(1\) on a tensor of 1 dims"):
        plan_of("0-1[S(0)]", "0-1[S(1)]", (4,))


# Recognition

RECOGNISED = [
    ("equal maps", "0-3[2x2: S(0), S(0)]", "0-3[S(0)]", (8,), []),
    ("local slice", "0-3[R]", "0-3[S(0)]", (8,), [["local"] * 4]),
    ("replica available, also on other boxes", "0-1[S(0)] + 2[] @ R", "1[] + 2[] @ S(0)", (4,), [["local", "send"]]),
    ("partial to replicate", "0-3[P]", "0-3[R]", (5, 3), [["all_reduce"]]),
    ("maximum to replicate", "0-3[P(max)]", "0-3[R]", (5, 3), [["all_reduce"]]),
    ("partial to shard", "0-3[P]", "0-3[S(1)]", (5, 7), [["reduce_scatter"]]),
    ("shard to replicate", "0-3[S(1)]", "0-3[R]", (5, 7), [["all_gather"]]),
    ("shard to replicate, any order of ranks", "2,0,3,1[S(1)]", "0-3[R]", (5, 7), [["all_gather"]]),
    ("shard i to shard j", "0-3[S(0)]", "0-3[S(1)]", (5, 7), [["all_to_all"]]),
    ("same boxes, other ranks", "0-1[S(0)]", "2-3[S(0)]", (4,), [["send"] * 2]),
    ("same boxes, ranks swapped", "0-1[S(0)]", "1,0[S(0)]", (4,), [["send"] * 2]),
    ("one group per row of a mesh", "0-3[2x2: S(0), P]", "0-3[2x2: S(0), R]", (4, 4), [["all_reduce"] * 2]),
    ("one group per column", "0-3[2x2: P, S(0)]", "0-3[2x2: R, S(0)]", (4, 4), [["all_reduce"] * 2]),
    ("gather within rows", "0-3[2x2: S(0), S(1)]", "0-3[2x2: S(0), R]", (4, 4), [["all_gather"] * 2]),
    ("scatter within rows", "0-3[2x2: S(0), P]", "0-3[2x2: S(0), S(1)]", (4, 4), [["reduce_scatter"] * 2]),
    ("exchange within rows", "0-3[2x2: S(0), S(1)]", "0-3[2x2: S(0), S(0)]", (4, 4), [["all_to_all"] * 2]),
    ("replicated partial: one copy each", "0-3[2x2: R, P]", "0-3[R]", (4,), [["all_reduce"] * 2]),
    ("replicated partial, scattered", "0-3[2x2: R, P]", "0-3[2x2: R, S(0)]", (4,), [["reduce_scatter"] * 2]),
    ("replicated shards, gathered", "0-3[2x2: R, S(0)]", "0-3[R]", (4,), [["all_gather"] * 2]),
    ("replicated shards, exchanged", "0-3[2x2: R, S(0)]", "0-3[2x2: R, S(1)]", (4, 4), [["all_to_all"] * 2]),
    ("partial to fewer terms", "0-3[P]", "0-3[2x2: P, R]", (4,), [["all_reduce"] * 2]),
    ("SplitAR", "0-1[S(0)] + 2[] @ P", "0-1[S(0)] + 2[] @ R", (4, 4), [["all_reduce"] * 2]),
    (
        "SplitAR, splits that cross",
        "0-1[S(0)] + 2-4[S(0)] @ P",
        "0-1[S(0)] + 2-4[S(0)] @ R",
        (6,),
        [["all_reduce"] * 4],
    ),
    ("SplitRS", "0-1[S(0)] + 2[] @ P", "0-1[S(0)] + 2[] @ S(1)", (4, 4), [["reduce_scatter"] * 2]),
    ("SplitAG", "0-1[S(0)] + 2[] @ S(1)", "0-1[S(0)] + 2[] @ R", (4, 4), [["all_gather"] * 2]),
    ("two families of partials", "0-1[P] + 2-3[P] @ R", "0-3[R]", (4,), [["all_reduce"] * 2]),
    ("partial to more ranks", "0-1[P]", "0-2[R]", (4,), [["all_reduce"], ["send"]]),
    ("partial to ranks without a term", "0-1[P]", "2-3[R]", (4,), [["send"] * 2, ["send"]]),
    ("shard to more ranks", "0-1[S(0)]", "0-2[R]", (4,), [["all_gather", "send", "send"]]),
    ("partial to shard with an empty piece", "0-2[P]", "0-2[S(0)]", (2,), [["reduce_scatter"]]),
    ("a scatter with a gap", "0-1[P]", "0,2,1[S(0:2,1,2)]", (5,), [["local"] * 2 + ["send"] * 4]),
    ("a gather from one rank", "0[] + 2-3[S(0)] @ R", "0-1[R]", (4,), [["local", "send", "send"]]),
    ("a gather along two dims", "0-3[2x2: S(0), S(1)]", "0-3[R]", (4, 4), [["all_gather"]]),
    ("an exchange with neighbours only", "0-2[S(0:3,2,2)]", "0-2[S(0:2,2,3)]", (7,), [["local"] * 3 + ["send"] * 2]),
    ("plain to partial", "0-1[R]", "0-1[P]", (4,), [["local"]]),
    ("sum to maximum", "0-1[P]", "0-1[P(max)]", (4,), [["local", "send"]]),
    ("same terms, other names", "0-1[P]", "0[] + 1[] @ P", (4,), []),
    ("nothing to move, but other shapes", "0-1[S(0)]", "0-1[S(1)]", (4, 0), [[]]),
]


@pytest.mark.parametrize(("source", "target", "shape", "expected"), [case[1:] for case in RECOGNISED])
def test_recognition(source: str, target: str, shape: tuple[int, ...], expected: list[list[str]]) -> None:
    plan = plan_of(source, target, shape)
    assert kinds(plan) == [sorted(phase) for phase in expected]
    check_reshard(plan)
    assert is_right(plan)


def test_a_collective_names_its_ranks_in_ascending_order_and_their_boxes() -> None:
    ((gather,),) = plan_of("2,0[S(0)]", "0,2[R]", (5,)).phases
    whole: Box = ((0, 5),)
    assert gather == Collective("all_gather", (0, 2), (((3, 5),), ((0, 3),)), (whole, whole))


# Sums and senders


def test_terms_are_summed_in_ascending_order_of_sender() -> None:
    plan = plan_of("3,0,2,1[P]", "4[]", (4,), collectives=False)
    assert [(m.sender, m.combine) for m in plan.phases[0]] == [(rank, "sum") for rank in range(4)]


def test_all_receivers_of_a_family_sum_in_one_order() -> None:
    plan = plan_of("0-5[2x3: R, P]", "0-7[R]", (4,), collectives=False)
    for receiver in range(8):
        senders = [move.sender for move in plan.phases[0] if move.receiver == receiver]
        assert [sender % 3 for sender in senders] == [0, 1, 2]


def test_a_sum_into_a_maximum_starts_with_a_copy() -> None:
    plan = plan_of("0-2[P]", "0-1[P(max)]", (4,), collectives=False)
    assert [(m.sender, m.receiver, m.combine) for m in plan.phases[0]] == [(0, 0, "copy"), (1, 0, "sum"), (2, 0, "sum")]


def test_senders_share_the_load() -> None:
    plan = plan_of("0-3[R]", "4-7[R]", (4,))
    assert sorted((m.sender, m.receiver) for m in plan.phases[0]) == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_a_pair_of_ranks_exchanges_one_box_however_others_cut_it() -> None:
    plan = plan_of("0-1[S(0)]", "2[] + 3-4[S(1)] @ R", (8, 8))
    assert sum(m.receiver == 2 for m in plan.phases[0]) == 2


# Bytes


@pytest.mark.parametrize(
    ("source", "target", "shape", "elements", "bound"),
    [
        ("0-3[P]", "0-3[R]", (6,), 36, 36),
        ("0-3[P]", "0-3[S(0)]", (6,), 18, 18),
        ("0-3[S(0)]", "0-3[R]", (6,), 18, 18),
        ("0-3[S(0)]", "0-3[S(1)]", (4, 4), 12, 12),
        ("0-3[R]", "0-3[S(0)]", (6,), 0, 0),
        ("0[]", "1-3[R]", (6,), 18, 18),
        ("0-1[P]", "2-3[R]", (6,), 18, 18),
        ("0-5[2x3: R, P]", "0-5[R]", (6,), 42, 42),
        ("0-1[R]", "1-2[P]", (6,), 0, 0),
    ],
)
def test_bytes_and_their_lower_bound(
    source: str, target: str, shape: tuple[int, ...], elements: int, bound: int
) -> None:
    plan = plan_of(source, target, shape)
    moved = reshard_bytes(plan, 8)
    assert sum(moved.values()) == 8 * elements
    assert all(sender != receiver for sender, receiver in moved)
    assert lower_bound_elements(plan.source, plan.target, shape) == bound


def test_bytes_by_pair_of_ranks() -> None:
    assert reshard_bytes(plan_of("0-1[S(0)]", "1-2[S(0)]", (5,)), 4) == {(0, 1): 12, (1, 2): 8}
    assert reshard_bytes(plan_of("0-1[P]", "0-1[R]", (5,)), 4) == {(0, 1): 20, (1, 0): 20}


# Relays, where a topology says which links are slow


PAIRS = nodes((0, 1), (2, 3))


def test_a_topology_makes_relays_of_what_no_collective_does() -> None:
    plan = plan_of("0[]", "2-3[R]", (4,), topology=PAIRS)
    assert plan.phases == ((Move(0, 2, ((0, 4),)),), (Move(2, 3, ((0, 4),), origin="target"),))
    summed = plan_of("0-1[P]", "2[]", (4,), topology=PAIRS)
    assert [[(m.sender, m.receiver, m.destination) for m in phase] for phase in summed.phases] == [
        [(0, 0, "scratch"), (1, 0, "scratch")],
        [(0, 2, "target")],
    ]


def test_collectives_come_first_and_what_they_leave_is_routed() -> None:
    plan = plan_of("0-1[P]", "0-3[R]", (4,), topology=PAIRS)
    assert kinds(plan) == [["all_reduce"], ["send"], ["send"]]
    check_reshard(plan)
    assert is_right(plan)


def test_without_collectives_everything_is_routed() -> None:
    plan = plan_of("0-3[P]", "0-3[R]", (4,), topology=PAIRS, collectives=False)
    check_reshard(plan)
    moves = [move for phase in plan.phases for move in phase]
    node_of = PAIRS.node_of
    assert sum(node_of[move.sender] != node_of[move.receiver] for move in moves) == 2


def test_what_is_in_place_or_does_not_move_is_so_with_a_topology() -> None:
    assert plan_of("0-3[2x2: S(0), S(0)]", "0-3[S(0)]", (8,), topology=PAIRS).is_nothing
    assert plan_of("0-1[S(0)]", "0-1[S(1)]", (4, 0), topology=PAIRS).phases == ((),)


def test_ranks_are_those_of_the_topology() -> None:
    message = "plan_reshard: expected ranks below 4, those of topology test; got rank 5; name a topology that has it"
    with pytest.raises(InvalidInput, match=message):
        plan_of("0-1[P]", "5[]", (4,), topology=PAIRS)


@settings(max_examples=100)
@given(annotation_pairs(), st.booleans())
def test_any_pair_with_relays(pair: Pair, collectives: bool) -> None:
    topology = nodes((0, 5, 3), (1,), (7, 2, 6, 4))
    plan = plan_reshard(pair.source, pair.target, pair.shape, collectives=collectives, topology=topology)
    check_reshard(plan)
    assert is_right(plan)


@pytest.mark.parametrize("target", ["0[] + 2-3[S(1)] @ R", "3[]", "0-3[R]"])
def test_routes_do_not_depend_on_the_length_of_a_free_dim(target: str) -> None:
    for source in ("0-2[P]", "0-1[S(1)]", "0,2[R]"):
        plan = plan_of(source, target, (3, 7), topology=PAIRS, free_dims=(0,))
        for length in (0, 1, 1000):
            other = plan.at((length, 7))
            assert other == plan_of(source, target, (length, 7), topology=PAIRS, free_dims=(0,))
            check_reshard(other)
        assert is_right(plan.at((5, 7)))


# Free dims


def test_a_plan_holds_for_every_length_of_a_free_dim() -> None:
    plan = plan_of("0-1[S(1)]", "0-1[R]", (3, 8), free_dims=(0,))
    assert plan.free_dims == (0,)
    for length in (0, 1, 17):
        other = plan.at((length, 8))
        check_reshard(other)
        assert is_right(other)
        assert other == plan_of("0-1[S(1)]", "0-1[R]", (length, 8), free_dims=(0,))


def test_a_plan_made_for_no_tokens_holds_for_some() -> None:
    plan = plan_of("0-2[P]", "3[]", (0, 8), free_dims=(0,))
    check_reshard(plan)
    assert is_right(plan.at((5, 8)))


@pytest.mark.parametrize("cut", ["0-1[S(0)]", "0[] + 1[] @ S(0)"])
def test_a_free_dim_is_not_cut(cut: str) -> None:
    message = r"expected free dim 0 to be whole, got it cut by 0.*; plan for its actual length instead"
    with pytest.raises(InvalidInput, match=message):
        plan_of(cut, "0-1[R]", (4,), free_dims=(0,))
    with pytest.raises(InvalidInput, match=message):
        plan_of("0-1[R]", cut, (4,), free_dims=(0,))


def test_a_free_dim_exists() -> None:
    with pytest.raises(InvalidInput, match="free dim 1 on a tensor of 1 dims"):
        plan_of("0[]", "1[]", (4,), free_dims=(1,))


# Faults of neighbouring systems


def values_after(plan: ReshardPlan, value: np.ndarray) -> dict[int, np.ndarray]:
    check_reshard(plan)
    source = shard_map(plan.source, plan.shape)
    return run(plan, scatter(source, value, np.random.default_rng(0)))


@pytest.mark.case(83)
def test_five_rows_over_four_ranks_come_back_as_five() -> None:
    value = np.arange(50.0).reshape(5, 10)
    gathered = values_after(plan_of("0-3[S(0)]", "0-3[R]", (5, 10)), value)
    assert all(np.array_equal(array, value) for array in gathered.values())


@pytest.mark.case(84, 87)
@pytest.mark.parametrize("mesh", ["1x1", "1x2", "1x3", "2x1", "2x2", "2x3"])
def test_nested_splits_come_back_whole(mesh: str) -> None:
    rows, columns = (int(size) for size in mesh.split("x"))
    ranks = f"0-{rows * columns - 1}"
    for length in range(1, 8):
        value = np.arange(length * 3.0).reshape(length, 3)
        for placements in ("S(0), S(0)", "S(0), S(1)", "S(1), S(0)", "R, S(0)", "S(0), R"):
            nested = f"{ranks}[{mesh}: {placements}]"
            gathered = values_after(plan_of(nested, f"{ranks}[R]", value.shape), value)
            assert all(np.array_equal(array, value) for array in gathered.values())
            flat = plan_of(nested, f"{ranks}[S(0)]", value.shape)
            for rank, array in values_after(flat, value).items():
                box = shard_map(flat.target, value.shape).piece(rank).box
                assert np.array_equal(array, value[relative(box, ((0, length), (0, 3)))])


@pytest.mark.case(84)
@pytest.mark.parametrize("num_inner", [1, 2, 3])
def test_unions_nest_too(num_inner: int) -> None:
    inner = [f"{num_inner * i}-{num_inner * i + num_inner - 1}[{num_inner}: S(0)]" for i in range(2)]
    for length in range(1, 8):
        value = np.arange(length * 3.0).reshape(length, 3)
        plan = plan_of(f"{inner[0]} + {inner[1]} @ S(0)", f"0-{2 * num_inner - 1}[R]", value.shape)
        assert all(np.array_equal(array, value) for array in values_after(plan, value).values())


@pytest.mark.case(85)
def test_explicit_sizes_leave_the_last_rank_empty() -> None:
    value = np.arange(6 * 256.0).reshape(6, 256)
    plan = plan_of("0-3[S(0)]", "0-3[S(0:2,2,2,0)]", value.shape)
    after = values_after(plan, value)
    assert [after[rank].shape[0] for rank in range(4)] == [2, 2, 2, 0]
    assert np.array_equal(np.concatenate([after[rank] for rank in range(4)]), value)
    assert isinstance(plan.target.subgroups[0].placements[0], Shard)


@pytest.mark.case(100)
@pytest.mark.parametrize(
    ("source", "target", "elements"),
    [
        ("0-3[2x2: S(0), S(1)]", "0-3[S(0)]", 8),
        ("0-3[S(0)]", "0-3[2x2: S(0), S(1)]", 8),
        ("0-3[2x2: S(0), S(1)]", "4-7[S(0)]", 16),
        ("0-3[S(0)]", "7,6,5,4[S(0)]", 16),
    ],
)
def test_a_tensor_lands_on_the_right_ranks_of_another_mesh(source: str, target: str, elements: int) -> None:
    value = np.arange(16.0).reshape(4, 4)
    plan = plan_of(source, target, value.shape)
    after = values_after(plan, value)
    assert set(after) == set(plan.target.ranks)
    for piece in shard_map(plan.target, value.shape).pieces:
        assert np.array_equal(after[piece.rank], value[relative(piece.box, ((0, 4), (0, 4)))])
    sent = Counter(reshard_bytes(plan, value.itemsize))
    assert sent.total() == elements * value.itemsize == lower_bound_elements(plan.source, plan.target, (4, 4)) * 8
