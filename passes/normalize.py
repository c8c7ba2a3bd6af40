"""Normalise: brings a captured graph to the few forms that the other passes know.

Aliases fold away (detach, full slices, casts to the same dtype, clone, t(t(x))); split becomes slices; select of a dim
of size 1 becomes squeeze; views become `reshape`; mean becomes a sum and a division by the global count; addmm becomes
a product and a sum, so that a bias is added once, after the reduction. Size arguments become the expressions of the
node's shape: no node depends on another for its size.

With `exact`, casts to float32 become casts to float64, so that models that cast inside can be compared in float64.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from hgraph.errors import CaptureError
from hgraph.graph import info, int_argument, where
from passes.rewriting import eliminate_dead_code, insert, replace_uses
from passes.rules.table import RULES

__all__ = ["normalize"]

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_CREATE_LIKE = (aten.full_like.default, aten.zeros_like.default, aten.ones_like.default)


def normalize(graph: fx.Graph, *, exact: bool = False) -> fx.Graph:
    """Returns `graph`, rewritten in place."""
    for node in list(graph.nodes):
        if node.op == "call_function" and (rewrite := _REWRITES.get(node.target)) is not None:
            rewrite(node)
    if exact:
        _raise_to_float64(graph)
    for node in list(graph.nodes):
        if node.op == "call_function":
            _fold_same_cast(node)
    eliminate_dead_code(graph)
    _forget_sizes(graph)
    eliminate_dead_code(graph)
    return graph


def _fold(node: fx.Node) -> None:
    replace_uses(node, node.args[0])  # type: ignore[arg-type]


def _view(node: fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if info(source).shape == info(node).shape:
        _fold(node)
    else:
        node.target = aten.reshape.default


def _transpose(node: fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if source.target == aten.t.default:
        replace_uses(node, source.args[0])  # type: ignore[arg-type]


def _slice(node: fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if info(source).shape == info(node).shape:
        return _fold(node)
    size = info(source).shape[int_argument(node, 1, 0)]
    if not isinstance(size, int):
        raise CaptureError(
            f"{where(node)} cuts the token dim, so that the graph would mix documents or drop tokens. Labels are "
            "already shifted in packed.labels, and positions are in packed.positions"
        )
    return None


def _slice_backward(node: fx.Node) -> None:
    if info(node.args[0]).shape == info(node).shape:  # type: ignore[arg-type]
        _fold(node)


def _split(node: fx.Node) -> None:
    source, size = node.args[0], node.args[1]
    assert isinstance(source, fx.Node)
    dim = int_argument(node, 2, 0)
    length = info(source).shape[dim]
    if not isinstance(length, int):
        raise CaptureError(f"{where(node)} splits the token dim; keep tokens in one piece")
    pieces = list(size) if isinstance(size, list | tuple) else [size] * -(-length // int_argument(node, 1))
    starts = [0]
    for piece in pieces:
        assert isinstance(piece, int)
        starts.append(min(length, starts[-1] + piece))
    for user in list(node.users):
        index = int_argument(user, 1)
        args = (source, dim, starts[index], starts[index + 1])
        replace_uses(user, insert(user, aten.slice.Tensor, args, like=user))
    node.graph.erase_node(node)


def _select(node: fx.Node) -> None:
    source, dim = node.args[0], node.args[1]
    if info(source).shape[dim] == 1:  # type: ignore[arg-type,index]
        node.target, node.args = aten.squeeze.dim, (source, dim)


def _select_backward(node: fx.Node) -> None:
    dim = node.args[2]
    if info(node).shape[dim] == 1:  # type: ignore[index]
        node.target, node.args = aten.unsqueeze.default, (node.args[0], dim)


def _mean(node: fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    shape = info(source).shape
    dims = list(node.args[1]) if len(node.args) > 1 and node.args[1] else list(range(len(shape)))  # type: ignore[arg-type]
    keep = bool(node.args[2]) if len(node.args) > 2 else False
    count = 1
    for dim in dims:
        size = shape[dim]
        if not isinstance(size, int):
            raise CaptureError(
                f"{where(node)} takes a mean over tokens, which would weigh micro-batches unequally. Return a sum over "
                "labelled tokens; the division by their number in the whole step is done for you"
            )
        count *= size
    total = insert(node, aten.sum.dim_IntList, (source, dims, keep), like=node)
    replace_uses(node, insert(node, aten.div.Scalar, (total, count), like=node))


def _add(node: fx.Node) -> None:
    """Python's `sum` begins with 0 + x."""
    source, other = node.args[:2]
    if other == 0 and isinstance(source, fx.Node) and info(source).dtype == info(node).dtype:
        _fold(node)


def _addmm(node: fx.Node) -> None:
    bias, first, second = node.args
    if node.kwargs:
        raise CaptureError(f"{where(node)}: beta and alpha of addmm are not supported")
    product = insert(node, aten.mm.default, (first, second), like=node)
    replace_uses(node, insert(node, aten.add.Tensor, (product, bias), like=node))


def _nll(node: fx.Node) -> None:
    # nll_loss_forward(x, labels, weight, reduction, ignore_index); nll_loss_backward(grad, x, labels, weight, ...)
    first = 2 if node.target == aten.nll_loss_forward.default else 3
    if node.args[first] is not None:
        raise CaptureError(f"{where(node)}: class weights are not supported; weigh tokens in the loss instead")
    if node.args[first + 1] == 1:
        raise CaptureError(
            f"{where(node)} takes the mean over the labels of one micro-batch, which would weigh micro-batches "
            "unequally. Use reduction='sum'; the division by the number of labels in the whole step is done for you"
        )


def _dropout(node: fx.Node) -> None:
    raise CaptureError(
        f"{where(node)} drops at random; masks that do not change with the layout are not there yet. Set dropout to "
        "0 in the configuration, or call model.eval() before compiling"
    )


def _arange(node: fx.Node) -> None:
    if any(not isinstance(size, int) for size in info(node).shape):
        raise CaptureError(
            f"{where(node)} numbers the tokens of the packed batch, so that positions would not restart in every "
            "document. Use packed.positions"
        )


def _clone(node: fx.Node) -> None:
    # Layout is the programs' business: reshape copies where it must.
    _fold(node)


_REWRITES: dict[Any, Callable[[fx.Node], None]] = {
    aten.detach.default: _fold,
    aten.alias.default: _fold,
    aten.lift_fresh_copy.default: _fold,
    aten.clone.default: _clone,
    aten.t.default: _transpose,
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_backward,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.select.int: _select,
    aten.select_backward.default: _select_backward,
    aten.mean.dim: _mean,
    aten.mean.default: _mean,
    aten.native_dropout.default: _dropout,
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.addmm.default: _addmm,
    aten.nll_loss_forward.default: _nll,
    aten.nll_loss_backward.default: _nll,
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    **dict.fromkeys(_VIEWS, _view),
}


def _fold_same_cast(node: fx.Node) -> None:
    if node.target != aten._to_copy.default:
        return
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if info(source).dtype == info(node).dtype:
        replace_uses(node, source)


def _raise_to_float64(graph: fx.Graph) -> None:
    for node in graph.nodes:
        facts = info(node)
        facts.dtypes = tuple(torch.float64 if dtype == torch.float32 else dtype for dtype in facts.dtypes)
        if node.kwargs.get("dtype") == torch.float32:
            node.kwargs = {**node.kwargs, "dtype": torch.float64}
        if node.target == aten._log_softmax_backward_data.default:
            node.args = (*node.args[:3], torch.float64)


def _forget_sizes(graph: fx.Graph) -> None:
    """Replaces symbolic sizes among the arguments by text; programs rebuild sizes from shapes and annotations.

    Operators without a rule are left to the verifier, which says so.
    """
    for node in graph.nodes:
        if node.op == "call_function" and (info(node).is_tensor or node.target is operator.getitem):
            node.args = fx.node.map_aggregate(node.args, functools.partial(_size_text, node))


def _size_text(node: fx.Node, argument: Any) -> Any:
    if not isinstance(argument, fx.Node) or argument.target is operator.getitem or info(argument).is_tensor:
        return argument
    if len(info(argument).shapes) > 1 or argument.op == "placeholder":
        return argument
    if node.target in RULES and not _is_size_argument(node, argument):
        raise CaptureError(
            f"{where(node)} computes with a size or with a value read from a tensor ({where(argument)}), which would "
            "tie the graph to one batch. Leave sizes of the batch out of the arithmetic (the division by the number of "
            "labels is done for you), or read the value from a per-token field of packed"
        )
    return str(argument.name)


def _is_size_argument(node: fx.Node, argument: fx.Node) -> bool:
    """Whether a symbolic size stands where the operator takes a shape, which programs rebuild."""
    position = _SIZES_AT.get(node.target)
    if position is None or position >= len(node.args):
        return False
    sizes = node.args[position]
    elsewhere = [other for index, other in enumerate(node.args) if index != position]
    return argument in (sizes if isinstance(sizes, list | tuple) else [sizes]) and argument not in elsewhere


_SIZES_AT: dict[Any, int] = {
    **dict.fromkeys(_VIEWS, 1),
    aten.expand.default: 1,
    aten.slice_backward.default: 1,
    aten.select_backward.default: 1,
    aten.full.default: 0,
    aten.zeros.default: 0,
    aten.ones.default: 0,
}
"""Which argument of an operator is a shape."""
