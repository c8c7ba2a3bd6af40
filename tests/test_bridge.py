"""Bridges: many tensors by one plan, bucket by bucket, equal to running each tensor's plan alone."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hgraph.bridge_plan import BridgePlan
from hgraph.errors import InvalidInput
from hgraph.shard_map import intersect, shard_map
from hgraph.traffic import traffic
from runtime.bridge import Bridge, arrived
from runtime.bridge_steps import Part
from runtime.buffer_pool import BufferPool
from runtime.gloo import ProcessTransport
from runtime.messages import Event, Message
from runtime.process_groups import create_groups
from runtime.requests import RankGenerator
from runtime.reshard import run_reshard
from runtime.virtual_cluster import VirtualCluster
from tests.bridge_runs import Allocations, Sources, bridge_plan, noise_of, run_bridge, tensor, watched
from tests.bridge_samples import BridgeSample, bridge_samples, nodes
from tests.gloo_workers import GlooPool
from tests.reshard_reference import is_value, scatter

SAMPLES = st.integers(1, 4).flatmap(lambda count: bridge_samples(count, max_ranks=8))
BUCKETS = st.sampled_from([None, 1, 40])


def plan_of(sample: BridgeSample, bucket_elements: int | None) -> BridgePlan:
    return bridge_plan({item.name: item for item in sample.reshards}, sample.topology, bucket_elements)


@given(SAMPLES, BUCKETS)
@settings(max_examples=60)
def test_any_tensors_together(sample: BridgeSample, bucket_elements: int | None) -> None:
    check_values(sample, bucket_elements)


@pytest.mark.long
@pytest.mark.timeout(1800)
@given(st.integers(1, 5).flatmap(lambda count: bridge_samples(count, max_ranks=16)), BUCKETS)
@settings(max_examples=500)
def test_any_tensors_together_on_sixteen_ranks(sample: BridgeSample, bucket_elements: int | None) -> None:
    check_values(sample, bucket_elements)


def check_values(sample: BridgeSample, bucket_elements: int | None) -> None:
    """Asserts that a bridge gives every rank what the definition of its target says."""
    plan = plan_of(sample, bucket_elements)
    num_ranks = plan.topology.num_ranks
    generator = np.random.default_rng(0)
    sources: Sources = {rank: {} for rank in range(num_ranks)}
    values = {}
    for item in sample.reshards:
        values[item.name] = generator.integers(-1000, 1000, size=item.shape).astype(np.float64)
        for rank, array in scatter(shard_map(item.source, item.shape), values[item.name], generator).items():
            sources[rank][item.name] = torch.from_numpy(np.asarray(array))
    results, cluster = run_bridge(plan, sources)
    for item in sample.reshards:
        arrays = {rank: result[item.name].numpy() for rank, result in results.items() if item.name in result}
        assert is_value(shard_map(item.target, item.shape), arrays, values[item.name])
    check_log(plan, cluster)


def check_log(plan: BridgePlan, cluster: VirtualCluster) -> None:
    """Asserts one message per pair, bucket and level, and the bytes and messages that the bridges state."""
    places = [(message.ranks, message.label) for message in cluster.log]
    assert len(set(places)) == len(places), "two messages of one pair of ranks in one level of a bucket"
    for rank in range(plan.topology.num_ranks):
        bridge = Bridge(plan, rank, torch.float64)
        sent = [message.num_bytes for message in cluster.log if message.ranks[0] == rank]
        assert sum(sent) == bridge.bytes_sent(rank)
        assert len(sent) == bridge.num_messages
        assert sum(message.num_bytes for message in cluster.log) == bridge.total_bytes


@given(SAMPLES, BUCKETS)
@settings(max_examples=40)
def test_equal_to_the_bit_to_running_each_plan_alone(sample: BridgeSample, bucket_elements: int | None) -> None:
    plan = plan_of(sample, bucket_elements)
    num_ranks = plan.topology.num_ranks
    sources = noise_of(sample.reshards, num_ranks)
    results, _ = run_bridge(plan, sources)
    for item in sample.reshards:
        own = plan.reshard_plan(item.name)
        alone = VirtualCluster(num_ranks).run(
            {
                rank: run_reshard(own, rank, sources[rank].get(item.name), label="alone", dtype=torch.float64)
                for rank in range(num_ranks)
            }
        )
        for rank, result in alone.items():
            assert (result is None) == (item.name not in results[rank])
            assert result is None or torch.equal(result, results[rank][item.name])


@given(SAMPLES, BUCKETS)
@settings(max_examples=40)
def test_what_is_prepared_keeps_its_invariants(sample: BridgeSample, bucket_elements: int | None) -> None:
    plan = plan_of(sample, bucket_elements)
    for rank in range(plan.topology.num_ranks):
        bridge = Bridge(plan, rank, torch.float32)
        for bucket, positions in zip(bridge.buckets, plan.buckets, strict=True):
            assert bucket.num_elements == plan.buffer_elements(positions)[rank]
            places = [
                (message.start, message.num_elements)
                for step in bucket.steps
                for message in (*step.sends, *step.receives)
            ]
            places += [(start, int(np.prod(shape))) for start, shape in bucket.sums]
            ends = list(itertools.accumulate((length for _, length in sorted(places)), initial=0))
            assert [start for start, _ in sorted(places)] == ends[:-1], "places overlap, or leave gaps"
            for step in bucket.steps:
                for _, writes in step.layers:
                    assert not any(meet(one.target, other.target) for one, other in itertools.combinations(writes, 2))


def meet(one: Part, other: Part) -> bool:
    if (one.tensor, one.origin, one.sum) != (other.tensor, other.origin, other.sum):
        return False
    boxes = [tuple((s.start, s.stop) for s in part.slices) for part in (one, other)]
    return intersect(*boxes) is not None


# The optimizer layout over four ranks of two nodes; replicas tp2, tp1, tp1.
PARAMETERS = {
    "embedding": tensor("0-3[S(0)]", "0-1[S(0)] + 2[] + 3[] @ R", (7, 3)),
    "norm": tensor("0-3[S(0)]", "0-1[R] + 2[] + 3[] @ R", (3,)),
    "up": tensor("0-3[S(0)]", "0-1[S(1)] + 2[] + 3[] @ R", (5, 4)),
}
GRADIENTS = {
    "embedding": tensor("0-1[S(0)] + 2[] + 3[] @ P", "0-3[S(0)]", (7, 3)),
    "norm": tensor("0-1[R] + 2[] + 3[] @ P", "0-3[S(0)]", (3,)),
    "up": tensor("0-1[S(1)] + 2[] + 3[] @ P", "0-3[S(0)]", (5, 4)),
}
TWO_NODES = nodes((0, 1), (2, 3))
PLANS = [
    bridge_plan(tensors, topology, bucket_elements)
    for tensors, topology, bucket_elements in itertools.product((PARAMETERS, GRADIENTS), (None, TWO_NODES), (None, 20))
]


def noise(plan: BridgePlan) -> Sources:
    return noise_of([item.reshard for item in plan.tensors], 4)


def test_parameters_are_cast_before_they_travel() -> None:
    plan = bridge_plan(PARAMETERS)
    sources = noise(plan)
    results, cluster = run_bridge(plan, sources, torch.bfloat16)
    whole = torch.cat([sources[rank]["up"] for rank in range(4)]).to(torch.bfloat16)
    assert torch.equal(results[0]["up"], whole[:, :2])
    assert torch.equal(results[1]["up"], whole[:, 2:])
    assert torch.equal(results[3]["up"], whole)
    wide = run_bridge(plan, sources, torch.float64)[1]
    assert 4 * sum(m.num_bytes for m in cluster.log) == sum(m.num_bytes for m in wide.log)


@pytest.mark.parametrize("plan", PLANS[4:], ids=["one bucket", "buckets", "two nodes", "two nodes, buckets"])
def test_gradients_of_unequal_replicas_are_summed_at_their_owner(plan: BridgePlan) -> None:
    sources = noise(plan)
    results, _ = run_bridge(plan, sources)
    first = torch.cat([sources[0]["up"], sources[1]["up"]], dim=1)
    total = first + sources[2]["up"] + sources[3]["up"]
    whole = torch.cat([results[rank]["up"] for rank in range(4)])
    torch.testing.assert_close(whole, total, rtol=1e-14, atol=1e-14)  # a node's sum may come before the owner's
    assert results[3]["norm"].shape == (0,)


def test_terms_of_a_node_are_summed_before_they_cross() -> None:
    plan = bridge_plan({"w": tensor("0[] + 1[] + 2[] + 3[] @ P", "0[]", (6,))}, TWO_NODES)
    results, cluster = run_bridge(plan, noise(plan))
    assert [message.ranks for message in cluster.log if message.ranks in ((2, 0), (3, 0))] in ([(2, 0)], [(3, 0)])
    torch.testing.assert_close(results[0]["w"], sum(s["w"] for s in noise(plan).values()), rtol=1e-14, atol=0)
    summing = next(message.ranks[0] for message in cluster.log if message.ranks[1] == 0 and message.ranks[0] > 1)
    bridge = Bridge(plan, summing, torch.float64)
    assert [shape for bucket in bridge.buckets for _, shape in bucket.sums] == [(6,)]


def test_sums_on_the_way_are_in_the_dtype_of_the_bridge() -> None:
    plan = bridge_plan({"w": tensor("0[] + 1[] + 2[] + 3[] + 4[] @ P", "0[]", (1,))}, nodes((0,), (1, 2, 3, 4)))
    terms: Sources = {
        rank: {"w": torch.tensor([value], dtype=torch.bfloat16)}
        for rank, value in enumerate((0.0, 256.0, 1.0, 1.0, 1.0))
    }
    assert run_bridge(plan, terms, torch.float32)[0][0]["w"].item() == 259.0


def levels_of_pairs(plan: BridgePlan) -> dict[tuple[int, int], set[int]]:
    levels: dict[tuple[int, int], set[int]] = {}
    routes = plan.routes
    for level, sender, receiver in zip(routes.level, routes.sender, routes.receiver, strict=True):
        levels.setdefault((int(sender), int(receiver)), set()).add(int(level))
    return levels


REPLICAS = ["0-7[S(0)] + 8-11[S(1)] + 12-13[S(0)] + 14[] + 15[]", "0-3[S(1)] + 4-7[S(1)] + 8-15[S(1)]", "0[] + 9[]"]


@pytest.mark.parametrize("union", REPLICAS)
@pytest.mark.parametrize(
    "groups", [((*range(16),),), (range(8), range(8, 16)), (range(5), range(5, 12), range(12, 16))]
)
def test_a_pair_of_ranks_meets_in_one_level_for_parameters_from_and_gradients_to_one_owner(
    union: str, groups: tuple[Any, ...]
) -> None:
    """So a bucket has one message per pair. Each tensor has one owner per element."""
    topology = nodes(*map(tuple, groups))
    shape = (32, 16)
    inward = bridge_plan({"w": tensor("0-15[S(0)]", f"{union} @ R", shape)}, topology, 100)
    outward = bridge_plan({"w": tensor(f"{union} @ P", "0-15[S(0)]", shape)}, topology, 100)
    for plan, copied in ((inward, True), (outward, False)):
        levels = levels_of_pairs(plan)
        assert levels
        for pair, found in levels.items():
            assert len(found) == 1, f"{pair} meets in levels {found}, copied: {copied}"


def test_equal_layers_are_worked_out_once() -> None:
    layers = {f"layer{number}.{name}": item for number in range(40) for name, item in PARAMETERS.items()}
    bridge = Bridge(bridge_plan(layers, TWO_NODES, 200), 1, torch.float32)
    assert len({id(local) for local in bridge.local}) == 3
    assert len(bridge.buckets) > 10


# Buckets and buffers


def layers_plan(num_layers: int, bucket_elements: int | None, kind: dict[str, Any]) -> BridgePlan:
    layers = {f"layer{number}.{name}": item for number in range(num_layers) for name, item in kind.items()}
    return bridge_plan(layers, TWO_NODES, bucket_elements)


@pytest.mark.parametrize("kind", [PARAMETERS, GRADIENTS], ids=["parameters", "gradients"])
def test_at_most_two_buckets_are_in_flight_and_buffers_are_reused(kind: dict[str, Any]) -> None:
    plan = layers_plan(6, 60, kind)
    assert len(plan.buckets) > 4
    sources = noise(plan)
    pools = {rank: BufferPool() for rank in range(4)}
    in_flight: dict[int, list[int]] = {rank: [] for rank in range(4)}
    results = [run_bridge(plan, sources, pools=pools)[0]]
    kept = {rank: pool.kept_bytes for rank, pool in pools.items()}
    cluster = VirtualCluster(4)
    bridges = {rank: Bridge(plan, rank, torch.float64, pool=pools[rank]) for rank in range(4)}
    results.append(
        cluster.run({rank: watched(b.run(sources[rank], "bridge"), in_flight[rank]) for rank, b in bridges.items()})
    )
    for rank, pool in pools.items():
        assert max(in_flight[rank]) == 2
        assert pool.lent_bytes == 0
        assert pool.peak_bytes == bridges[rank].peak_extra_bytes == traffic(plan, 8).peak_extra_bytes[rank]
        assert kept[rank] == pool.kept_bytes <= 2 * 8 * max(plan.buffer_elements(b)[rank] for b in plan.buckets)
        for name, value in results[0][rank].items():
            assert torch.equal(value, results[1][rank][name])


@given(SAMPLES, st.sampled_from([None, 1, 7, 40]))
@settings(max_examples=100, deadline=None)
def test_plans_state_the_memory_that_bridges_take(sample: BridgeSample, bucket_elements: int | None) -> None:
    check_stated_memory(plan_of(sample, bucket_elements))


@pytest.mark.parametrize("bucket_elements", [None, 1, 20, 60, 200, 10_000])
@pytest.mark.parametrize("kind", [PARAMETERS, GRADIENTS], ids=["parameters", "gradients"])
def test_plans_of_layers_state_the_memory_that_bridges_take(kind: dict[str, Any], bucket_elements: int | None) -> None:
    check_stated_memory(layers_plan(5, bucket_elements, kind))


def test_a_bucket_without_elements_takes_its_turn() -> None:
    """Of four buckets the second is empty, or moves nothing on rank 0: it decides which buckets share a buffer."""
    for second in (tensor("0[]", "1[]", (0,)), tensor("1[]", "2[]", (9,)), tensor("0[]", "0[]", (3,))):
        moved = [tensor("0[]", "1[]", (length,)) for length in (5, 4, 8)]
        tensors = {f"t{at}": item for at, item in enumerate([moved[0], second, *moved[1:]])}
        plan = bridge_plan(tensors, nodes((0, 1), (2,)), 1)
        assert len(plan.buckets) == 4
        check_stated_memory(plan)


def check_stated_memory(plan: BridgePlan) -> None:
    """Asserts that the plan's figure is, for every rank, what its bridge states, and what a run takes."""
    stated = traffic(plan, 8).peak_extra_bytes
    pools = {rank: BufferPool() for rank in range(plan.topology.num_ranks)}
    bridges = {rank: Bridge(plan, rank, torch.float64, pool=pool) for rank, pool in pools.items()}
    assert stated.tolist() == [bridges[rank].peak_extra_bytes for rank in pools]
    sources = noise_of([item.reshard for item in plan.tensors], plan.topology.num_ranks)
    run_bridge(plan, sources, pools=pools)
    assert stated.tolist() == [pool.peak_bytes for pool in pools.values()]


@pytest.mark.parametrize("kind", [PARAMETERS, GRADIENTS], ids=["parameters", "gradients"])
@pytest.mark.parametrize("bucket_elements", [None, 60])
def test_measured_memory_is_what_the_bridge_states(kind: dict[str, Any], bucket_elements: int | None) -> None:
    """Beside the results, a rank allocates no more than the messages and sums of two buckets; sources are cast."""
    plan = layers_plan(6, bucket_elements, kind)
    modes = {rank: Allocations() for rank in range(4)}

    def measured(generator: RankGenerator[Any], rank: int) -> RankGenerator[Any]:
        answer: Any = None
        while True:
            try:
                with modes[rank]:
                    request = generator.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = yield request

    cluster = VirtualCluster(4)
    bridges = {rank: Bridge(plan, rank, torch.float32) for rank in range(4)}
    sources = noise(plan)
    results = cluster.run({r: measured(b.run(sources[r], "bridge"), r) for r, b in bridges.items()})
    for rank, bridge in bridges.items():
        held = sum(value.nbytes for value in results[rank].values())
        assert held < modes[rank].peak_bytes <= held + bridge.peak_extra_bytes
        assert modes[rank].peak_bytes > held + bridge.peak_extra_bytes // 2


def test_a_pool_lends_what_was_given_back() -> None:
    pool = BufferPool()
    first, second = pool.take(10, torch.float64), pool.take(3, torch.float32)
    assert (pool.lent_bytes, pool.peak_bytes, pool.kept_bytes) == (92, 92, 92)
    address = first.data_ptr()
    pool.give_back(first)
    pool.give_back(second)
    again = pool.take(20, torch.float32)
    assert again.data_ptr() == address
    assert again.dtype == torch.float32
    assert (pool.lent_bytes, pool.peak_bytes, pool.kept_bytes) == (80, 92, 92)
    larger = pool.take(100, torch.float64)
    assert larger.numel() == 100
    assert pool.kept_bytes == 880, "the one that was too small was kept"


def test_nothing_for_a_rank_without_any_part() -> None:
    plan = bridge_plan(PARAMETERS)
    _, cluster = run_bridge(plan, noise(plan), num_ranks=8)
    assert len(cluster.log_of(0)) <= 6
    assert cluster.log_of(7) == []
    assert Bridge(plan, 7, torch.float64).bytes_sent(7) == 0
    assert [event.text for event in cluster.trace if event.rank == 7] == ["bridge: all arrived", "bridge: ended"]
    in_place = bridge_plan({"w": tensor("0-1[R]", "0-1[R]", (2,))})
    values = {rank: {"w": torch.ones(2, dtype=torch.float64)} for rank in range(2)}
    results, cluster = run_bridge(in_place, values, num_ranks=3)
    assert cluster.log == []
    assert results[1]["w"] is values[1]["w"]
    assert results[2] == {}


def test_a_plan_of_no_tensors() -> None:
    results, cluster = run_bridge(bridge_plan({}), {}, num_ranks=2)
    assert results == {0: {}, 1: {}}
    assert cluster.log == []


def test_all_has_arrived_before_later_buckets_have_left() -> None:
    """Rank 0 gets parts of the first tensor alone, but owns parts of all of them."""
    tensors = {f"w{number}": tensor("0-1[S(0)]", "0[]" if number == 0 else "1[]", (8,)) for number in range(5)}
    _, cluster = run_bridge(bridge_plan(tensors, bucket_elements=8), noise(bridge_plan(tensors)))
    order = [event.text for event in cluster.trace if event.rank == 0]
    assert order.index(arrived("bridge")) < order.index("bridge: bucket 2 posted")
    assert order.index("bridge: bucket 1 posted") < order.index("bridge: bucket 0 landed")


def drive_bridges(overlap: bool) -> list[tuple[dict[str, Tensor], list[Message], list[str]]]:
    rank = dist.get_rank()
    transport = ProcessTransport(create_groups([], 20.0), overlap=overlap)
    answers = []
    for plan in PLANS:
        bridge = Bridge(plan, rank, torch.float64)
        result = transport.drive(bridge.run(noise(plan)[rank], "bridge"))
        answers.append((result, transport.log, texts(transport.trace)))
    transport.close()
    return answers


def texts(trace: list[Event]) -> list[str]:
    return [event.text for event in trace]


@pytest.mark.gloo
def test_gloo_does_what_the_virtual_cluster_does(gloo: GlooPool) -> None:
    by_rank = gloo.run(drive_bridges, True)
    for index, plan in enumerate(PLANS):
        results, cluster = run_bridge(plan, noise(plan))
        for rank in range(4):
            tensors, log, trace = by_rank[rank][index]
            assert log == cluster.log_of(rank)
            assert trace == texts([event for event in cluster.trace if event.rank == rank])
            assert tensors.keys() == results[rank].keys()
            assert all(torch.equal(tensors[name], results[rank][name]) for name in tensors)


@contextmanager
def handed_over(counts: Counter[str]) -> Iterator[None]:
    """Counts messages and bytes given to `torch.distributed`."""
    issue = dist.batch_isend_irecv

    def counted(operations: list[dist.P2POp]) -> list[dist.Work]:
        for operation in operations:
            kind = "sent" if operation.op is dist.isend else "received"
            counts[f"messages {kind}"] += 1
            counts[f"bytes {kind}"] += operation.tensor.nbytes
        return issue(operations)

    dist.batch_isend_irecv = counted
    try:
        yield
    finally:
        dist.batch_isend_irecv = issue


def count_what_is_sent() -> list[Counter[str]]:
    rank = dist.get_rank()
    transport = ProcessTransport(create_groups([], 20.0))
    found = []
    for plan in PLANS:
        counts: Counter[str] = Counter()
        bridge = Bridge(plan, rank, torch.float32)
        with handed_over(counts):
            transport.drive(bridge.run(noise(plan)[rank], "bridge"))
        found.append(counts)
    transport.close()
    return found


@pytest.mark.gloo
def test_the_bytes_given_to_torch_distributed_are_those_of_the_plan(gloo: GlooPool) -> None:
    by_rank = gloo.run(count_what_is_sent)
    for index, plan in enumerate(PLANS):
        for rank in range(4):
            bridge, counts = Bridge(plan, rank, torch.float32), by_rank[rank][index]
            assert counts["bytes sent"] == bridge.bytes_sent(rank)
            assert counts["messages sent"] == bridge.num_messages
        assert sum(by_rank[rank][index]["bytes received"] for rank in range(4)) == bridge.total_bytes > 0


def test_what_a_bridge_refuses() -> None:
    bridge = Bridge(bridge_plan({"w": tensor("0-1[S(0)]", "0-1[R]", (4,))}), 0, torch.float32)
    with pytest.raises(InvalidInput, match=r"bridge: w: rank 0 expected \[2\], got \[3\], of \[4\] as 0-1\[S\(0\)\]"):
        next(bridge.run({"w": torch.ones(3)}, "x"))
    with pytest.raises(InvalidInput, match=r"bridge: w: rank 0 expected \[2\], got nothing"):
        next(bridge.run({}, "x"))
    with pytest.raises(InvalidInput, match="bridge: expected tensors of its plan, got v"):
        next(bridge.run({"w": torch.ones(2), "v": torch.ones(2)}, "x"))
