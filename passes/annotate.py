"""Annotate: which stage every node runs on, and the leaf annotations of parameters and overridden activations.

Stages. A forward node of layer i runs on the stage that holds layer i; what comes before the layers follows its inputs,
what comes after runs on the last stage. What derives from inputs alone has no stage and is recomputed where needed.
A backward node follows its forward node, but never runs on a later stage than its backward inputs.

Leaves. The `megatron` template reads the roles off the graph (Megatron-LM, arXiv 1909.08053, section 3): a linear
layer fed by the residual stream is split by columns, one fed by split activations by rows, embedding and head by
vocabulary.
Weights around attention are cut between whole heads. A template given by names, or overrides, replace these roles.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from hgraph.annotation import Annotation, replicated, sharded
from hgraph.capture import Captured
from hgraph.errors import InvalidAnnotation, InvalidInput
from hgraph.graph import NodeInfo, evaluate_shape, info, tensor_inputs, where
from hgraph.placements import Shard, balanced_sizes
from hgraph.shard_map import shard_map
from hgraph.strategy import Override, Scheme

__all__ = ["Leaves", "annotate", "assign_stages", "parameter_roles"]

aten = torch.ops.aten
_SPLIT_DIMS = {"column": 0, "vocab": 0, "row": 1}
"""The dim of a weight that a role splits."""
_ATTENTION = torch.ops.hydraulis.packed_attention.default


@dataclass(frozen=True, slots=True)
class Leaves:
    """Leaf annotations: of each (parameter name, stage), and of overridden activations by node."""

    parameters: Mapping[tuple[str, int], Annotation]
    activations: Mapping[fx.Node, Annotation]


def annotate(
    graph: fx.Graph, captured: Captured, scheme: Scheme, template: str | Sequence[tuple[str, str]] = "megatron"
) -> Leaves:
    """Sets the stage of every node and returns the leaf annotations for `scheme`, ranks counted from 0."""
    assign_stages(graph, captured, scheme)
    roles = _roles(graph, template)
    heads = _head_counts(graph)
    used = _stages_of_parameters(graph)
    parameters = {}
    for node, stages in used.items():
        for stage in stages:
            ranks = scheme.stage_ranks(stage)
            role = roles.get(node, "replicate")
            parameters[info(node).name, stage] = _leaf(info(node), role, heads.get(node), ranks)
    activations: dict[fx.Node, Annotation] = {}
    for override in scheme.overrides:
        _apply(override, graph, captured, scheme, used, parameters, activations)
    return Leaves(parameters, activations)


def assign_stages(graph: fx.Graph, captured: Captured, scheme: Scheme) -> None:
    """Sets `NodeInfo.stage` of every node."""
    layer_stage = _layer_stages(captured, scheme)
    after_layers = _depends_on_last_layer(graph, captured)
    by_sequence: dict[int, int] = {}
    for node in graph.nodes:
        facts = info(node)
        if node.op != "call_function":
            continue
        facts.stage = _stage(node, layer_stage, captured, scheme, after_layers, by_sequence)
        if facts.phase == "forward" and facts.stage is not None and facts.sequence >= 0:
            by_sequence[facts.sequence] = max(facts.stage, by_sequence.get(facts.sequence, 0))
    for node in reversed(graph.nodes):
        of_users = [info(user).stage for user in node.users if user.op == "call_function"]
        stages = [stage for stage in of_users if stage is not None]
        if _from_parameters_alone(node) and stages:
            info(node).stage = min(stages)
    _refuse_backward_flow(graph, scheme)


def _refuse_backward_flow(graph: fx.Graph, scheme: Scheme) -> None:
    """Raises where a forward value would go back to an earlier stage (layers used out of order, or twice)."""
    for node in graph.nodes:
        facts = info(node)
        if node.op != "call_function" or facts.phase != "forward" or facts.stage is None:
            continue
        for value in node.all_input_nodes:
            own = info(value).stage
            if own is not None and own > facts.stage:
                raise InvalidInput(
                    f"scheme {scheme}: {where(node)} is on stage {facts.stage}, but uses {where(value)} of stage "
                    f"{own}; layers that are used out of order or more than once cannot be cut into stages here: use "
                    "pp: 1, or a layer split that keeps them together"
                )


def _from_parameters_alone(node: fx.Node) -> bool:
    """Whether a node (a transposed weight) belongs where it is used rather than where it comes from."""
    inputs = node.all_input_nodes
    return node.op == "call_function" and bool(inputs) and all(info(a).role == "parameter" for a in inputs)


def _layer_stages(captured: Captured, scheme: Scheme) -> dict[int, int]:
    if scheme.pp == 1:
        return dict.fromkeys(range(captured.num_layers), 0)
    if captured.layers is None:
        raise InvalidInput(
            f"scheme {scheme}: pp={scheme.pp}, but the model has no list of layers (nn.ModuleList or nn.Sequential) to "
            "split; use pp: 1"
        )
    if scheme.pp > captured.num_layers:
        raise InvalidInput(f"scheme {scheme}: pp={scheme.pp} is above the model's {captured.num_layers} layers")
    split = scheme.layer_split(captured.num_layers)
    if sum(split) != captured.num_layers:
        raise InvalidInput(
            f"scheme {scheme}: layers {list(split)} sum to {sum(split)}; the model has {captured.num_layers} layers"
        )
    stages = [stage for stage, count in enumerate(split) for _ in range(count)]
    return dict(enumerate(stages))


def _layer_of(facts: NodeInfo, captured: Captured) -> int | None:
    if captured.layers is None:
        return None
    match = re.match(re.escape(captured.layers) + r"\.(\d+)(\.|$)", facts.module)
    return int(match[1]) if match else None


def _depends_on_last_layer(graph: fx.Graph, captured: Captured) -> set[fx.Node]:
    """Forward nodes outside the layers that use, directly or not, what the last layer gives."""
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or info(node).phase != "forward":
            continue
        inputs = node.all_input_nodes
        last = any(_layer_of(info(argument), captured) == captured.num_layers - 1 for argument in inputs)
        if _layer_of(info(node), captured) is None and (last or any(argument in reached for argument in inputs)):
            reached.add(node)
    return reached


def _stage(
    node: fx.Node,
    layer_stage: Mapping[int, int],
    captured: Captured,
    scheme: Scheme,
    after_layers: set[fx.Node],
    by_sequence: Mapping[int, int],
) -> int | None:
    facts = info(node)
    inputs = [info(argument) for argument in node.all_input_nodes]
    stages = [argument.stage for argument in inputs if argument.stage is not None]
    trained = any(argument.role == "parameter" for argument in inputs)
    if facts.phase == "forward" and not stages and not trained:
        return None
    layer = _layer_of(facts, captured)
    own = layer_stage[layer] if layer is not None else None
    if facts.phase == "forward":
        if own is not None:
            return own
        return scheme.pp - 1 if node in after_layers else max(stages, default=0)
    behind = [a.stage for a in inputs if a.stage is not None and a.phase == "backward"]
    if own is None and facts.module_class:
        # Sums of gradients belong to no module, and the sequence number they carry is another operator's.
        own = by_sequence.get(facts.sequence)
    if own is None and not behind:
        own = by_sequence.get(facts.sequence, max(stages, default=scheme.pp - 1))
    return min([*behind, *([own] if own is not None else [])])


def parameter_roles(graph: fx.Graph) -> dict[fx.Node, str]:
    """Returns `column`, `row` or `vocab` for parameters that the Megatron layout splits, read off the graph."""
    roles: dict[fx.Node, str] = {}
    split: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or info(node).phase != "forward":
            continue
        weight = _weight_of(node)
        if node.target == aten.embedding.default and weight is not None:
            roles[weight] = "vocab"
        elif weight is not None:
            row = node.args[0] in split
            roles.setdefault(weight, "row" if row else "column")
            if not row:
                split.add(node)
        elif any(argument in split for argument in node.all_input_nodes):
            split.add(node)
    return roles


def _weight_of(node: fx.Node) -> fx.Node | None:
    """The parameter of an embedding or of a product x @ t(weight)."""
    if node.target == aten.embedding.default:
        weight = node.args[0]
    elif node.target == aten.mm.default:
        weight = node.args[1]
        if isinstance(weight, fx.Node) and weight.target == aten.t.default:
            weight = weight.args[0]
    else:
        return None
    return weight if isinstance(weight, fx.Node) and info(weight).role == "parameter" else None


def _roles(graph: fx.Graph, template: str | Sequence[tuple[str, str]]) -> dict[fx.Node, str]:
    if template == "megatron":
        return parameter_roles(graph)
    if isinstance(template, str):
        raise InvalidInput(f"template: expected 'megatron' or pairs of a pattern and a role, got {template!r}")
    for pattern, role in template:
        if role not in _SPLIT_DIMS and role != "replicate":
            raise InvalidInput(f"template {pattern!r}: expected column, row, vocab or replicate, got {role!r}")
    parameters = [node for node in graph.nodes if node.op == "placeholder" and info(node).role == "parameter"]
    return {node: _named_role(info(node).name, template) for node in parameters}


def _named_role(name: str, template: Sequence[tuple[str, str]]) -> str:
    """The role of the first pattern that matches; a parameter without one is an error, not replicated in silence."""
    for pattern, role in template:
        if fnmatch.fnmatchcase(name, pattern):
            return role
    raise InvalidInput(
        f"template: no pattern matches parameter {name!r}; give it a role, or end the template with '*': replicate"
    )


@dataclass(frozen=True, slots=True)
class _Heads:
    """How a weight's split dim is made of heads."""

    is_query: bool
    queries: int
    keys: int


def _head_counts(graph: fx.Graph) -> dict[fx.Node, _Heads]:
    """The weights whose output (or, for the projection after attention, input) dim is made of attention heads."""
    result: dict[fx.Node, _Heads] = {}
    for node in graph.nodes:
        if node.target != _ATTENTION:
            continue
        queries, keys = (int(info(argument).shape[1]) for argument in node.args[:2])
        for position, argument in enumerate(node.args[:3]):
            weight = _weight_behind(argument)
            if weight is not None:
                result.setdefault(weight, _Heads(position == 0, queries, keys))
        weight = _weight_ahead(node)
        if weight is not None:
            result.setdefault(weight, _Heads(True, queries, keys))
    return result


def _weight_behind(node: fx.Node) -> fx.Node | None:
    seen: set[fx.Node] = set()
    queue = [node]
    while queue:
        current = queue.pop(0)
        weight = _weight_of(current) if current.op == "call_function" else None
        if weight is not None:
            return weight
        fresh = [a for a in tensor_inputs(current) if a not in seen] if current.op == "call_function" else []
        seen.update(fresh)
        queue.extend(fresh)
    return None


def _weight_ahead(node: fx.Node) -> fx.Node | None:
    seen = {node}
    queue = [node]
    while queue:
        current = queue.pop(0)
        weight = _weight_of(current)
        if weight is not None:
            return weight
        fresh = [user for user in current.users if user not in seen and info(user).phase == "forward"]
        seen.update(fresh)
        queue.extend(fresh)
    return None


def _stages_of_parameters(graph: fx.Graph) -> dict[fx.Node, tuple[int, ...]]:
    result = {}
    for node in graph.nodes:
        if node.op == "placeholder" and info(node).role == "parameter":
            stages = {info(user).stage for user in node.users if user.op == "call_function"}
            result[node] = tuple(sorted(stage for stage in stages if stage is not None))
    return result


def _leaf(facts: NodeInfo, role: str, heads: _Heads | None, ranks: tuple[int, ...]) -> Annotation:
    shape = [int(size) for size in facts.shape]
    if role == "replicate" or len(ranks) == 1:
        return replicated(ranks)
    dim = _SPLIT_DIMS[role]
    if dim >= len(shape):
        raise InvalidInput(f"parameter {facts.name} of {len(shape)} dims cannot be split by '{role}'; use 'replicate'")
    if heads is None or role == "vocab":
        return sharded(ranks, dim)
    if len(ranks) > heads.queries:
        raise InvalidInput(
            f"parameter {facts.name}: tp={len(ranks)} is above the {heads.queries} query heads; use a tp of at most "
            "that"
        )
    if not heads.is_query and len(ranks) > heads.keys:
        return replicated(ranks)
    units = heads.queries if len(ranks) > heads.keys else heads.keys
    if shape[dim] % units:
        return replicated(ranks)
    sizes = tuple(part * (shape[dim] // units) for part in balanced_sizes(units, len(ranks)))
    return sharded(ranks, dim, sizes).simplify(shape)


def _apply(
    override: Override,
    graph: fx.Graph,
    captured: Captured,
    scheme: Scheme,
    used: Mapping[fx.Node, tuple[int, ...]],
    parameters: dict[tuple[str, int], Annotation],
    activations: dict[fx.Node, Annotation],
) -> None:
    annotation = Annotation.parse(override.annotation)
    found = False
    for node, stages in used.items():
        if fnmatch.fnmatchcase(info(node).name, override.pattern):
            found = True
            for stage in stages:
                _check_override(override, annotation, info(node), scheme.stage_ranks(stage))
                parameters[info(node).name, stage] = annotation
    for module in captured.module_names:
        if not fnmatch.fnmatchcase(module, override.pattern):
            continue
        for node in _outputs_of_module(graph, module):
            found = True
            own = info(node).stage
            assert own is not None
            _check_override(override, annotation, info(node), scheme.stage_ranks(own))
            activations[node] = annotation
    if not found:
        raise InvalidInput(f"override {override.pattern!r}: matches no parameter and no module with an output")


def _check_override(override: Override, annotation: Annotation, facts: NodeInfo, ranks: tuple[int, ...]) -> None:
    if not set(annotation.ranks) <= set(ranks):
        raise InvalidAnnotation(
            f"override {override.pattern!r}: {annotation} uses ranks {list(annotation.ranks)}, but "
            f"{facts.name or facts.module} lives on ranks {list(ranks)} of its replica"
        )
    if annotation.is_partial:
        raise InvalidAnnotation(f"override {override.pattern!r}: {annotation} is partial; expected splits and copies")
    place = f"override {override.pattern!r}, {facts.name or 'output of ' + facts.module}"
    for placement in annotation.placements():
        if not isinstance(placement, Shard) or placement.dim >= len(facts.shape):
            continue
        if placement.sizes is not None and not isinstance(facts.shape[placement.dim], int):
            raise InvalidAnnotation(
                f"{place}: {placement} gives sizes for a dim whose length differs by batch; use S({placement.dim})"
            )
    try:
        shard_map(annotation, evaluate_shape(facts.shape, 4096, 5))
    except InvalidAnnotation as error:
        raise InvalidAnnotation(f"{place}: {error}") from None


def _outputs_of_module(graph: fx.Graph, module: str) -> list[fx.Node]:
    """Forward values made inside a module and used by forward nodes outside it."""

    def inside(node: fx.Node) -> bool:
        path = info(node).module
        return path == module or path.startswith(module + ".")

    return [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and info(node).phase == "forward"
        and info(node).is_tensor
        and info(node).stage is not None
        and inside(node)
        and any(
            user.op == "call_function" and info(user).phase == "forward" and not inside(user) for user in node.users
        )
    ]
