"""Memory of a program, from its graphs: bytes per rank as expressions in the token count.

Counted: parameters and accumulated gradients in the compute layout, this rank's share of master weights and moments,
values kept from forward to backward (times the micro-batches in flight), and the largest values of one program.

1F1B keeps at most p - s micro-batches on stage s of p. GPipe keeps all of a step, however many those are, so that a
budget says nothing about the size of one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from hgraph.capture import Captured
from hgraph.errors import InvalidInput
from hgraph.graph import BOUNDARIES, TOKENS, info
from hgraph.shard_map import shard_map
from hgraph.strategy import Scheme
from passes.pipelines import CompiledScheme

__all__ = ["StageMemory", "optimizer_bytes", "scheme_memory", "token_limit"]

MIB = 2**20
_OPTIMIZER_COPIES = 3
"""Master weights and two moments."""

_LIVE_TEMPORARIES = 3
"""How many values of the largest kind are alive at once while an operator runs (its inputs and its result)."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of the fullest rank of a stage; `per_micro_batch` and `temporary` are expressions in T.

    `in_flight` is the most micro-batches kept at once; None where that is all of a step.
    """

    fixed_bytes: int
    per_micro_batch: sympy.Expr
    temporary: sympy.Expr
    in_flight: int | None

    @property
    def peak_bytes(self) -> sympy.Expr:
        """With one micro-batch at once where nothing bounds their number."""
        in_flight = 1 if self.in_flight is None else self.in_flight
        return self.fixed_bytes + in_flight * self.per_micro_batch + self.temporary

    @property
    def start_bytes(self) -> float:
        """What is held without any token."""
        return float(self.peak_bytes.subs({TOKENS: 0, BOUNDARIES: 1}))

    @property
    def token_bytes(self) -> float:
        """What each token adds, where every token might be a sequence of its own."""
        return _slope(self.peak_bytes)


def scheme_memory(compiled: CompiledScheme, captured: Captured, num_ranks: int) -> list[StageMemory]:
    """Returns the memory of each stage of a scheme in a job of `num_ranks`."""
    result = []
    optimizer = optimizer_bytes(captured) // num_ranks
    for number, stage in enumerate(compiled.stages):
        candidates = []
        for rank, programs in stage.ranks.items():
            held = _parameter_bytes(compiled, captured, number, rank)
            saved = _sum(_saved(programs.forward.graph))
            largest = max(
                (_bytes(node) for node in _values(programs.forward.graph)), key=_slope, default=sympy.Integer(0)
            )
            in_flight = _in_flight(compiled.scheme, number)
            candidates.append(StageMemory(2 * held + optimizer, saved, _LIVE_TEMPORARIES * largest, in_flight))
        result.append(max(candidates, key=lambda memory: _slope(memory.peak_bytes)))
    return result


def optimizer_bytes(captured: Captured) -> int:
    """Returns the bytes of master weights and moments, before they are spread over ranks."""
    return _OPTIMIZER_COPIES * 4 * sum(torch.Size(facts.shape).numel() for facts in captured.parameters)


def token_limit(stages: Iterable[StageMemory], budget_bytes: float) -> int:
    """Returns the largest number of tokens of a micro-batch for which every stage fits into the budget (0: none).

    Raises `InvalidInput` where a stage keeps all micro-batches of a step: their number is not known here.
    """
    limits = []
    for stage in stages:
        if stage.in_flight is None:
            raise InvalidInput(
                "schedule gpipe keeps all micro-batches of a step at once, so that a memory budget gives no limit for "
                "one; give the scheme's limit in memory.max_tokens, or use schedule 1f1b"
            )
        slope = stage.token_bytes
        limits.append(int((budget_bytes - stage.start_bytes) / slope) if slope else 2**31)
    return max(0, min(limits))


def _in_flight(scheme: Scheme, stage: int) -> int | None:
    """The most micro-batches between forward and backward on a stage; one stage runs each backward at once."""
    if scheme.schedule == "gpipe" and scheme.pp > 1:
        return None
    return scheme.pp - stage


def _slope(expression: sympy.Expr) -> float:
    """Bytes per token, where every token might be a sequence of its own."""
    one = sympy.sympify(expression).subs(BOUNDARIES, TOKENS + 1)
    return float(one.subs(TOKENS, 1) - one.subs(TOKENS, 0))


def _parameter_bytes(compiled: CompiledScheme, captured: Captured, stage: int, rank: int) -> int:
    shapes = {name: (facts.shape, facts.dtype) for facts in captured.parameters for name in facts.names}
    total = 0
    for (name, own), annotation in compiled.parameters.items():
        if own == stage and rank in annotation.ranks:
            shape, dtype = shapes[name]
            total += torch.Size(shard_map(annotation, shape).local_shape(rank)).numel() * dtype.itemsize
    return total


def _saved(graph: fx.Graph) -> list[sympy.Expr]:
    """The bytes of each saved value, values that share memory counted once."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    roots: dict[fx.Node, sympy.Expr] = {}
    for name, node in output.args[0].items():  # type: ignore[union-attr]
        if name.startswith("saved:") and isinstance(node, fx.Node):
            root = _memory_of(node)
            if info(root).role not in ("parameter", "input", "buffer"):
                roots[root] = _bytes(root)
    return list(roots.values())


def _memory_of(node: fx.Node) -> fx.Node:
    views = (torch.ops.aten.reshape.default, torch.ops.aten.transpose.int, torch.ops.aten.t.default)
    more = (torch.ops.aten.unsqueeze.default, torch.ops.aten.squeeze.dim, torch.ops.aten.expand.default)
    while node.op == "call_function" and node.target in views + more:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _values(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and info(node).is_tensor]


def _bytes(node: fx.Node) -> sympy.Expr:
    facts = info(node)
    if not facts.is_tensor:
        return sympy.Integer(0)
    return sympy.prod(facts.shape) * facts.dtype.itemsize


def _sum(terms: Iterable[sympy.Expr]) -> sympy.Expr:
    return sum(terms, sympy.Integer(0))
