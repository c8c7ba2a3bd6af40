"""Running reshard plans: against a reference written from the definitions, on the virtual cluster and on gloo."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hgraph.annotation import Annotation, replicated, sharded
from hgraph.bridge_plan import plan_bridge
from hgraph.check_reshard import check_reshard
from hgraph.errors import InvalidInput
from hgraph.reshard import plan_reshard
from hgraph.reshard_plan import Collective, Move, ReshardPlan
from hgraph.shard_map import shard_map
from runtime.gloo import ProcessTransport
from runtime.messages import Message
from runtime.process_groups import create_groups
from runtime.reshard import prepare, run_reshard
from runtime.virtual_cluster import VirtualCluster
from tests.annotations import Pair, annotation_pairs, annotations, layouts, shapes
from tests.bridge_samples import BridgeSample, bridge_samples, nodes
from tests.gloo_workers import GlooPool
from tests.reshard_reference import Buffers, is_value, scatter


def sources_of(plan: ReshardPlan, seed: int = 0) -> tuple[np.ndarray, Buffers]:
    """Returns a random value of whole numbers and what each rank holds of it."""
    generator = np.random.default_rng(seed)
    value = generator.integers(-1000, 1000, size=plan.shape).astype(np.float64)
    return value, scatter(shard_map(plan.source, plan.shape), value, generator)


def tensors_of(buffers: Buffers) -> dict[int, Tensor]:
    return {rank: torch.from_numpy(np.asarray(array)) for rank, array in buffers.items()}


def run_on_cluster(
    plan: ReshardPlan, tensors: dict[int, Tensor], **options: Any
) -> tuple[dict[int, Tensor], VirtualCluster]:
    cluster = VirtualCluster(8)
    generators = {
        rank: run_reshard(plan, rank, tensors.get(rank), label="reshard", dtype=torch.float64, **options)
        for rank in range(8)
    }
    results = cluster.run(generators)
    return {rank: result for rank, result in results.items() if result is not None}, cluster


def assert_right(plan: ReshardPlan) -> None:
    value, buffers = sources_of(plan)
    tensors = tensors_of(buffers)
    results, _ = run_on_cluster(plan, {rank: tensor.clone() for rank, tensor in tensors.items()})
    assert all(result.is_contiguous() for result in results.values())
    assert is_value(shard_map(plan.target, plan.shape), {rank: t.numpy() for rank, t in results.items()}, value)


@given(annotation_pairs(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_pair_on_the_virtual_cluster(pair: Pair, collectives: bool) -> None:
    assert_right(plan_reshard(pair.source, pair.target, pair.shape, collectives=collectives))


@pytest.mark.long
@given(annotation_pairs(), st.booleans())
@settings(max_examples=2000, deadline=None)
def test_any_pair_on_the_virtual_cluster_long(pair: Pair, collectives: bool) -> None:
    assert_right(plan_reshard(pair.source, pair.target, pair.shape, collectives=collectives))


@st.composite
def plans_on_four_ranks(draw: st.DrawFn) -> ReshardPlan:
    shape = draw(shapes())
    source, target = (draw(annotations(shape, draw(layouts(4)))) for _ in range(2))
    return plan_reshard(source, target, shape, collectives=draw(st.integers(0, 3)) > 0)


def drive_plans(jobs: list[tuple[ReshardPlan, dict[int, Tensor]]]) -> list[tuple[Tensor | None, list[Message]]]:
    rank = dist.get_rank()
    operations = [operation for plan, _ in jobs for phase in plan.phases for operation in phase]
    groups = create_groups([operation.ranks for operation in operations if isinstance(operation, Collective)], 20.0)
    transport = ProcessTransport(groups)
    answers = []
    for plan, tensors in jobs:
        generator = run_reshard(plan, rank, tensors.get(rank), label="reshard", dtype=torch.float64)
        answers.append((transport.drive(generator), transport.log))
    transport.close()
    return answers


def plans_with_relays() -> st.SearchStrategy[ReshardPlan]:
    """Draws plans of one tensor of a bridge, and of `plan_reshard` with a topology, on up to four ranks."""
    return st.builds(_plan_with_relays, bridge_samples(1, max_ranks=4), st.sampled_from([None, False, True]))


def _plan_with_relays(sample: BridgeSample, collectives: bool | None) -> ReshardPlan:
    (reshard,), topology = sample.reshards, sample.topology
    if collectives is None:
        return plan_bridge(sample.reshards, topology).reshard_plan(reshard.name)
    return plan_reshard(reshard.source, reshard.target, reshard.shape, collectives=collectives, topology=topology)


def compare_with_gloo(gloo: GlooPool, plans: list[ReshardPlan]) -> None:
    """Runs plans on four processes and on the virtual cluster: the same messages, and results equal to the last bit."""
    sources = [tensors_of(sources_of(plan, seed)[1]) for seed, plan in enumerate(plans)]
    by_rank = gloo.run(drive_plans, list(zip(plans, sources, strict=True)))
    for index, (plan, tensors) in enumerate(zip(plans, sources, strict=True)):
        results, cluster = run_on_cluster(plan, {rank: tensor.clone() for rank, tensor in tensors.items()})
        for rank in range(4):
            result, log = by_rank[rank][index]
            assert log == cluster.log_of(rank), str(plan)
            assert (result is None) == (rank not in results), str(plan)
            assert result is None or torch.equal(result, results[rank]), str(plan)


@pytest.mark.gloo
@given(st.lists(plans_on_four_ranks(), min_size=40, max_size=40))
@settings(max_examples=1, deadline=None, derandomize=True, phases=[Phase.generate])
def test_gloo_does_what_the_virtual_cluster_does(gloo: GlooPool, plans: list[ReshardPlan]) -> None:
    compare_with_gloo(gloo, plans)


@pytest.mark.gloo
@given(st.lists(plans_with_relays(), min_size=10, max_size=10))
@settings(max_examples=1, deadline=None, derandomize=True, phases=[Phase.generate])
def test_gloo_relays_as_the_virtual_cluster_does(gloo: GlooPool, plans: list[ReshardPlan]) -> None:
    compare_with_gloo(gloo, plans)


@pytest.mark.long
@pytest.mark.gloo
@given(st.lists(plans_with_relays(), min_size=50, max_size=50))
@settings(
    max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
def test_gloo_relays_two_hundred_times_as_the_virtual_cluster_does(gloo: GlooPool, plans: list[ReshardPlan]) -> None:
    compare_with_gloo(gloo, plans)


def test_sums_for_others_live_in_scratch_buffers_of_their_boxes() -> None:
    box, left = ((2, 4), (0, 3)), ((0, 1), (0, 3))
    moves = (
        tuple(
            Move(rank, 0, part, "sum" if rank else "copy", destination="scratch")
            for part in (box, left)
            for rank in range(3)
        ),
        (
            Move(0, 3, box, origin="scratch"),
            Move(0, 3, left, origin="scratch"),
            *(Move(rank, 3, ((1, 2), (0, 3)), "sum") for rank in range(3)),
        ),
    )
    plan = ReshardPlan(Annotation.parse("0-2[P]"), Annotation.parse("3[]"), (4, 3), moves)
    check_reshard(plan)
    assert [region.shape for region in prepare(plan, 0).scratch] == [(2, 3), (1, 3)]
    assert [prepare(plan, rank).scratch for rank in (1, 2, 3)] == [()] * 3
    tensors = {rank: torch.full((4, 3), 10.0**rank, dtype=torch.float64) for rank in range(3)}
    results, cluster = run_on_cluster(plan, tensors)
    assert torch.equal(results[3], torch.full((4, 3), 111.0, dtype=torch.float64))
    assert sorted(map(str, cluster.log)) == [
        "send 0->3 96 B 'reshard'",
        "send 1->0 72 B 'reshard'",
        "send 1->3 24 B 'reshard'",
        "send 2->0 72 B 'reshard'",
        "send 2->3 24 B 'reshard'",
    ]


def test_scratch_boxes_that_are_read_together_share_a_buffer() -> None:
    whole, left, right = ((0, 4),), ((0, 2),), ((2, 4),)
    phases = (
        (Move(0, 1, left, destination="scratch"), Move(0, 1, right, destination="scratch")),
        (Move(1, 2, whole, origin="scratch"),),
    )
    plan = ReshardPlan(Annotation.parse("0[]"), Annotation.parse("2[]"), (4,), phases)
    check_reshard(plan)
    assert [region.shape for region in prepare(plan, 1).scratch] == [(4,)]
    assert_right(plan)


def test_a_rank_that_only_passes_on_ends_with_nothing() -> None:
    box = ((0, 4),)
    phases = ((Move(0, 1, box, destination="scratch"),), (Move(1, 2, box, origin="scratch"),))
    for target in ("2[]", "1-2[S(0:0,4)]"):
        plan = ReshardPlan(Annotation.parse("0[]"), Annotation.parse(target), (4,), phases)
        check_reshard(plan)
        assert_right(plan)


def test_a_prepared_sum_in_scratch_holds_for_every_length_of_its_free_dims() -> None:
    topology = nodes((0, 1), (2,))
    plan = plan_reshard(Annotation.parse("0-1[P]"), Annotation.parse("2[]"), (0, 5), topology=topology, free_dims=(0,))
    prepared = {rank: prepare(plan, rank) for rank in range(3)}
    for length in (0, 1, 4):
        runs = {}
        for rank in range(3):
            tensor = torch.ones((length, 5), dtype=torch.float64) if rank < 2 else None
            options = {"label": "reshard", "dtype": torch.float64, "shape": (length, 5)}
            runs[rank] = run_reshard(prepared[rank], rank, tensor, **options)
        assert torch.equal(VirtualCluster(3).run(runs)[2], torch.full((length, 5), 2.0, dtype=torch.float64))


@pytest.mark.case(84)
@pytest.mark.parametrize("mesh", ["2x2", "2x3", "3x2"])
@pytest.mark.parametrize("length", range(1, 8))
def test_nested_splits_gather_to_the_whole(mesh: str, length: int) -> None:
    num_ranks = int(mesh[0]) * int(mesh[2])
    nested = Annotation.parse(f"0-{num_ranks - 1}[{mesh}: S(0), S(0)]")
    plan = plan_reshard(nested, replicated(range(num_ranks)), (length, 3))
    value, buffers = sources_of(plan)
    results, _ = run_on_cluster(plan, tensors_of(buffers))
    assert len(results) == num_ranks
    assert all(torch.equal(result, torch.from_numpy(value)) for result in results.values())


@pytest.mark.case(83)
def test_five_rows_over_four_ranks_come_back_as_five() -> None:
    plan = plan_reshard(sharded(range(4), 0), replicated(range(4)), (5, 10))
    value, buffers = sources_of(plan)
    results, _ = run_on_cluster(plan, tensors_of(buffers))
    assert all(torch.equal(result, torch.from_numpy(value)) for result in results.values())


@pytest.mark.case(100)
def test_between_meshes_and_onto_other_ranks() -> None:
    square = Annotation.parse("0-3[2x2: S(0), S(0)]")
    for target in (sharded(range(4), 0), sharded((5, 4, 7, 6), 0), sharded((3, 4), 0)):
        for source, goal in ((square, target), (target, square)):
            plan = plan_reshard(source, goal, (16,), collectives=False)
            value, buffers = sources_of(plan)
            results, cluster = run_on_cluster(plan, tensors_of(buffers))
            pieces = shard_map(goal, (16,))
            assert is_value(pieces, {rank: tensor.numpy() for rank, tensor in results.items()}, value)
            moved = [op for phase in plan.phases for op in phase if isinstance(op, Move) and op.sender != op.receiver]
            planned_bytes = sum((move.box[0][1] - move.box[0][0]) * 8 for move in moved)
            assert sum(message.num_bytes for message in cluster.log) == planned_bytes


def test_all_moves_of_a_pair_travel_in_one_message() -> None:
    moves = (
        Move(0, 1, ((0, 1), (0, 2))),
        Move(0, 1, ((2, 4), (1, 3))),
        Move(2, 1, ((1, 2), (0, 3)), "sum"),
        Move(1, 1, ((1, 2), (0, 3)), "sum"),
    )
    plan = ReshardPlan(Annotation.parse("0-2[P]"), Annotation.parse("1[]"), (4, 3), (moves,))
    tensors = {rank: torch.full((4, 3), 10.0**rank, dtype=torch.float64) for rank in range(3)}
    results, cluster = run_on_cluster(plan, tensors)
    assert [str(message) for message in cluster.log] == [
        "send 0->1 48 B 'reshard'",
        "send 2->1 24 B 'reshard'",
    ]
    assert results[1].tolist() == [[1, 1, 0], [110, 110, 110], [0, 1, 1], [0, 1, 1]]


def test_terms_are_summed_in_the_order_of_the_plan() -> None:
    plan = plan_reshard(Annotation.parse("1,2,3[P]"), Annotation.parse("0[]"), (1,), collectives=False)
    values = {1: 1e16, 2: 1.0, 3: -1e16}
    tensors = {rank: torch.tensor([value], dtype=torch.float64) for rank, value in values.items()}
    assert run_on_cluster(plan, tensors)[0][0].item() == 0.0


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("0-1[P]", "0-1[R]"),
        ("0-1[S(1)]", "0-2[R]"),
        ("0-1[R]", "0-1[S(1)]"),
        ("0-1[P]", "2[]"),
        ("0-2[P]", "0-2[S(1)]"),
    ],
)
def test_a_prepared_plan_holds_for_every_length_of_its_free_dims(num_tokens: int, source: str, target: str) -> None:
    for planned in (0, 3):
        plan = plan_reshard(Annotation.parse(source), Annotation.parse(target), (planned, 5), free_dims=(0,))
        prepared = {rank: prepare(plan, rank) for rank in range(3)}
        value, buffers = sources_of(plan.at((num_tokens, 5)))
        tensors = tensors_of(buffers)
        cluster = VirtualCluster(3)
        results = cluster.run(
            {
                rank: run_reshard(
                    prepared[rank],
                    rank,
                    tensors.get(rank),
                    label="reshard",
                    dtype=torch.float64,
                    shape=(num_tokens, 5),
                )
                for rank in range(3)
            }
        )
        arrays = {rank: result.numpy() for rank, result in results.items() if result is not None}
        assert is_value(shard_map(plan.target, (num_tokens, 5)), arrays, value)


def test_an_all_reduce_copies_its_input_once_or_not_at_all() -> None:
    plan = plan_reshard(Annotation.parse("0-1[P]"), replicated((0, 1)), (4,))
    for may_overwrite in (False, True):
        tensors = {rank: torch.ones(4, dtype=torch.float64) for rank in range(2)}
        results, _ = run_on_cluster(plan, tensors, may_overwrite=may_overwrite)
        for rank in range(2):
            assert (results[rank].data_ptr() == tensors[rank].data_ptr()) == may_overwrite
            assert tensors[rank].tolist() == ([2.0] * 4 if may_overwrite else [1.0] * 4)


def test_nothing_to_do_returns_the_tensor_itself() -> None:
    plan = plan_reshard(replicated((0, 1)), Annotation.parse("0-1[2: R]"), (4,))
    tensors = {rank: torch.ones(4, dtype=torch.float64) for rank in range(2)}
    results, cluster = run_on_cluster(plan, tensors)
    assert results[0] is tensors[0]
    assert cluster.log == []


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (
            {0: torch.ones(3), 1: torch.ones(2)},
            r"'reshard': rank 0 expected \[2\], got \[3\], of a tensor \[4\] as 0-1\[S",
        ),
        ({0: torch.ones(2)}, r"'reshard': rank 1 expected \[2\], got nothing"),
        ({0: torch.ones(2), 1: torch.ones(2), 2: torch.ones(1)}, r"'reshard': rank 2 expected nothing, got \[1\]"),
    ],
)
def test_a_source_of_the_wrong_shape(tensors: dict[int, Tensor], text: str) -> None:
    plan = plan_reshard(sharded((0, 1), 0), replicated((0, 1)), (4,))
    with pytest.raises(InvalidInput, match=text):
        run_on_cluster(plan, tensors)
