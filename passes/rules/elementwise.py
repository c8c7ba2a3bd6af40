"""Rules of elementwise and creation operators: dims correspond from the right, broadcast dims carry no letter."""

from __future__ import annotations

import torch
from torch import fx

from hgraph.graph import Shape, Size, info, tensor_inputs
from passes.rules.sharding import Dims, OpSharding

__all__ = [
    "creation",
    "elementwise",
    "linear_cast",
    "linear_in_first",
    "linear_jointly",
    "linear_power",
    "nonlinear",
    "sequence",
]


def elementwise(node: fx.Node, linear: tuple[frozenset[int], ...]) -> OpSharding:
    """The rule of an elementwise operator that is linear in each of the input sets `linear`."""
    shape = info(node).shape
    sizes: dict[str, Size] = {}
    output = _output_dims(shape, sizes)
    inputs = tuple(_broadcast_dims(info(argument).shape, shape, output) for argument in tensor_inputs(node))
    return OpSharding(inputs, (output,) * len(info(node).shapes), sizes, linear=linear)


def nonlinear(node: fx.Node) -> list[OpSharding]:
    return [elementwise(node, ())]


def linear_in_first(node: fx.Node) -> list[OpSharding]:
    """Linear in the first input where everything else is a plain number (negation, scaling by a scalar)."""
    alone = len(tensor_inputs(node)) == 1 and isinstance(node.args[0], fx.Node)
    return [elementwise(node, (frozenset({0}),) if alone else ())]


def linear_jointly(node: fx.Node) -> list[OpSharding]:
    """Sums and differences: partial if all terms are; a plain number may not be added to a partial value."""
    count = len(tensor_inputs(node))
    same = count == 2 and len({info(argument).shape for argument in tensor_inputs(node)}) == 1
    return [elementwise(node, (frozenset({0, 1}),) if same else ())]


def linear_power(node: fx.Node) -> list[OpSharding]:
    """x ** 1 is linear, every other power is not."""
    return [elementwise(node, (frozenset({0}),) if node.args[1] == 1 else ())]


def linear_cast(node: fx.Node) -> list[OpSharding]:
    """Linear where the cast does not round: a value is reduced on the narrow side of a widening cast."""
    source, target = info(tensor_inputs(node)[0]).dtype, info(node).dtype
    widening = source.is_floating_point and torch.promote_types(source, target) == target
    return [elementwise(node, (frozenset({0}),) if widening else ())]


def creation(node: fx.Node) -> list[OpSharding]:
    """Made from constants alone, or from the shape of an input: may be made in any layout."""
    sizes: dict[str, Size] = {}
    output = _output_dims(info(node).shape, sizes)
    inputs = tuple(_broadcast_dims(info(argument).shape, info(node).shape, output) for argument in tensor_inputs(node))
    return [OpSharding(inputs, (output,), sizes)]


def sequence(node: fx.Node) -> list[OpSharding]:
    """Consecutive numbers: every rank makes them all, as its piece would have a start of its own."""
    return [OpSharding((), ((("n",),),), {"n": info(node).shape[0]}, frozenset("n"))]


def _output_dims(shape: Shape, sizes: dict[str, Size]) -> Dims:
    dims: list[tuple[str, ...]] = []
    for index, size in enumerate(shape):
        if size == 1:
            dims.append(())
            continue
        sizes[f"d{index}"] = size
        dims.append((f"d{index}",))
    return tuple(dims)


def _broadcast_dims(shape: Shape, output_shape: Shape, output: Dims) -> Dims:
    offset = len(output) - len(shape)
    return tuple(
        output[offset + index] if size == output_shape[offset + index] else () for index, size in enumerate(shape)
    )
