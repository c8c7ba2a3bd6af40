"""Decides which edges are drawn as lines and which are named at their target instead.

A joint graph of forward and backward has dozens of values that live across its whole length; as lines they would bury
the flow. Messages are always drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from hgraph.pictures.graph import PictureEdge, PictureGraph
from hgraph.pictures.layers import assign_layers

__all__ = ["drawn_edges"]

_LINES_BESIDE_NODES = 10
_LINES_BETWEEN_CLUSTERS = 6


def drawn_edges(graph: PictureGraph) -> tuple[PictureEdge, ...]:
    """Returns the edges to draw as lines; all others are references."""
    position = {node.id: index for index, node in enumerate(graph.nodes)}
    cluster = {node.id: node.cluster for node in graph.nodes}
    lines = [edge for edge in graph.edges if edge.style != "reference" and edge.source != edge.target]
    inside = [edge for edge in lines if cluster[edge.source] == cluster[edge.target]]
    between = [edge for edge in lines if cluster[edge.source] != cluster[edge.target]]
    forward = [edge for edge in inside if position[edge.source] < position[edge.target]]
    kept = {*_short_enough(graph, forward), *_few_enough(between, cluster)}
    return tuple(edge for edge in graph.edges if edge in kept)


def _short_enough(graph: PictureGraph, edges: Sequence[PictureEdge]) -> list[PictureEdge]:
    """Returns the edges without the longest: no layer has more than a few lines that pass by its nodes."""
    nodes = [node.id for node in graph.nodes]
    layer = assign_layers(nodes, [(edge.source, edge.target) for edge in edges], (), ())
    cluster = {node.id: node.cluster for node in graph.nodes}
    lines: dict[str | None, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    kept = []
    by_length = sorted(edges, key=lambda edge: (edge.style != "message", layer[edge.target] - layer[edge.source]))
    for edge in by_length:
        rows = lines[cluster[edge.source]]
        passed = range(layer[edge.source] + 1, layer[edge.target])
        crowded = any(len(rows[index] | {edge.source}) > _LINES_BESIDE_NODES for index in passed)
        if crowded and edge.style != "message":
            continue
        kept.append(edge)
        for index in passed:
            rows[index].add(edge.source)
    return kept


def _few_enough(edges: Sequence[PictureEdge], cluster: Mapping[str, str | None]) -> list[PictureEdge]:
    """Returns messages, and what joins a pair of clusters by few values only."""
    values: dict[tuple[str | None, str | None], set[str]] = defaultdict(set)
    for edge in edges:
        values[cluster[edge.source], cluster[edge.target]].add(edge.source)
    return [
        edge
        for edge in edges
        if edge.style == "message" or len(values[cluster[edge.source], cluster[edge.target]]) <= _LINES_BETWEEN_CLUSTERS
    ]
