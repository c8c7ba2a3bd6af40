"""Cluster files: YAML in, a `Topology` out, and back; topologies that come with the package; torchrun's environment.

`docs/clusters.md` is the page for users. Reading finds every fault of a file in one go
(`hgraph/topology_file_reader.py`); what was read and written reads as an equal topology, and writes the same text.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from hgraph.annotation import MOST_RANKS
from hgraph.errors import FileErrors, InvalidInput
from hgraph.shipped import read_named, shipped_names
from hgraph.topology import Link, Node, Topology, uniform
from hgraph.topology_file_reader import VERSION, TopologyReport, node_name, read_topology
from hgraph.yaml_report import read_document

__all__ = [
    "ASSUMED_LOCAL",
    "ASSUMED_NETWORK",
    "check_topology_text",
    "known_topologies",
    "load_topology",
    "parse_topology",
    "topology_from_environment",
    "write_topology",
]

ASSUMED_LOCAL = Link(10.0, 10.0)
ASSUMED_NETWORK = Link(1.0, 50.0)
"""Links where nobody says what they are: processes on CPUs over sockets, nodes on 10 Gb/s Ethernet."""


def known_topologies() -> tuple[str, ...]:
    """Returns the names of the topologies that come with this package."""
    return shipped_names("clusters", ".yaml")


def load_topology(path_or_name: str | os.PathLike[str]) -> Topology:
    """Returns the topology in the file at a path, or one that comes with this package, by name (`8x8-a800`).

    What has a folder or an ending (`cluster.yaml`, `./cluster`) is a path. Raises `FileErrors` with every fault of the
    file, `InvalidInput` where there is neither such a file nor such a name.
    """
    text, is_name = read_named(path_or_name, "clusters", ".yaml", "cluster")
    return parse_topology(text, f"{os.fspath(path_or_name)}.yaml" if is_name else os.fspath(path_or_name))


def parse_topology(text: str, name: str = "<text>") -> Topology:
    """Returns the topology that `text` describes; `name` is what messages call it. Raises `FileErrors`."""
    report = check_topology_text(text, name)
    if report.topology is None:
        raise FileErrors(name, report.problems)
    return report.topology


def check_topology_text(text: str, name: str = "<text>") -> TopologyReport:
    """Returns everything there is to say about `text`: its faults, or the topology where there are none."""
    try:
        document = read_document(text, name)
    except FileErrors as error:
        return TopologyReport(name, None, error.problems)
    return read_topology(document)


def write_topology(topology: Topology) -> str:
    """Returns the canonical text of `topology`.

    Equal neighbouring nodes are one entry with a count; where all nodes are equal, `nodes` is their number. Names are
    left out where they are node0, node1 and so on, ranks where they are 0, 1, 2 and so on in order.
    """
    entries = CommentedMap(version=VERSION, name=topology.name)
    if topology.source:
        entries["source"] = topology.source
    in_order = [rank for node in topology.nodes for rank in node.ranks] == list(range(topology.num_ranks))
    usual_names = [node.name for node in topology.nodes] == [node_name(i) for i in range(len(topology.nodes))]
    kinds = [_kind(node) for node in topology.nodes]
    if in_order and usual_names and kinds.count(kinds[0]) == len(kinds):
        entries["nodes"] = len(kinds)
        entries.update(_node_entry(topology.nodes[0], with_network=not _has_no_network(topology)))
    else:
        entries["nodes"] = _node_list(topology, in_order, usual_names)
    writer = YAML()
    writer.width = 10_000
    writer.indent(mapping=2, sequence=4, offset=2)
    text = io.StringIO()
    writer.dump(entries, text)
    return text.getvalue()


def _kind(node: Node) -> tuple[int, Link, Link, float, int]:
    return len(node.ranks), node.local, node.network, node.memory_gib, node.ranks_per_port


def _has_no_network(topology: Topology) -> bool:
    return topology.is_one_node and topology.nodes[0].network == topology.nodes[0].local


def _node_list(topology: Topology, in_order: bool, usual_names: bool) -> list[CommentedMap]:
    entries = []
    with_network = not _has_no_network(topology)
    by_itself = not (in_order and usual_names)
    groups = itertools.groupby(enumerate(topology.nodes), lambda item: (by_itself and item[0], _kind(item[1])))
    for _, group in groups:
        nodes = [node for _, node in group]
        entry = CommentedMap()
        if not usual_names:
            entry["name"] = nodes[0].name
        if len(nodes) > 1:
            entry["count"] = len(nodes)
        entry.update(_node_entry(nodes[0], with_network))
        if not in_order:
            del entry["ranks_per_node"]
            entry["ranks"] = _on_one_line(nodes[0].ranks)
        entries.append(entry)
    return entries


def _node_entry(node: Node, with_network: bool) -> CommentedMap:
    entry = CommentedMap(ranks_per_node=len(node.ranks))
    if node.ranks_per_port != 1:
        entry["ranks_per_port"] = node.ranks_per_port
    if node.memory_gib:
        entry["memory_gib"] = _number(node.memory_gib)
    entry["local"] = _link_entry(node.local)
    if with_network:
        entry["network"] = _link_entry(node.network)
    return entry


def _link_entry(link: Link) -> CommentedMap:
    entry = CommentedMap(bandwidth_gb_s=_number(link.bandwidth_gb_s), latency_us=_number(link.latency_us))
    entry.fa.set_flow_style()
    return entry


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else float(value)


def _on_one_line(items: Sequence[Any]) -> CommentedSeq:
    result = CommentedSeq(items)
    result.fa.set_flow_style()
    return result


def topology_from_environment(
    environment: Mapping[str, str] | None = None, cluster: str | os.PathLike[str] | None = None
) -> Topology:
    """Returns the topology of a job that torchrun started, read from `environment` (the process's own).

    torchrun numbers ranks node by node and says how many each node has (LOCAL_WORLD_SIZE), how many there are
    (WORLD_SIZE) and which node this is (GROUP_RANK). Nodes are taken to be equal. Links are those of `cluster`, a file
    or known name: its topology itself where that has as many nodes and ranks, else the links its nodes have in common.
    Without `cluster` links are assumed, and `source` says so.

    Raises `InvalidInput` outside torchrun, where nodes differ, and where `cluster` has no common links to offer.
    """
    values = os.environ if environment is None else environment
    world, per_node = _integer(values, "WORLD_SIZE", 1), _integer(values, "LOCAL_WORLD_SIZE", 1)
    node = _integer(values, "GROUP_RANK", 0)
    if world % per_node:
        raise InvalidInput(
            f"environment: expected nodes of equal size, got WORLD_SIZE={world} ranks on nodes of "
            f"LOCAL_WORLD_SIZE={per_node}; describe the nodes in a cluster file instead"
        )
    num_nodes = world // per_node
    if node >= num_nodes or ("RANK" in values and _integer(values, "RANK", 0) // per_node != node):
        raise InvalidInput(
            f"environment: expected ranks numbered node by node, got RANK={values.get('RANK', '(none)')} with "
            f"GROUP_RANK={node}, {per_node} ranks per node and {world} in all; nodes may differ in size: describe them "
            "in a cluster file instead"
        )
    if cluster is not None:
        return _with_links_of(load_topology(cluster), os.fspath(cluster), num_nodes, per_node)
    topology = uniform("torchrun", num_nodes, per_node, ASSUMED_LOCAL, ASSUMED_NETWORK)
    source = "assumed: nobody said what the links are; name a cluster file to say it"
    return Topology(topology.name, topology.nodes, source)


def _integer(values: Mapping[str, str], name: str, least: int) -> int:
    text = values.get(name)
    if text is None:
        raise InvalidInput(
            f"environment: expected {name}, which torchrun sets, got nothing; start the job with torchrun, or name a "
            "cluster file"
        )
    if not text.isdecimal() or int(text[:20]) < least:
        raise InvalidInput(f"environment: expected {name} to be an integer of {least} or more, got {text!r}")
    if int(text[:20]) > MOST_RANKS:
        raise InvalidInput(f"environment: expected {name} of at most {MOST_RANKS} (2^20), got {text}")
    return int(text)


def _with_links_of(known: Topology, name: str, num_nodes: int, per_node: int) -> Topology:
    ranks = [node.ranks for node in known.nodes]
    if ranks == [tuple(range(first * per_node, (first + 1) * per_node)) for first in range(num_nodes)]:
        return known
    kinds = {(node.local, node.network, node.memory_gib, node.ranks_per_port) for node in known.nodes}
    if len(kinds) > 1:
        raise InvalidInput(
            f"cluster {name}: expected {num_nodes} nodes of {per_node} ranks, as torchrun started them, or nodes that "
            f"are all alike, got {len(known.nodes)} nodes of {', '.join(str(len(each)) for each in ranks)} ranks"
        )
    ((local, network, memory_gib, ranks_per_port),) = kinds
    if per_node % ranks_per_port:
        raise InvalidInput(
            f"cluster {name}: expected nodes of a multiple of {ranks_per_port} ranks, which share a network port, got "
            f"{per_node} ranks per node"
        )
    sized = uniform(
        f"{known.name}, as started", num_nodes, per_node, local, network,
        memory_gib=memory_gib, ranks_per_port=ranks_per_port,
    )  # fmt: skip
    return Topology(sized.name, sized.nodes, known.source)
