"""Replicas of a layout on the ranks of a cluster.

A stage stays within one node where it fits into one; only a stage wider than a node spans several. A replica stays
within one node where it can; its stages follow one another through the nodes otherwise. Wide stages are placed first,
so that widths which divide one another leave no gaps.
"""

from __future__ import annotations

from collections.abc import Sequence

from hgraph.strategy import Replica, Scheme
from hgraph.topology import Topology
from strategies.scheme_table import Layout

__all__ = ["place_layout"]


def place_layout(schemes: Sequence[Scheme], layout: Layout, topology: Topology) -> tuple[Replica, ...] | None:
    """Returns the replicas of a layout, wide ones first, on ranks of `topology`; None where they do not fit."""
    wanted = [scheme for scheme, count in zip(schemes, layout, strict=True) for _ in range(count)]
    wanted.sort(key=lambda scheme: (-_width(scheme), -scheme.num_ranks, str(scheme)))
    free = [sorted(node.ranks) for node in topology.nodes]
    largest = max(map(len, free))
    replicas = []
    for scheme in wanted:
        ranks = _take_replica(scheme, free, largest)
        if ranks is None:
            return None
        replicas.append(Replica(scheme, tuple(ranks)))
    return tuple(replicas)


def _width(scheme: Scheme) -> int:
    return max(stage.num_ranks for stage in scheme.stages)


def _take_replica(scheme: Scheme, free: list[list[int]], largest: int) -> list[int] | None:
    node = _tightest(scheme.num_ranks, free)
    if node is not None:
        return _take(scheme.num_ranks, node, free)
    ranks: list[int] = []
    node = None
    for stage in scheme.stages:
        if node is None or len(free[node]) < stage.num_ranks:
            node = _tightest(stage.num_ranks, free)
        if node is not None:
            ranks += _take(stage.num_ranks, node, free)
            continue
        taken = _take_nodes(stage.num_ranks, free) if stage.num_ranks > largest else None
        if taken is None:
            return None
        ranks += taken
    return ranks


def _tightest(count: int, free: list[list[int]]) -> int | None:
    """Returns the node with the fewest free ranks among those with `count` or more; of equal ones the first."""
    fitting = [(len(own), node) for node, own in enumerate(free) if len(own) >= count]
    return min(fitting)[1] if fitting else None


def _take(count: int, node: int, free: list[list[int]]) -> list[int]:
    taken, free[node] = free[node][:count], free[node][count:]
    return taken


def _take_nodes(count: int, free: list[list[int]]) -> list[int] | None:
    """Returns the ranks of a stage wider than any node: of the nodes with most free ranks, in order."""
    taken: list[int] = []
    for node in sorted(range(len(free)), key=lambda node: (-len(free[node]), node)):
        taken += _take(min(count - len(taken), len(free[node])), node, free)
        if len(taken) == count:
            return taken
    return None
