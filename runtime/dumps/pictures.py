"""Stage graphs as pictures: a cluster per stage and phase, colours by placement, communication standing out.

Condensed (the default), one picture node is one module at work, with its parameters, what leaves it, and their
annotations. Full, it is one operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import fx

from hgraph.annotation import Annotation
from hgraph.graph import NodeInfo, info, node_text
from hgraph.pictures import PictureCluster, PictureEdge, PictureGraph, PictureNode, fill_class_of
from passes.pipelines import CompiledScheme
from passes.split_stages import Phase, StageGraphs
from runtime.dumps.communication import LOCAL, reshard_text
from runtime.dumps.groups import Group, groups_of
from runtime.dumps.summary import group_text

__all__ = ["PHASES", "scheme_picture", "stage_picture"]

PHASES: tuple[Phase, ...] = ("forward", "backward")

_TOOLTIP_LINES = 40


def scheme_picture(compiled: CompiledScheme, num_layers: int, *, full: bool = False) -> PictureGraph:
    """Returns the whole scheme: stages side by side, backward below forward, messages between them."""
    parts = [_Part(compiled, stage.graphs, phase, num_layers, full) for stage in compiled.stages for phase in PHASES]
    places = {
        (part.stage, name): place for part in parts if part.phase == "forward" for name, place in part.places.items()
    }
    edges = [edge for part in parts for edge in part.edges]
    for part in parts:
        edges += [
            PictureEdge(places[part.stage, name], reader, style="reference")
            for name, reader in part.reads_saved
            if (part.stage, name) in places
        ]
    edges += _messages(compiled, parts)
    return PictureGraph(
        f"{compiled.scheme}: {_pictured(full)}; ranks are counted from 0 within the replica",
        tuple(node for part in parts for node in part.nodes),
        tuple(dict.fromkeys(edges)),
        tuple(part.cluster for part in parts),
    )


def stage_picture(
    compiled: CompiledScheme, num_layers: int, stage: int, phase: Phase, *, full: bool = False
) -> PictureGraph:
    """Returns one phase of one stage by itself."""
    part = _Part(compiled, compiled.stages[stage].graphs, phase, num_layers, full)
    nodes, edges = list(part.nodes), list(part.edges)
    for transfer in compiled.transfers:
        if transfer.sender == stage and transfer.phase == phase and transfer.name in part.sends:
            label, text = f"to stage {transfer.receiver}", f"{_shape_text(transfer.shape)} {transfer.source}"
            node = PictureNode(
                f"{part.cluster.id}:send:{transfer.name}", label, text, part.cluster.id, "communication", "hexagon"
            )
            nodes.append(node)
            edges.append(PictureEdge(part.sends[transfer.name], node.id, style="message"))
    title = f"{compiled.scheme}: {part.cluster.title}: {_pictured(full)}"
    return PictureGraph(title, tuple(nodes), tuple(dict.fromkeys(edges)), (part.cluster,))


def _pictured(full: bool) -> str:
    return "every operator" if full else "a node per module"


def _messages(compiled: CompiledScheme, parts: Iterable[_Part]) -> list[PictureEdge]:
    by_place = {(part.stage, part.phase): part for part in parts}
    edges = []
    for transfer in compiled.transfers:
        sender, receiver = by_place[transfer.sender, transfer.phase], by_place[transfer.receiver, transfer.phase]
        if transfer.name in sender.sends and transfer.name in receiver.received:
            edges.append(PictureEdge(sender.sends[transfer.name], receiver.received[transfer.name], style="message"))
    return edges


@dataclass(slots=True)
class _Leaving:
    """What leaves a group: values that other groups read, and gradients of parameters."""

    values: list[fx.Node] = field(default_factory=list)
    gradients: list[tuple[str, fx.Node]] = field(default_factory=list)


class _Part:
    """The picture of one phase of one stage. `places` gives the picture node of each value, by the value's name."""

    def __init__(
        self, compiled: CompiledScheme, graphs: StageGraphs, phase: Phase, num_layers: int, full: bool
    ) -> None:
        self.compiled, self.stage, self.phase, self.full = compiled, graphs.stage, phase, full
        self.graph = graphs.graph(phase)
        layers = compiled.scheme.layer_split(num_layers)[graphs.stage]
        ranks = group_text(compiled.scheme.stage_ranks(graphs.stage))
        title = f"stage {graphs.stage} {phase}: ranks {ranks}, {layers} layer{'' if layers == 1 else 's'}"
        self.cluster = PictureCluster(f"s{graphs.stage}{phase[0]}", title, *_place(compiled, graphs.stage, phase))
        self.nodes: list[PictureNode] = []
        self.edges: list[PictureEdge] = []
        self.places: dict[str, str] = {}
        self.received: dict[str, str] = {}
        self.sends: dict[str, str] = {}
        self.reads_saved: list[tuple[str, str]] = []
        self._draw()

    def _draw(self) -> None:
        outputs = _outputs(self.graph)
        groups = groups_of(self.graph, full=self.full)
        owner = {node: group for group in groups for node in group.nodes}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._draw_placeholder(node)
        for number, group in enumerate(groups):
            name = group.nodes[0].name if self.full or group.is_reshard else f"{number} {group.module or 'model'}"
            place = f"{self.cluster.id}:{name}"
            self.places |= {node.name: place for node in group.nodes}
            self.nodes.append(self._group_node(place, group, owner, outputs))
        for group in groups:
            self._draw_edges(group)
        self._draw_outputs(outputs)

    def _draw_placeholder(self, node: fx.Node) -> None:
        facts = info(node)
        if facts.role == "received":
            label = f"from stage {facts.extra['source_stage']}" if "source_stage" in facts.extra else "received"
            words, text = reshard_text(node)
            place = self._add(node, f"{words}: {label}", text, "communication", "hexagon")
            self.received[facts.name] = place
            return
        if facts.role == "input" and (self.full or self.phase == "forward"):
            self._add(node, facts.name, _shape_text(facts.shape), "plain", "pill")
        if facts.role == "scale":
            self._add(node, "scale of the loss", "1 / labelled tokens of the batch", "plain", "pill")
        if self.full and facts.role in ("parameter", "buffer"):
            annotation = self._annotation(node)
            text = f"{_shape_text(facts.shape)} {annotation or ''}".strip()
            self._add(node, facts.name, text, "plain" if annotation is None else fill_class_of(annotation), "pill")

    def _add(self, node: fx.Node, label: str, sublabel: str, fill_class: str, shape: str) -> str:
        place = f"{self.cluster.id}:{node.name}"
        self.nodes.append(
            PictureNode(place, label, sublabel, self.cluster.id, fill_class, shape, f"{label}\n{node_text(node)}")  # type: ignore[arg-type]
        )
        self.places[node.name] = place
        return place

    def _annotation(self, node: fx.Node) -> Annotation | None:
        facts = info(node)
        if facts.role == "parameter":
            return self.compiled.parameters.get((facts.name, self.stage))
        return facts.annotation

    def _group_node(
        self, place: str, group: Group, owner: Mapping[fx.Node, Group], outputs: Mapping[str, fx.Node]
    ) -> PictureNode:
        node = group.nodes[0]
        tooltip = "\n".join([_origin(node), *(node_text(one) for one in group.nodes[:_TOOLTIP_LINES])])
        if group.is_reshard:
            words, text = reshard_text(node)
            fill, shape = ("plain", "box") if words == LOCAL else ("communication", "hexagon")
            sublabel = f"{text}\n{_shape_text(info(node).shape)}"
            return PictureNode(place, words, sublabel, self.cluster.id, fill, shape, tooltip)  # type: ignore[arg-type]
        leaving = _leaving(group, owner, outputs)
        lines = [] if self.full else self._parameter_lines(group)
        lines += [_value_text(value) for value in leaving.values[:1]]
        if len(leaving.values) > 1:
            lines[-1] += f", +{len(leaving.values) - 1}"
        lines += [self._gradient_text(name, group, value) for name, value in leaving.gradients]
        shown = [*leaving.values, *(value for _, value in leaving.gradients)]
        label = _operator_name(node) if self.full else _label(group)
        if not self.full and group.module and group.module_class:
            lines.insert(0, group.module_class)
        return PictureNode(place, label, "\n".join(lines), self.cluster.id, _fill(shown), "box", tooltip)

    def _parameter_lines(self, group: Group) -> list[str]:
        read = [argument for node in group.nodes for argument in node.all_input_nodes]
        parameters = dict.fromkeys(one for one in read if info(one).role in ("parameter", "buffer"))
        if self.phase == "backward":
            return []
        lines = []
        for one in parameters:
            name, shape = _short(info(one).name, group.module), _shape_text(info(one).shape)
            lines.append(f"{name} {shape} {self._annotation(one) or ''}".strip())
        return lines

    def _gradient_text(self, name: str, group: Group, value: fx.Node) -> str:
        return f"grad of {_short(name, group.module)} {self.compiled.gradients.get((name, self.stage), '')}".strip()

    def _draw_edges(self, group: Group) -> None:
        target = self.places[group.nodes[0].name]
        for node in group.nodes:
            for argument in node.all_input_nodes:
                source = self.places.get(argument.name)
                if source is not None and source != target:
                    self.edges.append(PictureEdge(source, target))
                elif info(argument).role == "saved":
                    self.reads_saved.append((argument.name, target))

    def _draw_outputs(self, outputs: Mapping[str, fx.Node]) -> None:
        for name, node in outputs.items():
            if name.startswith("send:") and node.name in self.places:
                self.sends[name.removeprefix("send:")] = self.places[node.name]
        loss = outputs.get("loss")
        if loss is not None and loss.name in self.places:
            place = f"{self.cluster.id}:output loss"
            annotation = info(loss).annotation
            text = f"sum over labelled tokens, {annotation}"
            fill = "plain" if annotation is None else fill_class_of(annotation)
            self.nodes.append(PictureNode(place, "loss", text, self.cluster.id, fill, "pill"))
            self.edges.append(PictureEdge(self.places[loss.name], place))


def _place(compiled: CompiledScheme, stage: int, phase: Phase) -> tuple[int, int]:
    """Returns column and row: backward below forward, or beside it where there is one stage, so that it fits a page."""
    return (PHASES.index(phase), 0) if compiled.scheme.pp == 1 else (stage, PHASES.index(phase))


def _outputs(graph: fx.Graph) -> dict[str, fx.Node]:
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    values = output.args[0]
    assert isinstance(values, dict)
    return {name: node for name, node in values.items() if isinstance(node, fx.Node)}


def _leaving(group: Group, owner: Mapping[fx.Node, Group], outputs: Mapping[str, fx.Node]) -> _Leaving:
    """Returns what leaves a group, the last value first; what is merely kept for the backward pass is not told."""
    sent = {node for name, node in outputs.items() if name.startswith("send:") or name == "loss"}
    result = _Leaving()
    for node in reversed(group.nodes):
        if node in sent or any(owner.get(user) not in (None, group) for user in node.users):
            result.values.append(node)
    own = set(group.nodes)
    result.gradients = [
        (name.removeprefix("gradient:"), node)
        for name, node in outputs.items()
        if name.startswith("gradient:") and node in own
    ]
    return result


def _label(group: Group) -> str:
    if group.module:
        return group.module
    if not group.module_class and all(info(node).stage is None for node in group.nodes):
        return "inputs"
    if all(_operator_name(node) == "add" for node in group.nodes):
        return "sum of gradients"
    return group.module_class or "loss"


def _operator_name(node: fx.Node) -> str:
    parts = str(getattr(node.target, "__name__", node.target)).split(".")
    return parts[0] if len(parts) == 1 or parts[0] not in ("aten", "hydraulis") else parts[1]


def _fill(values: Iterable[fx.Node]) -> str:
    annotation = next((own for node in values if (own := _annotation_of(info(node))) is not None), None)
    return "plain" if annotation is None else fill_class_of(annotation)


def _annotation_of(facts: NodeInfo) -> Annotation | None:
    return next((annotation for annotation in facts.annotations if annotation is not None), None)


def _value_text(node: fx.Node) -> str:
    facts = info(node)
    shape = next((shape for shape in facts.shapes if shape is not None), ())
    return f"→ {_shape_text(shape)} {_annotation_of(facts) or ''}".strip()


def _shape_text(shape: Iterable[object]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _origin(node: fx.Node) -> str:
    """Returns the module and line that a node comes from; no folder of the file, so that dumps can be compared."""
    facts = info(node)
    module = f"module {facts.module or '(root)'}" + (f" ({facts.module_class})" if facts.module_class else "")
    return f"{module}, {Path(facts.source).name}" if facts.source else module


def _short(name: str, module: str) -> str:
    return name.removeprefix(f"{module}.") if module else name
