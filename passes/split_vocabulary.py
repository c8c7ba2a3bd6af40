"""Split vocabulary: writes log-softmax and its backward as maxima, sums and elementwise operators.

Their rules then say by themselves what a split class dim costs: an all-reduce (max) and an all-reduce (sum) of one
number per token forward, and one all-reduce (sum) backward.
"""

from __future__ import annotations

import torch
from torch import fx

from hgraph.graph import Shape, info, int_argument
from passes.rewriting import insert, replace_uses

__all__ = ["split_vocabulary"]

aten = torch.ops.aten


def split_vocabulary(graph: fx.Graph) -> fx.Graph:
    """Returns `graph`, rewritten in place."""
    for node in list(graph.nodes):
        if node.target == aten._log_softmax.default:
            _forward(node)
        elif node.target == aten._log_softmax_backward_data.default:
            _backward(node)
    return graph


def _forward(node: fx.Node) -> None:
    logits, dim = node.args[0], int_argument(node, 1)
    assert isinstance(logits, fx.Node)
    one = _reduced(info(node).shape, dim)
    greatest = insert(node, aten.amax.default, (logits, [dim], True), like=node, shape=one)
    shifted = insert(node, aten.sub.Tensor, (logits, greatest), like=node)
    exponent = insert(node, aten.exp.default, (shifted,), like=node)
    total = insert(node, aten.sum.dim_IntList, (exponent, [dim], True), like=node, shape=one)
    logarithm = insert(node, aten.log.default, (total,), like=node, shape=one)
    replace_uses(node, insert(node, aten.sub.Tensor, (shifted, logarithm), like=node))


def _backward(node: fx.Node) -> None:
    grad, output, dim = node.args[0], node.args[1], int_argument(node, 2)
    one = _reduced(info(node).shape, dim)
    probability = insert(node, aten.exp.default, (output,), like=node)
    total = insert(node, aten.sum.dim_IntList, (grad, [dim], True), like=node, shape=one)
    share = insert(node, aten.mul.Tensor, (probability, total), like=node)
    replace_uses(node, insert(node, aten.sub.Tensor, (grad, share), like=node))


def _reduced(shape: Shape, dim: int) -> Shape:
    position = dim % len(shape)
    return (*shape[:position], 1, *shape[position + 1 :])
