"""Parts the nodes of a graph into groups that a picture draws as one node each.

Condensed, a group is one module at work: the nodes of its own code that can run in one go. A module whose code goes on
after that of another (`x + attention(x)`, then `x + mlp(x)`) has several groups. Every Reshard is a group of its own,
with the views of its result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import networkx as nx
import torch
from torch import fx

from hgraph.graph import info
from passes.insert_comm import is_reshard

__all__ = ["Group", "groups_of", "runs_here"]

_VIEWS = (
    torch.ops.aten.reshape.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.t.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.squeeze.dim,
)


@dataclass(slots=True, eq=False)
class Group:
    """Nodes that a picture draws as one, and where they come from."""

    module: str
    module_class: str
    nodes: list[fx.Node] = field(default_factory=list)
    before: set[Group] = field(default_factory=set)
    """Groups whose values this one reads."""

    @property
    def is_reshard(self) -> bool:
        return is_reshard(self.nodes[0])


def runs_here(node: fx.Node) -> bool:
    """Whether a node of a stage graph is an operator that the stage runs."""
    return node.op == "call_function"


def groups_of(graph: fx.Graph, *, full: bool = False) -> list[Group]:
    """Returns the groups of the operators of a graph, each after those that it reads from; `full`: one per node."""
    owner: dict[fx.Node, Group] = {}
    latest: dict[tuple[str, str], list[Group]] = {}
    groups: list[Group] = []
    for node in graph.nodes:
        if not runs_here(node):
            continue
        facts = info(node)
        before = {owner[argument] for argument in node.all_input_nodes if argument in owner}
        key = (facts.module, facts.module_class)
        known = [] if full or is_reshard(node) else latest.setdefault(key, [])
        group = next((one for one in reversed(known) if _may_join(one, before)), None)
        if group is None and not full and node.target in _VIEWS:
            group = _moved_by(before)
        if group is None:
            group = Group(*key)
            groups.append(group)
            known.append(group)
        group.nodes.append(node)
        group.before |= before - {group}
        owner[node] = group
    return _sorted(groups)


def _moved_by(before: set[Group]) -> Group | None:
    """Returns the Reshard whose result is merely viewed here: the view belongs to it, and not to a group of its own."""
    group = next(iter(before)) if len(before) == 1 else None
    return group if group is not None and group.is_reshard else None


def _may_join(group: Group, before: set[Group]) -> bool:
    """Whether a node that reads from `before` can be part of `group` without a circle: none of them reads from it."""
    seen: set[Group] = set()
    stack = [other for other in before if other is not group]
    while stack:
        other = stack.pop()
        if other is group:
            return False
        if other not in seen:
            seen.add(other)
            stack.extend(other.before)
    return True


def _sorted(groups: list[Group]) -> list[Group]:
    order: nx.DiGraph = nx.DiGraph()
    position: Mapping[Group, int] = {group: index for index, group in enumerate(groups)}
    order.add_nodes_from(groups)
    order.add_edges_from((before, group) for group in groups for before in group.before)
    return list(nx.lexicographical_topological_sort(order, key=position.__getitem__))
