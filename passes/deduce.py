"""Deduce: an annotation on every value, forward and backward, from the leaves and the operators' rules.

Partial values flow through sums of equal partials, negation, scaling, views and casts that do not round. If any
consumer needs a value reduced, it is reduced at its producer and every consumer uses the reduced one: a fixpoint of a
few sweeps.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from hgraph.annotation import Annotation, replicated
from hgraph.capture import Captured
from hgraph.errors import VerificationError
from hgraph.graph import info, tensor_inputs, where
from hgraph.placements import Partial, Placement, Replicate
from hgraph.strategy import Scheme
from passes.annotate import Leaves
from passes.rules.lift import Solution, solve
from passes.rules.sharding import representative_numel
from passes.rules.table import rule_of

__all__ = ["deduce", "reduced", "value_at"]

_MAX_SWEEPS = 16


def deduce(graph: fx.Graph, captured: Captured, scheme: Scheme, leaves: Leaves) -> None:
    """Sets `produced`, `annotations` and `required` of every node that has a stage."""
    wanted = _wanted(graph, captured, leaves)
    reduce_at: set[fx.Node] = set()
    for _ in range(_MAX_SWEEPS):
        found = _sweep(graph, scheme, leaves, wanted, reduce_at)
        if found <= reduce_at:
            return
        reduce_at |= found
    raise VerificationError(f"deduction of scheme {scheme} did not settle in {_MAX_SWEEPS} sweeps")


def reduced(annotation: Annotation) -> Annotation:
    """Returns the annotation with partial placements turned into replicated ones."""

    def reduce(placement: Placement) -> Placement:
        return Replicate() if isinstance(placement, Partial) else placement

    return annotation.map_placements(reduce)


def value_at(value: fx.Node, stage: int, scheme: Scheme, leaves: Leaves) -> Annotation | None:
    """Returns how an operator of `stage` sees `value`: None where every rank can have it whole for nothing."""
    facts = info(value)
    if facts.role == "parameter":
        return leaves.parameters[facts.name, stage]
    if facts.role != "operator" or facts.stage is None:
        return None
    if facts.stage != stage:
        return replicated(scheme.stage_ranks(stage))
    return facts.annotation


def _sweep(
    graph: fx.Graph,
    scheme: Scheme,
    leaves: Leaves,
    wanted: Mapping[fx.Node, Annotation],
    reduce_at: set[fx.Node],
) -> set[fx.Node]:
    """One pass in topological order; returns the producers whose partial value some consumer needs reduced."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        facts = info(node)
        if node.op != "call_function" or facts.stage is None:
            continue
        if node.target is operator.getitem:
            parent, index = node.args
            assert isinstance(parent, fx.Node) and isinstance(index, int)
            facts.produced = (info(parent).produced[index],)
        else:
            found |= _apply_rule(node, scheme, leaves, wanted)
        facts.annotations = tuple(_visible(node, produced, leaves, reduce_at) for produced in facts.produced)
    return found


def _apply_rule(node: fx.Node, scheme: Scheme, leaves: Leaves, wanted: Mapping[fx.Node, Annotation]) -> set[fx.Node]:
    facts = info(node)
    assert facts.stage is not None
    inputs = tensor_inputs(node)
    seen = [value_at(value, facts.stage, scheme, leaves) for value in inputs]
    ranks = scheme.stage_ranks(facts.stage)
    aims = [wanted[node]] if node in wanted else []
    solution = solve(
        rule_of(node),
        seen,
        ranks,
        [representative_numel(info(value).shape) for value in inputs],
        [info(value).role == "parameter" for value in inputs],
        aims,
    )
    facts.required = solution.required
    facts.produced = tuple(
        None if annotation is None or shape is None else annotation
        for annotation, shape in zip(_padded(solution, len(facts.shapes)), facts.shapes, strict=True)
    )
    found = {_root(inputs[index]) for index in solution.reduced}
    crossing = [value for value in inputs if _crosses(value, facts.stage)]
    found |= {_root(value) for value in crossing if (own := info(value).annotation) is not None and own.is_partial}
    return found


def _padded(solution: Solution, count: int) -> list[Annotation | None]:
    outputs = list(solution.outputs)
    return outputs + [None] * (count - len(outputs))


def _crosses(value: fx.Node, stage: int) -> bool:
    facts = info(value)
    return facts.role == "operator" and facts.stage is not None and facts.stage != stage


def _visible(node: fx.Node, produced: Annotation | None, leaves: Leaves, reduce_at: set[fx.Node]) -> Annotation | None:
    if produced is None:
        return None
    if node in leaves.activations:
        return leaves.activations[node]
    return reduced(produced) if node in reduce_at else produced


def _root(value: fx.Node) -> fx.Node:
    """The producer of a partial value, behind views, scalings and casts."""
    while value.op == "call_function" and value.target is not operator.getitem:
        inputs = tensor_inputs(value)
        if len(inputs) != 1 or (source := info(inputs[0]).annotation) is None or not source.is_partial:
            return value
        value = inputs[0]
    return value


def _wanted(graph: fx.Graph, captured: Captured, leaves: Leaves) -> dict[fx.Node, Annotation]:
    """The annotations that gradients should have: those of their parameters on the gradient's stage."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    values = output.args[0]
    assert isinstance(values, tuple | list)
    result: dict[fx.Node, Annotation] = {}
    for value, name in zip(values, captured.outputs, strict=True):
        if name is None or name == "loss" or not isinstance(value, fx.Node):
            continue
        stage = info(value).stage
        if stage is None:
            raise VerificationError(f"the gradient of {name} has no stage: {where(value)}")
        if (name, stage) in leaves.parameters:
            result[value] = leaves.parameters[name, stage]
    return result
