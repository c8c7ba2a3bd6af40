"""What `hgraph reshard` and `hgraph switch` say of a plan's traffic: rows of tables, data for JSON, the heat map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hgraph.errors import InvalidInput, NotSupported
from hgraph.lower_bound import LowerBound
from hgraph.pictures import heat_map_svg, quantity
from hgraph.topology import LinkClass, Topology
from hgraph.traffic import Load, Traffic
from runtime.cli.options import check_folder

__all__ = [
    "BYTES_HEADERS",
    "LOAD_HEADERS",
    "TrafficReport",
    "check_picture",
    "draw_traffic",
    "messages_text",
    "whole_nodes",
]

BYTES_HEADERS = ("links", "bytes", "lower bound", "ratio")
LOAD_HEADERS = ("load of", "greatest", "on", "mean", "greatest / mean", "least possible", "greatest / least")
_CLASSES: tuple[tuple[LinkClass, str], ...] = (("network", "over the network"), ("local", "inside nodes"))
_RESOURCES = {
    "network sender": ("network, sending rank", "rank"),
    "network receiver": ("network, receiving rank", "rank"),
    "port sender": ("network, sending port", "port"),
    "port receiver": ("network, receiving port", "port"),
    "node sender": ("network, sending node", "node"),
    "node receiver": ("network, receiving node", "node"),
    "local sender": ("inside nodes, sending rank", "rank"),
    "local receiver": ("inside nodes, receiving rank", "rank"),
}
"""What a resource of `Traffic.loads` is called, and what its members are."""


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """The traffic of a plan with the least that any plan moves.

    `least_loads` are the least possible greatest loads in bytes, by resource as in `Traffic.loads`, where they are
    known. `has_links` says whether the topology is one that the user named, so that milliseconds mean something.
    """

    found: Traffic
    least: LowerBound
    has_links: bool
    least_loads: Mapping[str, float] | None = None

    def least_bytes(self, link_class: LinkClass | None = None) -> int:
        """Returns the lower bound on bytes over links of a class (over all links)."""
        least, size = self.least, self.found.element_bytes
        elements = {"network": least.network_elements, "local": least.local_elements, None: least.total_elements}
        return elements[link_class] * size

    @property
    def ms(self) -> float | None:
        """Predicted milliseconds; None where nothing is known of the links."""
        return self.found.ms if self.has_links else None

    def bytes_rows(self) -> list[tuple[str, ...]]:
        """Returns one row per link class and one for all, for `BYTES_HEADERS`."""
        shown = [] if self.found.topology.is_one_node else list(_CLASSES)
        rows = [_bytes_row(words, self.found.class_bytes(kind), self.least_bytes(kind)) for kind, words in shown]
        return [*rows, _bytes_row("all", self.found.total_bytes, self.least_bytes())]

    def load_rows(self) -> list[tuple[str, ...]]:
        """Returns one row per resource that carries anything, for `LOAD_HEADERS`."""
        rows: list[tuple[str, ...]] = []
        for name, load in self.found.loads().items():
            words, member = _RESOURCES[name]
            if not load.greatest or (member == "port" and not self._shares_ports):
                continue
            where = self.found.topology.nodes[load.member].name if member == "node" else f"{member} {load.member}"
            least = None if self.least_loads is None else self.least_loads[name]
            rows.append(
                (words, quantity(load.greatest), where, quantity(load.mean), f"{load.ratio:.2f}", *_least(load, least))
            )
        return rows

    @property
    def _shares_ports(self) -> bool:
        return any(node.ranks_per_port > 1 for node in self.found.topology.nodes)

    def data(self) -> dict[str, object]:
        """Returns everything as plain data; bytes are exact."""
        found = self.found
        classes: dict[str, object] = {
            kind: {"bytes": found.class_bytes(kind), "lower_bound_bytes": self.least_bytes(kind)}
            for kind, _ in _CLASSES
        }
        least = self.least_loads
        loads = {
            name: {
                "greatest_bytes": load.greatest,
                "mean_bytes": load.mean,
                "member": load.member,
                "least_possible_bytes": None if least is None else least[name],
            }
            for name, load in found.loads().items()
        }
        pairs = found.matrix()
        rows, columns = pairs.nonzero()
        traffic = [[int(i), int(j), int(pairs[i, j])] for i, j in zip(rows, columns, strict=True)]
        return {
            "element_bytes": found.element_bytes,
            "total_bytes": found.total_bytes,
            "lower_bound_bytes": self.least_bytes(),
            "links": classes,
            "loads": loads,
            "messages": found.num_messages,
            "predicted_ms": self.ms,
            "peak_extra_bytes": found.peak_extra_bytes.tolist(),
            "sender_receiver_bytes": traffic,
        }


def _bytes_row(words: str, moved: int, least: int) -> tuple[str, ...]:
    return words, f"{moved:,}", f"{least:,}", f"{moved / least:.3f}" if least else ("-" if moved else "1.000")


def _least(load: Load, least: float | None) -> tuple[str, str]:
    if least is None:
        return "-", "-"
    return quantity(least), f"{load.greatest / least:.2f}" if least else "-"


def messages_text(found: Traffic) -> str:
    """Returns the number of messages with its noun."""
    return f"{found.num_messages:,} message{'' if found.num_messages == 1 else 's'}"


def check_picture(path: str | None) -> None:
    """Raises unless a picture can be written to `path`: `InvalidInput`, or `NotSupported` for formats but SVG."""
    if path is None:
        return
    suffix = Path(path).suffix.lower()
    if suffix == ".png":
        raise NotSupported(
            f"--picture {path}: PNG is not there, for nothing this package needs can draw text as pixels; "
            f"name a .svg, which every browser opens: {Path(path).with_suffix('.svg')}"
        )
    if suffix != ".svg":
        raise InvalidInput(f"--picture {path}: expected a name that ends in .svg, got {suffix or 'no ending'!r}")
    check_folder(Path(path).parent)


def draw_traffic(path: str | Path, title: str, found: Traffic) -> None:
    """Writes the heat map of the traffic to a file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(heat_map_svg(found.matrix(), title, found.topology), encoding="utf-8")


def whole_nodes(topology: Topology, num_ranks: int) -> Topology:
    """Returns the nodes that hold the ranks below `num_ranks`: the others take no part, and would only dilute means.

    Nodes stay whole; where the rest would not be ranks 0 to n - 1, the topology stays as it is.
    """
    nodes = tuple(node for node in topology.nodes if min(node.ranks) < num_ranks)
    ranks = sorted(rank for node in nodes for rank in node.ranks)
    if len(nodes) == len(topology.nodes) or ranks != list(range(len(ranks))):
        return topology
    return Topology(topology.name, nodes, topology.source)
