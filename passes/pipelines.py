"""The order of the passes, and what a scheme compiles to. This is the only place that decides it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from hgraph.annotation import Annotation
from hgraph.capture import Captured
from hgraph.garbage import collector_paused
from hgraph.graph import annotated_text
from hgraph.reshard_plan import Collective
from hgraph.strategy import Scheme, check_compilable
from passes.annotate import annotate
from passes.deduce import deduce
from passes.insert_comm import insert_comm
from passes.normalize import normalize
from passes.program import Program, compile_program
from passes.rewriting import copy_graph
from passes.specialize import class_key, local_reshards, localize
from passes.split_stages import Phase, StageGraphs, Transfer, split_stages
from passes.split_vocabulary import split_vocabulary
from passes.verify import verify_deduced, verify_inserted, verify_normalized, verify_split

__all__ = ["PASSES", "CompiledScheme", "CompiledStage", "RankProgram", "compile_scheme", "normalized"]

PASSES = ("normalize", "split_vocabulary", "annotate", "deduce", "insert_comm", "split_stages", "specialize")
"""Names of the passes, in order."""

Dump = Callable[[str, str], None]
"""Called with the name of a pass and the text of the graph after it."""


@dataclass(frozen=True, slots=True)
class RankProgram:
    """What one rank of a stage runs: the shared programs of its shape class, and its own coordinates."""

    forward: Program
    backward: Program
    coordinates: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CompiledStage:
    """One stage: its graphs, and a program per rank (counted within the replica)."""

    graphs: StageGraphs
    ranks: Mapping[int, RankProgram]
    num_programs: int


@dataclass(frozen=True, slots=True)
class CompiledScheme:
    """A scheme compiled for one captured model; ranks are counted from 0 within the replica.

    `parameters` and `gradients` give the annotation of each (parameter name, stage).
    """

    scheme: Scheme
    stages: tuple[CompiledStage, ...]
    transfers: tuple[Transfer, ...]
    parameters: Mapping[tuple[str, int], Annotation]
    gradients: Mapping[tuple[str, int], Annotation]
    graph: fx.Graph = field(repr=False)

    @property
    def num_programs(self) -> int:
        return sum(stage.num_programs for stage in self.stages)

    def groups(self) -> set[tuple[int, ...]]:
        """Returns the device groups of all collectives of all programs."""
        programs = [p for stage in self.stages for rank in stage.ranks.values() for p in (rank.forward, rank.backward)]
        plans = [reshard.plan for program in programs for reshard in program.reshards if reshard.plan is not None]
        operations = [operation for plan in plans for phase in plan.phases for operation in phase]
        return {operation.ranks for operation in operations if isinstance(operation, Collective)}


def normalized(captured: Captured, *, exact: bool = False, dump: Dump | None = None) -> Captured:
    """Returns the captured model with a normalised graph; done once, for all schemes."""
    graph, _ = copy_graph(captured.graph)
    normalize(graph, exact=exact)
    verify_normalized(graph)
    _dump(dump, "normalize", graph)
    return Captured(
        graph,
        captured.parameters,
        captured.buffers,
        captured.outputs,
        captured.layers,
        captured.num_layers,
        captured.extra_fields,
        captured.module_names,
    )


@collector_paused()
def compile_scheme(
    captured: Captured,
    scheme: Scheme,
    template: str | Sequence[tuple[str, str]] = "megatron",
    *,
    dump: Dump | None = None,
) -> CompiledScheme:
    """Returns the programs of every stage and rank of a scheme. `captured` comes from `normalized`.

    Raises `NotSupported` for a scheme that only plans can speak of (`check_compilable`).
    """
    check_compilable(scheme)
    graph, _ = copy_graph(captured.graph)
    if any(stage.num_ranks > 1 for stage in scheme.stages):
        split_vocabulary(graph)
        _dump(dump, "split_vocabulary", graph)
    leaves = annotate(graph, captured, scheme, template)
    _dump(dump, "annotate", graph)
    deduce(graph, captured, scheme, leaves)
    verify_deduced(graph, scheme)
    _dump(dump, "deduce", graph)
    insert_comm(graph, scheme, leaves)
    verify_inserted(graph, scheme, leaves)
    _dump(dump, "insert_comm", graph)
    stages, transfers = split_stages(graph, captured, scheme)
    verify_split(stages, transfers)
    for stage in stages:
        _dump(dump, "split_stages", stage.forward, f"stage {stage.stage} forward\n")
        _dump(dump, "split_stages", stage.backward, f"stage {stage.stage} backward\n")
    compiled = tuple(_specialize(stage, scheme, leaves.parameters, dump) for stage in stages)
    gradients = {(name, stage.stage): own for stage in stages for name, own in stage.gradients.items()}
    return CompiledScheme(scheme, compiled, tuple(transfers), leaves.parameters, gradients, graph)


def _specialize(
    stage: StageGraphs, scheme: Scheme, parameters: Mapping[tuple[str, int], Annotation], dump: Dump | None
) -> CompiledStage:
    made: dict[object, tuple[Program, Program, Mapping[str, Callable[[int], int]]]] = {}
    ranks = {}
    for rank in scheme.stage_ranks(stage.stage):
        key = class_key((stage.forward, stage.backward), rank)
        if key not in made:
            made[key] = _programs(stage, scheme, rank, parameters, dump)
        forward, backward, coordinates = made[key]
        ranks[rank] = RankProgram(forward, backward, {name: value(rank) for name, value in coordinates.items()})
    return CompiledStage(stage, ranks, 2 * len(made))


def _programs(
    stage: StageGraphs,
    scheme: Scheme,
    rank: int,
    parameters: Mapping[tuple[str, int], Annotation],
    dump: Dump | None,
) -> tuple[Program, Program, Mapping[str, Callable[[int], int]]]:
    programs: dict[Phase, Program] = {}
    coordinates: dict[str, Callable[[int], int]] = {}
    phases: tuple[Phase, ...] = ("forward", "backward")
    for phase in phases:
        graph = stage.graph(phase)
        reshards = local_reshards(graph, scheme)
        local = localize(graph, rank, reshards, lambda name: parameters[name, stage.stage])
        programs[phase] = compile_program(local.graph, tuple(reshards.values()))
        coordinates |= local.coordinates
        if dump is not None:
            dump("specialize", f"stage {stage.stage} {phase}, rank {rank}\n{programs[phase].source}")
    return programs["forward"], programs["backward"], coordinates


def _dump(dump: Dump | None, name: str, graph: fx.Graph, title: str = "") -> None:
    if dump is not None:
        dump(name, title + annotated_text(graph))
