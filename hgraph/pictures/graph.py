"""Graphs to be drawn, as values that know nothing of where they come from.

Invariants
----------
- Ids of nodes are distinct, ids of clusters too; edges join nodes of the graph; a node's cluster is one of the graph's.
- Fill classes are keys of `palette.FILLS`; no two clusters share a place.
- Nodes are listed in order of the flow: pictures draw an edge downwards when its source is listed first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from hgraph.errors import InvalidInput
from hgraph.pictures.palette import FILLS

__all__ = ["EdgeStyle", "LegendEntry", "PictureCluster", "PictureEdge", "PictureGraph", "PictureNode", "Shape"]

Shape: TypeAlias = Literal["box", "pill", "hexagon"]
EdgeStyle: TypeAlias = Literal["data", "message", "reference"]


@dataclass(frozen=True, slots=True)
class PictureNode:
    """A box with a label and smaller lines below it (`sublabel`, lines parted by newlines).

    Shapes: `box` for computations, `pill` for inputs, parameters and outputs, `hexagon` for communication. `tooltip` is
    shown when the pointer rests on the node.
    """

    id: str
    label: str
    sublabel: str = ""
    cluster: str | None = None
    fill_class: str = "plain"
    shape: Shape = "box"
    tooltip: str = ""

    def __post_init__(self) -> None:
        if not self.id or "\n" in self.id:
            raise InvalidInput(f"picture node: expected an id of one line, got {self.id!r}")
        if self.fill_class not in FILLS:
            raise InvalidInput(
                f"picture node {self.id}: expected a fill class among {', '.join(FILLS)}, got {self.fill_class!r}"
            )
        if self.shape not in get_args(Shape):
            raise InvalidInput(f"picture node {self.id}: expected a shape box, pill or hexagon, got {self.shape!r}")


@dataclass(frozen=True, slots=True)
class PictureEdge:
    """An arrow. A `message` is drawn bold; a `reference` is not drawn as a line but named at its target."""

    source: str
    target: str
    label: str = ""
    style: EdgeStyle = "data"

    def __post_init__(self) -> None:
        if self.style not in get_args(EdgeStyle):
            raise InvalidInput(
                f"picture edge {self.source} -> {self.target}: expected a style data, message or reference, "
                f"got {self.style!r}"
            )


@dataclass(frozen=True, slots=True)
class PictureCluster:
    """A titled frame around nodes, at a place of the picture's grid: stages left to right, backward below forward."""

    id: str
    title: str
    column: int = 0
    row: int = 0

    def __post_init__(self) -> None:
        if not self.id or self.column < 0 or self.row < 0:
            raise InvalidInput(
                f"picture cluster {self.id!r}: expected an id and a place of 0 or more, got {self.column}, {self.row}"
            )


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """One line of the legend: a fill class and what it means here."""

    fill_class: str
    text: str


@dataclass(frozen=True, slots=True)
class PictureGraph:
    """A graph to be drawn. Without `legend` the picture explains the fill classes that it uses."""

    title: str
    nodes: tuple[PictureNode, ...]
    edges: tuple[PictureEdge, ...] = ()
    clusters: tuple[PictureCluster, ...] = ()
    legend: tuple[LegendEntry, ...] = ()

    def __post_init__(self) -> None:
        for name in ("nodes", "edges", "clusters", "legend"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_distinct("node id", [node.id for node in self.nodes])
        self._check_distinct("cluster id", [cluster.id for cluster in self.clusters])
        self._check_distinct("place of clusters", [f"column {c.column}, row {c.row}" for c in self.clusters])
        self._check_names()

    def _check_distinct(self, what: str, values: list[str]) -> None:
        twice = [value for value, count in Counter(values).items() if count > 1]
        if twice:
            raise InvalidInput(f"picture {self.title}: {what} {'; '.join(twice)} is used twice")

    def _check_names(self) -> None:
        known, known_clusters = {node.id for node in self.nodes}, {cluster.id for cluster in self.clusters}
        for node in self.nodes:
            if node.cluster is not None and node.cluster not in known_clusters:
                raise InvalidInput(f"picture {self.title}: node {node.id}: there is no cluster {node.cluster!r}")
        for edge in self.edges:
            for end in (edge.source, edge.target):
                if end not in known:
                    raise InvalidInput(f"picture {self.title}: edge {edge.source} -> {edge.target}: no node {end!r}")
        for entry in self.legend:
            if entry.fill_class not in FILLS:
                raise InvalidInput(f"picture {self.title}: legend: there is no fill class {entry.fill_class!r}")

    @property
    def legend_entries(self) -> tuple[LegendEntry, ...]:
        """The legend as given, or one entry per fill class in use, in the order of the palette."""
        if self.legend:
            return self.legend
        used = {node.fill_class for node in self.nodes}
        return tuple(LegendEntry(name, fill.meaning) for name, fill in FILLS.items() if name in used)
