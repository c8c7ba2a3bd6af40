"""Bridges: many plans in one exchange, equal to running each plan alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hgraph.annotation import Annotation, replicated, sharded
from hgraph.errors import InvalidInput, PlanError
from hgraph.reshard import plan_reshard
from hgraph.reshard_plan import ReshardPlan
from hgraph.shard_map import intersect, shard_map
from runtime.bridge import Bridge
from runtime.gloo import ProcessTransport
from runtime.messages import Message
from runtime.process_groups import create_groups
from runtime.reshard import run_reshard
from runtime.virtual_cluster import VirtualCluster
from tests.annotations import annotation_pairs
from tests.gloo_workers import GlooPool
from tests.reshard_reference import is_value, scatter

Sources = dict[int, dict[str, Tensor]]


def plan(source: str, target: str, shape: tuple[int, ...]) -> ReshardPlan:
    return plan_reshard(Annotation.parse(source), Annotation.parse(target), shape, collectives=False)


def noise_of(plans: dict[str, ReshardPlan], num_ranks: int) -> Sources:
    """Returns random reals, the same where ranks hold one term."""
    sources: Sources = {rank: {} for rank in range(num_ranks)}
    for seed, (name, item) in enumerate(plans.items()):
        pieces = shard_map(item.source, item.shape)
        terms: dict[tuple[int, int], Tensor] = {}
        for piece in pieces.pieces:
            generator = torch.Generator().manual_seed(1000 * seed + 50 * piece.family + piece.term)
            whole = terms.setdefault(
                (piece.family, piece.term), torch.randn(item.shape, generator=generator, dtype=torch.float64)
            )
            sources[piece.rank][name] = whole[tuple(slice(*ends) for ends in piece.box)].clone()
    return sources


def run_bridge(
    plans: dict[str, ReshardPlan], sources: Sources, dtype: torch.dtype = torch.float64
) -> tuple[dict[int, dict[str, Tensor]], VirtualCluster]:
    cluster = VirtualCluster(8)
    generators = {rank: Bridge(plans, rank, dtype).run(sources.get(rank, {}), "bridge") for rank in range(8)}
    return cluster.run(generators), cluster


@given(st.lists(annotation_pairs(), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_any_tensors_together(pairs: list) -> None:
    plans = {
        f"w{index}": plan_reshard(pair.source, pair.target, pair.shape, collectives=False)
        for index, pair in enumerate(pairs)
    }
    generator = np.random.default_rng(0)
    sources: Sources = {rank: {} for rank in range(8)}
    values = {}
    for name, item in plans.items():
        values[name] = generator.integers(-1000, 1000, size=item.shape).astype(np.float64)
        for rank, array in scatter(shard_map(item.source, item.shape), values[name], generator).items():
            sources[rank][name] = torch.from_numpy(np.asarray(array))
    results, cluster = run_bridge(plans, sources)
    for name, item in plans.items():
        arrays = {rank: result[name].numpy() for rank, result in results.items() if name in result}
        assert is_value(shard_map(item.target, item.shape), arrays, values[name])
    pairs_of_ranks = [message.ranks for message in cluster.log]
    assert len(set(pairs_of_ranks)) == len(pairs_of_ranks), "two messages of one pair of ranks"
    bridge = Bridge(plans, 0, torch.float64)
    assert sum(message.num_bytes for message in cluster.log) == bridge.total_bytes
    for rank in range(8):
        sent = [message.num_bytes for message in cluster.log if message.ranks[0] == rank]
        assert sum(sent) == bridge.bytes_sent(rank)


@given(st.lists(annotation_pairs(), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_equal_to_the_bit_to_running_each_plan_alone(pairs: list) -> None:
    plans = {
        f"w{index}": plan_reshard(pair.source, pair.target, pair.shape, collectives=False)
        for index, pair in enumerate(pairs)
    }
    sources = noise_of(plans, 8)
    results, _ = run_bridge(plans, sources)
    for name, item in plans.items():
        alone = VirtualCluster(8).run(
            {
                rank: run_reshard(item, rank, sources[rank].get(name), label="alone", dtype=torch.float64)
                for rank in range(8)
            }
        )
        for rank, result in alone.items():
            assert (result is None) == (name not in results[rank])
            assert result is None or torch.equal(result, results[rank][name])


@given(st.lists(annotation_pairs(), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_writes_that_run_together_do_not_meet(pairs: list) -> None:
    plans = {
        f"w{index}": plan_reshard(pair.source, pair.target, pair.shape, collectives=False)
        for index, pair in enumerate(pairs)
    }
    for rank in range(8):
        for _, writes in Bridge(plans, rank, torch.float32)._layers:
            boxes = [(item.name, [(s.start, s.stop) for s in item.write.target.slices]) for item in writes]
            for (name, box), (other_name, other) in itertools.combinations(boxes, 2):
                assert name != other_name or intersect(tuple(box), tuple(other)) is None


PARAMETERS = {
    "embedding": plan("0-3[S(0)]", "0-1[S(0)] + 2[] + 3[] @ R", (7, 3)),
    "norm": plan("0-3[S(0)]", "0-1[R] + 2[] + 3[] @ R", (3,)),
    "up": plan("0-3[S(0)]", "0-1[S(1)] + 2[] + 3[] @ R", (5, 4)),
}
GRADIENTS = {
    "embedding": plan("0-1[S(0)] + 2[] + 3[] @ P", "0-3[S(0)]", (7, 3)),
    "norm": plan("0-1[R] + 2[] + 3[] @ P", "0-3[S(0)]", (3,)),
    "up": plan("0-1[S(1)] + 2[] + 3[] @ P", "0-3[S(0)]", (5, 4)),
}


def test_parameters_are_cast_before_they_travel() -> None:
    sources = noise_of(PARAMETERS, 4)
    results, cluster = run_bridge(PARAMETERS, sources, torch.bfloat16)
    whole = torch.cat([sources[rank]["up"] for rank in range(4)]).to(torch.bfloat16)
    assert torch.equal(results[0]["up"], whole[:, :2])
    assert torch.equal(results[1]["up"], whole[:, 2:])
    assert torch.equal(results[3]["up"], whole)
    wide = run_bridge(PARAMETERS, sources, torch.float64)[1]
    assert 4 * sum(m.num_bytes for m in cluster.log) == sum(m.num_bytes for m in wide.log)


def test_gradients_of_unequal_replicas_are_summed_at_their_owner() -> None:
    sources = noise_of(GRADIENTS, 4)
    results, _ = run_bridge(GRADIENTS, sources)
    first = torch.cat([sources[0]["up"], sources[1]["up"]], dim=1)
    total = first + sources[2]["up"] + sources[3]["up"]
    assert torch.equal(torch.cat([results[rank]["up"] for rank in range(4)]), total)
    assert results[3]["norm"].shape == (0,)


def test_a_wider_accumulator_sums_narrow_terms_exactly() -> None:
    plans = {"w": plan("0-2[P]", "0[]", (1,))}
    terms = {rank: {"w": torch.tensor([value], dtype=torch.bfloat16)} for rank, value in enumerate((256.0, 1.0, 1.0))}
    assert run_bridge(plans, terms, torch.float32)[0][0]["w"].item() == 258.0


def test_one_message_per_pair_and_nothing_for_a_rank_without_any() -> None:
    _, cluster = run_bridge(PARAMETERS, noise_of(PARAMETERS, 4))
    assert len(cluster.log_of(0)) <= 6
    assert cluster.log_of(7) == []
    results, cluster = run_bridge(
        {"w": plan("0-1[R]", "0-1[R]", (2,))},
        noise_of({"w": plan("0[]", "0[]", (2,))}, 1) | {1: {"w": torch.ones(2, dtype=torch.float64)}},
    )
    assert cluster.log == []
    assert results[1]["w"].tolist() == [1.0, 1.0]
    assert results[2] == {}


def drive_bridges(sources: Sources) -> list[tuple[dict[str, Tensor], list[Message]]]:
    rank = dist.get_rank()
    transport = ProcessTransport(create_groups([], 20.0))
    answers = []
    for plans in (PARAMETERS, GRADIENTS):
        bridge = Bridge(plans, rank, torch.float64)
        tensors = {name: noise_of(plans, 4)[rank][name] for name in plans}
        answers.append((transport.drive(bridge.run(tensors, "bridge")), transport.log))
    transport.close()
    return answers


@pytest.mark.gloo
def test_gloo_does_what_the_virtual_cluster_does(gloo: GlooPool) -> None:
    by_rank = gloo.run(drive_bridges, {})
    for index, plans in enumerate((PARAMETERS, GRADIENTS)):
        results, cluster = run_bridge(plans, noise_of(plans, 4))
        for rank in range(4):
            tensors, log = by_rank[rank][index]
            assert log == cluster.log_of(rank)
            assert tensors.keys() == results[rank].keys()
            assert all(torch.equal(tensors[name], results[rank][name]) for name in tensors)


def test_what_a_bridge_refuses() -> None:
    gather = plan_reshard(sharded((0, 1), 0), replicated((0, 1)), (4,))
    with pytest.raises(PlanError, match="bridge: w: expected one phase of moves; plan with collectives=False"):
        Bridge({"w": gather}, 0, torch.float32)
    free = plan_reshard(sharded((0, 1), 0), replicated((0, 1)), (4, 2), collectives=False, free_dims=(1,))
    with pytest.raises(PlanError, match=r"bridge: w: expected a plan of fixed lengths, got free dims \(1,\)"):
        Bridge({"w": free}, 0, torch.float32)
    bridge = Bridge({"w": plan("0-1[S(0)]", "0-1[R]", (4,))}, 0, torch.float32)
    with pytest.raises(InvalidInput, match=r"bridge: w: rank 0 expected \[2\], got \[3\], of \[4\] as 0-1\[S\(0\)\]"):
        next(bridge.run({"w": torch.ones(3)}, "x"))
    with pytest.raises(InvalidInput, match=r"bridge: w: rank 0 expected \[2\], got nothing"):
        next(bridge.run({}, "x"))
    with pytest.raises(InvalidInput, match="bridge: expected tensors of its plans, got v"):
        next(bridge.run({"w": torch.ones(2), "v": torch.ones(2)}, "x"))
