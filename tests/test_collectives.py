"""Which collectives are recognised, in every form of the layouts: the table of the docs, by hand; properties."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hgraph.annotation import Annotation
from hgraph.check_reshard import check_reshard
from hgraph.placements import Partial, Placement, Shard
from hgraph.reshard import lower_bound_elements, plan_reshard, reshard_bytes
from hgraph.reshard_plan import Collective, Move, ReshardPlan, empty_box
from hgraph.shard_map import shard_map
from hgraph.topology import Link, Topology, uniform
from tests.annotations import Pair, annotation_pairs
from tests.gloo_workers import GlooPool
from tests.reshard_reference import is_right, is_value
from tests.reshard_table import COMMAND, PAGE, ROWS, Row, kind_of, page, plan_of
from tests.test_run_reshard import assert_right, drive_plans, run_on_cluster, sources_of, tensors_of

AR, RS, AG, A2A, SEND, LOCAL = "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send", "local"
Phases = list[dict[str, int]]

EXPECTED: dict[str, list[Phases]] = {
    "Equal shard maps": [[], [], [], []],
    "A replica is on the rank": [[{LOCAL: 4}], [{LOCAL: 4}], [{LOCAL: 4}], [{LOCAL: 1}]],
    "Partial to replicate": [
        [{AR: 1}],  # one axis
        [{AR: 1}],  # maximum
        [{AR: 1}],  # ranks in any order
        [{AR: 2}],  # a group per row
        [{AR: 2}],  # a group per column
        [{AR: 4}],  # the middle one of three axes
        [{AR: 2}],  # fewer terms
        [{AR: 2}],  # two ranks hold each of two terms: both pairs reduce, in one phase
        [{AR: 2}, {SEND: 6}],  # of three terms: each half by one team, for all six
        [{AR: 1}, {SEND: 3}],  # nothing to divide: one team reduces
        [{AR: 2}],  # two subgroups hold the sum each
        [{AR: 2}, {SEND: 4}],  # each half reduced in its row, sent to the two of the other row
        [{AR: 1}, {SEND: 1}],  # more ranks
        [{RS: 1}, {SEND: 2}],  # some of the ranks: each gets a half, then they swap
    ],
    "Partial to shard": [
        [{RS: 1}],  # dim 0
        [{RS: 1}],  # dim 1, uneven
        [{RS: 1}],  # maximum, dim 2
        [{RS: 1}],  # explicit sizes
        [{RS: 1}],  # fewer elements than ranks
        [{RS: 1}],  # ranks in any order
        [{RS: 1}],  # along two dims
        [{RS: 2}],  # within rows
        [{RS: 2}],  # within rows, the same dim again
        [{RS: 1}],  # some of the ranks: the others get nothing
        [{RS: 1, SEND: 2}],  # more ranks: both terms go to the third
        [{RS: 1}, {SEND: 4}],  # each part on two ranks: quarters, then pairs swap
        [{RS: 2}],  # two ranks hold each of two terms
        [{RS: 2}, {SEND: 6}],  # of three terms: each team does half of every third, then twins swap
        [{RS: 2}],  # to disjoint parts
    ],
    "Shard to replicate": [
        [{AG: 1}],  # dim 0
        [{AG: 1}],  # dim 1, uneven
        [{AG: 1}],  # dim 2, explicit sizes
        [{AG: 1}],  # ranks in any order
        [{AG: 2}],  # nested axes, the inner one
        [{AG: 2}],  # both dims, the inner axis
        [{AG: 2}],  # both dims, the outer axis
        [{AG: 1}],  # nested axes, both
        [{AG: 1}],  # both dims, both axes
        [{AG: 2}],  # two ranks hold each part
        [{AG: 1, LOCAL: 1}],  # one rank holds all already
        [{AG: 1, SEND: 2}],  # fewer elements than ranks: the third gets both
        [{AG: 1, SEND: 2}],  # more ranks
    ],
    "Shard of one dim to shard of another": [
        [{A2A: 1}],  # dim 0 to 1
        [{A2A: 1}],  # dim 2 to 0, uneven
        [{A2A: 1}],  # explicit sizes
        [{A2A: 1}],  # ranks in any order
        [{A2A: 1}],  # fewer rows than ranks: the fourth gives nothing
        [{A2A: 1}],  # fewer columns than ranks: the fourth gets nothing
        [{A2A: 2}],  # within rows
        [{A2A: 2}],  # both dims to one of them
        [{A2A: 2}],  # two ranks hold each part, before and after
        [{A2A: 2}],  # before
        [{A2A: 1}],  # after: what is given is received twice
        [{A2A: 1}],  # more ranks
        [{A2A: 1}],  # some of the ranks
        [{A2A: 1}],  # rows on some, all on the others
    ],
    "Same boxes, other ranks": [[{SEND: 2}], [{SEND: 2}], [{SEND: 2}], [{LOCAL: 2, SEND: 2}]],
    "SplitAR: terms in subgroups with other splits": [
        [{AR: 2}],  # 2 against 1: a slice per rank of the two
        [{AR: 4}],  # 3 against 2: borders at 1/3, 1/2, 2/3
        [{AR: 16}],  # 16 against 8
        [{AR: 2}],  # 2 against twice 1: groups of three
        [{AR: 4}],  # maximum, uneven: 4+3 against 3+2+2, borders at 3, 4, 5
        [{AR: 4}],  # ranks in any order
        [{AR: 4}],  # splits of two dims: four quarters
        [{AR: 2}],  # terms inside a subgroup too
        [{AR: 1}, {SEND: 1}],  # a term on two ranks: one reduces and shares
    ],
    "SplitRS": [
        [{RS: 2}],
        [{RS: 4}],
        [{RS: 16}],
        [{RS: 2}],
        [{RS: 4}],
        [{RS: 4}],
        [{LOCAL: 2, SEND: 4}],  # receivers are not those that hold the terms of their part
    ],
    "SplitAG": [
        [{AG: 2}],
        [{AG: 4}],
        [{AG: 16}],
        [{AG: 2}],
        [{AG: 4}],
        [{AG: 4}],
        [{AG: 2}],  # a copy per subgroup: each gathers its own
    ],
    "Everything else": [
        [{LOCAL: 4, SEND: 1}],  # 2,1,2,1 to 2,2,1,1: one row moves
        [{LOCAL: 3, SEND: 2}],  # neighbours
        [{LOCAL: 2, SEND: 6}],  # eight quarters are wanted, two are there
        [{LOCAL: 2, SEND: 2}],  # both have the middle: each misses an end that the other has
        [{LOCAL: 2, SEND: 4}],  # a gap: the third part lies between those of the two that hold terms
        [{SEND: 2}, {SEND: 1}],  # summed at one, then shared
        [{LOCAL: 1, SEND: 2}],  # terms to one rank
        [{LOCAL: 1, SEND: 1}],  # a sum into terms of a maximum
        [{LOCAL: 1, SEND: 2}],  # one rank to all
    ],
}
CASES = [
    (section, row, expected)
    for section, rows in ROWS.items()
    for row, expected in zip(rows, EXPECTED[section], strict=True)
]
each_row = pytest.mark.parametrize(
    ("section", "row", "expected"), CASES, ids=[f"{section}: {row[0]}" for section, row, _ in CASES]
)


def kinds(plan: ReshardPlan) -> Phases:
    """Returns how many operations of each kind every phase has."""
    return [dict(Counter(map(kind_of, phase))) for phase in plan.phases]


def num_moved(plan: ReshardPlan) -> int:
    return sum(reshard_bytes(plan, 1).values())


# The table


@pytest.mark.case(119)
def test_the_table_of_the_docs_is_what_plans_are() -> None:
    assert sum(map(len, ROWS.values())) >= 40
    assert PAGE.read_text() == page(), f"{PAGE.name} is stale; `{COMMAND}` writes it anew"


@each_row
def test_what_is_recognised(section: str, row: Row, expected: Phases) -> None:
    plan = plan_of(*row[1:])
    assert kinds(plan) == expected
    check_reshard(plan)
    assert is_right(plan)


def test_every_row_on_the_virtual_cluster() -> None:
    for _, row, _ in CASES:
        plan = plan_of(*row[1:])
        if max(*plan.source.ranks, *plan.target.ranks) < 8:
            assert_right(plan)


@each_row
def test_a_row_moves_as_little_as_can_be(section: str, row: Row, expected: Phases) -> None:
    plan = plan_of(*row[1:])
    moved, direct = num_moved(plan), num_moved(plan_of(*row[1:], collectives=False))
    assert moved <= direct
    if not plan.target.is_partial:
        assert moved == lower_bound_elements(plan.source, plan.target, plan.shape)


@each_row
def test_the_names_of_ranks_do_not_matter(section: str, row: Row, expected: Phases) -> None:
    plan = plan_of(*row[1:])
    num_ranks = max(*plan.source.ranks, *plan.target.ranks) + 1
    for seed in range(3):
        order = random.Random(seed).sample(range(num_ranks), num_ranks)
        other = plan_reshard(plan.source.relabel(order), plan.target.relabel(order), plan.shape)
        check_reshard(other)
        assert kinds(other) == expected


def with_dims(annotation: Annotation, order: Sequence[int]) -> Annotation:
    """Returns the annotation of the tensor with its dims permuted."""

    def move(placement: Placement) -> Placement:
        return replace(placement, dim=order[placement.dim]) if isinstance(placement, Shard) else placement

    return annotation.map_placements(move)


@each_row
def test_the_order_of_dims_does_not_matter(section: str, row: Row, expected: Phases) -> None:
    plan = plan_of(*row[1:])
    for order in itertools.permutations(range(len(plan.shape))):
        shape = tuple(plan.shape[order.index(dim)] for dim in range(len(order)))
        other = plan_reshard(with_dims(plan.source, order), with_dims(plan.target, order), shape)
        check_reshard(other)
        assert kinds(other) == expected


@each_row
def test_maximum_is_recognised_as_sum_is(section: str, row: Row, expected: Phases) -> None:
    plan = plan_of(*row[1:])
    reduces = {plan.source.reduce, plan.target.reduce}
    if "sum" not in reduces or "max" in reduces:
        return

    def to_maximum(placement: Placement) -> Placement:
        return Partial("max") if isinstance(placement, Partial) else placement

    other = plan_reshard(plan.source.map_placements(to_maximum), plan.target.map_placements(to_maximum), plan.shape)
    check_reshard(other)
    assert kinds(other) == expected and is_right(other)


# Properties of any plan


def check_moved(pair: Pair, seed: int) -> None:
    plan = plan_reshard(pair.source, pair.target, pair.shape)
    direct = plan_reshard(pair.source, pair.target, pair.shape, collectives=False)
    check_reshard(plan)
    assert is_right(plan, seed)
    assert num_moved(plan) <= num_moved(direct)
    operations = list(itertools.chain(*plan.phases))
    if not pair.source.is_partial:
        assert num_moved(plan) == num_moved(direct) == lower_bound_elements(pair.source, pair.target, pair.shape)
    if operations and all(kind_of(operation) == RS for operation in operations) and len(plan.phases) == 1:
        assert num_moved(plan) == lower_bound_elements(pair.source, pair.target, pair.shape)


@settings(max_examples=150)
@given(annotation_pairs(), st.integers(0, 99))
def test_no_plan_moves_more_than_direct_messages(pair: Pair, seed: int) -> None:
    check_moved(pair, seed)


@pytest.mark.long
@settings(max_examples=5000, suppress_health_check=list(HealthCheck))
@given(annotation_pairs(), st.integers(0, 99))
def test_no_plan_moves_more_than_direct_messages_long(pair: Pair, seed: int) -> None:
    check_moved(pair, seed)


@pytest.mark.parametrize("shape", [(6, 4), (6,), (12,)])
def test_what_several_teams_could_reduce_is_divided_among_them(shape: tuple[int, ...]) -> None:
    plan = plan_of("0-5[2x3: R, P]", "0-5[R]", shape)
    loads = Counter[int]()
    for (sender, receiver), count in reshard_bytes(plan, 1).items():
        loads[sender] += count
        loads[receiver] += count
    assert len(loads) == 6 and max(loads.values()) - min(loads.values()) <= 2
    assert {operation.ranks for operation in plan.phases[0] if isinstance(operation, Collective)} == {
        (0, 1, 2),
        (3, 4, 5),
    }


def test_teams_take_turns_where_nothing_can_be_divided() -> None:
    plan = plan_of("0-11[2x2x3: S(0), R, P]", "0-11[2x2x3: S(0), R, R]", (2,))
    teams = [operation.ranks for operation in plan.phases[0] if isinstance(operation, Collective)]
    assert sorted(teams) == [(0, 1, 2), (9, 10, 11)]


def test_teams_on_other_nodes_do_not_share() -> None:
    source, target = Annotation.parse("0-5[2x3: R, P]"), Annotation.parse("0-5[R]")
    apart = plan_reshard(source, target, (6,), topology=nodes(2, 3))
    check_reshard(apart)
    assert kinds(apart) == [{AR: 2}] and set(reshard_bytes(apart, 1)) <= set(pairs_within((0, 1, 2), (3, 4, 5)))
    together = plan_reshard(source, target, (6,), topology=nodes(1, 6))
    check_reshard(together)
    assert kinds(together)[0] == {AR: 2} and num_moved(together) == 42


def nodes(count: int, ranks: int) -> Topology:
    return uniform("nodes", count, ranks, Link(100.0, 1.0), Link(10.0, 5.0))


def pairs_within(*nodes: tuple[int, ...]) -> list[tuple[int, int]]:
    return [pair for node in nodes for pair in itertools.permutations(node, 2)]


def test_a_free_dim_is_not_divided() -> None:
    source, target = Annotation.parse("0-5[2x3: R, P]"), Annotation.parse("0-5[R]")
    plan = plan_reshard(source, target, (5, 2), free_dims=(0,))
    boxes = {box for operation in plan.phases[0] for box in operation.contributed}  # type: ignore[union-attr]
    assert boxes == {((0, 5), (0, 1)), ((0, 5), (1, 2))}
    for length in (0, 1, 9):
        other = plan.at((length, 2))
        check_reshard(other)
        assert is_right(other)


def test_free_dims_alone_leave_nothing_to_divide() -> None:
    source, target = Annotation.parse("0-5[2x3: R, P]"), Annotation.parse("0-5[R]")
    plan = plan_reshard(source, target, (5, 1), free_dims=(0, 1))
    assert kinds(plan) == [{AR: 1}, {SEND: 3}]
    check_reshard(plan.at((3, 7)))


# Ranks that give or get nothing

WITH_NOTHING = [
    ("a rank without rows", "0-3[S(0)]", "0-3[S(1)]", (3, 8)),
    ("a rank without columns", "0-3[S(0)]", "0-3[S(1)]", (8, 3)),
    ("a rank that the source has not", "0-1[S(0)]", "0-3[S(1)]", (4, 8)),
    ("a rank that the target has not", "0-3[S(0)]", "0-1[S(1)]", (8, 4)),
    ("a term on a rank that gets nothing", "0-3[P]", "0-3[S(0)]", (3,)),
    ("a term on a rank that the target has not", "0-3[P]", "0-1[S(0)]", (5,)),
    ("parts that several receive", "0-3[S(0)]", "0-3[2x2: R, S(1)]", (8, 4)),
    ("a gather along two dims", "0-3[2x2: S(0), S(1)]", "0-3[R]", (5, 5)),
]


def test_a_rank_that_gives_or_gets_nothing_has_the_empty_box() -> None:
    ((exchange,),) = plan_of("0-3[S(0)]", "0-3[S(1)]", (3, 8)).phases
    assert isinstance(exchange, Collective)
    assert exchange.contributed[3] == ((0, 0), (0, 0)) and exchange.received[3] == ((0, 3), (6, 8))
    free = plan_reshard(Annotation.parse("0-3[P]"), Annotation.parse("0-3[S(1)]"), (5, 3), free_dims=(0,))
    ((scatter,),) = free.phases
    assert isinstance(scatter, Collective)
    assert scatter.received[3] == empty_box(((0, 5), (0, 3)), (0,)) == ((0, 5), (0, 0))
    check_reshard(free.at((0, 3)))
    check_reshard(free.at((7, 3)))


@pytest.mark.gloo
def test_collectives_with_nothing_over_gloo(gloo: GlooPool) -> None:
    plans = [plan_of(source, target, shape) for _, source, target, shape in WITH_NOTHING]
    sources = [sources_of(plan, seed) for seed, plan in enumerate(plans)]
    jobs = [(plan, tensors_of(buffers)) for plan, (_, buffers) in zip(plans, sources, strict=True)]
    by_rank = gloo.run(drive_plans, jobs)
    for index, (plan, tensors) in enumerate(jobs):
        assert not any(isinstance(operation, Move) for phase in plan.phases for operation in phase), str(plan)
        simulated, cluster = run_on_cluster(plan, {rank: tensor.clone() for rank, tensor in tensors.items()})
        results = {rank: by_rank[rank][index][0] for rank in range(4)}
        arrays = {rank: result.numpy() for rank, result in results.items() if result is not None}
        assert arrays.keys() == simulated.keys()
        assert is_value(shard_map(plan.target, plan.shape), arrays, sources[index][0]), str(plan)
        assert all(by_rank[rank][index][1] == cluster.log_of(rank) for rank in range(4)), str(plan)
