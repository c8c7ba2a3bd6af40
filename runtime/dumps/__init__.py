"""Dumps: what a pool compiled to, as named texts and pictures. Nothing here writes a file.

The same model and pool give the same bytes, so that dumps can be compared and serve as goldens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from hgraph.capture import Captured
from hgraph.graph import annotated_text
from hgraph.pictures import PictureGraph, grid_svg, to_dot, to_svg
from hgraph.schedule import build_schedule, lower
from hgraph.schedule_grid import schedule_grid
from hgraph.simulate import simulate
from hgraph.strategy import Scheme
from passes.pipelines import CompiledScheme, CompiledStage
from passes.program import Program
from passes.split_stages import Phase
from runtime.dumps.communication import words_of_reshard
from runtime.dumps.pictures import PHASES, scheme_picture, stage_picture
from runtime.dumps.summary import group_text, scheme_summary

__all__ = ["FORMATS", "folder_names", "schedule_files", "scheme_files"]

FORMATS = ("text", "dot", "svg")

_FORWARD_UNITS, _BACKWARD_UNITS = 1.0, 2.0


def folder_names(schemes: Iterable[Scheme]) -> dict[str, str]:
    """Returns a folder name for each scheme text: letters, digits, `.`, `+` and `-` alone; no two are equal."""
    names: dict[str, str] = {}
    for scheme in schemes:
        base = re.sub(r"[^\w.+-]+", "-", str(scheme).partition("[")[0]).strip("-")
        base += "-overrides" if scheme.overrides else ""
        name, number = base, 1
        while name in names.values():
            number += 1
            name = f"{base}-{number}"
        names[str(scheme)] = name
    return names


def scheme_files(
    compiled: CompiledScheme,
    captured: Captured,
    num_ranks: int,
    *,
    formats: Collection[str] = FORMATS,
    num_micro_batches: int = 4,
    full: bool = False,
) -> dict[str, str]:
    """Returns the files of one scheme, text by name: summary, graphs, local programs, schedule.

    Pictures have a node per module, or with `full` one per operator.
    """
    files: dict[str, str] = {}
    if "text" in formats:
        files["summary.txt"] = scheme_summary(compiled, captured, num_ranks)
        files["graph.txt"] = annotated_text(compiled.graph)
        for stage in compiled.stages:
            files |= _stage_texts(stage)
    files |= _pictures("graph", scheme_picture(compiled, captured.num_layers, full=full), formats)
    for stage in compiled.stages:
        number = stage.graphs.stage
        for phase in PHASES:
            picture = stage_picture(compiled, captured.num_layers, number, phase, full=full)
            files |= _pictures(f"stage{number}-{phase}", picture, formats)
    return files | schedule_files(compiled, num_micro_batches, formats)


def schedule_files(compiled: CompiledScheme, num_micro_batches: int, formats: Collection[str]) -> dict[str, str]:
    """Returns the schedule for `num_micro_batches` equal micro-batches: a grid and the actions, as text and picture."""
    scheme = compiled.scheme
    edges = sorted({(one.sender, one.receiver) for one in compiled.transfers if one.phase == "forward"})
    schedule = lower(build_schedule(scheme.schedule, scheme.pp, num_micro_batches), edges or None)
    simulated = simulate(schedule, _FORWARD_UNITS, _BACKWARD_UNITS, edges=edges or None)
    files = {}
    if "text" in formats:
        head = "a forward pass takes one unit of time, a backward pass two, messages none"
        files["schedule.txt"] = f"{head}\n\n{schedule_grid(schedule)}\n\n{schedule}\n"
    if "svg" in formats:
        title = f"{scheme}: {num_micro_batches} equal micro-batches, as if 1 ms forward and 2 ms backward a stage"
        files["schedule.svg"] = grid_svg(simulated, title)
    return files


def _pictures(name: str, graph: PictureGraph, formats: Collection[str]) -> dict[str, str]:
    files = {}
    if "dot" in formats:
        files[f"{name}.dot"] = to_dot(graph)
    if "svg" in formats:
        files[f"{name}.svg"] = to_svg(graph)
    return files


def _stage_texts(stage: CompiledStage) -> dict[str, str]:
    """Returns the graphs of a stage, on global shapes, and the source of its local programs."""
    files = {}
    for phase in PHASES:
        name = f"stage{stage.graphs.stage}-{phase}"
        files[f"{name}.txt"] = annotated_text(stage.graphs.graph(phase))
        for ranks, program in _programs(stage, phase):
            files[f"{name}-ranks-{group_text(ranks)}.py"] = _program_text(program, ranks)
    return files


def _programs(stage: CompiledStage, phase: Phase) -> list[tuple[list[int], Program]]:
    """Returns the distinct programs of a stage with the ranks that run them."""
    found: list[tuple[list[int], Program]] = []
    for rank, own in stage.ranks.items():
        program = own.forward if phase == "forward" else own.backward
        ranks = next((ranks for ranks, known in found if known is program), None)
        if ranks is None:
            found.append(([rank], program))
        else:
            ranks.append(rank)
    return found


def _program_text(program: Program, ranks: Sequence[int]) -> str:
    lines = [f"# The program of rank{'s' if len(ranks) > 1 else ''} {group_text(ranks)} (counted within the replica)."]
    for index, one in enumerate(program.reshards):
        words = words_of_reshard(one.source, one.target, one.shape)
        lines.append(f"# communicate({index}): {words}: {one.source} -> {one.target}: {one.label}")
    return "\n".join(lines) + "\n" + program.source
