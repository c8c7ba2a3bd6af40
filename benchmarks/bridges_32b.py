"""Compares the 14 bridges of the published 32B pool with the least that any plan moves, and with simpler plans.

    python benchmarks/bridges_32b.py                          # 64 ranks on 8 nodes
    python benchmarks/bridges_32b.py --ranks 1024             # the pool stretched; loads against the mean
    python benchmarks/bridges_32b.py --growth growth.svg      # planning time against pairs, 64 to 1,024 ranks

Prints markdown; planning times are of one core, in seconds of the processor. Beside our plans stand (a) a plan per
tensor, senders not chosen (the lowest rank that holds a value sends it), and (b) one fused plan with the least loaded
sender; both unicast: every receiver gets its own copy, every term goes to the owner by itself. In these bridges every
parameter has one owner, so (a) and (b) move the same bytes where weights are split, and differ in messages.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hgraph.annotation import Annotation, Subgroup
from hgraph.bridge_plan import BridgePlan, plan_bridge
from hgraph.bundles import Bundle, TensorReshard
from hgraph.lower_bound import LowerBound, lower_bound
from hgraph.pictures.svg import MONOSPACE, Canvas
from hgraph.placements import Replicate, Shard
from hgraph.route_plan import SOURCE, Routes
from hgraph.shard_map import duplicate, summed
from hgraph.topology import Topology, uniform
from hgraph.topology_file import load_topology
from hgraph.traffic import Traffic, traffic
from strategies.least_load import LeastLoad, least_loads

# LLaMA 32B and its pool of strategies, (tp, pp) per replica, on 64 A800: source github.com/lhy101/Hydraulis,
# examples/strategy/build_parallel_scheme_space_32b.py (layers, hidden, vocabulary), examples/scripts/e2e_train.sh (ffn,
# heads); the pool is that of the case study of arXiv 2412.07894; its first strategy is the optimizer layout.
LAYERS, HIDDEN, FFN, VOCABULARY = 60, 6656, 17920, 30592
POOL: tuple[tuple[tuple[int, int], ...], ...] = (
    ((16, 1),) * 4,
    ((16, 1), (8, 3), (8, 3)),
    ((16, 1), *((8, 1),) * 6),
    ((16, 1), *((4, 1),) * 12),
    ((8, 3), *((4, 1),) * 10),
    ((8, 1), *((4, 1),) * 14),
    ((4, 2),) * 8,
)
OPTIMIZER_TP = 16
ELEMENT_BYTES = {"parameters": 2, "gradients": 4}  # bfloat16 and float32
BUCKET_BYTES = 100e6

LAYER_TENSORS = (
    *((name, (HIDDEN, HIDDEN), 0) for name in ("q", "k", "v")),
    ("o", (HIDDEN, HIDDEN), 1),
    *((name, (FFN, HIDDEN), 0) for name in ("gate", "up")),
    ("down", (HIDDEN, FFN), 1),
    *((name, (HIDDEN,), None) for name in ("attention_norm", "mlp_norm")),
)
"""Name, shape and the dim that tensor parallelism splits (None: replicated)."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """One direction of one strategy: `kind` is `parameters` (from the optimizer layout) or `gradients` (to it)."""

    strategy: tuple[tuple[int, int], ...]
    kind: str
    reshards: tuple[TensorReshard, ...]

    @property
    def name(self) -> str:
        """The schemes and how often each, such as `tp16 + 2 x tp8.pp3`."""
        counts = {scheme: self.strategy.count(scheme) for scheme in dict.fromkeys(self.strategy)}
        texts = {scheme: f"tp{scheme[0]}" + (f".pp{scheme[1]}" if scheme[1] > 1 else "") for scheme in counts}
        return " + ".join((f"{count} x " if count > 1 else "") + texts[scheme] for scheme, count in counts.items())

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.kind]


@dataclass(frozen=True, slots=True)
class Result:
    """Our plan of a bridge, the least possible, and the two simpler plans."""

    bridge: Bridge
    plan_s: float
    bundles: tuple[Bundle, ...]
    ours: Traffic
    per_tensor: Traffic
    unicast: Traffic
    bound: LowerBound

    def over_bound(self, found: Traffic) -> float:
        """Network bytes over the lower bound."""
        return found.class_bytes("network") / (self.bound.network_elements * self.bridge.element_bytes)

    def over_least(self, found: Traffic, least: dict[str, LeastLoad]) -> dict[str, float]:
        """Greatest load over the least possible, by resource; 1 where nothing has to move and nothing does."""
        size = self.bridge.element_bytes
        return {
            name: load.greatest / (least[name].num_elements * size) if load.greatest else 1.0
            for name, load in found.loads().items()
        }

    @property
    def messages_of_a_pair(self) -> float:
        """The most messages of a pair of ranks in one bucket."""
        pairs = self.ours.sender * self.ours.topology.num_ranks + self.ours.receiver
        _, levels = np.unique(pairs, return_counts=True)
        return int(levels.max(initial=0))


def stretched(ranks: int) -> list[tuple[tuple[int, int], ...]]:
    """Returns the pool for a multiple of 64 ranks: every replica as many times more."""
    return [tuple(scheme for scheme in strategy for _ in range(ranks // 64)) for strategy in POOL]


def cluster(ranks: int) -> Topology:
    """Returns the published cluster, with as many nodes as `ranks` take."""
    known = load_topology("8x8-a800")
    node = known.nodes[0]
    return uniform(
        known.name, ranks // 8, 8, node.local, node.network,
        memory_gib=node.memory_gib, ranks_per_port=node.ranks_per_port,
    )  # fmt: skip


def tensors() -> list[tuple[str, tuple[int, ...], int | None, int]]:
    """Returns name, shape, split dim and layer of every parameter, in order of first use."""
    layers = [
        (f"layers.{layer}.{name}", shape, dim, layer) for layer in range(LAYERS) for name, shape, dim in LAYER_TENSORS
    ]
    embedding = (VOCABULARY, HIDDEN)
    last = LAYERS - 1
    return [("embedding", embedding, 0, 0), *layers, ("norm", (HIDDEN,), None, last), ("head", embedding, 0, last)]


def _replica(dim: int | None, ranks: Sequence[int]) -> Annotation:
    placement = Replicate() if dim is None else Shard(dim)
    return Annotation((Subgroup(tuple(ranks), (len(ranks),), (placement,)),))


def optimizer_layout(dim: int | None, ranks: int) -> Annotation:
    """Returns (tp 16, pp 1) on all ranks, states spread over the replicas (ZeRO-1)."""
    if dim is None:
        return Annotation((Subgroup(tuple(range(ranks)), (ranks,), (Shard(0),)),))
    replicas = ranks // OPTIMIZER_TP
    order = tuple(replica * OPTIMIZER_TP + position for position in range(OPTIMIZER_TP) for replica in range(replicas))
    return Annotation((Subgroup(order, (OPTIMIZER_TP, replicas), (Shard(dim), Shard(0))),))


def compute_layout(strategy: Sequence[tuple[int, int]], dim: int | None, layer: int, kind: str) -> Annotation:
    """Returns the layout of a parameter of `layer` (or its gradient): a subgroup per replica, on its stage's ranks."""
    parts, first = [], 0
    for tp, pp in strategy:
        start = first + layer * pp // LAYERS * tp
        parts.append(_replica(dim, range(start, start + tp)))
        first += tp * pp
    return duplicate(parts) if kind == "parameters" else summed(parts)


def bridges(ranks: int) -> Iterator[Bridge]:
    """Yields both bridges of every strategy."""
    for strategy in stretched(ranks):
        for kind in ELEMENT_BYTES:
            known: dict[tuple[object, ...], tuple[Annotation, Annotation]] = {}
            reshards = []
            for name, shape, dim, layer in tensors():
                key = (dim, *(layer * pp // LAYERS for _, pp in strategy))
                if key not in known:
                    known[key] = optimizer_layout(dim, ranks), compute_layout(strategy, dim, layer, kind)
                home, compute = known[key]
                source, target = (home, compute) if kind == "parameters" else (compute, home)
                reshards.append(TensorReshard(name, source, target, shape))
            yield Bridge(strategy, kind, tuple(reshards))


def without_relay(plan: BridgePlan, *, choose: bool, per_tensor: bool) -> BridgePlan:
    """Returns the plan where every term goes straight to every receiver, from the least loaded holder or the lowest."""
    sent = np.zeros(plan.topology.num_ranks)
    rows: list[tuple[int, int, int, int]] = []
    for number in sorted(range(len(plan.bundles)), key=lambda number: -plan.bundles[number].num_elements):
        bundle = plan.bundles[number]
        level = 2 if bundle.is_copy else 1
        for term in bundle.terms:
            for receiver in bundle.receivers:
                if receiver in term:
                    continue
                sender = min(term, key=lambda rank: (sent[rank], rank)) if choose else min(term)
                sent[sender] += bundle.num_elements
                rows.append((number, sender, receiver, level))
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    table = table[np.lexsort((table[:, 0], table[:, 3]))]
    routes = Routes(
        bundle=table[:, 0],
        sender=table[:, 1],
        receiver=table[:, 2],
        level=table[:, 3],
        origin=np.full(len(table), SOURCE),
        combines=table[:, 3] < 2,
        roots=np.full(len(plan.bundles), -1),
    )
    buckets = tuple((at,) for at in range(len(plan.tensors))) if per_tensor else plan.buckets
    return replace(plan, routes=routes, buckets=buckets)


def measure(bridge: Bridge, topology: Topology, *, simpler: bool = True) -> Result:
    """Plans one bridge, and the simpler plans unless told not to."""
    started = time.process_time()
    plan = plan_bridge(bridge.reshards, topology, bucket_elements=int(BUCKET_BYTES / bridge.element_bytes))
    plan_s = time.process_time() - started
    size = bridge.element_bytes
    ours = traffic(plan, size)
    others = [
        traffic(without_relay(plan, choose=choose, per_tensor=not choose), size) if simpler else ours
        for choose in (False, True)
    ]
    return Result(bridge, plan_s, plan.bundles, ours, *others, lower_bound(plan.bundles, topology))


HEADERS = (
    "strategy", "bridge", "network GB", "x bound", "sender", "receiver", "port", "node", "local sender",
    "local receiver", "messages", "pair and bucket", "predicted ms", "plan s", "(a) x bound", "(a) load",
    "(a) messages", "(b) x bound", "(b) load", "(b) messages",
)  # fmt: skip


def table(ranks: int, *, with_least: bool) -> Iterator[str]:
    """Yields the lines of the markdown table; without the linear programs loads are over their mean."""
    yield "| " + " | ".join(HEADERS) + " |"
    yield "|" + "---|" * len(HEADERS)
    topology = cluster(ranks)
    total_s = 0.0
    for bridge in bridges(ranks):
        result = measure(bridge, topology)
        total_s += result.plan_s
        yield "| " + " | ".join(_cells(result, topology, with_least)) + " |"
    yield ""
    yield f"planning all of them: {total_s:.2f} s"


def _cells(result: Result, topology: Topology, with_least: bool) -> list[str]:
    ours = result.ours
    if with_least:
        least = least_loads(result.bundles, topology, result.bound)
        over, *others = (result.over_least(found, least) for found in (ours, result.per_tensor, result.unicast))
    else:
        over, *others = (
            {name: load.ratio for name, load in found.loads().items()}
            for found in (ours, result.per_tensor, result.unicast)
        )
    worst = {
        "port": max(over["port sender"], over["port receiver"]),
        "node": max(over["node sender"], over["node receiver"]),
    }
    cells = [
        result.bridge.name, result.bridge.kind, f"{ours.class_bytes('network') / 1e9:.1f}",
        f"{result.over_bound(ours):.3f}", f"{over['network sender']:.3f}", f"{over['network receiver']:.3f}",
        f"{worst['port']:.3f}", f"{worst['node']:.3f}", f"{over['local sender']:.3f}", f"{over['local receiver']:.3f}",
        f"{ours.num_messages}", f"{result.messages_of_a_pair}", f"{ours.ms:.0f}", f"{result.plan_s:.2f}",
    ]  # fmt: skip
    for found, loads in zip((result.per_tensor, result.unicast), others, strict=True):
        greatest = max(loads["network sender"], loads["network receiver"])
        cells += [f"{result.over_bound(found):.2f}", f"{greatest:.2f}", f"{found.num_messages}"]
    return cells


def growth(path: Path) -> None:
    """Measures the planning time of all bridges at 64 to 1,024 ranks and draws it against (owner, receiver) pairs."""
    points = []
    for ranks in (64, 128, 256, 512, 1024):
        topology = cluster(ranks)
        num_pairs, plan_s = 0, 0.0
        for bridge in bridges(ranks):
            result = measure(bridge, topology, simpler=False)
            num_pairs += _pairs(result)
            plan_s += result.plan_s
        print(f"{ranks} ranks: {num_pairs} pairs, {plan_s:.2f} s, {plan_s / num_pairs * 1e6:.2f} us a pair", flush=True)
        points.append((ranks, num_pairs, plan_s))
    path.write_text(growth_svg(points))


def _pairs(result: Result) -> int:
    """Returns how many ranks need something of how many that hold it: pairs of an owner and a replica's rank."""
    pairs = {
        (owner, rank)
        for bundle in result.bundles
        for owner in (bundle.terms[0] if bundle.is_copy else bundle.receivers)
        for rank in (bundle.receivers if bundle.is_copy else (rank for term in bundle.terms for rank in term))
    }
    return len(pairs)


def growth_svg(points: Sequence[tuple[int, int, float]]) -> str:
    """Returns a log-log chart of (ranks, pairs, seconds), with a line of equal time per pair through the first."""
    left, top, width, height = 80.0, 50.0, 480.0, 300.0
    pairs, seconds = [point[1] for point in points], [point[2] for point in points]
    line = [seconds[0] * count / pairs[0] for count in pairs]
    low_x, high_x = np.log10(min(pairs)), np.log10(max(pairs))
    low_y, high_y = np.log10(min(seconds + line)), np.log10(max(seconds + line))

    def at(count: float, second: float) -> tuple[float, float]:
        x = (np.log10(count) - low_x) / max(high_x - low_x, 1e-9)
        y = (np.log10(second) - low_y) / max(high_y - low_y, 1e-9)
        return left + float(x) * width, top + height * (1 - float(y))

    canvas = Canvas()
    canvas.text(left, 28, "Planning time of all 14 bridges against (owner, receiver) pairs", "title")
    canvas.element("path", {"class": "frame", "d": f"M{left} {top} v{height} h{width}"})
    for name, values in (("even", line), ("measured", seconds)):
        corners = [at(count, second) for count, second in zip(pairs, values, strict=True)]
        canvas.element("path", {"class": name, "d": "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in corners)})
    for ranks, count, second in points:
        x, y = at(count, second)
        canvas.element("circle", {"class": "point", "cx": x, "cy": y, "r": 4})
        canvas.text(x + 8, y + 16, f"{ranks} ranks: {count:,} pairs, {second:.2f} s", "label")
    canvas.text(
        left, top + height + 30, "pairs (log scale); dashed: the same time per pair as at the first point", "label"
    )
    styles = {
        "text": f"font-family:{MONOSPACE};font-size:12px;fill:#1f2933",
        ".title": "font-size:15px;font-weight:bold",
        ".frame": "fill:none;stroke:#9aa5b1;stroke-width:1.2",
        ".measured": "fill:none;stroke:#3b74c0;stroke-width:2",
        ".even": "fill:none;stroke:#8393a3;stroke-width:1.2;stroke-dasharray:5 4",
        ".point": "fill:#3b74c0",
    }
    return canvas.render(left + width + 320, top + height + 60, "Planning time", styles)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64, help="a multiple of 64")
    parser.add_argument("--growth", type=Path, metavar="FILE.svg", help="draw planning time against pairs instead")
    options = parser.parse_args()
    if options.ranks < 64 or options.ranks % 64:
        parser.error(f"--ranks: expected a multiple of 64, got {options.ranks}")
    if options.growth:
        growth(options.growth)
        return
    for line in table(options.ranks, with_least=options.ranks <= 128):
        print(line, flush=True)


if __name__ == "__main__":
    main()
