"""Split stages: one forward and one backward graph per pipeline stage, and the transfers between stages.

Placeholders of a stage graph have the roles `parameter`, `buffer`, `input`, `scale`, `received` (another stage's
value) and `saved` (kept from the forward graph for the backward graph). The output is a dictionary with the keys
`loss`, `send:<transfer>`, `saved:<name>` and `gradient:<parameter>`. What derives from inputs alone, and views of
parameters, is recomputed in every graph that needs it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx

from hgraph.annotation import Annotation
from hgraph.capture import Captured
from hgraph.errors import NotSupported
from hgraph.graph import NodeInfo, Shape, info, set_info, where
from hgraph.strategy import Scheme
from passes.insert_comm import is_reshard

__all__ = ["StageGraphs", "Transfer", "split_stages"]

Phase = Literal["forward", "backward"]
_PARAMETER_VIEWS = (torch.ops.aten.t.default, torch.ops.aten.transpose.int, torch.ops.aten.permute.default)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One value that crosses from a stage to another, in the forward or in the backward part of a micro-batch."""

    name: str
    sender: int
    receiver: int
    source: Annotation
    target: Annotation
    shape: Shape
    dtype: torch.dtype
    phase: Phase


@dataclass(slots=True)
class StageGraphs:
    """The graphs of one stage, on global shapes with annotations; `gradients` maps parameter names to annotations."""

    stage: int
    forward: fx.Graph
    backward: fx.Graph
    gradients: dict[str, Annotation] = field(default_factory=dict)
    loss: Annotation | None = None

    def graph(self, phase: Phase) -> fx.Graph:
        return self.forward if phase == "forward" else self.backward


def split_stages(graph: fx.Graph, captured: Captured, scheme: Scheme) -> tuple[list[StageGraphs], list[Transfer]]:
    """Returns the graphs of each stage and all transfers."""
    crossings = {node: _transfer(node) for node in graph.nodes if is_reshard(node) and _crosses(node)}
    outputs = _outputs(graph, captured)
    stages = [_split(graph, stage, crossings, outputs) for stage in range(scheme.pp)]
    return stages, list(crossings.values())


def _crosses(node: fx.Node) -> bool:
    source = info(node).extra["source_stage"]
    value = node.args[0]
    assert isinstance(value, fx.Node)
    return info(value).role == "operator" and source is not None and source != info(node).stage


def _transfer(node: fx.Node) -> Transfer:
    facts = info(node)
    value = node.args[0]
    assert isinstance(value, fx.Node) and facts.stage is not None and facts.annotation is not None
    sender, receiver = facts.extra["source_stage"], facts.stage
    phase: Phase = "forward" if info(value).phase == "forward" and sender < receiver else "backward"
    if phase == "backward" and sender < receiver:
        raise NotSupported(f"a gradient would flow from stage {sender} to stage {receiver}: {where(value)}")
    facts.phase = phase
    return Transfer(
        node.name, sender, receiver, facts.extra["source"], facts.annotation, facts.shape, facts.dtype, phase
    )


def _outputs(graph: fx.Graph, captured: Captured) -> dict[str, fx.Node]:
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    values = output.args[0]
    assert isinstance(values, tuple | list)
    result: dict[str, fx.Node] = {}
    for value, name in zip(values, captured.outputs, strict=True):
        if name is not None and isinstance(value, fx.Node):
            result["loss" if name == "loss" else f"gradient:{name}"] = value
    return result


def _split(graph: fx.Graph, stage: int, crossings: dict[fx.Node, Transfer], outputs: dict[str, fx.Node]) -> StageGraphs:
    sends = {"forward": {}, "backward": {}}  # type: dict[str, dict[str, fx.Node]]
    for node, transfer in crossings.items():
        if transfer.sender == stage:
            value = node.args[0]
            assert isinstance(value, fx.Node)
            sends[transfer.phase][f"send:{transfer.name}"] = value
    own = {name: node for name, node in outputs.items() if info(node).stage == stage}
    wanted = {name: node for name, node in own.items() if name != "loss"} | sends["backward"]
    result = StageGraphs(stage, fx.Graph(), fx.Graph())
    backward = _Builder(graph, stage, "backward", crossings)
    backward.build(wanted)
    forward = _Builder(graph, stage, "forward", crossings)
    kept = {f"saved:{node.name}": node for node in backward.saved}
    forward.build({name: node for name, node in own.items() if name == "loss"} | sends["forward"] | kept)
    result.forward, result.backward = forward.graph, backward.graph
    for name, node in own.items():
        annotation = info(node).annotation
        assert annotation is not None, f"{name} has no annotation"
        if name == "loss":
            result.loss = annotation
        else:
            result.gradients[name.removeprefix("gradient:")] = annotation
    return result


class _Builder:
    """Copies the part of the joint graph that one program of one stage needs."""

    def __init__(self, source: fx.Graph, stage: int, phase: Phase, crossings: dict[fx.Node, Transfer]) -> None:
        self.source, self.stage, self.phase, self.crossings = source, stage, phase, crossings
        self.graph = fx.Graph()
        self.saved: list[fx.Node] = []

    def build(self, wanted: dict[str, fx.Node]) -> None:
        needed = self._needed(list(wanted.values()))
        mapping: dict[fx.Node, fx.Node] = {}
        for node in self.source.nodes:
            if node in needed and (role := self._placeholder_role(node)) is not None:
                mapping[node] = self._placeholder(node, role)
        for node in self.source.nodes:
            if node in needed and node not in mapping:
                mapping[node] = self._copy(node, lambda old: mapping[old])
        self.graph.output({name: mapping[node] for name, node in wanted.items()})

    def _needed(self, roots: list[fx.Node]) -> set[fx.Node]:
        needed: set[fx.Node] = set()
        stack = list(roots)
        while stack:
            node = stack.pop()
            if node in needed:
                continue
            needed.add(node)
            if self._placeholder_role(node) is None:
                stack.extend(node.all_input_nodes)
        return needed

    def _placeholder_role(self, node: fx.Node) -> str | None:
        """How a value enters this program, or None where the program computes it."""
        facts = info(node)
        if node.op == "placeholder":
            return facts.role
        transfer = self.crossings.get(node)
        if transfer is not None and transfer.receiver == self.stage and transfer.phase == self.phase:
            return "received"
        if self.phase == "forward" or facts.phase == "backward" or _recomputed(node):
            return None
        return "saved"

    def _placeholder(self, node: fx.Node, role: str) -> fx.Node:
        facts = copy(info(node))
        if role in ("received", "saved"):
            facts.name = node.name
        if role == "saved":
            self.saved.append(node)
        facts.role = role  # type: ignore[assignment]
        new = self.graph.placeholder(node.name)
        new.name = node.name
        return set_info(new, facts)

    def _copy(self, node: fx.Node, transform: Callable[[fx.Node], fx.Node]) -> fx.Node:
        new = self.graph.node_copy(node, transform)
        new.name = node.name
        facts: NodeInfo = copy(info(node))
        return set_info(new, facts)


def _recomputed(node: fx.Node) -> bool:
    """Whether a forward value is cheaper made again than kept: views of parameters, and constants."""
    if node.target is operator.getitem:
        return False
    if not node.all_input_nodes:
        return True
    of_parameters = all(info(argument).role == "parameter" for argument in node.all_input_nodes)
    return of_parameters and node.target in _PARAMETER_VIEWS
