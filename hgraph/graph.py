"""Graph access: the one place that knows where our facts sit on an FX node.

`info(node)` returns the node's `NodeInfo`. Symbolic sizes are sympy expressions in `TOKENS` (padded tokens of a
micro-batch) and `BOUNDARIES` (number of sequences + 1).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import sympy
import torch
from torch import fx

from hgraph.annotation import Annotation

__all__ = [
    "BOUNDARIES",
    "TOKENS",
    "NodeInfo",
    "Shape",
    "Size",
    "annotated_text",
    "evaluate_shape",
    "info",
    "int_argument",
    "neighbourhood",
    "reshard",
    "set_info",
    "tensor_inputs",
    "where",
]

Size: TypeAlias = int | sympy.Expr
Shape: TypeAlias = tuple[Size, ...]

TOKENS = sympy.Symbol("T", integer=True, nonnegative=True)
BOUNDARIES = sympy.Symbol("S1", integer=True, positive=True)

_KEY = "hydraulis"


@dataclass(slots=True)
class NodeInfo:
    """What we know of a node.

    `shapes` and `dtypes` have one entry per tensor result (None for results that are not tensors). `annotations` has
    what consumers see, `produced` what the operator itself gives (before a reduction or an override moves it);
    `required` what each tensor input must look like, in order of `tensor_inputs`.
    """

    phase: Literal["forward", "backward"] = "forward"
    shapes: tuple[Shape | None, ...] = ()
    dtypes: tuple[torch.dtype | None, ...] = ()
    role: Literal["operator", "parameter", "buffer", "input", "scale", "received", "saved", "size"] = "operator"
    name: str = ""
    module: str = ""
    module_class: str = ""
    source: str = ""
    sequence: int = -1
    stage: int | None = None
    produced: tuple[Annotation | None, ...] = ()
    annotations: tuple[Annotation | None, ...] = ()
    required: tuple[Annotation | None, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> Shape:
        assert self.shapes and self.shapes[0] is not None, "not a tensor"
        return self.shapes[0]

    @property
    def dtype(self) -> torch.dtype:
        assert self.dtypes and self.dtypes[0] is not None, "not a tensor"
        return self.dtypes[0]

    @property
    def annotation(self) -> Annotation | None:
        return self.annotations[0] if self.annotations else None

    @property
    def is_tensor(self) -> bool:
        return bool(self.shapes) and self.shapes[0] is not None


def info(node: fx.Node) -> NodeInfo:
    """Returns the facts of a node, creating empty ones on first use."""
    if _KEY not in node.meta:
        node.meta[_KEY] = NodeInfo()
    return node.meta[_KEY]


def set_info(node: fx.Node, value: NodeInfo) -> fx.Node:
    """Sets the facts of a node and returns the node."""
    node.meta[_KEY] = value
    return node


def int_argument(node: fx.Node, position: int, default: int | None = None) -> int:
    """Returns an argument of a node that is a plain integer."""
    value = node.args[position] if len(node.args) > position else default
    assert isinstance(value, int), f"{node}: argument {position} is {value!r}"
    return value


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """Returns the nodes among the arguments that are tensors, with repeats, in order of the arguments."""
    return [argument for argument in _flat_nodes(node) if info(argument).is_tensor]


def reshard(value: torch.Tensor, source: str, target: str) -> torch.Tensor:
    """A Reshard node: the same tensor under another annotation. Stands in graphs only; programs lower it."""
    raise AssertionError("reshard nodes are lowered before a program runs")


@functools.lru_cache(maxsize=65536)
def evaluate_shape(shape: Shape, tokens: int, boundaries: int) -> tuple[int, ...]:
    """Returns the shape for concrete sizes."""
    values = {TOKENS: tokens, BOUNDARIES: boundaries}
    return tuple(size if isinstance(size, int) else int(size.subs(values)) for size in shape)


def where(node: fx.Node) -> str:
    """Returns where a node comes from, for messages: operator, module and the user's source line."""
    facts = info(node)
    module = f"module {facts.module or '(root)'}" + (f" ({facts.module_class})" if facts.module_class else "")
    return f"{_target_text(node.target)} [{node.name}] in {module}" + (f", {facts.source}" if facts.source else "")


def neighbourhood(node: fx.Node, lines: int = 10) -> str:
    """Returns the graph around a node, with an arrow at it."""
    nodes = list(node.graph.nodes)
    index = nodes.index(node)
    start = max(0, index - lines // 2)
    return "\n".join(f"{'->' if other is node else '  '} {node_text(other)}" for other in nodes[start : start + lines])


def node_text(node: fx.Node) -> str:
    """Returns one stable line: name, shapes, annotation, operator, arguments, stage."""
    facts = info(node)
    results = ", ".join(
        f"{_dtype_text(dtype)}{_shape_text(shape)}"
        for shape, dtype in zip(facts.shapes, facts.dtypes, strict=True)
        if shape is not None
    )
    annotations = "; ".join(str(annotation) for annotation in facts.annotations if annotation is not None)
    stage = "" if facts.stage is None else f" stage {facts.stage}"
    target = node.target if node.op in ("placeholder", "output") else _target_text(node.target)
    arguments = ", ".join(_argument_text(argument) for argument in node.args)
    return f"%{node.name}: {results or '-'} {{{annotations}}} = {target}({arguments}) # {facts.phase}{stage}"


def annotated_text(graph: fx.Graph) -> str:
    """Returns the whole graph, one line a node; the same graph gives the same text."""
    return "\n".join(node_text(node) for node in graph.nodes) + "\n"


def _flat_nodes(node: fx.Node) -> Iterator[fx.Node]:
    stack: list[Any] = [*node.kwargs.values()][::-1] + [*node.args][::-1]
    while stack:
        item = stack.pop()
        if isinstance(item, fx.Node):
            yield item
        elif isinstance(item, Sequence) and not isinstance(item, str):
            stack.extend(reversed(item))


def _dtype_text(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _shape_text(shape: Shape) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _target_text(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


def _argument_text(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        return f"%{argument.name}"
    if isinstance(argument, list | tuple):
        return "[" + ", ".join(map(_argument_text, argument)) + "]"
    return str(argument)
