"""Rules of operators that contract: matrix products, sums, maxima, norms, embedding, cross entropy."""

from __future__ import annotations

from torch import fx

from hgraph.graph import Shape, Size, info, int_argument, tensor_inputs
from passes.rules.sharding import Dims, OpSharding

__all__ = [
    "amax",
    "bmm",
    "embedding",
    "embedding_backward",
    "layer_norm",
    "layer_norm_backward",
    "log_softmax",
    "mm",
    "nll_loss",
    "nll_loss_backward",
    "sum_dims",
]


def letters(text: str, node: fx.Node, shapes: list[Shape], **options: object) -> OpSharding:
    """The rule written as `mk,kn->mn`; sizes come from `shapes` of inputs, then of outputs."""
    left, _, right = text.partition("->")
    words = [*left.split(","), *right.split(",")]
    sizes: dict[str, Size] = {}
    dims: list[Dims] = []
    for word, shape in zip(words, shapes, strict=True):
        sizes |= dict(zip(word, shape, strict=True))
        dims.append(tuple((letter,) if size != 1 else () for letter, size in zip(word, shape, strict=True)))
    count = len(left.split(","))
    return OpSharding(tuple(dims[:count]), tuple(dims[count:]), sizes, **options)  # type: ignore[arg-type]


def mm(node: fx.Node) -> list[OpSharding]:
    return [letters("mk,kn->mn", node, _shapes(node), contraction="sum")]


def bmm(node: fx.Node) -> list[OpSharding]:
    return [letters("bmk,bkn->bmn", node, _shapes(node), contraction="sum")]


def sum_dims(node: fx.Node) -> list[OpSharding]:
    return [_reduction(node, "sum", (frozenset({0}),))]


def amax(node: fx.Node) -> list[OpSharding]:
    return [_reduction(node, "max", ())]


def log_softmax(node: fx.Node) -> list[OpSharding]:
    """The class dim must be whole; a split vocabulary is decomposed first (`passes/split_vocabulary.py`)."""
    shape = info(node).shape
    position = 1 if "backward" not in str(node.target) else 2
    dim = int_argument(node, position) % len(shape)
    sizes: dict[str, Size] = {f"d{index}": size for index, size in enumerate(shape)}
    dims = tuple((f"d{index}",) if size != 1 else () for index, size in enumerate(shape))
    count = len(tensor_inputs(node))
    return [OpSharding((dims,) * count, (dims,), sizes, frozenset({f"d{dim}"}))]


def embedding(node: fx.Node) -> list[OpSharding]:
    """A split vocabulary gives partial rows: ids held elsewhere contribute zero."""
    weight, ids = (info(argument).shape for argument in tensor_inputs(node))
    places = "abcefg"[: len(ids)]
    return [letters(f"vd,{places}->{places}d", node, [weight, ids, info(node).shape], contraction="sum")]


def embedding_backward(node: fx.Node) -> list[OpSharding]:
    """The rows of the gradient may be split as the weight is (`wanted`); split tokens give partial rows."""
    grad, ids = (info(argument).shape for argument in tensor_inputs(node))
    places = "abcefg"[: len(ids)]
    return [letters(f"{places}d,{places}->vd", node, [grad, ids, info(node).shape], contraction="sum")]


def nll_loss(node: fx.Node) -> list[OpSharding]:
    """Labels held elsewhere are ignored, so a split vocabulary, like split tokens, gives partial sums."""
    log_probability, labels = (info(argument).shape for argument in tensor_inputs(node))
    output, weight = info(node).shapes
    assert output is not None and weight is not None
    text = "tv,t->t," if output else "tv,t->,"
    return [letters(text, node, [log_probability, labels, output, weight], contraction="sum")]


def nll_loss_backward(node: fx.Node) -> list[OpSharding]:
    grad, log_probability, labels, total = (info(argument).shape for argument in tensor_inputs(node))
    text = "t,tv,t,->tv" if grad else ",tv,t,->tv"
    return [letters(text, node, [grad, log_probability, labels, total, info(node).shape])]


def layer_norm(node: fx.Node) -> list[OpSharding]:
    """Normalised dims must be whole on every rank."""
    shape, normalised = info(node).shape, len(node.args[1])  # type: ignore[arg-type]
    sizes, dims, fixed = _normalised(shape, normalised)
    statistics = (*dims[: len(shape) - normalised], *((),) * normalised)
    inputs = [dims] + [dims[len(shape) - normalised :]] * (len(tensor_inputs(node)) - 1)
    return [OpSharding(tuple(inputs), (dims, statistics, statistics), sizes, fixed)]


def layer_norm_backward(node: fx.Node) -> list[OpSharding]:
    """grad, x, mean, rstd, weight, bias -> gradients of x, weight and bias; split rows give partial gradients."""
    shape, normalised = info(tensor_inputs(node)[0]).shape, len(node.args[2])  # type: ignore[arg-type]
    sizes, dims, fixed = _normalised(shape, normalised)
    statistics = (*dims[: len(shape) - normalised], *((),) * normalised)
    affine = dims[len(shape) - normalised :]
    count = len(tensor_inputs(node))
    inputs = [dims, dims, statistics, statistics, affine, affine][:count]
    outputs = tuple(
        None if own is None else (dims if index == 0 else affine) for index, own in enumerate(info(node).shapes)
    )
    return [OpSharding(tuple(inputs), outputs, sizes, fixed, contraction="sum")]


def _normalised(shape: Shape, count: int) -> tuple[dict[str, Size], Dims, frozenset[str]]:
    sizes: dict[str, Size] = {f"d{index}": size for index, size in enumerate(shape)}
    dims = tuple((f"d{index}",) if size != 1 else () for index, size in enumerate(shape))
    return sizes, dims, frozenset(f"d{index}" for index in range(len(shape) - count, len(shape)))


def _reduction(node: fx.Node, kind: str, linear: tuple[frozenset[int], ...]) -> OpSharding:
    shape = info(tensor_inputs(node)[0]).shape
    dims_argument = node.args[1] if len(node.args) > 1 else []
    given = [dims_argument] if isinstance(dims_argument, int) else list(dims_argument or range(len(shape)))  # type: ignore[arg-type]
    reduced = {int(dim) % len(shape) for dim in given} if shape else set()
    keep = bool(node.args[2]) if len(node.args) > 2 else False
    sizes: dict[str, Size] = {f"d{index}": size for index, size in enumerate(shape)}
    source = tuple((f"d{index}",) if size != 1 else () for index, size in enumerate(shape))
    target = tuple(
        () if index in reduced else letters_ for index, letters_ in enumerate(source) if keep or index not in reduced
    )
    return OpSharding((source,), (target,), sizes, contraction=kind, linear=linear)  # type: ignore[arg-type]


def _shapes(node: fx.Node) -> list[Shape]:
    return [*(info(argument).shape for argument in tensor_inputs(node)), info(node).shape]
