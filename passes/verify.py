"""Verify: what must hold of a graph between two passes, re-derived, so that a fault is blamed on its maker."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from hgraph.annotation import replicated
from hgraph.errors import VerificationError
from hgraph.graph import evaluate_shape, info, neighbourhood, tensor_inputs, where
from hgraph.shard_map import same_map
from hgraph.strategy import Scheme
from passes.annotate import Leaves
from passes.deduce import value_at
from passes.insert_comm import is_reshard
from passes.isolation import check_isolation
from passes.rules.table import rule_of
from passes.split_stages import StageGraphs, Transfer

__all__ = ["verify_deduced", "verify_inserted", "verify_normalized", "verify_split"]


def verify_normalized(graph: fx.Graph) -> None:
    """No forward operator but packed attention mixes tokens, and every operator has a rule."""
    graph.lint()
    check_isolation(graph)
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            rule_of(node)


def verify_deduced(graph: fx.Graph, scheme: Scheme) -> None:
    """Every tensor of a stage has an annotation on ranks of that stage."""
    for node in graph.nodes:
        facts = info(node)
        if node.op != "call_function" or facts.stage is None:
            continue
        for shape, annotation in zip(facts.shapes, facts.annotations, strict=True):
            if shape is None:
                continue
            if annotation is None:
                raise VerificationError(f"deduce left {where(node)} without an annotation\n{neighbourhood(node)}")
            if not set(annotation.ranks) <= set(scheme.stage_ranks(facts.stage)):
                raise VerificationError(
                    f"deduce put {where(node)} of stage {facts.stage} on {annotation}; the stage has ranks "
                    f"{list(scheme.stage_ranks(facts.stage))}"
                )


def verify_inserted(graph: fx.Graph, scheme: Scheme, leaves: Leaves) -> None:
    """What every consumer sees is what it requires, on its own stage."""
    graph.lint()
    for node in graph.nodes:
        facts = info(node)
        if node.op != "call_function" or facts.stage is None or is_reshard(node) or not facts.required:
            continue
        for value, required in zip(tensor_inputs(node), facts.required, strict=True):
            assert required is not None
            seen = value_at(value, facts.stage, scheme, leaves) or replicated(scheme.stage_ranks(facts.stage))
            own = info(value)
            if own.role == "operator" and own.stage not in (None, facts.stage):
                raise VerificationError(f"{where(node)} of stage {facts.stage} reads {value} of stage {own.stage}")
            shape = evaluate_shape(own.shape, 97, 5)
            if not same_map(seen, required, shape):
                raise VerificationError(
                    f"{where(node)} requires {required} of {value}, which is {seen}\n{neighbourhood(node)}"
                )


def verify_split(stages: Sequence[StageGraphs], transfers: Sequence[Transfer]) -> None:
    """Each stage graph stands alone; every transfer is sent once and received once; saved values are kept."""
    sent: list[str] = []
    received: list[str] = []
    for stage in stages:
        for graph in (stage.forward, stage.backward):
            graph.lint()
            sent += [name.removeprefix("send:") for name in _output_names(graph) if name.startswith("send:")]
            received += [info(node).name for node in graph.nodes if info(node).role == "received"]
        kept = {name for name in _output_names(stage.forward) if name.startswith("saved:")}
        read = {f"saved:{info(node).name}" for node in stage.backward.nodes if info(node).role == "saved"}
        if kept != read:
            raise VerificationError(f"stage {stage.stage}: forward keeps {sorted(kept)}, backward reads {sorted(read)}")
    names = sorted(transfer.name for transfer in transfers)
    if sorted(sent) != names or sorted(received) != names:
        raise VerificationError(f"transfers {names}: sent {sorted(sent)}, received {sorted(received)}")


def _output_names(graph: fx.Graph) -> list[str]:
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    values = output.args[0]
    assert isinstance(values, dict)
    return list(values)
