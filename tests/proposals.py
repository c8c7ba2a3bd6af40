"""Small schemes, clusters and batches that the tests of proposals share."""

from __future__ import annotations

from itertools import product

from hgraph.profile import Profile, SchemeCost
from hgraph.scheme_text import parse_scheme
from hgraph.topology import Link, Topology, uniform
from strategies.scheme_table import Layout, SchemeLimits, SchemeTable, scheme_table

__all__ = ["COSTS", "all_layouts", "nodes", "profile", "small_table"]

COSTS = {
    "tp1": SchemeCost(2e-4, 0.40, 3.0, 300),
    "tp2": SchemeCost(1e-4, 0.23, 4.0, 800),
    "tp1.pp2": SchemeCost(1e-4, 0.20, 2.0, 450),
    "tp4": SchemeCost(6e-5, 0.15, 6.0, 2000),
}
"""The wider, the dearer per token and rank, and the more tokens it holds; ms."""


def profile() -> Profile:
    return Profile(COSTS, {})


def small_table(num_ranks: int = 8, limits: SchemeLimits | None = None, **costs: SchemeCost) -> SchemeTable:
    schemes = {parse_scheme(name): cost for name, cost in (costs or COSTS).items()}
    return scheme_table(schemes, num_ranks, limits or SchemeLimits())[0]


def nodes(count: int = 2, ranks: int = 4) -> Topology:
    return uniform("small", count, ranks, Link(100, 1), Link(10, 10))


def all_layouts(table: SchemeTable, num_ranks: int) -> list[Layout]:
    """Returns every layout that fills the ranks."""
    counts = [range(num_ranks // int(size) + 1) for size in table.size_T]
    return [layout for layout in product(*counts) if sum(layout * table.size_T) == num_ranks]
