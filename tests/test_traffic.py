"""Traffic: counted again from the moves themselves, and by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hgraph.annotation import Annotation
from hgraph.bridge_plan import BridgePlan, plan_bridge
from hgraph.bundles import TensorReshard
from hgraph.errors import InvalidInput
from hgraph.reshard import plan_reshard, reshard_bytes
from hgraph.reshard_plan import Move, ReshardPlan
from hgraph.shard_map import box_numel
from hgraph.topology import Link, Node, Topology, uniform
from hgraph.traffic import reshard_cost, traffic
from tests.annotations import Pair, annotation_pairs

LOCAL, NETWORK = Link(4.0, 3.0), Link(0.5, 20.0)
CLUSTER = uniform("cluster", 2, 4, LOCAL, NETWORK, ranks_per_port=2)


def bridge(*texts: str, topology: Topology = CLUSTER, bucket_elements: int | None = None) -> BridgePlan:
    """Returns the plan of tensors written as `source -> target, 4x2`."""
    reshards = []
    for number, text in enumerate(texts):
        pair, shape = text.rsplit(",", 1)
        source, target = map(Annotation.parse, map(str.strip, pair.split("->")))
        lengths = tuple(int(length) for length in shape.split("x"))
        reshards.append(TensorReshard(f"t{number}", source, target, lengths))
    return plan_bridge(reshards, topology, bucket_elements=bucket_elements)


def test_by_hand() -> None:
    """Rank 0 has 8 numbers that all need: one goes to node 1, and each node shares inside, 3 times."""
    found = traffic(bridge("0[] -> 0-7[R], 8"), 4)
    assert found.class_bytes("network") == 32 and found.class_bytes("local") == 6 * 32 and found.total_bytes == 7 * 32
    assert found.sent("network").tolist() == [32, *[0] * 7] and found.received("network").sum() == 32
    entry = int(found.received("network").argmax())
    assert found.sent("local")[[0, entry]].tolist() == [96, 96] and found.received("local").sum() == 192
    assert found.port_sent.tolist() == [32, 0, 0, 0] and found.node_sent.tolist() == [32, 0]
    assert found.port_received.sum() == 32 and found.node_received.tolist() == [0, 32]
    assert found.num_messages == 7 and found.num_buckets == 1
    # Level 2: 32 B over a port of 0.5 GB/s and 20 us. Level 3: three messages out of the entry.
    assert found.level_ms == pytest.approx((0, 0, 32 / 0.5e6 + 0.020, 96 / 4e6 + 0.009))
    assert found.ms == pytest.approx(sum(found.level_ms))
    assert found.peak_extra_bytes[0] == 32 + 96 and found.peak_extra_bytes[entry] == 32 + 96
    loads = found.loads()
    assert (loads["network sender"].greatest, loads["network sender"].mean, loads["network sender"].member) == (
        32,
        4,
        0,
    )
    assert loads["node receiver"].ratio == 2.0 and loads["local sender"].greatest == 96


def test_ranks_that_share_a_port_wait_for_each_other() -> None:
    """Each rank of node 0 sends 4 bytes to its twin; two of them share a port."""
    found = traffic(bridge("0-3[S(0)] -> 4-7[S(0)], 4"), 4)
    assert found.port_sent.tolist() == [8, 8, 0, 0] and found.loads()["network sender"].ratio == 2.0
    assert found.ms == pytest.approx(8 / 0.5e6 + 2 * 0.020)


def test_mixed_nodes_take_the_slower_port_and_the_longer_latency() -> None:
    fast = Node("fast", (0,), LOCAL, Link(10.0, 1.0))
    slow = Node("slow", (1,), LOCAL, Link(1.0, 50.0))
    for text in ("0[] -> 1[], 1000", "1[] -> 0[], 1000"):
        found = traffic(bridge(text, topology=Topology("mixed", (fast, slow))), 1)
        assert found.ms == pytest.approx(1000 / 1e6 + 0.050)


def test_one_message_per_pair_level_and_bucket() -> None:
    texts = ["0[] -> 0-7[R], 8"] * 3 + ["1[] -> 1[], 8"]
    assert traffic(bridge(*texts), 4).num_messages == 7
    split = traffic(bridge(*texts, bucket_elements=1), 4)
    assert split.num_buckets == 4 and split.num_messages == 21
    assert split.ms > traffic(bridge(*texts), 4).ms
    # Two of the three buckets that move anything are in flight at a time.
    assert (split.peak_extra_bytes * 3 == 2 * traffic(bridge(*texts), 4).peak_extra_bytes).all()


def test_nothing_moves() -> None:
    for found in (traffic(bridge("0[] -> 0[], 8"), 4), traffic(bridge(), 4), traffic(bridge("0[] -> 0-7[R], 0"), 4)):
        assert found.total_bytes == found.num_messages == found.ms == 0 and found.level_ms == ()
        assert found.loads()["network sender"].ratio == 1.0 and not found.matrix().any()


def recount(plan: ReshardPlan, element_bytes: int, counts: Counter[tuple[int, int]]) -> None:
    for phase in plan.phases:
        for move in phase:
            assert isinstance(move, Move)
            if move.sender != move.receiver:
                counts[move.sender, move.receiver] += box_numel(move.box) * element_bytes


@settings(max_examples=40, deadline=None)
@given(st.lists(annotation_pairs(), min_size=1, max_size=3), st.sampled_from([None, 1, 10]))
def test_bytes_are_those_of_the_moves(pairs: list[Pair], bucket_elements: int | None) -> None:
    reshards = [TensorReshard(f"t{at}", pair.source, pair.target, pair.shape) for at, pair in enumerate(pairs)]
    plan = plan_bridge(reshards, CLUSTER, bucket_elements=bucket_elements)
    found = traffic(plan, 2)
    counts: Counter[tuple[int, int]] = Counter()
    messages = 0
    for bucket in plan.buckets:
        met = set()
        for at in bucket:
            recount(plan.reshard_plan(f"t{at}"), 2, counts)
            for level, phase in enumerate(plan.moves(plan.tensors[at])):
                met |= {(level, move.sender, move.receiver) for move in phase if move.sender != move.receiver}
        messages += len(met)
    matrix = found.matrix()
    assert {(int(s), int(r)): int(matrix[s, r]) for s, r in np.argwhere(matrix)} == {
        k: v for k, v in counts.items() if v
    }
    assert found.num_messages == messages
    assert (found.matrix("local") + found.matrix("network") == matrix).all()
    assert (found.sent("local") + found.sent("network") == matrix.sum(axis=1)).all()
    assert (found.received("local") + found.received("network") == matrix.sum(axis=0)).all()
    own = [plan.buffer_elements(bucket) for bucket in plan.buckets]
    assert (found.peak_extra_bytes <= 4 * np.max(own, axis=0)).all()
    assert (found.peak_extra_bytes >= 2 * np.max(own, axis=0)).all()


@settings(max_examples=40, deadline=None)
@given(annotation_pairs())
def test_one_tensor_with_collectives(pair: Pair) -> None:
    plan = plan_reshard(pair.source, pair.target, pair.shape)
    found = traffic(plan, 8, CLUSTER)
    matrix = found.matrix()
    assert {(int(s), int(r)): int(matrix[s, r]) for s, r in np.argwhere(matrix)} == reshard_bytes(plan, 8)
    cost = plan.cost(CLUSTER, 8)
    assert cost == reshard_cost(plan, CLUSTER, 8)
    assert cost.local_bytes + cost.network_bytes == found.total_bytes and cost.ms == found.ms
    assert cost.least_network_bytes <= cost.network_bytes


def test_cost_beside_the_least() -> None:
    """Four copies over the network where one would do."""
    annotations = Annotation.parse("0[]"), Annotation.parse("4-7[R]")
    cost = plan_reshard(*annotations, (10,), collectives=False).cost(CLUSTER, 2)
    assert (cost.network_bytes, cost.least_network_bytes, cost.local_bytes, cost.least_bytes) == (80, 20, 0, 80)


def test_sums_on_the_way_count_as_memory() -> None:
    """Terms on ranks 4 and 5 are summed at one of them, which holds 6 numbers and two messages of 6."""
    found = traffic(bridge("0,4,5[P] -> 0[], 6"), 1)
    assert sorted(found.peak_extra_bytes.tolist()) == [0, 0, 0, 0, 0, 6, 6, 18]


def test_errors() -> None:
    plan = bridge("0[] -> 1[], 4")
    other = uniform("other", 1, 8, LOCAL, NETWORK)
    with pytest.raises(InvalidInput, match="expected topology cluster, for which the bridge was planned, got other"):
        traffic(plan, 4, other)
    assert traffic(plan, 4, CLUSTER).total_bytes == 16
    single = plan_reshard(Annotation.parse("0[]"), Annotation.parse("9[]"), (4,))
    with pytest.raises(InvalidInput, match="traffic: expected a topology of 10 or more ranks, got none"):
        traffic(single, 4)
    with pytest.raises(InvalidInput, match="traffic: expected a topology of 10 or more ranks, got cluster with 8"):
        single.cost(CLUSTER, 4)
