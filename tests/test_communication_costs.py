"""Costs of bridges, switches and messages of a model known by its sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hgraph.communication_costs import CommunicationCosts, resized
from hgraph.errors import InvalidInput
from hgraph.memory_model import ModelSizes
from hgraph.model_tensors import bridge_reshards, num_parameters, parameter_tensors
from hgraph.strategy import Replica, Scheme, Strategy
from hgraph.topology import Link, Topology, uniform

MODEL = ModelSizes(layers=4, hidden=64, ffn_hidden=192, heads=4, vocab=256)
CLUSTER = uniform("test", 2, 4, Link(100.0, 0.0), Link(10.0, 0.0), ranks_per_port=2)


def strategy(name: str, *degrees: tuple[int, int]) -> Strategy:
    replicas, first = [], 0
    for tp, pp in degrees:
        replicas.append(Replica(Scheme.uniform(tp, pp), tuple(range(first, first + tp * pp))))
        first += tp * pp
    return Strategy(name, tuple(replicas))


EIGHT = strategy("tp1x8", *[(1, 1)] * 8)
ONE = strategy("tp8", (8, 1))
PIPE = strategy("tp2.pp4", (2, 4))


class TestTensors:
    def test_counts_of_a_published_model(self) -> None:
        llama_7b = ModelSizes(layers=32, hidden=4096, ffn_hidden=11008, heads=32, vocab=32000)
        assert num_parameters(llama_7b) == 6_738_415_616  # the released LLaMA 7B, arXiv 2302.13971

    def test_grouped_heads_and_two_matrices(self) -> None:
        tensors = {one.name: one for one in parameter_tensors(replace(MODEL, kv_heads=1, gated=False))}
        assert tensors["layers.0.k"].shape == (16, 64)
        assert "layers.0.gate" not in tensors

    def test_a_layer_lies_on_the_ranks_of_its_stage(self) -> None:
        reshards = {one.name: one for one in bridge_reshards(MODEL, PIPE, "parameters", 8)}
        assert reshards["layers.3.q"].target.ranks == (6, 7)
        assert reshards["embedding"].target.ranks == (0, 1)
        assert reshards["layers.3.q"].source.ranks == tuple(range(8))


class TestBridges:
    def test_planned_and_counted_bytes_agree_where_every_byte_crosses_once(self) -> None:
        costs = CommunicationCosts(MODEL, CLUSTER)
        # Each node needs the half that the other one owns: bytes over two ports of 10 GB/s.
        expected_ms = num_parameters(MODEL) * 2 / 2 / 20e6
        # The plan brings them into a node once, then shares them out there.
        assert expected_ms <= costs.bridge_ms(EIGHT, "parameters") <= 1.5 * expected_ms
        assert costs._bytes_ms(EIGHT, "parameters") == pytest.approx(expected_ms)

    def test_gradients_are_of_float32(self) -> None:
        costs = CommunicationCosts(MODEL, CLUSTER)
        assert costs._bytes_ms(EIGHT, "gradients") == pytest.approx(2 * costs._bytes_ms(EIGHT, "parameters"))

    def test_a_switch_is_both_bridges(self) -> None:
        costs = CommunicationCosts(MODEL, CLUSTER)
        both = costs.bridge_ms(EIGHT, "gradients") + costs.bridge_ms(ONE, "parameters")
        assert costs.switch_ms(EIGHT, ONE) == both


class TestMessages:
    def test_rows_are_boundaries_and_the_node_border_is_slower(self) -> None:
        costs = CommunicationCosts(MODEL, CLUSTER)
        rows = costs.transfers_ms(PIPE.replicas[0], (1000, 3000))
        assert len(rows) == 3
        assert rows[1][0] > rows[0][0] == rows[2][0] > 0.0
        assert rows[0][1] == pytest.approx(3 * rows[0][0])

    def test_one_stage_sends_nothing(self) -> None:
        assert CommunicationCosts(MODEL, CLUSTER).transfers_ms(ONE.replicas[0], (5,)) == ()


class TestResized:
    def test_more_nodes_and_part_of_one(self) -> None:
        assert [len(resized(CLUSTER, ranks).nodes) for ranks in (8, 16, 4, 2)] == [2, 4, 1, 1]
        assert resized(CLUSTER, 16).nodes[3].ranks_per_port == 2

    def test_a_part_of_a_node_more(self) -> None:
        with pytest.raises(InvalidInput, match="test: expected a multiple of its 4 ranks per node, got 6 ranks"):
            resized(CLUSTER, 6)

    def test_nodes_that_differ(self) -> None:
        first, second = CLUSTER.nodes
        mixed = Topology("mixed", (first, replace(second, local=Link(1.0, 0.0))))
        with pytest.raises(InvalidInput, match="cluster mixed: expected nodes that are alike, to make one of 16 ranks"):
            resized(mixed, 16)
