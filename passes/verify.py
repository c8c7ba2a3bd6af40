"""Verify: what must hold of a graph between two passes, re-derived, so that a fault is blamed on its maker."""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set

import torch
from torch import fx

from hgraph.annotation import replicated
from hgraph.errors import CaptureError, VerificationError
from hgraph.graph import evaluate_shape, info, neighbourhood, tensor_inputs, where
from hgraph.shard_map import same_map
from hgraph.strategy import Scheme
from passes.annotate import Leaves
from passes.deduce import value_at
from passes.insert_comm import is_reshard
from passes.rules.sharding import letters_of
from passes.rules.table import RULES, rule_of
from passes.split_stages import StageGraphs, Transfer

__all__ = ["check_isolation", "verify_deduced", "verify_inserted", "verify_normalized", "verify_split"]

aten = torch.ops.aten
_MAY_MIX = (torch.ops.hydraulis.packed_attention.default,)
_MAY_SUM = (aten.sum.dim_IntList, aten.sum.default, aten.nll_loss_forward.default)
_SUMS_OF_SUMS = (aten.add.Tensor, aten.sub.Tensor)
_SCALINGS = (aten.mul.Tensor, aten.div.Tensor)
_LINEAR = (
    *_MAY_SUM,
    aten.neg.default,
    aten.mul.Scalar,
    aten.div.Scalar,
    aten._to_copy.default,
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    operator.getitem,
)


def verify_normalized(graph: fx.Graph) -> None:
    """No forward operator but packed attention mixes tokens, and every operator has a rule."""
    graph.lint()
    check_isolation(graph)
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            rule_of(node)


def check_isolation(graph: fx.Graph) -> None:
    """Raises `CaptureError` where one token's value could depend on a token of another document.

    Only packed attention may look along the token dim, and only sums at the end of the loss may contract it; from
    there on the loss must stay a sum over tokens, so that those of micro-batches add up.
    """
    summed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or info(node).phase != "forward":
            continue
        for shape in info(node).shapes:
            if shape is not None and sum(1 for size in shape if not isinstance(size, int)) > 1:
                _leak(node, "relates every token to every other")
        if any(value in summed for value in node.all_input_nodes):
            _check_sum(node, summed)
            summed.add(node)
        elif node.target in RULES and node.target not in _MAY_MIX and _contracts_tokens(node):
            summed.add(node)


def _contracts_tokens(node: fx.Node) -> bool:
    """Whether a node sums over tokens; an error where it looks along them in another way."""
    rule = rule_of(node)[0]
    tokens = {letter for letter, size in rule.sizes.items() if not isinstance(size, int)}
    if tokens & rule.fixed:
        _leak(node, "reads along the token dim")
    kept = {letter for dims in rule.outputs if dims is not None for letter in letters_of(dims)}
    used = {letter for dims in rule.inputs for letter in letters_of(dims)}
    contracts = bool(tokens & used - kept)
    if contracts and node.target not in _MAY_SUM:
        _leak(node, "contracts the token dim")
    return contracts


def _check_sum(node: fx.Node, summed: Set[fx.Node]) -> None:
    """Raises where what follows a sum over tokens is no sum over tokens."""
    if any(not isinstance(size, int) for shape in info(node).shapes if shape is not None for size in shape):
        _leak(node, "gives every token a sum over all tokens")
    values = [argument for argument in node.args[:2] if isinstance(argument, fx.Node | int | float)]
    of_tokens = [value in summed for value in values]
    if node.target in _LINEAR or (node.target in _SUMS_OF_SUMS and all(of_tokens)):
        return
    scaled = [[True, False]] if node.target == aten.div.Tensor else [[True, False], [False, True]]
    if node.target in _SCALINGS and of_tokens in scaled:
        return
    raise CaptureError(
        f"the loss is not a sum over tokens: {where(node)} follows a sum over the tokens of a micro-batch, so that "
        "losses of micro-batches would not add up. Return a plain sum over labelled tokens; the division by their "
        f"number in the whole step is done for you. Around it:\n{neighbourhood(node)}"
    )


def _leak(node: fx.Node, what: str) -> None:
    raise CaptureError(
        f"documents would see each other: {where(node)} {what}. Use scaled_dot_product_attention(..., is_causal=True) "
        "or hgraph.packed_attention, which keep documents apart, and per-token operators elsewhere. Around it:\n"
        + neighbourhood(node)
    )


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
