"""Insert communication: a Reshard node wherever what a consumer needs differs from what the producer gives.

One Reshard per value and target; later consumers share it. A value used on another stage first crosses whole (one
transfer per value and stage), then is cut there. Values that must be reduced, or that an override moves, are resharded
right after their producer.
"""

from __future__ import annotations

from copy import copy

from torch import fx

from hgraph.annotation import Annotation, replicated
from hgraph.graph import evaluate_shape, info, reshard, set_info, tensor_inputs
from hgraph.shard_map import same_map
from hgraph.strategy import Scheme
from passes.annotate import Leaves

__all__ = ["insert_comm", "is_reshard"]

_PROBES = ((97, 5), (4, 3), (1, 2))
"""Token counts at which two annotations of a symbolic shape are compared."""


def is_reshard(node: fx.Node) -> bool:
    """Whether a node is a Reshard."""
    return node.op == "call_function" and node.target is reshard


def insert_comm(graph: fx.Graph, scheme: Scheme, leaves: Leaves) -> None:
    """Inserts Reshard nodes; afterwards the visible annotation of every input equals what is required."""
    for node in list(graph.nodes):
        if node.op == "call_function" and info(node).stage is not None:
            _after_producer(node)
    made: dict[tuple[fx.Node, int, Annotation], fx.Node] = {}
    for node in list(graph.nodes):
        facts = info(node)
        if node.op != "call_function" or facts.stage is None or is_reshard(node) or not facts.required:
            continue
        for value, required in zip(tensor_inputs(node), facts.required, strict=True):
            assert required is not None
            _before_consumer(node, value, required, scheme, leaves, made)


def _after_producer(node: fx.Node) -> None:
    facts = info(node)
    if len(facts.annotations) != 1 or facts.annotation == facts.produced[0]:
        return
    produced, visible = facts.produced[0], facts.annotation
    assert produced is not None and visible is not None
    users = list(node.users)
    facts.annotations = (produced,)
    new = _reshard(node, node.next, produced, visible, facts.stage)
    for user in users:
        user.replace_input_with(node, new)


def _before_consumer(
    node: fx.Node,
    value: fx.Node,
    required: Annotation,
    scheme: Scheme,
    leaves: Leaves,
    made: dict[tuple[fx.Node, int, Annotation], fx.Node],
) -> None:
    stage = info(node).stage
    assert stage is not None
    facts = info(value)
    if facts.role == "parameter":
        current, given = value, leaves.parameters[facts.name, stage]
    elif facts.role != "operator" or facts.stage is None:
        current, given = value, replicated(scheme.stage_ranks(stage))
    elif facts.stage != stage:
        given = replicated(scheme.stage_ranks(stage))
        assert facts.annotation is not None
        current = _shared(value, facts.annotation, given, stage, node, made)
    else:
        assert facts.annotation is not None
        current, given = value, facts.annotation
    if not _same(given, required, value):
        current = _shared(current, given, required, stage, node, made)
    if current is not value:
        node.replace_input_with(value, current)


def _shared(
    value: fx.Node,
    source: Annotation,
    target: Annotation,
    stage: int,
    consumer: fx.Node,
    made: dict[tuple[fx.Node, int, Annotation], fx.Node],
) -> fx.Node:
    key = (value, stage, target)
    if key not in made:
        made[key] = _reshard(value, consumer, source, target, stage)
        info(made[key]).phase = info(consumer).phase
    return made[key]


def _reshard(value: fx.Node, before: fx.Node, source: Annotation, target: Annotation, stage: int | None) -> fx.Node:
    with value.graph.inserting_before(before):
        node = value.graph.call_function(reshard, (value, str(source), str(target)))
    facts = copy(info(value))
    facts.extra = {"source": source, "source_stage": info(value).stage}
    facts.role, facts.name, facts.stage = "operator", "", stage
    facts.produced = facts.annotations = (target,)
    facts.required = (source,)
    return set_info(node, facts)


def _same(first: Annotation, second: Annotation, value: fx.Node) -> bool:
    if first == second:
        return True
    shape = info(value).shape
    return all(same_map(first, second, evaluate_shape(shape, *probe)) for probe in _PROBES)
