"""Specialize: the graphs of a stage become local programs, one per shape class.

Ranks of a stage whose local shapes agree share a program; what still differs between them (where a rank's part of the
vocabulary or of the heads starts) is an input, a *coordinate*. Size arguments are rebuilt from global shape and
annotation. Reshards are lowered to plans: `communicate` nodes, or nothing where a rank already holds what is needed.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from hgraph.annotation import Annotation
from hgraph.errors import NotSupported
from hgraph.graph import BOUNDARIES, TOKENS, NodeInfo, Shape, Size, evaluate_shape, info, set_info, tensor_inputs, where
from hgraph.placements import Shard
from hgraph.reshard import plan_reshard
from hgraph.shard_map import ShardMap, shard_map
from hgraph.strategy import Scheme
from passes.insert_comm import is_reshard
from passes.local_operators import IGNORED, local_amax, local_embedding, local_embedding_backward, local_labels
from passes.program import LocalReshard, communicate, local_length

__all__ = ["LocalGraph", "class_key", "local_reshards", "localize"]

aten = torch.ops.aten
_ALIASING = (
    aten.reshape.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.slice.Tensor,
    aten.select.int,
    operator.getitem,
)
_PROBE_TOKENS, _PROBE_BOUNDARIES = 1013, 7
"""Sizes that stand for symbolic ones where only static dims matter; above any number of ranks."""


@dataclass(slots=True)
class LocalGraph:
    """A local graph, and the coordinates of each rank of its class by input name."""

    graph: fx.Graph
    coordinates: dict[str, Callable[[int], int]] = field(default_factory=dict)


def local_reshards(graph: fx.Graph, scheme: Scheme) -> dict[fx.Node, LocalReshard]:
    """Returns the lowered form of every Reshard node of a stage graph that is not a transfer."""
    result = {}
    for node in graph.nodes:
        if not is_reshard(node):
            continue
        facts = info(node)
        assert facts.annotation is not None
        source = facts.extra["source"]
        result[node] = LocalReshard(
            source,
            facts.annotation,
            facts.shape,
            facts.dtype,
            _plan(source, facts.annotation, facts.shape),
            f"{node.name} of {facts.module or 'loss'}",
        )
    return result


def _plan(source: Annotation, target: Annotation, shape: Shape) -> Any:
    free = [dim for dim, size in enumerate(shape) if not isinstance(size, int)]
    if any(_cuts(annotation, dim) for annotation in (source, target) for dim in free):
        return None
    probe = evaluate_shape(shape, _PROBE_TOKENS, _PROBE_BOUNDARIES)
    return plan_reshard(source, target, probe, free_dims=free)


def _cuts(annotation: Annotation, dim: int) -> bool:
    return any(isinstance(placement, Shard) and placement.dim == dim for placement in annotation.placements())


def _owns_memory(value: fx.Node, user: fx.Node) -> bool:
    """Whether `user` is the only one that can see the memory of `value`: views are followed to what made them."""
    while value.op == "call_function" and list(value.users) == [user]:
        if value.target not in _ALIASING:
            return not is_reshard(value) and value.target != aten.expand.default
        value, user = value.args[0], value  # type: ignore[assignment]
    return False


def class_key(graphs: Iterable[fx.Graph], rank: int) -> tuple[Any, ...]:
    """Returns what the shape class of `rank` is told by: the local static shape of every operand and result."""
    return tuple(
        _static_shape(annotation, shape, rank)
        for graph in graphs
        for node in graph.nodes
        for shape, annotation in (*_results(node), *_operands(node))
        if shape is not None and annotation is not None
    )


def _results(node: fx.Node) -> Iterable[tuple[Shape | None, Annotation | None]]:
    return zip(info(node).shapes, info(node).annotations, strict=False)


def _operands(node: fx.Node) -> Iterable[tuple[Shape | None, Annotation | None]]:
    """Parameters have annotations as operands alone."""
    required = info(node).required
    if node.op != "call_function" or not required:
        return ()
    return zip([info(value).shape for value in tensor_inputs(node)], required, strict=True)


def _static_shape(annotation: Annotation, shape: Shape, rank: int) -> tuple[Any, ...] | None:
    if rank not in annotation.ranks:
        return None
    local = _map(annotation, shape).local_shape(rank)
    return tuple(length if isinstance(size, int) else "symbolic" for length, size in zip(local, shape, strict=True))


@functools.lru_cache(maxsize=65536)
def _map(annotation: Annotation, shape: Shape) -> ShardMap:
    return shard_map(annotation, evaluate_shape(shape, _PROBE_TOKENS, _PROBE_BOUNDARIES))


def localize(
    graph: fx.Graph,
    rank: int,
    reshards: dict[fx.Node, LocalReshard],
    parameters: Callable[[str], Annotation],
) -> LocalGraph:
    """Returns the local graph of `rank` (counted within the replica), good for every rank of its class."""
    return _Localizer(graph, rank, reshards, parameters).run()


class _Localizer:
    def __init__(
        self,
        graph: fx.Graph,
        rank: int,
        reshards: dict[fx.Node, LocalReshard],
        parameters: Callable[[str], Annotation],
    ) -> None:
        self.source, self.rank, self.parameters = graph, rank, parameters
        self.index = {node: number for number, node in enumerate(reshards)}
        self.reshards = reshards
        self.result = LocalGraph(fx.Graph())
        self.mapping: dict[fx.Node, fx.Node | None] = {}
        self.inputs: dict[str, fx.Node] = {}
        self.lengths: dict[tuple[Annotation, Shape, int], fx.Node] = {}

    def run(self) -> LocalGraph:
        graph = self.result.graph
        for name in ("num_tokens", "num_boundaries"):
            self._input(name)
        for node in self.source.nodes:
            if node.op == "placeholder":
                self.mapping[node] = self._placeholder(node)
            elif node.op == "output":
                values = node.args[0]
                assert isinstance(values, dict)
                kept = {name: self.mapping[value] for name, value in values.items() if self.mapping[value] is not None}
                graph.output(kept)
            else:
                self.mapping[node] = self._operator(node)
        return self.result

    def _placeholder(self, node: fx.Node) -> fx.Node | None:
        annotation = self._annotation(node)
        if annotation is not None and self.rank not in annotation.ranks:
            return None
        name = f"{info(node).role}:{info(node).name}"
        new = self.result.graph.create_node("placeholder", name, name=node.name)
        return self._describe(new, node)

    def _annotation(self, node: fx.Node) -> Annotation | None:
        facts = info(node)
        return self.parameters(facts.name) if facts.role == "parameter" else facts.annotation

    def _operator(self, node: fx.Node) -> fx.Node | None:
        facts = info(node)
        held = [annotation for annotation in facts.annotations if annotation is not None]
        if is_reshard(node):
            return self._reshard(node)
        if held and all(self.rank not in annotation.ranks for annotation in held):
            return None
        special = _SPECIAL.get(node.target)
        args = special(self, node) if special is not None else self._arguments(node)
        if isinstance(args, fx.Node):
            return self._describe(args, node)
        new = self.result.graph.create_node("call_function", node.target, args, dict(node.kwargs), name=node.name)
        return self._describe(new, node)

    def _reshard(self, node: fx.Node) -> fx.Node | None:
        lowered = self.reshards[node]
        value = node.args[0]
        assert isinstance(value, fx.Node)
        here = self.rank in lowered.source.ranks, self.rank in lowered.target.ranks
        if not any(here):
            return None
        if lowered.plan is not None and lowered.plan.is_nothing:
            return self.mapping[value]
        operand = self.mapping[value] if here[0] else None
        args = (operand, self.index[node], operand is not None and _owns_memory(value, node))
        new = self.result.graph.create_node("call_function", communicate, args, name=node.name)
        described = self._describe(new, node)
        return described if here[1] else None

    def _describe(self, new: fx.Node, old: fx.Node) -> fx.Node:
        facts: NodeInfo = copy(info(old))
        facts.shapes = tuple(
            shape
            if shape is None or annotation is None or self.rank not in annotation.ranks
            else self._local_shape(annotation, shape)
            for shape, annotation in zip(
                facts.shapes, facts.annotations or (self._annotation(old),) * len(facts.shapes), strict=True
            )
        )
        return set_info(new, facts)

    def _local_shape(self, annotation: Annotation, shape: Shape) -> Shape:
        local = _map(annotation, shape).local_shape(self.rank)
        return tuple(
            length if isinstance(size, int) or _cuts(annotation, dim) else size
            for dim, (length, size) in enumerate(zip(local, shape, strict=True))
        )

    def _arguments(self, node: fx.Node) -> tuple[Any, ...]:
        def local(argument: fx.Node) -> fx.Node:
            new = self.mapping[argument]
            assert new is not None, f"{where(node)}: rank {self.rank} does not hold {argument}"
            return new

        return fx.node.map_arg(node.args, local)  # type: ignore[return-value]

    # Sizes and coordinates

    def _input(self, name: str) -> fx.Node:
        if name not in self.inputs:
            graph = self.result.graph
            first = next(iter(graph.nodes), None)
            with graph.inserting_before(first) if first is not None else graph.inserting_after(graph._root):
                node = graph.create_node("placeholder", name, name=name.replace(":", "_"))
            self.inputs[name] = set_info(node, NodeInfo(role="size", name=name))
        return self.inputs[name]

    def coordinate(self, name: str, value: Callable[[int], int]) -> fx.Node:
        """An input that differs between the ranks of a class."""
        self.result.coordinates.setdefault(name, value)
        return self._input(name)

    def size(self, size: Size, dim: int, node: fx.Node, annotation: Annotation | None, shape: Shape) -> Any:
        """The local length of a dim as an argument: a number, or a node where it depends on the batch."""
        if annotation is None:
            return size if isinstance(size, int) else self._expression(size, node)
        if isinstance(size, int):
            return _map(annotation, shape).local_shape(self.rank)[dim]
        if not _cuts(annotation, dim):
            return self._expression(size, node)
        key = (annotation, shape, dim)
        if key not in self.lengths:
            whole = tuple(length if isinstance(length, int) else self._expression(length, node) for length in shape)
            rank = self.coordinate("rank", lambda rank: rank)
            self.lengths[key] = self.result.graph.call_function(local_length, (str(annotation), whole, dim, rank))
            set_info(self.lengths[key], NodeInfo(role="size"))
        return self.lengths[key]

    def _expression(self, size: sympy.Expr, node: fx.Node) -> fx.Node:
        if size == TOKENS:
            return self._input("num_tokens")
        if size == BOUNDARIES:
            return self._input("num_boundaries")
        constant, rest = size.as_coeff_Add()
        if constant != 0 and constant.is_Integer and rest != 0:
            args = (self._expression(rest, node), int(constant))
            return set_info(self.result.graph.call_function(operator.add, args), NodeInfo(role="size"))
        coefficient, rest = size.as_coeff_Mul()
        if rest in (TOKENS, BOUNDARIES) and coefficient.is_Integer:
            args = (self._expression(rest, node), int(coefficient))
            return set_info(self.result.graph.call_function(operator.mul, args), NodeInfo(role="size"))
        raise NotSupported(f"size {size} of {where(node)}: expected a multiple of the token or sequence count")

    def sizes(self, node: fx.Node) -> list[Any]:
        """The local shape of a node's result as an argument."""
        shape, annotation = info(node).shape, info(node).annotation
        return [self.size(size, dim, node, annotation, shape) for dim, size in enumerate(shape)]

    def start(self, annotation: Annotation, shape: Shape, dim: int, name: str) -> fx.Node:
        """The coordinate where the rank's box starts along a static dim."""
        pieces = _map(annotation, shape)
        return self.coordinate(f"start_{name}_{dim}", lambda rank: pieces.piece(rank).box[dim][0])


def _shape_argument(position: int) -> Callable[[_Localizer, fx.Node], tuple[Any, ...]]:
    """The argument at `position` is the result's shape."""

    def rebuild(local: _Localizer, node: fx.Node) -> tuple[Any, ...]:
        args = list(local._arguments(node))
        args[position] = local.sizes(node)
        return tuple(args)

    return rebuild


def _input_annotation(node: fx.Node, number: int) -> Annotation | None:
    required = info(node).required
    return required[number] if required else None


def _squeeze(local: _Localizer, node: fx.Node) -> fx.Node:
    """A dim that is longer than 1 must stay where a rank holds one element of it: only the global shape tells."""
    return local.result.graph.call_function(aten.reshape.default, (local._arguments(node)[0], local.sizes(node)))


def _amax(local: _Localizer, node: fx.Node) -> Any:
    """A rank may hold nothing of the dim over which the greatest is taken."""
    annotation = _input_annotation(node, 0)
    shape = info(tensor_inputs(node)[0]).shape
    given = node.args[1]
    assert isinstance(given, list | tuple)
    dims = [dim % len(shape) for dim in given if isinstance(dim, int)]
    if annotation is None or not any(_cuts(annotation, dim) for dim in dims):
        return local._arguments(node)
    return local.result.graph.call_function(local_amax, local._arguments(node))


def _embedding(local: _Localizer, node: fx.Node) -> Any:
    """With a split vocabulary: rows of ids held elsewhere are zero."""
    weight, ids = local._arguments(node)[:2]
    annotation = _input_annotation(node, 0)
    shape = info(tensor_inputs(node)[0]).shape
    if annotation is None or not _cuts(annotation, 0):
        return local._arguments(node)
    rows = _map(annotation, shape).local_shape(local.rank)[0]
    start = local.start(annotation, shape, 0, node.name)
    return local.result.graph.call_function(local_embedding, (weight, ids, start, rows))


def _embedding_backward(local: _Localizer, node: fx.Node) -> Any:
    grad, ids, _, padding, scaled = local._arguments(node)
    annotation = info(node).annotation
    if scaled:
        raise NotSupported(f"{where(node)}: scale_grad_by_freq depends on the batch; set it to False")
    if annotation is None or not _cuts(annotation, 0):
        return local._arguments(node)
    shape = info(node).shape
    rows = _map(annotation, shape).local_shape(local.rank)[0]
    start = local.start(annotation, shape, 0, node.name)
    return local.result.graph.call_function(local_embedding_backward, (grad, ids, start, rows, padding))


def _nll(local: _Localizer, node: fx.Node) -> tuple[Any, ...]:
    """With a split vocabulary: labels become local, and those held elsewhere are ignored."""
    args = list(local._arguments(node))
    first = 0 if node.target == aten.nll_loss_forward.default else 1
    annotation = _input_annotation(node, first)
    shape = info(tensor_inputs(node)[first]).shape
    if annotation is None or not _cuts(annotation, 1):
        return tuple(args)
    classes = _map(annotation, shape).local_shape(local.rank)[1]
    start = local.start(annotation, shape, 1, node.name)
    labels = local.result.graph.call_function(local_labels, (args[first + 1], start, classes, args[first + 4]))
    args[first + 1] = set_info(labels, copy(info(tensor_inputs(node)[first + 1])))
    args[first + 4] = IGNORED
    return tuple(args)


def _attention(local: _Localizer, node: fx.Node) -> tuple[Any, ...]:
    args = list(local._arguments(node))
    first = 0 if node.target == torch.ops.hydraulis.packed_attention.default else 1
    for number, name in ((first, "query"), (first + 1, "key")):
        annotation = _input_annotation(node, number)
        if annotation is None or not _cuts(annotation, 1):
            continue
        shape = info(tensor_inputs(node)[number]).shape
        args[-3 + number - first] = local.start(annotation, shape, 1, f"{node.name}_{name}")
    return tuple(args)


_SPECIAL: dict[Any, Callable[[_Localizer, fx.Node], Any]] = {
    aten.reshape.default: _shape_argument(1),
    aten.expand.default: _shape_argument(1),
    aten.slice_backward.default: _shape_argument(1),
    aten.select_backward.default: _shape_argument(1),
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.squeeze.default: _squeeze,
    aten.amax.default: _amax,
    aten.full.default: _shape_argument(0),
    aten.zeros.default: _shape_argument(0),
    aten.ones.default: _shape_argument(0),
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.nll_loss_forward.default: _nll,
    aten.nll_loss_backward.default: _nll,
    torch.ops.hydraulis.packed_attention.default: _attention,
    torch.ops.hydraulis.packed_attention_backward.default: _attention,
}
