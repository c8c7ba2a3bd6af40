"""Bridge plans: invariants, sharing of patterns, buckets, moves of one rank, and random tensors on random clusters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from torch import Tensor

from hgraph import bundles as bundles_module
from hgraph.annotation import Annotation
from hgraph.bridge_plan import BridgePlan, plan_bridge
from hgraph.bundles import TensorReshard
from hgraph.check_reshard import check_reshard
from hgraph.check_routes import check_routes
from hgraph.errors import InvalidAnnotation, InvalidInput, PlanError
from hgraph.reshard import plan_reshard
from hgraph.reshard_plan import Move, ReshardPlan
from hgraph.shard_map import box_numel, shard_map
from hgraph.topology import Topology
from runtime.reshard import run_reshard
from runtime.virtual_cluster import VirtualCluster
from tests.bridge_samples import BridgeSample, bridge_samples, nodes
from tests.reshard_reference import is_right, is_value, scatter

TWO_NODES = nodes((0, 1), (2, 3))


def tensor(name: str, source: str, target: str, shape: tuple[int, ...]) -> TensorReshard:
    return TensorReshard(name, Annotation.parse(source), Annotation.parse(target), shape)


def bridge_of(*tensors: tuple[str, str, tuple[int, ...]], topology: Topology = TWO_NODES, **options: int) -> BridgePlan:
    reshards = [tensor(f"t{number}", *fields) for number, fields in enumerate(tensors)]
    return plan_bridge(reshards, topology, **options)


def prove(plan: BridgePlan) -> None:
    """Proves the routes and every tensor's own plan, and runs that on numbers."""
    check_routes(plan.routes, plan.bundles, plan.topology)
    for name in plan.positions:
        check_reshard(plan.reshard_plan(name))
        assert is_right(plan.reshard_plan(name)), plan.reshard_plan(name)


def network_elements(plan: BridgePlan) -> int:
    """Returns how many elements cross the network."""
    routes, node_of = plan.routes, numpy.array(plan.topology.node_of)
    crosses = node_of[routes.sender] != node_of[routes.receiver]
    return int(plan.elements()[routes.bundle[crosses]].sum())


# Moves


def test_a_value_crosses_once_and_is_shared_in_its_node() -> None:
    plan = bridge_of(("0[]", "2-3[R]", (4,)))
    assert plan.reshard_plan("t0").phases == (
        (Move(0, 2, ((0, 4),)),),
        (Move(2, 3, ((0, 4),), origin="target"),),
    )


def test_terms_are_summed_in_scratch_before_they_cross() -> None:
    plan = bridge_of(("0-1[P]", "2[]", (4,)))
    box = ((0, 4),)
    assert plan.reshard_plan("t0").phases == (
        (Move(0, 0, box, "copy", "source", "scratch"), Move(1, 0, box, "sum", "source", "scratch")),
        (Move(0, 2, box, "copy", "scratch", "target"),),
    )


def test_a_root_adds_to_its_own_term_and_others_get_the_sum() -> None:
    plan = bridge_of(("0-2[P(max)]", "0[] + 3[] @ R", (4,)))
    box = ((0, 4),)
    assert plan.reshard_plan("t0").phases == (
        (Move(0, 0, box), Move(1, 0, box, "max")),
        (Move(2, 0, box, "max"),),
        (Move(0, 3, box, origin="target"),),
    )


def test_a_relay_passes_on_copies_and_sums_inside_a_node() -> None:
    topology = nodes((0, 1, 2), (3,))
    box = ((0, 4),)
    plan = bridge_of(("0[]", "1-3[R]", (4,)), topology=topology)
    prove(plan)
    assert plan.reshard_plan("t0").phases == (
        (Move(0, 3, box), Move(0, 1, box)),
        (Move(1, 2, box, origin="target"),),
    )
    plan = bridge_of(("1-3[P]", "0[]", (4,)), topology=topology)
    prove(plan)
    assert plan.reshard_plan("t0").phases == (
        (Move(1, 1, box, "copy", "source", "scratch"), Move(2, 1, box, "sum", "source", "scratch")),
        (Move(1, 0, box, "copy", "scratch"), Move(3, 0, box, "sum")),
    )


def test_the_layouts_of_several_tensors_share_their_bundles_and_loads() -> None:
    plan = bridge_of(*[("0-1[R]", "2-3[S(0)]", (4,))] * 2, ("0-1[R]", "2[]", (4,)))
    assert len(plan.patterns) == 2 and len(plan.bundles) == 2
    sent = numpy.bincount(plan.routes.sender, plan.elements()[plan.routes.bundle])
    assert sent.tolist() == [8, 4]


@pytest.mark.parametrize(
    ("source", "target", "shape"),
    [
        ("0-3[P]", "0[] + 2[] @ R", (4,)),
        ("0-3[S(0)]", "0-3[R]", (6, 2)),
        ("0-1[P] + 2-3[P] @ R", "0-3[S(0)]", (5,)),
        ("0-3[2x2: P, R]", "3-4[R]", ()),
    ],
)
def test_the_moves_of_one_rank_are_those_it_takes_part_in(source: str, target: str, shape: tuple[int, ...]) -> None:
    plan = bridge_of((source, target, shape), topology=nodes((0, 1), (2, 3), (4,)))
    for rank in range(5):
        own = plan.moves(plan.tensors[0], rank)
        for everything, mine in zip(plan.moves(plan.tensors[0]), own, strict=True):
            assert [move for move in everything if rank in (move.sender, move.receiver)] == list(mine)


def test_copies_of_a_pair_are_merged_and_sums_have_the_boxes_of_their_need() -> None:
    plan = bridge_of(("0[]", "0[] + 1-2[S(0)] @ R", (4,)), topology=nodes((0, 1, 2)))
    assert [move.box for move in plan.reshard_plan("t0").phases[0]] == [((0, 4),)]


def test_who_needs_the_same_terms_needs_them_together() -> None:
    plan = bridge_of(("0-2[P]", "4-5[P] + 6-7[P] @ R", (4,)), topology=nodes((0, 1, 2), (3,), (4, 5, 6, 7)))
    prove(plan)
    assert network_elements(plan) == 4


def test_of_two_sums_that_would_meet_in_scratch_one_goes_directly() -> None:
    # Ranks 0 and 1 want the sum of the terms of ranks 4 and 5, rank 3 wants that of all three. Rank 5 is busy.
    topology = nodes((4, 5), (6, 7), (0, 1, 2, 3))
    busy = ("5[]", "0[]", (100,))
    plan = bridge_of(("4-6[P]", "0,1,6,2[2x2: P, R] + 3[] @ R", (4,)), busy, topology=topology)
    prove(plan)
    assert sorted((bundle.terms, bundle.direct) for bundle in plan.bundles) == [
        (((4,), (5,)), True),
        (((4,), (5,), (6,)), False),
        (((5,),), False),
        (((6,),), False),
    ]


# Invariants


def test_a_broken_part_of_a_tensor_is_refused() -> None:
    plan = bridge_of(("0-1[P]", "2-3[R]", (4,)))
    broken = replace(plan, routes=replace(plan.routes, origin=numpy.zeros_like(plan.routes.origin)), _known={})
    check_reshard(plan.reshard_plan("t0"))
    with pytest.raises(PlanError):
        check_reshard(broken.reshard_plan("t0"))


@pytest.mark.parametrize("buckets", [((0, 1),), ((0, 1), (1, 2)), ((1, 0), (2,)), ((0, 1), (), (2,)), ((0, 2), (1,))])
def test_buckets_hold_every_tensor_once_in_order(buckets: tuple[tuple[int, ...], ...]) -> None:
    plan = bridge_of(*[("0[]", "1[]", (4,))] * 3)
    assert replace(plan, buckets=((0,), (1, 2))).buckets == ((0,), (1, 2))
    with pytest.raises(InvalidInput, match="bridge: expected buckets that hold the tensors 0 to 2 in this order"):
        replace(plan, buckets=buckets)


def test_tensors_have_distinct_names() -> None:
    with pytest.raises(InvalidInput, match=r"bridge: expected tensors of distinct names, got \['w'\] more than once"):
        plan_bridge([tensor("w", "0[]", "1[]", (4,)), tensor("w", "0[]", "1[]", (2,))])


def test_ranks_are_those_of_the_topology() -> None:
    message = "bridge: expected ranks below 4, those of topology test; got rank 4"
    with pytest.raises(InvalidInput, match=message):
        bridge_of(("0[]", "4[]", (4,)))


def test_an_annotation_fits_its_shape() -> None:
    with pytest.raises(InvalidAnnotation, match=r"S\(1\) on a tensor of 1 dims"):
        bridge_of(("0-1[S(0)]", "0-1[S(1)]", (4,)))


def test_a_bridge_of_nothing_has_no_buckets() -> None:
    plan = plan_bridge([])
    assert plan.buckets == () and len(plan.routes) == 0 and plan.topology.num_ranks == 1


# Patterns


@pytest.fixture
def plannings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Returns the shapes for which needs were worked out."""
    shapes = []
    find = bundles_module.find_needs

    def counted(source, target, node_of):
        shapes.append(source.shape)
        return find(source, target, node_of)

    monkeypatch.setattr(bundles_module, "find_needs", counted)
    return shapes


def layers(count: int, source: str, target: str, *shapes: tuple[int, ...]) -> list[TensorReshard]:
    return [
        tensor(f"layer{layer}.{number}", source, target, shape)
        for layer in range(count)
        for number, shape in enumerate(shapes)
    ]


def test_sixty_equal_layers_are_planned_once(plannings: list[tuple[int, ...]]) -> None:
    reshards = layers(60, "0-3[2x2: S(0), S(1)]", "0-1[S(0)] + 2-3[S(1)] @ R", (512, 256), (128, 1024))
    plan = plan_bridge(reshards, TWO_NODES, smallest_part=1 << 40)
    assert plannings == [(2, 2)]
    assert len(plan.patterns) == 1
    assert [t.scale for t in plan.tensors[:2]] == [(256, 128), (64, 512)]
    for position in (0, 1, 118, 119):
        check_reshard(plan.reshard_plan(reshards[position].name))


def test_sizes_that_do_not_divide_are_planned_as_they_are(plannings: list[tuple[int, ...]]) -> None:
    reshards = layers(60, "0-1[S(0)]", "0-3[S(0)]", (6, 8), (6, 4), (8, 8), (7, 8))
    plan = plan_bridge(reshards, TWO_NODES)
    assert sorted(plannings) == [(4, 1), (6, 1), (7, 1)]
    prove(replace_tensors(plan, 4))


def test_nested_splits_are_planned_on_what_all_of_them_divide(plannings: list[tuple[int, ...]]) -> None:
    plan = plan_bridge(layers(60, "0-3[2x2: S(0), S(0)]", "0-2[S(0)]", (24,), (48,), (8,), (6,)), TWO_NODES)
    assert sorted(plannings) == [(6,), (8,), (12,)]
    prove(replace_tensors(plan, 4))


def test_stated_sizes_are_planned_as_they_are(plannings: list[tuple[int, ...]]) -> None:
    plan = plan_bridge(layers(60, "0-1[S(0:6,2)]", "2-3[S(1)]", (8, 6), (8, 2)), TWO_NODES)
    assert plannings == [(8, 2)]
    prove(replace_tensors(plan, 2))


def test_lengths_of_zero_and_scalars_have_patterns_too(plannings: list[tuple[int, ...]]) -> None:
    plan = plan_bridge(layers(60, "0-1[R]", "2-3[R]", (), (0,), (0, 5), (0, 4), (5, 0)), TWO_NODES)
    assert sorted(plannings) == [(), (0,), (0, 1), (1, 0)]
    prove(replace_tensors(plan, 5))


def test_no_element_moves_but_local_shapes_change() -> None:
    plan = bridge_of(("0-1[S(0)]", "0-1[S(1)]", (4, 0)))
    assert plan.reshard_plan("t0").phases == ((),)
    prove(plan)


def test_what_is_in_place_has_no_phases() -> None:
    plan = bridge_of(("0-3[2x2: S(0), S(0)]", "0-3[S(0)]", (8,)), ("0-3[P]", "0-1[P] + 2-3[P] @ P", (8,)))
    assert plan.reshard_plan("t0").is_nothing and plan.reshard_plan("t1").is_nothing
    prove(plan)


def test_equal_annotations_that_are_two_objects_make_one_pattern(plannings: list[tuple[int, ...]]) -> None:
    plan_bridge([tensor(f"t{number}", "0-1[S(0)]", "0-1[R]", (4,)) for number in range(5)])
    assert plannings == [(2,)]


def replace_tensors(plan: BridgePlan, count: int) -> BridgePlan:
    """Returns the bridge of the first tensors alone, with the routes of all."""
    return replace(plan, tensors=plan.tensors[:count], buckets=(tuple(range(count)),))


# Buckets


def test_buffers_and_buckets_by_hand() -> None:
    tensors = [("0-1[P]", "2[]", (4,)), ("0-1[P]", "2[]", (2,)), ("0-1[P]", "2[]", (8,))]
    plan = bridge_of(*tensors)
    # Rank 0 sums (4): receives 4 from rank 1 and sends 4 to rank 2.
    assert plan.buffer_elements((0,)).tolist() == [12, 4, 4, 0]
    assert plan.elements((0, 1)).tolist() == [6] and plan.elements().tolist() == [14]
    assert bridge_of(*tensors, bucket_elements=18).buckets == ((0, 1), (2,))
    assert bridge_of(*tensors, bucket_elements=17).buckets == ((0,), (1,), (2,))
    assert bridge_of(*tensors, bucket_elements=1).buckets == ((0,), (1,), (2,))
    assert bridge_of(*tensors, bucket_elements=42).buckets == ((0, 1, 2),)


@pytest.mark.parametrize("size", [0, -5, 2.5, float("inf"), "8", True])
def test_sizes_of_buckets_are_counts(size: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        bridge_of(("0[]", "1[]", (4,)), bucket_elements=size)
    assert str(caught.value) == (
        f"bridge: expected bucket_elements of 1 or more, an integer, got {size!r}; leave it out for one bucket"
    )


def test_buckets_change_no_move() -> None:
    tensors = [("0-1[P]", "2-3[R]", (4,)), ("0-3[S(0)]", "0[] + 3[] @ R", (6,))]
    whole, cut = bridge_of(*tensors), bridge_of(*tensors, bucket_elements=1)
    assert [whole.reshard_plan(name) for name in whole.positions] == [cut.reshard_plan(name) for name in cut.positions]


# Large bundles are cut


def sent_by_each(plan: BridgePlan) -> list[int]:
    elements = plan.elements()[plan.routes.bundle]
    return numpy.bincount(plan.routes.sender, elements, minlength=plan.topology.num_ranks).astype(int).tolist()


ONE_EACH = nodes((0,), (1,), (2,), (3,), (4,))


def test_holders_share_what_only_one_rank_needs() -> None:
    copies = tensor("t", "0[] + 1[] + 2[] + 3[] @ R", "4[]", (400,))
    assert sent_by_each(plan_bridge([copies], ONE_EACH, smallest_part=1)) == [100, 100, 100, 100, 0]
    assert sent_by_each(plan_bridge([copies], ONE_EACH, smallest_part=100)) == [100, 100, 100, 100, 0]
    assert sent_by_each(plan_bridge([copies], ONE_EACH)) == [400, 0, 0, 0, 0]


def test_receivers_share_the_summing_of_what_all_of_them_need() -> None:
    plan = plan_bridge([tensor("t", "0[] + 1[] + 2[] + 3[] @ P", "0-3[R]", (80, 10))], ONE_EACH, smallest_part=1)
    check_reshard(plan.reshard_plan("t"))
    roots = plan.routes.roots.tolist()
    assert sorted(set(roots)) == [0, 1, 2, 3] and {roots.count(rank) for rank in range(4)} == {len(roots) // 4}
    assert max(sent_by_each(plan)) == 1200  # a quarter of the sums to three others, and own terms of three quarters


def test_a_part_has_a_box_of_its_own_in_every_tensor() -> None:
    shapes = {"a": (6, 400), "b": (400, 6), "c": (7, 401), "d": (), "e": (0, 3)}
    tensors = [tensor(name, "0[] + 1[] @ R", "2-3[R]", shape) for name, shape in shapes.items()]
    plan = plan_bridge(tensors, ONE_EACH, smallest_part=1)
    check_routes(plan.routes, plan.bundles, plan.topology)
    for name in shapes:
        check_reshard(plan.reshard_plan(name))
    assert [pattern.shape for pattern in plan.patterns][:2] == [(1, 4), (4, 1)]
    assert sum(bundle.num_elements for bundle in plan.bundles) == 2400 + 2400 + 7 * 401 + 1


def test_terms_go_to_terms_in_their_own_node_and_else_in_turn() -> None:
    pairs = nodes((0, 1), (2, 3), (4, 5), (6, 7))
    summed = tensor("t", "0[] + 2[] + 4[] + 6[] @ P", "1[] + 3[] + 5[] + 7[] @ P", (8,))
    plan = plan_bridge([summed], pairs)
    assert sorted(zip(plan.routes.sender, plan.routes.receiver, strict=True)) == [(0, 1), (2, 3), (4, 5), (6, 7)]


# Any tensors on any cluster


def run_on_cluster(plan: ReshardPlan, num_ranks: int, number: int) -> None:
    """Runs a plan on the virtual cluster in float64 and compares with the definition, exactly: numbers are whole."""
    generator = numpy.random.default_rng(number)
    value = generator.integers(-1000, 1000, size=plan.shape).astype(numpy.float64)
    buffers = scatter(shard_map(plan.source, plan.shape), value, generator)
    tensors: dict[int, Tensor] = {rank: torch.from_numpy(numpy.asarray(array)) for rank, array in buffers.items()}
    runs = {
        rank: run_reshard(plan, rank, tensors.get(rank), label="reshard", dtype=torch.float64)
        for rank in range(num_ranks)
    }
    results = VirtualCluster(num_ranks).run(runs)
    arrays = {rank: result.numpy() for rank, result in results.items() if result is not None}
    assert is_value(shard_map(plan.target, plan.shape), arrays, value), plan


def check_bridge(sample: BridgeSample) -> None:
    for smallest_part in (1, 1 << 16):
        plan = plan_bridge(sample.reshards, sample.topology, smallest_part=smallest_part)
        check_routes(plan.routes, plan.bundles, plan.topology)
        for number, name in enumerate(plan.positions):
            part = plan.reshard_plan(name)
            check_reshard(part)
            run_on_cluster(part, sample.topology.num_ranks, number)


def check_pair(sample: BridgeSample) -> None:
    (reshard,) = sample.reshards
    for collectives, topology in itertools.product((True, False), (None, sample.topology)):
        plan = plan_reshard(reshard.source, reshard.target, reshard.shape, collectives=collectives, topology=topology)
        check_reshard(plan)
        run_on_cluster(plan, sample.topology.num_ranks, 0)


def check_samples(num_tensors: int, check: Callable[[BridgeSample], None], count: int, number: int) -> None:
    @seed(number)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(bridge_samples(num_tensors))
    def run(sample: BridgeSample) -> None:
        check(sample)

    run()


SWEEPS = {"a pair": (1, check_pair), "a bridge of one": (1, check_bridge), "a bridge of three": (3, check_bridge)}


@pytest.mark.parametrize("sweep", SWEEPS)
def test_any_tensors_on_any_cluster(sweep: str) -> None:
    check_samples(*SWEEPS[sweep], count=50, number=0)


@pytest.mark.long
@pytest.mark.parametrize("number", range(1, 11))
@pytest.mark.parametrize("sweep", SWEEPS)
def test_five_thousand_pairs_on_any_cluster(sweep: str, number: int) -> None:
    check_samples(*SWEEPS[sweep], count=500, number=number)


ORDERS = [order for size in (1, 2, 3) for order in itertools.permutations(range(4), size)]
LONG = pytest.mark.long


@pytest.mark.parametrize("num_sources", [pytest.param(1, marks=LONG), 2, pytest.param(3, marks=LONG)])
def test_every_order_of_every_subset_of_ranks(num_sources: int) -> None:
    node_of = (0, 1, 0, 1)
    for source, target in itertools.product(itertools.permutations(range(4), num_sources), ORDERS):
        plan = bridge_of((_placed(source, "P"), _placed(target, "S(0)"), (6,)), topology=nodes((0, 2), (1, 3)))
        check_routes(plan.routes, plan.bundles, plan.topology)
        check_reshard(plan.reshard_plan("t0"))
        # Of each element, one sum crosses from every node that has terms but that of the receiver.
        held = {node_of[rank] for rank in source}
        pieces = shard_map(plan.tensors[0].reshard.target, (6,)).pieces
        assert network_elements(plan) == sum(box_numel(p.box) * len(held - {node_of[p.rank]}) for p in pieces)


def _placed(ranks: tuple[int, ...], placement: str) -> str:
    return f"{','.join(map(str, ranks))}[{placement if len(ranks) > 1 else ''}]"
