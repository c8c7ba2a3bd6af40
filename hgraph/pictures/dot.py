"""Writes a picture graph in the DOT language, for those who have Graphviz or another reader of it."""

from __future__ import annotations

from hgraph.pictures.graph import PictureEdge, PictureGraph, PictureNode
from hgraph.pictures.palette import FILLS

__all__ = ["to_dot"]

_SHAPES = {"box": "box", "pill": "ellipse", "hexagon": "hexagon"}
_EDGE_STYLES = {
    "data": 'color="#52606d"',
    "message": 'color="#b3261e", penwidth=2',
    "reference": 'color="#9aa5b1", style=dashed, constraint=false',
}


def to_dot(graph: PictureGraph) -> str:
    """Returns the graph as DOT text: clusters as subgraphs, fill classes as colours, the legend as a cluster."""
    lines = [
        "digraph picture {",
        f'  graph [label="{_escape(graph.title)}", labelloc=t, fontname="sans-serif", rankdir=TB];',
        '  node [style="filled", fontname="monospace", fontsize=11];',
        '  edge [fontname="monospace", fontsize=9];',
    ]
    lines += [f"  {_node(node)}" for node in graph.nodes if node.cluster is None]
    for index, cluster in enumerate(graph.clusters):
        lines += [f"  subgraph cluster_{index} {{", f'    label="{_escape(cluster.title)}"; style=rounded;']
        lines += [f"    {_node(node)}" for node in graph.nodes if node.cluster == cluster.id]
        lines.append("  }")
    lines += [f"  {_edge(edge)}" for edge in graph.edges]
    lines += [*_legend(graph), "}"]
    return "\n".join(lines) + "\n"


def _node(node: PictureNode) -> str:
    fill = FILLS[node.fill_class]
    label = _escape("\n".join(part for part in (node.label, node.sublabel) if part))
    pen = ", penwidth=2" if node.shape == "hexagon" else ""
    tooltip = f', tooltip="{_escape(node.tooltip)}"' if node.tooltip else ""
    return (
        f'"{_escape(node.id)}" [label="{label}", shape={_SHAPES[node.shape]}, fillcolor="{fill.fill}", '
        f'color="{fill.border}", fontcolor="{fill.text}"{pen}{tooltip}];'
    )


def _edge(edge: PictureEdge) -> str:
    label = f', label="{_escape(edge.label)}"' if edge.label else ""
    return f'"{_escape(edge.source)}" -> "{_escape(edge.target)}" [{_EDGE_STYLES[edge.style]}{label}];'


def _legend(graph: PictureGraph) -> list[str]:
    entries = graph.legend_entries
    if not entries:
        return []
    lines = ["  subgraph cluster_legend {", '    label="legend"; style=dashed;']
    for index, entry in enumerate(entries):
        fill = FILLS[entry.fill_class]
        lines.append(
            f'    "legend {index}" [label="{_escape(entry.text)}", shape=box, fillcolor="{fill.fill}", '
            f'color="{fill.border}", fontcolor="{fill.text}"];'
        )
    return [*lines, "  }"]


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
