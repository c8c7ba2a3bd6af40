"""`hgraph switch`: what a change of layout moves, beside the least that it could."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hgraph.errors import InvalidInput
from hgraph.yaml_report import nearest
from runtime.cli.options import (
    captured_model,
    cluster_option,
    config_option,
    json_option,
    load_cluster,
    load_run_config,
    out,
    picture_option,
    pool_option,
    print_json,
    read_pool,
    settings_argument,
    table,
    working,
)

if TYPE_CHECKING:
    from hgraph.bridge_plan import BridgePlan
    from hgraph.capture import Captured
    from hgraph.strategy import Pool, Strategy
    from hgraph.topology import Topology
    from passes.pipelines import CompiledScheme
    from runtime.cli.traffic_report import TrafficReport
    from runtime.config import RunConfig
    from runtime.layouts import SwitchedKind

__all__ = ["OPTIMIZER", "command"]

OPTIMIZER = "optimizer"
"""What the optimizer layout is called among the names of strategies."""

_RANKS_LISTED = 8
"""Up to so many ranks have their peak memory told one by one."""


@dataclass(frozen=True, slots=True)
class _Switch:
    """One plan of a switch: what moves, between which layouts, and its traffic."""

    kind: SwitchedKind
    source: str
    target: str
    dtype: str
    plan: BridgePlan
    plan_ms: float
    report: TrafficReport


@click.command(name="switch")
@click.option("--from", "start", metavar="NAME", required=True, help="Strategy of the pool, or `optimizer`.")
@click.option("--to", "end", metavar="NAME", required=True, help="Strategy of the pool, or `optimizer`.")
@click.option("--gradients", is_flag=True, help="Gradients too, not parameters alone.")
@click.option(
    "--bucket-mb",
    type=click.FloatRange(min=0, min_open=True),
    default=25.0,
    show_default=True,
    help="Size of a bucket.",
)
@cluster_option
@config_option
@pool_option
@picture_option
@json_option
@settings_argument
def command(
    start: str,
    end: str,
    gradients: bool,
    bucket_mb: float,
    cluster: str | None,
    config_path: str | None,
    pool_path: str | None,
    picture: str | None,
    as_json: bool,
    settings: tuple[str, ...],
) -> None:
    """Show what moves when the layout changes from one strategy of a pool to another, or to the optimizer layout.

    From `optimizer` to a strategy is the bridge at the start of a step; from a strategy to `optimizer`, with
    --gradients, the one at its end. From strategy to strategy is a direct switch in the middle of a step. Bytes stand
    beside the lower bound, loads beside the mean and the least possible. Without --cluster all ranks are in one node.
    The model is that of the configuration, by default the one of `hgraph train`.

    \b
    Examples:
      hgraph switch --pool examples/first_light/strategies.yaml --from optimizer --to tp2+tp1x2
      hgraph switch --pool examples/first_light/strategies.yaml --from tp4 --to optimizer --gradients
      hgraph switch --pool examples/first_light/strategies.yaml --from tp4 --to tp1x4 --cluster 4-cpu
      hgraph switch --pool examples/first_light/strategies.yaml --from tp4 --to tp1x4 --picture switch.svg
    """
    from runtime.cli.traffic_report import check_picture

    check_picture(picture)
    config = load_run_config(config_path, pool_path, settings)
    pool, captured, compiled = _inputs(config, (start, end))
    topology = _topology(cluster, pool.num_ranks)
    switches = [
        _switch(kind, pool, captured, compiled, topology, ends, config.dtype, bucket_mb, cluster is not None)
        for kind, ends in _moves(start, end, gradients)
    ]
    drawn = _draw(picture, switches)
    if as_json:
        print_json(_data(start, end, cluster, pool, bucket_mb, switches))
    else:
        _show(switches, topology, cluster, drawn)


def _moves(start: str, end: str, gradients: bool) -> list[tuple[SwitchedKind, tuple[str, str]]]:
    """Returns what moves from where to where; gradients of a strategy return to the optimizer layout."""
    moves: list[tuple[SwitchedKind, tuple[str, str]]] = [("parameters", (start, end))]
    if gradients:
        moves.append(("gradients", (end, OPTIMIZER) if start == OPTIMIZER else (start, end)))
    return moves


def _check_names(pool: Pool, ends: tuple[str, str]) -> None:
    known = [OPTIMIZER, *(strategy.name for strategy in pool.strategies)]
    for option, name in zip(("--from", "--to"), ends, strict=True):
        if name not in known:
            raise InvalidInput(
                f"{option}: no strategy {name!r} in the pool; there are {', '.join(known[1:])}, and `{OPTIMIZER}` for "
                f"the optimizer layout{nearest(name, known)}"
            )
    if ends[0] == ends[1]:
        raise InvalidInput(f"--from and --to: expected two layouts, got {ends[0]!r} twice; nothing would move")


def _inputs(config: RunConfig, ends: tuple[str, str]) -> tuple[Pool, Captured, dict[str, CompiledScheme]]:
    """Returns the pool, the graph of the model, and the compiled schemes of both ends."""
    _check_names(read_pool(config, None), ends)  # what is wrong in the file is told before the model is traced
    model, captured = captured_model(config)
    from passes.pipelines import compile_scheme, normalized
    from runtime.facts import leaf_template, model_facts

    pool = read_pool(config, model_facts(captured))
    template, start = leaf_template(pool, model), normalized(captured)
    replicas = [replica for name in ends if name != OPTIMIZER for replica in _strategy(pool, name).replicas]
    schemes = {str(replica.scheme): replica.scheme for replica in replicas}
    with working(f"compiling {len(schemes)} schemes"):
        return pool, captured, {text: compile_scheme(start, scheme, template) for text, scheme in schemes.items()}


def _strategy(pool: Pool, name: str) -> Strategy:
    return next(strategy for strategy in pool.strategies if strategy.name == name)


def _topology(cluster: str | None, num_ranks: int) -> Topology:
    from hgraph.topology import single_node
    from runtime.cli.traffic_report import whole_nodes

    return single_node(num_ranks) if cluster is None else whole_nodes(load_cluster(cluster, num_ranks), num_ranks)


def _switch(
    kind: SwitchedKind,
    pool: Pool,
    captured: Captured,
    compiled: Mapping[str, CompiledScheme],
    topology: Topology,
    ends: tuple[str, str],
    dtype: str,
    bucket_mb: float,
    has_links: bool,
) -> _Switch:
    """Returns one plan of the switch with its traffic. Gradients are of float32, or float64 where the model is."""
    import torch

    from hgraph.bridge_plan import plan_bridge
    from hgraph.lower_bound import lower_bound
    from hgraph.traffic import traffic
    from runtime.bridge_planner import bucket_elements
    from runtime.cli.reshard import ELEMENT_BYTES
    from runtime.cli.traffic_report import TrafficReport
    from runtime.layouts import switch_reshards
    from strategies.least_load import least_loads

    start, end = (None if name == OPTIMIZER else _strategy(pool, name) for name in ends)
    if kind == "gradients" and dtype != "float64":
        dtype = "float32"
    size = ELEMENT_BYTES[dtype]
    with working(f"planning {kind}"):
        reshards = switch_reshards(start, end, kind, compiled, captured, pool.num_ranks)
        begin = time.perf_counter()
        plan = plan_bridge(reshards, topology, bucket_elements=bucket_elements(bucket_mb, getattr(torch, dtype)))
        plan_ms = (time.perf_counter() - begin) * 1e3
    with working("finding the least possible loads"):
        least = lower_bound(plan.bundles, topology)
        loads = {name: load.num_elements * size for name, load in least_loads(plan.bundles, topology, least).items()}
    report = TrafficReport(traffic(plan, size), least, has_links, loads)
    return _Switch(kind, *ends, dtype, plan, plan_ms, report)


def _draw(picture: str | None, switches: Sequence[_Switch]) -> list[str]:
    """Writes the heat map of each plan, the second under a name with its kind; returns the paths."""
    from runtime.cli.traffic_report import draw_traffic

    written = []
    for number, switch in enumerate(switches if picture is not None else ()):
        assert picture is not None
        path = Path(picture)
        if number:
            path = path.with_name(f"{path.stem}-{switch.kind}{path.suffix}")
        draw_traffic(path, _title(switch), switch.report.found)
        written.append(str(path))
    return written


def _title(switch: _Switch) -> str:
    return f"{switch.kind.capitalize()}, {switch.source} -> {switch.target}"


def _show(switches: Sequence[_Switch], topology: Topology, cluster: str | None, drawn: Sequence[str]) -> None:
    from hgraph.pictures import quantity
    from runtime.cli.traffic_report import BYTES_HEADERS, LOAD_HEADERS, messages_text

    console = out()
    where = "in one node (--cluster names others)" if cluster is None else f"on {topology.name}, {_nodes(topology)}"
    click.echo(f"{topology.num_ranks} ranks {where}")
    for switch in switches:
        report, plan = switch.report, switch.plan
        elements = quantity(_held_bytes(switch))
        click.echo(f"\n{_title(switch)}: {len(plan.tensors)} tensors, {elements} in {switch.dtype}")
        console.print(table("Bytes between ranks", BYTES_HEADERS, report.bytes_rows(), numbers=(1, 2, 3)))
        if loads := report.load_rows():
            console.print(table("Loads", LOAD_HEADERS, loads, numbers=(1, 3, 4, 5, 6)))
        ms = "" if report.ms is None else f", predicted {report.ms:.4g} ms"
        buckets = f"{len(plan.buckets)} bucket{'' if len(plan.buckets) == 1 else 's'}"
        click.echo(f"{messages_text(report.found)} in {buckets}{ms}; planned in {switch.plan_ms:.3g} ms")
        click.echo(_peak_text(switch))
    for path in drawn:
        click.echo(f"wrote {path}")


def _nodes(topology: Topology) -> str:
    count = len(topology.nodes)
    return f"{count} node{'' if count == 1 else 's'} used"


def _held_bytes(switch: _Switch) -> int:
    from runtime.layouts import parameter_of

    shapes = {parameter_of(tensor.reshard.name): tensor.reshard.shape for tensor in switch.plan.tensors}
    return sum(map(math.prod, shapes.values())) * switch.report.found.element_bytes


def _peak_text(switch: _Switch) -> str:
    """Returns what ranks need beside source and target: of each, or the greatest and the mean where there are many."""
    from hgraph.pictures import quantity

    peak = switch.report.found.peak_extra_bytes
    head = "peak extra memory of messages and sums, at most two buckets at a time"
    if len(peak) <= _RANKS_LISTED:
        return f"{head}: " + ", ".join(f"rank {rank} {quantity(int(own))}" for rank, own in enumerate(peak))
    worst = int(peak.argmax())
    return f"{head}: at most {quantity(int(peak[worst]))} (rank {worst}), mean {quantity(float(peak.mean()))}"


def _data(
    start: str, end: str, cluster: str | None, pool: Pool, bucket_mb: float, switches: Sequence[_Switch]
) -> dict[str, object]:
    return {
        "from": start,
        "to": end,
        "cluster": cluster,
        "ranks": pool.num_ranks,
        "bucket_mb": bucket_mb,
        "moves": [
            {
                "kind": switch.kind,
                "source": switch.source,
                "target": switch.target,
                "dtype": switch.dtype,
                "tensors": [
                    {
                        "name": tensor.reshard.name,
                        "source": str(tensor.reshard.source),
                        "target": str(tensor.reshard.target),
                        "shape": tensor.reshard.shape,
                    }
                    for tensor in switch.plan.tensors
                ],
                "buckets": [list(bucket) for bucket in switch.plan.buckets],
                "plan_ms": round(switch.plan_ms, 3),
                **switch.report.data(),
            }
            for switch in switches
        ],
    }
