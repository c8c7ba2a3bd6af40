"""Cluster files: what is read, what is written, the text of every complaint, and torchrun's environment."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hgraph.errors import FileErrors, InvalidInput
from hgraph.topology import Link, Node, Topology, ranks_by_node, single_node, uniform
from hgraph.topology_file import (
    check_topology_text,
    known_topologies,
    load_topology,
    parse_topology,
    topology_from_environment,
    write_topology,
)

PAGE = Path(__file__).parent.parent / "docs" / "clusters.md"

MIXED = """\
version: 1
name: mixed
nodes:
  - name: large
    ranks_per_node: 4
    ranks_per_port: 2
    memory_gib: 80
    local: {bandwidth_gb_s: 200, latency_us: 5}
    network: {bandwidth_gb_s: 25, latency_us: 10}
  - name: small
    ranks_per_node: 2
    memory_gib: 40
    local: {bandwidth_gb_s: 16, latency_us: 8}
    network: {bandwidth_gb_s: 12.5, latency_us: 20}
"""

LINKS = "local: {bandwidth_gb_s: 2, latency_us: 1}\nnetwork: {bandwidth_gb_s: 1, latency_us: 2}\n"


def complaints(text: str) -> list[str]:
    report = check_topology_text(text, "c.yaml")
    assert (report.topology is None) == bool(report.problems)
    return [str(problem) for problem in report.problems]


# What is read and written


def test_mixed_nodes() -> None:
    topology = parse_topology(MIXED)
    assert [node.ranks for node in topology.nodes] == [(0, 1, 2, 3), (4, 5)]
    assert topology.port_of().tolist() == [0, 0, 1, 1, 2, 3]
    assert topology.link(0, 1) == Link(200.0, 5.0) and topology.link(5, 4) == Link(16.0, 8.0)
    assert topology.link(0, 5) == topology.link(5, 0) == Link(12.5, 20.0)
    assert write_topology(topology) == MIXED


def test_entries_take_what_they_do_not_say_from_the_top() -> None:
    text = f"version: 1\nname: x\nranks_per_node: 2\n{LINKS}nodes:\n  - count: 2\n  - ranks_per_node: 3\n"
    assert [node.ranks for node in parse_topology(text).nodes] == [(0, 1), (2, 3), (4, 5, 6)]


def test_ranks_in_any_order() -> None:
    text = f"version: 1\nname: x\n{LINKS}nodes:\n  - ranks: [3, 0]\n  - ranks: [1, 2]\n"
    topology = parse_topology(text)
    assert topology.node_of == (0, 1, 1, 0) and parse_topology(write_topology(topology)) == topology


def test_one_node_needs_no_network() -> None:
    topology = parse_topology(
        "version: 1\nname: x\nnodes: 1\nranks_per_node: 2\nlocal: {bandwidth_gb_s: 2, latency_us: 1}\n"
    )
    assert topology.nodes[0].network == topology.nodes[0].local and "network" not in write_topology(topology)


def test_what_comes_with_the_package() -> None:
    assert known_topologies() == ("4-cpu", "8x8-a800", "8x8-h100")
    for name in known_topologies():
        topology = load_topology(name)
        assert topology.source and parse_topology(write_topology(topology)) == topology
    a800, h100 = load_topology("8x8-a800"), load_topology("8x8-h100")
    assert a800.num_ranks == h100.num_ranks == 64 and load_topology("4-cpu").is_one_node
    assert 2 * a800.nodes[0].local.bandwidth_gb_s == 400 and 8 * a800.nodes[0].network.bandwidth_gb_s == 200
    assert 2 * h100.nodes[0].local.bandwidth_gb_s == 900 and 8 * h100.nodes[0].network.bandwidth_gb_s == 400


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(MIXED)
    assert load_topology(path) == parse_topology(MIXED)
    with pytest.raises(InvalidInput, match="nowhere.yaml: expected a file that can be read"):
        load_topology("nowhere.yaml")
    message = (
        "cluster '8x8-a80': expected a file or one of the names 4-cpu, 8x8-a800, 8x8-h100, got neither; did you mean "
        "'8x8-a800'"
    )
    with pytest.raises(InvalidInput) as error:
        load_topology("8x8-a80")
    assert str(error.value).startswith(message)


links = st.builds(Link, st.sampled_from([0.5, 1.0, 12.5, 400.0]), st.sampled_from([0.0, 2.5, 10.0]))


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = list(range(sum(sizes)))
    if draw(st.booleans()):
        order = draw(st.permutations(order))
    nodes, first = [], 0
    kinds = draw(st.lists(st.tuples(links, links, st.sampled_from([0.0, 80.0, 79.5])), min_size=1, max_size=2))
    prefix = draw(st.sampled_from(["node", "n"]))
    for at, size in enumerate(sizes):
        per_port = draw(st.sampled_from([count for count in (1, 2, 3, 4) if size % count == 0]))
        kind = draw(st.sampled_from(kinds))
        nodes.append(Node(f"{prefix}{at}", tuple(order[first : first + size]), *kind, per_port))
        first += size
    return Topology("drawn", tuple(nodes), draw(st.sampled_from(["", "somewhere: here"])))


@settings(max_examples=40)
@given(topologies())
def test_text_parses_back(topology: Topology) -> None:
    text = write_topology(topology)
    assert parse_topology(text) == topology
    assert write_topology(parse_topology(text)) == text


def test_the_examples_of_the_docs_read() -> None:
    examples = [part.split("```")[0] for part in PAGE.read_text().split("```yaml\n")[1:]]
    assert len(examples) >= 2
    for example in examples:
        assert parse_topology(example).num_ranks > 0


# Complaints


AT_MOST, BELOW = "a cluster of at most 1048576 ranks", "ranks below 1048576"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["line 1: expected a mapping, got an empty file"]),
        ("3", ["line 1: expected a mapping, got 3"]),
        (
            "version: 2\nnodes: 0\nlocal: {bandwidth_gb_s: 0, latency_us: -1}\nnetwrok: 1\n",
            [
                "line 1: name: expected a value, got nothing; the key is missing",
                "line 1: version: expected version 1, got 2",
                "line 2: nodes: expected the number of nodes or a list of them, got 0",
                "line 3: local.bandwidth_gb_s: expected a value above 0, got 0",
                "line 3: local.latency_us: expected a value of 0 or more, got -1",
                "line 4: netwrok: unknown key; the keys here are version, name, source, nodes, ranks_per_node, "
                "ranks_per_port, memory_gib, local, network; did you mean 'network'?",
            ],
        ),
        (
            "version: 1\nname: x\nnodes: 2\n",
            [
                "line 1: expected local, got nothing; give it at the top of the file",
                "line 1: expected network, got nothing; give it at the top of the file",
                "line 1: expected ranks_per_node, got nothing; give it at the top of the file",
            ],
        ),
        (
            f"version: 1\nname: x\n{LINKS}nodes:\n  - ranks: [0, 1]\n    count: 2\n  - ranks: [1, 4]\n    name: 3\n",
            ["line 9: nodes[1].name: expected text, got 3"],
        ),
        (
            f"version: 1\nname: x\n{LINKS}nodes:\n  - ranks: [0, 1]\n    count: 2\n  - ranks: [1, 4]\n"
            "    ranks_per_node: 2\n    ranks_per_port: 3\n",
            [
                "line 5: nodes: expected the ranks 0 to 4, each in one node, got none for 2, 3",
                "line 7: nodes[0].count: expected one node where its ranks are given, got 2",
                "line 8: nodes[1].ranks[0]: rank 1 is in nodes[0] already; expected each rank in one node",
                "line 9: nodes[1].ranks_per_node: expected ranks or ranks_per_node, got both; leave one out",
                "line 10: nodes[1].ranks_per_port: expected a divisor of the 2 ranks of a node, got 3 per port",
            ],
        ),
        (
            f"version: 1\nname: x\n{LINKS}nodes:\n  - ranks: [0]\n  - ranks_per_node: 1\n    network: 3\n",
            ["line 8: nodes[1].network: expected a mapping, got 3"],
        ),
        (
            f"version: 1\nname: x\n{LINKS}nodes:\n  - ranks: [0]\n  - ranks_per_node: 1\n",
            ["line 7: nodes[1]: expected ranks, as nodes[0] has them, got none; give all or none"],
        ),
        (
            f"version: 1\nname: x\n{LINKS}ranks_per_node: 1\nnodes:\n  - name: node1\n  - count: 2\n",
            ["line 8: nodes[1].name: the name 'node1' is that of nodes[0] too; expected a name for each node"],
        ),
        (
            f"version: 1\nname: x\n{LINKS}ranks_per_node: 3\nranks_per_port: 2\nnodes: 2\n",
            ["line 6: ranks_per_port: expected a divisor of the 3 ranks of a node, got 2 per port"],
        ),
        *(
            (
                f"version: 1\nname: x\n{LINKS}{entries}",
                [f"{where}: expected {limit} (2^20), got {got}"],
            )
            for entries, where, limit, got in [
                ("ranks_per_node: 8\nnodes: 100000000\n", "line 6: nodes", AT_MOST, "800000000"),
                ("ranks_per_node: 1\nnodes: 1048577\n", "line 6: nodes", AT_MOST, "1048577"),
                (f"ranks_per_node: 1{'0' * 30}\nnodes: 1\n", "line 6: nodes", AT_MOST, f"1{'0' * 30}"),
                (
                    "ranks_per_node: 8\nnodes:\n  - count: 131072\n  - count: 1\n",
                    "line 8: nodes[1]",
                    AT_MOST,
                    "1048584 up to this entry",
                ),
                ("nodes:\n  - ranks: [0, 99999999999]\n", "line 6: nodes[0].ranks[1]", BELOW, "99999999999"),
            ]
        ),
        (
            "version: 1\nname: x\nnodes: []\n",
            ["line 3: nodes: expected the number of nodes or a list of them, got an empty list"],
        ),
    ],
)
def test_complaints(text: str, expected: list[str]) -> None:
    assert complaints(text) == expected


def test_the_report_is_raised() -> None:
    with pytest.raises(FileErrors, match="c.yaml: 1 problem\n  c.yaml: line 3: nodes: expected the number of nodes"):
        parse_topology("version: 1\nname: x\nnodes: []\n", "c.yaml")
    assert str(check_topology_text(MIXED, "c.yaml")) == "c.yaml: no problems; nodes: 2, ranks: 6"


# Topologies


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Link(0.0, 1.0), "link: expected a bandwidth above 0 GB/s and a latency of 0 us or more, got 0.0 GB/s"),
        (lambda: Link(1.0, -1.0), "got 1.0 GB/s and -1.0 us"),
        (lambda: Node("a", (), Link(1, 1), Link(1, 1)), "node a: expected ranks, a whole number of them per"),
        (lambda: Node("a", (0, 1, 2), Link(1, 1), Link(1, 1), 0.0, 2), "got ranks [0, 1, 2] and 2 per port"),
        (lambda: Topology("t", ()), "topology t: expected the ranks 0 to n - 1, each in one node; got []"),
        (lambda: uniform("t", 2, 1, Link(1, 1), Link(1, 1)).nodes[1:] and Topology("t", (single_node(1).nodes[0],) * 2),
         "topology t: expected the ranks 0 to n - 1, each in one node; got [0, 0]"),
    ],
)  # fmt: skip
def test_invariants(build: object, message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        build()  # type: ignore[operator]
    assert message in str(error.value)


@settings(max_examples=40)
@given(topologies())
def test_links_are_the_bottlenecks_of_the_graph(topology: Topology) -> None:
    """Between nodes: the least bandwidth on the path. Inside: the switch, not the way through a shared port."""
    graph = topology.graph()
    for sender in range(topology.num_ranks):
        for receiver in range(topology.num_ranks):
            if sender == receiver:
                continue
            link_class = topology.link_class(sender, receiver)
            edges = [(first, second) for first, second, kind in graph.edges(data="link_class") if kind == link_class]
            path = networkx.shortest_path(graph.edge_subgraph(edges), sender, receiver)
            on_path = [graph.edges[pair] for pair in pairwise(path)]
            link = topology.link(sender, receiver)
            assert min(edge["bandwidth_gb_s"] for edge in on_path) == link.bandwidth_gb_s
            assert max(edge["latency_us"] for edge in on_path) == link.latency_us


def test_time_and_groups() -> None:
    assert Link(2.0, 5.0).ms(4e6, 3) == pytest.approx(2.0 + 0.015)
    topology = parse_topology(MIXED)
    assert ranks_by_node(topology, [5, 1, 4, 0]) == {1: [5, 4], 0: [1, 0]}


# torchrun


def environment(**values: int) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def test_torchrun_without_a_file_says_that_links_are_assumed() -> None:
    topology = topology_from_environment(environment(WORLD_SIZE=6, LOCAL_WORLD_SIZE=3, GROUP_RANK=1, RANK=4))
    assert [node.ranks for node in topology.nodes] == [(0, 1, 2), (3, 4, 5)]
    assert topology.source.startswith("assumed") and "source: 'assumed: " in write_topology(topology)


def test_torchrun_with_a_file() -> None:
    job = environment(WORLD_SIZE=64, LOCAL_WORLD_SIZE=8, GROUP_RANK=7)
    assert topology_from_environment(job, "8x8-a800") == load_topology("8x8-a800")
    two = topology_from_environment(environment(WORLD_SIZE=16, LOCAL_WORLD_SIZE=8, GROUP_RANK=0), "8x8-a800")
    assert len(two.nodes) == 2 and two.nodes[1].network == load_topology("8x8-a800").nodes[0].network
    assert two.name == "8 nodes of 8 A800-80GB, as started" and two.nodes[0].ranks_per_port == 2


@pytest.mark.parametrize(
    ("values", "cluster", "message"),
    [
        ({}, None, "environment: expected WORLD_SIZE, which torchrun sets, got nothing; start the job with torchrun"),
        (
            {"WORLD_SIZE": "four", "LOCAL_WORLD_SIZE": "2"},
            None,
            "environment: expected WORLD_SIZE to be an integer of 1 or more, got 'four'",
        ),
        (
            environment(WORLD_SIZE=5, LOCAL_WORLD_SIZE=2, GROUP_RANK=0),
            None,
            "expected nodes of equal size, got WORLD_SIZE=5",
        ),
        (
            environment(WORLD_SIZE=4, LOCAL_WORLD_SIZE=2, GROUP_RANK=2),
            None,
            "expected ranks numbered node by node, got RANK=(none) with GROUP_RANK=2, 2 ranks per node and 4 in all",
        ),
        (
            environment(WORLD_SIZE=4, LOCAL_WORLD_SIZE=2, GROUP_RANK=1, RANK=0),
            None,
            "expected ranks numbered node by node, got RANK=0 with GROUP_RANK=1",
        ),
        (
            environment(WORLD_SIZE=1048577, LOCAL_WORLD_SIZE=1, GROUP_RANK=0),
            None,
            "environment: expected WORLD_SIZE of at most 1048576 (2^20), got 1048577",
        ),
        (
            {"WORLD_SIZE": "9" * 5000, "LOCAL_WORLD_SIZE": "1"},
            None,
            "environment: expected WORLD_SIZE of at most 1048576 (2^20), got 999",
        ),
        (
            environment(WORLD_SIZE=6, LOCAL_WORLD_SIZE=3, GROUP_RANK=1),
            "8x8-a800",
            "cluster 8x8-a800: expected nodes of a multiple of 2 ranks, which share a network port, got 3 ranks",
        ),
    ],
)
def test_torchrun_errors(values: dict[str, str], cluster: str | None, message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        topology_from_environment(values, cluster)
    assert message in str(error.value)


def test_torchrun_with_a_file_of_other_nodes(tmp_path: Path) -> None:
    path = tmp_path / "mixed.yaml"
    path.write_text(MIXED)
    with pytest.raises(
        InvalidInput, match="expected 2 nodes of 3 ranks, as torchrun started them, or nodes that are all"
    ):
        topology_from_environment(environment(WORLD_SIZE=6, LOCAL_WORLD_SIZE=3, GROUP_RANK=0), path)
