"""Reads a cluster document into a `Topology`, or finds everything that is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from hgraph.annotation import MOST_RANKS
from hgraph.errors import Problem
from hgraph.topology import Link, Node, Topology
from hgraph.yaml_report import STRICT, Document, Key, Report, describe, key_text

__all__ = ["VERSION", "TopologyReport", "node_name", "read_topology"]

VERSION = 1

Count: TypeAlias = Annotated[int, Field(ge=1)]
Rank: TypeAlias = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class TopologyReport:
    """What was found in a cluster file: the topology (None if there are faults) and the faults."""

    path: str
    topology: Topology | None
    problems: tuple[Problem, ...] = ()

    def __str__(self) -> str:
        count = len(self.problems)
        head = f"{self.path}: {count or 'no'} problem{'' if count == 1 else 's'}"
        if self.topology is not None:
            head += f"; nodes: {len(self.topology.nodes)}, ranks: {self.topology.num_ranks}"
        return "\n".join([head, *(f"  {self.path}: {problem}" for problem in self.problems)])


@checked_dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class _LinkEntry:
    bandwidth_gb_s: Annotated[float, Field(gt=0)]
    latency_us: Annotated[float, Field(ge=0)]


@checked_dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class _ClusterEntry:
    version: int
    name: Annotated[str, Field(min_length=1)]
    source: str = ""
    nodes: Any
    ranks_per_node: Count | None = None
    ranks_per_port: Count | None = None
    memory_gib: Annotated[float, Field(ge=0)] | None = None
    local: _LinkEntry | None = None
    network: _LinkEntry | None = None


@checked_dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class _NodeEntry:
    name: Annotated[str, Field(min_length=1)] | None = None
    count: Count = 1
    ranks: Annotated[tuple[Rank, ...], Field(min_length=1)] | None = None
    ranks_per_node: Count | None = None
    ranks_per_port: Count | None = None
    memory_gib: Annotated[float, Field(ge=0)] | None = None
    local: _LinkEntry | None = None
    network: _LinkEntry | None = None


@dataclass(frozen=True, slots=True)
class _Kind:
    """`count` equal nodes from the entry at `key`; `ranks` where the file gives them (then `count` is 1)."""

    key: Key
    name: str | None
    count: int
    size: int
    ranks: tuple[int, ...] | None
    local: Link
    network: Link
    memory_gib: float
    ranks_per_port: int


def node_name(index: int) -> str:
    """Returns the name of the node at `index` where the file gives none."""
    return f"node{index}"


def read_topology(document: Document) -> TopologyReport:
    """Returns the topology that `document` describes, or all its faults."""
    reader = _TopologyReader(document)
    topology = reader.topology()
    problems = sorted(reader.report.problems, key=lambda problem: (problem.line, problem.key))
    return TopologyReport(document.path, None if problems else topology, tuple(problems))


class _TopologyReader:
    def __init__(self, document: Document) -> None:
        self.data = document.data
        self.report = Report(document)
        self.alone = False

    def topology(self) -> Topology | None:
        entry = self.report.check(_ClusterEntry, self.data, ())
        if (
            isinstance(self.data, dict)
            and isinstance(self.data.get("version"), int)
            and self.data["version"] != VERSION
        ):
            self.report.add(("version",), f"expected version {VERSION}, got {self.data['version']}")
        entries = self._node_entries(entry)
        if entry is None or entries is None:
            return None
        self.alone = sum(node.count for _, node in entries) == 1
        kinds = [self._kind(key, node, entry) for key, node in entries]
        if not self._is_of_possible_size(entries, kinds):
            return None
        self._check_ranks(entries)
        if self.report.problems:
            return None
        nodes = self._nodes([kind for kind in kinds if kind is not None])
        return None if self.report.problems else Topology(entry.name, nodes, entry.source)

    def _node_entries(self, entry: _ClusterEntry | None) -> list[tuple[Key, _NodeEntry]] | None:
        """Returns the entries of `nodes`, one for a plain number, or None where any of them is wrong."""
        nodes = self.data.get("nodes") if isinstance(self.data, dict) else None
        if isinstance(nodes, int) and not isinstance(nodes, bool) and nodes > 0:
            return [((), _NodeEntry(count=nodes))]
        if isinstance(nodes, list) and nodes:
            checked = [
                (("nodes", i), self.report.check(_NodeEntry, node, ("nodes", i))) for i, node in enumerate(nodes)
            ]
            return [(key, node) for key, node in checked if node] if all(node for _, node in checked) else None
        if isinstance(self.data, dict) and "nodes" in self.data:
            got = "an empty list" if nodes == [] else describe(nodes)
            self.report.add(("nodes",), f"expected the number of nodes or a list of them, got {got}")
        return None

    def _kind(self, key: Key, node: _NodeEntry, cluster: _ClusterEntry) -> _Kind | None:
        local, network = node.local or cluster.local, node.network or cluster.network
        network = network or (local if self.alone else None)
        size = len(node.ranks) if node.ranks else node.ranks_per_node or cluster.ranks_per_node
        if node.ranks is not None and node.ranks_per_node is not None:
            self.report.add((*key, "ranks_per_node"), "expected ranks or ranks_per_node, got both; leave one out")
        if node.ranks is not None and node.count > 1:
            self.report.add((*key, "count"), f"expected one node where its ranks are given, got {node.count}")
        for name, value in (("local", local), ("network", network), ("ranks_per_node", size)):
            if value is None:
                self.report.add(key, f"expected {name}, got nothing; give it {_here_or_above(key)}")
        ports = node.ranks_per_port or cluster.ranks_per_port or 1
        if size is not None and size % ports:
            where = key if node.ranks_per_port else ()
            self.report.add(
                (*where, "ranks_per_port"), f"expected a divisor of the {size} ranks of a node, got {ports} per port"
            )
        if local is None or network is None or size is None:
            return None
        memory = node.memory_gib if node.memory_gib is not None else cluster.memory_gib or 0.0
        return _Kind(key, node.name, node.count, size, node.ranks, _link(local), _link(network), float(memory), ports)

    def _is_of_possible_size(self, entries: list[tuple[Key, _NodeEntry]], kinds: list[_Kind | None]) -> bool:
        """Returns whether all ranks can be made one by one; tells where the nodes up to an entry have too many."""
        total = 0
        for (key, node), kind in zip(entries, kinds, strict=True):
            total += node.count * (kind.size if kind else 1)
            if total > MOST_RANKS:
                message = f"expected a cluster of at most {MOST_RANKS} ranks (2^20), got {total}"
                self.report.add(key or ("nodes",), message + (" up to this entry" if len(entries) > 1 else ""))
                return False
            for position, rank in enumerate(node.ranks or ()):
                if rank >= MOST_RANKS:
                    message = f"expected ranks below {MOST_RANKS} (2^20), got {rank}"
                    self.report.add((*key, "ranks", position), message)
                    return False
        return True

    def _check_ranks(self, entries: list[tuple[Key, _NodeEntry]]) -> None:
        given = [(key, node.ranks) for key, node in entries if node.ranks is not None]
        if not given:
            return
        for key, node in entries:
            if node.ranks is None:
                self.report.add(key, f"expected ranks, as {key_text(given[0][0])} has them, got none; give all or none")
        owner: dict[int, Key] = {}
        for key, ranks in given:
            for position, rank in enumerate(ranks):
                if rank in owner:
                    message = f"rank {rank} is in {key_text(owner[rank])} already; expected each rank in one node"
                    self.report.add((*key, "ranks", position), message)
                owner.setdefault(rank, key)
        missing = sorted(set(range(max(owner) + 1)) - set(owner))
        if missing and len(given) == len(entries):
            text = ", ".join(map(str, missing[:8])) + (" and more" if len(missing) > 8 else "")
            self.report.add(("nodes",), f"expected the ranks 0 to {max(owner)}, each in one node, got none for {text}")

    def _nodes(self, kinds: list[_Kind]) -> tuple[Node, ...]:
        nodes: list[Node] = []
        names: dict[str, Key] = {}
        first = 0
        for kind in kinds:
            for copy in range(kind.count):
                name = node_name(len(nodes)) if kind.name is None else kind.name + (str(copy) if kind.count > 1 else "")
                if name in names:
                    message = f"the name {name!r} is that of {key_text(names[name]) or 'another node'} too"
                    self.report.add((*kind.key, "name"), f"{message}; expected a name for each node")
                names[name] = kind.key
                ranks = kind.ranks or tuple(range(first, first + kind.size))
                first += kind.size
                nodes.append(Node(name, ranks, kind.local, kind.network, kind.memory_gib, kind.ranks_per_port))
        return tuple(nodes)


def _here_or_above(key: Key) -> str:
    return "here or for all nodes at the top of the file" if key else "at the top of the file"


def _link(entry: _LinkEntry) -> Link:
    return Link(float(entry.bandwidth_gb_s), float(entry.latency_us))
