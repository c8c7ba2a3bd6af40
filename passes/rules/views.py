"""Rules of views: reshape as a correspondence of factored dims, and operators that permute, add or drop dims."""

from __future__ import annotations

import sympy
from torch import fx

from hgraph.errors import RuleError
from hgraph.graph import Shape, Size, info, int_argument, tensor_inputs, where
from passes.rules.sharding import Dims, OpSharding

__all__ = ["cat", "expand", "permute", "reshape", "select", "slice_dim", "squeeze", "transpose", "unsqueeze"]

_ALONE = (frozenset({0}),)


def reshape(node: fx.Node) -> list[OpSharding]:
    """Dims are factored from the left; groups of dims that do not factor must be replicated."""
    sizes: dict[str, Size] = {}
    fixed: set[str] = set()
    source, target = _factor(info(tensor_inputs(node)[0]).shape, info(node).shape, sizes, fixed)
    return [OpSharding((source,), (target,), sizes, frozenset(fixed), linear=_ALONE, is_view=True)]


def transpose(node: fx.Node) -> list[OpSharding]:
    rank = len(info(node).shape)
    first, second = int_argument(node, 1, 0) % max(rank, 1), int_argument(node, 2, 1) % max(rank, 1)
    order = list(range(rank))
    if rank > 1:
        order[first], order[second] = order[second], order[first]
    return [_reordered(node, order)]


def permute(node: fx.Node) -> list[OpSharding]:
    rank = len(info(node).shape)
    order = node.args[1]
    assert isinstance(order, list | tuple)
    return [_reordered(node, [dim % rank for dim in order if isinstance(dim, int)])]


def unsqueeze(node: fx.Node) -> list[OpSharding]:
    source, sizes = _own_dims(info(tensor_inputs(node)[0]).shape)
    dim = int_argument(node, 1) % len(info(node).shape)
    return [_view(source, (*source[:dim], (), *source[dim:]), sizes)]


def squeeze(node: fx.Node) -> list[OpSharding]:
    shape = info(tensor_inputs(node)[0]).shape
    source, sizes = _own_dims(shape)
    given = node.args[1] if len(node.args) > 1 else list(range(len(shape)))
    dims = list(given) if isinstance(given, list | tuple) else [given]
    dropped = {dim % len(shape) for dim in dims if isinstance(dim, int) and shape[dim % len(shape)] == 1}
    return [_view(source, tuple(letters for dim, letters in enumerate(source) if dim not in dropped), sizes)]


def expand(node: fx.Node) -> list[OpSharding]:
    """Expanded dims are new letters that the input lacks."""
    shape, source_shape = info(node).shape, info(tensor_inputs(node)[0]).shape
    sizes: dict[str, Size] = {f"d{index}": size for index, size in enumerate(shape) if size != 1}
    target = tuple((f"d{index}",) if size != 1 else () for index, size in enumerate(shape))
    offset = len(shape) - len(source_shape)
    source = tuple(
        target[offset + index] if size == shape[offset + index] else () for index, size in enumerate(source_shape)
    )
    return [_view(source, target, sizes)]


def slice_dim(node: fx.Node) -> list[OpSharding]:
    """slice, slice_backward, select_backward of one dim: that dim must be whole on every rank."""
    dim = _dim_of(node)
    shape, source_shape = info(node).shape, info(tensor_inputs(node)[0]).shape
    sizes: dict[str, Size] = {}
    source: list[tuple[str, ...]] = []
    target: list[tuple[str, ...]] = []
    for index, (own, other) in enumerate(zip(source_shape, shape, strict=True)):
        if index == dim:
            sizes |= {"in": own, "out": other}
            source.append(("in",))
            target.append(("out",))
            continue
        letters = (f"d{index}",) if own != 1 else ()
        sizes |= {f"d{index}": own}
        source.append(letters)
        target.append(letters)
    fixed = frozenset({"in", "out"})
    return [OpSharding((tuple(source),), (tuple(target),), sizes, fixed, linear=_ALONE, is_view=True)]


def select(node: fx.Node) -> list[OpSharding]:
    """select drops a dim, select_backward adds it; either way it must be whole on every rank."""
    shape, source_shape = info(node).shape, info(tensor_inputs(node)[0]).shape
    drops = len(shape) < len(source_shape)
    longer = source_shape if drops else shape
    position = 1 if drops else 2
    dim = int_argument(node, position) % len(longer)
    dims, sizes = _own_dims(longer)
    rest = tuple(letters for index, letters in enumerate(dims) if index != dim)
    source, target = (dims, rest) if drops else (rest, dims)
    return [OpSharding((source,), (target,), sizes, frozenset(dims[dim]), linear=_ALONE, is_view=True)]


def cat(node: fx.Node) -> list[OpSharding]:
    """The dim along which tensors are joined must be whole on every rank."""
    if len({len(info(argument).shape) for argument in tensor_inputs(node)}) > 1:
        raise RuleError(
            f"{where(node)} joins tensors of different numbers of dims, as a key/value cache does; call a Hugging Face "
            "model with use_cache=False"
        )
    shape = info(node).shape
    dim = int_argument(node, 1, 0) % len(shape)
    sizes: dict[str, Size] = {f"d{index}": size for index, size in enumerate(shape)}
    target = tuple((f"d{index}",) if size != 1 else () for index, size in enumerate(shape))
    inputs, fixed = [], {f"d{dim}"}
    for number, argument in enumerate(tensor_inputs(node)):
        letter = f"c{number}"
        sizes[letter] = info(argument).shape[dim]
        fixed.add(letter)
        inputs.append((*target[:dim], (letter,), *target[dim + 1 :]))
    everything = frozenset(range(len(inputs)))
    return [OpSharding(tuple(inputs), (target,), sizes, frozenset(fixed), linear=(everything,))]


def _dim_of(node: fx.Node) -> int:
    """The dim argument: second of slice(x, dim), third of slice_backward(x, sizes, dim)."""
    position = 2 if "backward" in str(node.target) else 1
    return int_argument(node, position, 0) % len(info(node).shape)


def _own_dims(shape: Shape) -> tuple[Dims, dict[str, Size]]:
    dims = tuple((f"d{index}",) if size != 1 else () for index, size in enumerate(shape))
    return dims, {f"d{index}": size for index, size in enumerate(shape) if size != 1}


def _view(source: Dims, target: Dims, sizes: dict[str, Size]) -> OpSharding:
    return OpSharding((source,), (target,), sizes, linear=_ALONE, is_view=True)


def _reordered(node: fx.Node, order: list[int]) -> OpSharding:
    source, sizes = _own_dims(info(tensor_inputs(node)[0]).shape)
    return _view(source, tuple(source[dim] for dim in order), sizes)


def _factor(source: Shape, target: Shape, sizes: dict[str, Size], fixed: set[str]) -> tuple[Dims, Dims]:
    """Common factors of two shapes of equal product, from the left, as letters."""
    dims: tuple[list[list[str]], list[list[str]]] = ([[] for _ in source], [[] for _ in target])
    left, right = (iter([dim for dim, size in enumerate(shape) if size != 1]) for shape in (source, target))
    i, j = next(left, None), next(right, None)
    if i is None or j is None:
        return _frozen(dims)
    rest_i, rest_j = source[i], target[j]
    while i is not None and j is not None:
        factor = _common(rest_i, rest_j)
        letter = f"f{len(sizes)}"
        if factor is None:
            _fix_rest(source, target, i, j, dims, sizes, fixed)
            break
        sizes[letter] = factor
        dims[0][i].append(letter)
        dims[1][j].append(letter)
        rest_i, rest_j = _quotient(rest_i, factor), _quotient(rest_j, factor)
        if rest_i == 1:
            i = next(left, None)
            rest_i = source[i] if i is not None else 1
        if rest_j == 1:
            j = next(right, None)
            rest_j = target[j] if j is not None else 1
    return _frozen(dims)


def _common(first: Size, second: Size) -> Size | None:
    """The smaller of two sizes where it divides the larger."""
    for smaller, larger in ((first, second), (second, first)):
        ratio = sympy.cancel(sympy.sympify(larger) / smaller)
        if ratio.is_integer and ratio.is_positive is not False and not sympy.denom(ratio).free_symbols:
            return smaller
    return None


def _quotient(size: Size, factor: Size) -> Size:
    ratio = sympy.cancel(sympy.sympify(size) / factor)
    return int(ratio) if ratio.is_Integer else ratio


def _fix_rest(
    source: Shape,
    target: Shape,
    i: int,
    j: int,
    dims: tuple[list[list[str]], list[list[str]]],
    sizes: dict[str, Size],
    fixed: set[str],
) -> None:
    """Dims from here on do not factor: each gets a letter of its own that must be replicated."""
    for shape, first, lists, mark in ((source, i, dims[0], "x"), (target, j, dims[1], "y")):
        for index in range(first, len(shape)):
            letter = f"{mark}{index}"
            sizes[letter] = shape[index]
            fixed |= {letter, *lists[index]}
            lists[index][:] = [letter]


def _frozen(dims: tuple[list[list[str]], list[list[str]]]) -> tuple[Dims, Dims]:
    source, target = (tuple(map(tuple, lists)) for lists in dims)
    return source, target
