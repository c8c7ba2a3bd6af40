"""Helpers of passes that rewrite graphs: copies, insertion with facts, replacement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import fx

from hgraph.graph import Shape, info, set_info

__all__ = ["copy_graph", "eliminate_dead_code", "insert", "replace_uses"]


def copy_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Returns a copy whose nodes have facts of their own, and the map from old to new nodes."""
    result = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        new = result.node_copy(node, lambda old: mapping[old])
        new.name = node.name
        new.meta = dict(node.meta)
        facts = copy(info(node))
        facts.extra = dict(facts.extra)
        set_info(new, facts)
        mapping[node] = new
    return result, mapping


def insert(
    before: fx.Node,
    target: Callable[..., Any],
    args: Sequence[Any],
    *,
    like: fx.Node,
    shape: Shape | None = None,
    dtype: torch.dtype | None = None,
    kwargs: dict[str, Any] | None = None,
) -> fx.Node:
    """Returns a new node before `before` that takes phase, module and source from `like`."""
    facts = copy(info(like))
    facts.extra = {}
    facts.role, facts.name = "operator", ""
    facts.shapes = (info(like).shape if shape is None else shape,)
    facts.dtypes = (info(like).dtype if dtype is None else dtype,)
    facts.produced = facts.annotations = facts.required = ()
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, tuple(args), kwargs or {})
    return set_info(node, facts)


def replace_uses(node: fx.Node, replacement: fx.Node) -> None:
    """Makes every user of `node` use `replacement`, and erases `node`."""
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Erases operators that nothing uses; placeholders stay."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
