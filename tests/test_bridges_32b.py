"""The published 32B pool: its 14 bridges beside what any plan must move, and the benchmark that prints them."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

import pytest

from benchmarks.bridges_32b import Bridge, Result, bridges, cluster, growth_svg, measure, stretched, table
from strategies.least_load import least_loads

# Ratios to the least possible: the published goals.
NETWORK_BYTES, LOAD = 1.05, 1.10
NUM_BRIDGES = 14


@pytest.fixture(scope="module")
def results() -> list[Result]:
    topology = cluster(64)
    return [measure(bridge, topology) for bridge in bridges(64)]


def test_every_bridge_is_there(results: list[Result]) -> None:
    assert len(results) == NUM_BRIDGES and len({(result.bridge.name, result.bridge.kind) for result in results}) == 14
    assert [result.bridge.name for result in results[::2]] == [
        "4 x tp16", "tp16 + 2 x tp8.pp3", "tp16 + 6 x tp8", "tp16 + 12 x tp4", "tp8.pp3 + 10 x tp4",
        "tp8 + 14 x tp4", "8 x tp4.pp2",
    ]  # fmt: skip
    elements = sum(bundle.num_elements for bundle in results[0].bundles)
    assert 32e9 < elements < 33e9


def test_bytes_are_at_most_1_05_of_the_lower_bound(results: list[Result]) -> None:
    for result in results:
        assert 1 <= result.over_bound(result.ours) <= NETWORK_BYTES, result.bridge.name
        assert result.ours.class_bytes("local") >= result.bound.local_elements * result.bridge.element_bytes


def test_one_message_per_pair_and_bucket(results: list[Result]) -> None:
    for result in results:
        assert result.messages_of_a_pair == 1, result.bridge.name
        pairs = len({*zip(result.ours.sender.tolist(), result.ours.receiver.tolist(), strict=True)})
        assert result.ours.num_messages <= pairs * result.ours.num_buckets


def test_loads_are_at_most_1_10_of_the_least_possible(results: list[Result]) -> None:
    topology = cluster(64)
    for result in results:
        least = least_loads(result.bundles, topology, result.bound)
        assert all(found.is_optimum for found in least.values())
        for name, over in result.over_least(result.ours, least).items():
            assert 1 - 1e-9 <= over <= LOAD, (result.bridge.name, result.bridge.kind, name, over)


def test_simpler_plans_move_more_or_send_more_messages(results: list[Result]) -> None:
    for result in results:
        assert result.per_tensor.class_bytes("network") >= result.ours.class_bytes("network")
        assert result.unicast.class_bytes("network") >= result.ours.class_bytes("network")
        assert result.per_tensor.num_messages > result.ours.num_messages
    with_two_replicas_a_node = results[6]
    assert with_two_replicas_a_node.over_bound(with_two_replicas_a_node.unicast) > 1.8


def test_a_stretched_pool() -> None:
    assert len(stretched(128)[1]) == 6 and cluster(128).num_ranks == 128
    bridge: Bridge = next(iter(bridges(128)))
    assert {rank for reshard in bridge.reshards for rank in reshard.target.ranks} == set(range(128))


def test_the_table_is_markdown(monkeypatch: pytest.MonkeyPatch) -> None:
    first = list(bridges(64))[:1]

    def only(ranks: int) -> Iterator[Bridge]:
        return iter(first)

    monkeypatch.setattr("benchmarks.bridges_32b.bridges", only)
    lines = list(table(64, with_least=True))
    assert len({line.count("|") for line in lines[:3]}) == 1 and lines[2].startswith(
        "| 4 x tp16 | parameters | 195.1 | 1.000"
    )
    assert lines[-1].startswith("planning all of them: ")


def test_the_chart_is_drawn() -> None:
    points = [(64, 1000, 0.5), (128, 3000, 1.0), (1024, 90000, 40.0)]
    text = growth_svg(points)
    root = ElementTree.fromstring(text)
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any("1024 ranks: 90,000 pairs, 40.00 s" in line for line in texts)
    assert text == growth_svg(points)
