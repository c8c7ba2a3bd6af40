"""Pictures: graphs as DOT and SVG, schedules, tables and traffic as SVG, drawn without any program outside Python."""

from __future__ import annotations

from hgraph.pictures.dot import to_dot
from hgraph.pictures.graph import LegendEntry, PictureCluster, PictureEdge, PictureGraph, PictureNode
from hgraph.pictures.graph_svg import to_svg
from hgraph.pictures.heat_map import heat_map_svg, quantity
from hgraph.pictures.palette import fill_class_of
from hgraph.pictures.schedule_svg import grid_svg, grids_svg
from hgraph.pictures.table_svg import table_svg

__all__ = [
    "LegendEntry",
    "PictureCluster",
    "PictureEdge",
    "PictureGraph",
    "PictureNode",
    "fill_class_of",
    "grid_svg",
    "grids_svg",
    "heat_map_svg",
    "quantity",
    "table_svg",
    "to_dot",
    "to_svg",
]
