"""`hgraph reshard`: how one tensor gets from one annotation to another."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import click

from hgraph.annotation import Annotation
from hgraph.bridge_plan import plan_bridge
from hgraph.bundles import TensorReshard, gather_bundles
from hgraph.check_reshard import check_reshard
from hgraph.errors import HydraulisError, InvalidAnnotation, InvalidInput, PlanError
from hgraph.lower_bound import lower_bound
from hgraph.pictures import quantity
from hgraph.reshard import plan_reshard, reshard_bytes
from hgraph.reshard_plan import Move, Operation, ReshardPlan
from hgraph.reshard_text import held_texts, operation_text
from hgraph.shard_map import ShardMap, shard_map
from hgraph.topology import Topology, single_node
from hgraph.traffic import traffic
from runtime.cli.options import cluster_option, json_option, load_cluster, out, picture_option, print_json, table
from runtime.cli.traffic_report import (
    BYTES_HEADERS,
    LOAD_HEADERS,
    TrafficReport,
    check_picture,
    draw_traffic,
    messages_text,
    whole_nodes,
)

__all__ = ["command"]

ELEMENT_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}
MOST_STEPS = 40
"""Steps of one phase that are printed; `--json` has all."""
MOST_ELEMENTS = 2**60
"""Tensors of so many elements are refused: bytes on links are counted in 64 bits."""
MOST_BYTES = 2**62
"""What all links together carry stays below it: a rank may need twice that beside its buffers, messages and sums."""
_HINT = "write 0-3[S(0)], 0-3[2x2: S(0), R] or 0-1[S(1)] + 2[] @ R (docs/concepts.md)"


@dataclass(frozen=True, slots=True)
class _Answer:
    """What is told of one reshard."""

    plan: ReshardPlan
    dtype: str
    topology: Topology
    report: TrafficReport
    verdict: str | None
    """What `check_reshard` finds wrong; None where it proves the plan."""


@click.command(name="reshard")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option("--shape", "shape_text", metavar="8x6", required=True, help="Lengths of the tensor's dims, or `scalar`.")
@click.option("--dtype", type=click.Choice(list(ELEMENT_BYTES)), default="float32", show_default=True)
@click.option("--bridge", is_flag=True, help="Plan as between steps: moves with relays, not collectives.")
@cluster_option
@picture_option
@json_option
def command(
    source: str,
    target: str,
    shape_text: str,
    dtype: str,
    bridge: bool,
    cluster: str | None,
    picture: str | None,
    as_json: bool,
) -> None:
    """Show how a tensor gets from annotation SRC to annotation DST: boxes, steps, bytes, and their lower bound.

    The plan is the one that programs run inside a step, with collectives where the boxes allow them; with --bridge it
    is the one of bridges and switches, where bytes that several ranks of a node need cross the network once. Exit
    status 1 where the checker does not prove the plan. docs/concepts.md describes annotations.

    \b
    Examples:
      hgraph reshard "0-3[S(0)]" "0-3[S(1)]" --shape 8x6
      hgraph reshard "0-1[P] + 2[] @ P" "0-2[S(0)]" --shape 7x4 --dtype bfloat16
      hgraph reshard "0-7[S(0)]" "8-15[R]" --shape 4096x4096 --bridge --cluster 8x8-a800
      hgraph reshard "0-3[S(0)]" "0-3[R]" --shape 1024x64 --picture traffic.svg
      hgraph reshard "0-1[S(0:5,3)]" "1[]" --shape 8 --json
    """
    check_picture(picture)
    tensor = _tensor(source, target, shape_text)
    num_ranks = max(*tensor.source.ranks, *tensor.target.ranks) + 1
    topology = single_node(num_ranks) if cluster is None else whole_nodes(load_cluster(cluster, num_ranks), num_ranks)
    answer = _answer(tensor, topology, dtype, bridge=bridge, has_links=cluster is not None)
    if picture is not None:
        draw_traffic(
            picture, f"{tensor.source} -> {tensor.target}, {_shape_text(tensor.shape)} {dtype}", answer.report.found
        )
    if as_json:
        print_json(_data(answer))
    else:
        _show(answer, picture)
    if answer.verdict is not None:
        raise SystemExit(1)


def parse_shape(text: str) -> tuple[int, ...]:
    """Returns the shape that `8x6`, `8,6` or `scalar` says; raises `InvalidInput`, for 2^60 elements or more too."""
    if text.strip() == "scalar":
        return ()
    parts = [part.strip() for part in text.replace("x", ",").split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise InvalidInput(f"--shape: expected lengths of 0 or more, such as 8x6, or `scalar`; got {text!r}")
    # More digits than 2^60 has are too many, whichever they are; Python itself reads no more than some thousands.
    shape = tuple(int(part.lstrip("0")[:20] or "0") for part in parts)
    if max(*shape, math.prod(shape)) >= MOST_ELEMENTS:
        raise InvalidInput(
            f"--shape: expected lengths and a number of elements below 2^60 ({MOST_ELEMENTS:,}), got {_cut(text)}; "
            "give the shape of one tensor"
        )
    return shape


def _cut(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _tensor(source: str, target: str, shape_text: str) -> TensorReshard:
    """Returns the tensor that the arguments describe; raises `InvalidInput` that says which argument is wrong."""
    shape = parse_shape(shape_text)
    annotations = []
    for name, text in (("SRC", source), ("DST", target)):
        try:
            annotation = Annotation.parse(text)
        except HydraulisError as error:
            raise InvalidAnnotation(f"{name} {text!r}: {error}; {_HINT}") from None
        try:
            shard_map(annotation, shape)
        except HydraulisError as error:
            raise InvalidAnnotation(f"{name} {text!r} does not fit --shape {shape_text}: {error}") from None
        annotations.append(annotation)
    return TensorReshard("tensor", annotations[0], annotations[1], shape)


def _answer(tensor: TensorReshard, topology: Topology, dtype: str, *, bridge: bool, has_links: bool) -> _Answer:
    if bridge:
        plan = plan_bridge([tensor], topology).reshard_plan(tensor.name)
    else:
        plan = plan_reshard(tensor.source, tensor.target, tensor.shape)
    moved = sum(reshard_bytes(plan, ELEMENT_BYTES[dtype]).values())
    if moved >= MOST_BYTES:
        raise InvalidInput(
            f"--shape {_shape_text(tensor.shape)}: expected a plan that moves less than 2^62 bytes between all ranks, "
            f"got {quantity(moved)}; give a smaller shape"
        )
    _, _, bundles = gather_bundles([tensor])
    found = traffic(plan, ELEMENT_BYTES[dtype], topology)
    report = TrafficReport(found, lower_bound(bundles, topology), has_links)
    try:
        check_reshard(plan)
    except PlanError as error:
        return _Answer(plan, dtype, topology, report, str(error))
    return _Answer(plan, dtype, topology, report, None)


def _shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _show(answer: _Answer, picture: str | None) -> None:
    plan, report, console = answer.plan, answer.report, out()
    click.echo(f"{plan.source} -> {plan.target}, {_shape_text(plan.shape)} {answer.dtype}, {_cluster_text(answer)}")
    before, after = held_texts(plan.source, plan.shape), held_texts(plan.target, plan.shape)
    ranks = sorted({*before, *after})
    boxes = [(str(rank), before.get(rank, "-"), after.get(rank, "-")) for rank in ranks]
    console.print(table("Boxes", ("rank", "before", "after"), boxes, numbers=(0,)))
    _show_steps(answer)
    console.print(table("Bytes between ranks", BYTES_HEADERS, report.bytes_rows(), numbers=(1, 2, 3)))
    if loads := report.load_rows():
        headers, rows = LOAD_HEADERS[:5], [row[:5] for row in loads]
        console.print(table("Loads", headers, rows, numbers=(1, 3, 4)))
    peak = quantity(int(report.found.peak_extra_bytes.max()))
    ms = "" if report.ms is None else f", predicted {report.ms:.4g} ms"
    click.echo(f"{messages_text(report.found)}{ms}, at most {peak} beside both buffers on a rank")
    proved = "complete, exact and non-redundant, as check_reshard proves"
    click.echo(f"check: {proved if answer.verdict is None else answer.verdict}")
    if picture is not None:
        click.echo(f"wrote {picture}")


def _cluster_text(answer: _Answer) -> str:
    topology = answer.topology
    if not answer.report.has_links:
        return "all ranks in one node (--cluster names others)"
    count = len(topology.nodes)
    return f"{topology.name} ({count} node{'s' if count > 1 else ''} used)"


def _show_steps(answer: _Answer) -> None:
    plan = answer.plan
    if plan.is_nothing:
        click.echo("Steps: none, every rank holds what it needs")
    for number, phase in enumerate(plan.phases, start=1):
        click.echo(f"Steps, phase {number} of {len(plan.phases)}")
        for operation in phase[:MOST_STEPS]:
            moved = _moved_bytes(plan, operation, ELEMENT_BYTES[answer.dtype])
            click.echo(f"  {operation_text(operation)}" + (f" ({quantity(moved)})" if moved else ""))
        if len(phase) > MOST_STEPS:
            click.echo(f"  and {len(phase) - MOST_STEPS:,} more; --json has all")


def _moved_bytes(plan: ReshardPlan, operation: Operation, element_bytes: int) -> int:
    alone = dataclasses.replace(plan, phases=((operation,),))
    return sum(reshard_bytes(alone, element_bytes).values())


def _data(answer: _Answer) -> dict[str, object]:
    plan = answer.plan
    before, after = shard_map(plan.source, plan.shape), shard_map(plan.target, plan.shape)
    return {
        "source": str(plan.source),
        "target": str(plan.target),
        "shape": plan.shape,
        "dtype": answer.dtype,
        "cluster": answer.topology.name if answer.report.has_links else None,
        "before": _pieces(before),
        "after": _pieces(after),
        "phases": [[_operation_data(operation) for operation in phase] for phase in plan.phases],
        **answer.report.data(),
        "proved": answer.verdict is None,
        "fault": answer.verdict,
    }


def _pieces(held: ShardMap) -> list[dict[str, object]]:
    return [{"rank": p.rank, "box": p.box, "family": p.family, "term": p.term} for p in held.pieces]


def _operation_data(operation: Operation) -> dict[str, object]:
    kind = "move" if isinstance(operation, Move) else operation.kind
    return {"kind": kind, **dataclasses.asdict(operation), "text": operation_text(operation)}
