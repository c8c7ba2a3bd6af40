"""The work of compiled programs, as closed expressions in the tokens of a micro-batch, for costs that nobody measured.

Counted from the local graphs of every rank: floating-point operations of matrix products and of packed attention, bytes
that all other operators read and write, operators launched, bytes of weights, and what reshards take over the links of
a cluster. `hgraph/analytic_cost.py` turns these amounts into a, b and c. Not counted: values passed between stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import sympy
import torch
from torch import fx

from hgraph.analytic_cost import Floats, Work
from hgraph.capture import Captured
from hgraph.graph import BOUNDARIES, TOKENS, evaluate_shape, info, tensor_inputs
from hgraph.memory_model import SchemeMemory
from hgraph.reshard import plan_reshard
from hgraph.strategy import Scheme
from hgraph.topology import Topology
from hgraph.traffic import traffic
from passes.pipelines import CompiledScheme, CompiledStage
from passes.program import LocalReshard, Program, communicate
from runtime.memory import optimizer_bytes, scheme_memory

__all__ = ["ProgramWork", "scheme_stage_memory", "stage_work", "work_of_programs"]

aten = torch.ops.aten
_MATRIX_PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1, aten.bmm.default: 0}
"""Operator -> which argument is the left factor, whose last dim is contracted."""

_NO_WORK = (
    aten.reshape.default, aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.slice.Tensor, aten.select.int, aten.expand.default,
    aten.view.default, aten.detach.default,
)  # fmt: skip
_FEW, _MORE = 512, 1024
"""Tokens at which what reshards take is evaluated; in between and beyond it is a straight line."""


@dataclass(frozen=True, slots=True)
class ProgramWork:
    """What forward and backward of one rank's programs do for a micro-batch of T tokens.

    `attention_flops` are for each squared length of a sequence; the others are expressions in T.
    """

    attention_flops: sympy.Expr
    matrix_flops: sympy.Expr
    moved_bytes: sympy.Expr
    launches: int

    def __add__(self, other: ProgramWork) -> ProgramWork:
        return ProgramWork(
            self.attention_flops + other.attention_flops,
            self.matrix_flops + other.matrix_flops,
            self.moved_bytes + other.moved_bytes,
            self.launches + other.launches,
        )


def program_work(program: Program) -> ProgramWork:
    """Returns the work of one local program."""
    attention, products, moved = sympy.Integer(0), sympy.Integer(0), sympy.Integer(0)
    launches = 0
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target in _NO_WORK or node.target is communicate:
            continue
        if not info(node).is_tensor:
            continue
        launches += 1
        if node.target in _MATRIX_PRODUCTS:
            left = node.args[_MATRIX_PRODUCTS[node.target]]
            products += 2 * _numel(node) * info(left).shape[-1]
        elif str(node.target).startswith("hydraulis.packed_attention"):
            attention += _attention_flops(node)
        else:
            moved += sum((_bytes(each) for each in (node, *tensor_inputs(node))), sympy.Integer(0))
    return ProgramWork(attention, sympy.expand(products), sympy.expand(moved), launches)


def _attention_flops(node: fx.Node) -> sympy.Expr:
    """For each squared length: 2 products over half of the square forward, 5 backward, which has the scores again."""
    backward = "backward" in str(node.target)
    query, value = (node.args[1], node.args[3]) if backward else (node.args[0], node.args[2])
    _, heads, size = info(query).shape  # type: ignore[arg-type]
    value_size = info(value).shape[-1]  # type: ignore[arg-type]
    return heads * (3 * size + 2 * value_size if backward else size + value_size)


def _numel(node: fx.Node) -> sympy.Expr:
    return sympy.prod(info(node).shape)


def _bytes(node: fx.Node) -> sympy.Expr:
    facts = info(node)
    return _numel(node) * facts.dtype.itemsize if facts.is_tensor else sympy.Integer(0)


def stage_work(stage: CompiledStage) -> ProgramWork:
    """Returns the work of the rank of a stage that has the most matrix products."""
    found = [program_work(each.forward) + program_work(each.backward) for each in stage.ranks.values()]
    return max(found, key=lambda work: _line(work.matrix_flops)[0])


def work_of_programs(
    compiled: Mapping[str, CompiledScheme] | Callable[[Scheme], CompiledScheme],
    captured: Captured,
    num_ranks: int,
    topology: Topology,
) -> Work:
    """Returns the work and memory of schemes from their programs; `compiled` has them, or compiles one."""
    known: dict[str, CompiledScheme] = {}

    def programs(scheme: Scheme) -> CompiledScheme:
        if str(scheme) not in known:
            known[str(scheme)] = compiled(scheme) if callable(compiled) else compiled[str(scheme)]
        return known[str(scheme)]

    rows: dict[str, list[Floats]] = {}

    def features(scheme: Scheme) -> list[Floats]:
        if str(scheme) not in rows:
            rows[str(scheme)] = [_features(stage, topology) for stage in programs(scheme).stages]
        return rows[str(scheme)]

    return Work(features, lambda scheme: scheme_stage_memory(programs(scheme), captured, num_ranks))


def scheme_stage_memory(compiled: CompiledScheme, captured: Captured, num_ranks: int) -> tuple[SchemeMemory, ...]:
    """Returns what each stage holds beside optimizer states; what another stage exceeds in both ways is left out."""
    share = optimizer_bytes(captured) // num_ranks
    stages = scheme_memory(compiled, captured, num_ranks)
    found = [SchemeMemory(stage.start_bytes - share, stage.token_bytes) for stage in stages if stage.token_bytes > 0]
    distinct = list(dict.fromkeys(found))
    return tuple(own for own in distinct if not any(_exceeds(other, own) for other in distinct if other != own))


def _exceeds(other: SchemeMemory, own: SchemeMemory) -> bool:
    return other.fixed_bytes >= own.fixed_bytes and other.token_bytes >= own.token_bytes


def _features(stage: CompiledStage, topology: Topology) -> Floats:
    """Amounts of `hgraph.analytic_cost.FEATURES`."""
    work = stage_work(stage)
    programs = next(iter(stage.ranks.values()))
    few, more = (_exchange_ms(programs.forward, programs.backward, topology, tokens) for tokens in (_FEW, _MORE))
    slope_ms = max(0.0, (more - few) / (_MORE - _FEW))
    matrix_slope, _ = _line(work.matrix_flops)
    moved_slope, moved_start = _line(work.moved_bytes)
    return np.array(
        [
            float(work.attention_flops),
            matrix_slope,
            moved_slope,
            slope_ms,
            work.launches,
            moved_start,
            max(0.0, few - _FEW * slope_ms),
        ]
    )


def _line(expression: sympy.Expr) -> tuple[float, float]:
    """Slope and start of an expression in T, for micro-batches of few sequences."""
    start, end = (float(sympy.sympify(expression).subs({TOKENS: tokens, BOUNDARIES: 2})) for tokens in (0, 1))
    return end - start, start


def _exchange_ms(forward: Program, backward: Program, topology: Topology, tokens: int) -> float:
    return sum(_reshard_ms(reshard, topology, tokens) for each in (forward, backward) for reshard in each.reshards)


def _reshard_ms(reshard: LocalReshard, topology: Topology, tokens: int) -> float:
    shape = evaluate_shape(reshard.shape, tokens, 2)
    plan = reshard.plan.at(shape) if reshard.plan is not None else plan_reshard(reshard.source, reshard.target, shape)
    return traffic(plan, reshard.dtype.itemsize, topology).ms
