"""Times the fused bridges against one exchange per tensor, in the same run, over gloo; counts the bytes handed over.

    python benchmarks/bridge_time.py
    python benchmarks/bridge_time.py --bucket-mb 5 --repetitions 40 --json result.json

Four ranks; weights of a Llama of 60 M parameters in float32 (hidden 512, 8 layers, ffn 1536, vocabulary 32000); the
optimizer layout spreads every tensor over all ranks, the strategy is {tp 2} + {tp 1} x 2, cut as Megatron does. Both
ways follow the same plan, so they move the same bytes between the same ranks; without fusion every tensor is an
exchange of its own. Times are of the slowest rank; the two alternate, medians are compared. Bytes are counted where
they are given to `torch.distributed`, and must be those that the plan states.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import spawn

from hgraph.annotation import Annotation
from hgraph.bridge_plan import BridgePlan, plan_bridge
from hgraph.bundles import TensorReshard
from hgraph.shard_map import shard_map
from runtime.bridge import Bridge
from runtime.bridge_planner import bucket_elements
from runtime.gloo import ProcessTransport
from runtime.layouts import optimizer_annotation
from runtime.process_groups import create_groups
from runtime.requests import RankGenerator
from runtime.reshard import PreparedReshard, prepare, run_reshard

NUM_RANKS = 4
HIDDEN, LAYERS, FFN, VOCABULARY = 512, 8, 1536, 32000
SPLITS = {
    "attention.q_proj": (HIDDEN, HIDDEN, 0),
    "attention.k_proj": (HIDDEN, HIDDEN, 0),
    "attention.v_proj": (HIDDEN, HIDDEN, 0),
    "attention.o_proj": (HIDDEN, HIDDEN, 1),
    "mlp.gate_proj": (FFN, HIDDEN, 0),
    "mlp.up_proj": (FFN, HIDDEN, 0),
    "mlp.down_proj": (HIDDEN, FFN, 1),
}


def tensors() -> list[tuple[str, tuple[int, ...], int | None]]:
    """Returns name, shape and the dim that tensor parallelism splits, in the order of first use."""
    found: list[tuple[str, tuple[int, ...], int | None]] = [("embed", (VOCABULARY, HIDDEN), 0)]
    for layer in range(LAYERS):
        found.append((f"layers.{layer}.attention_norm", (HIDDEN,), None))
        found += [(f"layers.{layer}.{name}", (rows, columns), dim) for name, (rows, columns, dim) in SPLITS.items()]
        found.append((f"layers.{layer}.mlp_norm", (HIDDEN,), None))
    return [*found, ("norm", (HIDDEN,), None), ("head", (VOCABULARY, HIDDEN), 0)]


def plans(bucket_mb: float) -> dict[str, BridgePlan]:
    """Returns the plan of each direction."""
    inward, outward = [], []
    for name, shape, dim in tensors():
        home = optimizer_annotation(shape, NUM_RANKS)
        first = "0-1[R]" if dim is None else f"0-1[S({dim})]"
        inward.append(TensorReshard(name, home, Annotation.parse(f"{first} + 2[] + 3[] @ R"), shape))
        outward.append(TensorReshard(name, Annotation.parse(f"{first} + 2[] + 3[] @ P"), home, shape))
    size = bucket_elements(bucket_mb, torch.float32)
    return {
        "parameters": plan_bridge(inward, bucket_elements=size),
        "gradients": plan_bridge(outward[::-1], bucket_elements=size),
    }


def sources(plan: BridgePlan, rank: int) -> dict[str, Tensor]:
    """Returns random values of what `rank` holds before."""
    found = {}
    for tensor in plan.tensors:
        reshard = tensor.reshard
        for piece in shard_map(reshard.source, reshard.shape).pieces:
            if piece.rank == rank:
                found[reshard.name] = torch.randn([stop - start for start, stop in piece.box])
    return found


def one_by_one(
    prepared: dict[str, PreparedReshard], rank: int, held: dict[str, Tensor]
) -> RankGenerator[dict[str, Tensor]]:
    """Runs an exchange for each tensor, one after another."""
    results = {}
    for name, plan in prepared.items():
        result = yield from run_reshard(plan, rank, held.get(name), label=name, dtype=torch.float32)
        assert result is not None
        results[name] = result
    return results


class Counter:
    """Counts messages and bytes that are handed to `torch.distributed` for sending."""

    def __init__(self) -> None:
        self.num_bytes, self.num_messages = 0, 0
        self._issue = dist.batch_isend_irecv
        dist.batch_isend_irecv = self._count

    def _count(self, operations: list[dist.P2POp]) -> list[dist.Work]:
        sent = [operation.tensor for operation in operations if operation.op is dist.isend]
        self.num_bytes += sum(tensor.nbytes for tensor in sent)
        self.num_messages += len(sent)
        return self._issue(operations)

    def take(self) -> list[int]:
        """Returns bytes and messages of all ranks since the last call."""
        totals = torch.tensor([self.num_bytes, self.num_messages])
        self.num_bytes, self.num_messages = 0, 0
        dist.all_reduce(totals)
        return totals.tolist()


def timed_ms(run: Callable[[], Any]) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    run()
    elapsed = torch.tensor([1e3 * (time.perf_counter() - start_s)])
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return elapsed.item()


def worker(rank: int, store: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    transport = ProcessTransport(create_groups([], 120.0))
    counter, rows = Counter(), []
    for direction, plan in plans(args.bucket_mb).items():
        held = sources(plan, rank)
        bridge = Bridge(plan, rank, torch.float32)
        prepared = {t.reshard.name: prepare(plan.reshard_plan(t.reshard.name), rank) for t in plan.tensors}
        ways: dict[str, Callable[[], Any]] = {
            "fused": lambda bridge=bridge, held=held: transport.drive(bridge.run(held, "bridge")),
            "unfused": lambda p=prepared, held=held: transport.drive(one_by_one(p, rank, held)),
        }
        results = {name: run() for name, run in ways.items()}
        for name, value in results["unfused"].items():
            torch.testing.assert_close(value, results["fused"][name])
        del results
        counter.take()
        times: dict[str, list[float]] = {name: [] for name in ways}
        counted: dict[str, list[int]] = {}
        for _ in range(args.repetitions):
            for name, run in ways.items():
                times[name].append(timed_ms(run))
                counted[name] = counter.take()
                assert counted[name][0] == bridge.total_bytes, f"{counted[name][0]} B, planned {bridge.total_bytes} B"
        rows.append(
            {
                "direction": direction,
                "fused_ms": statistics.median(times["fused"]),
                "unfused_ms": statistics.median(times["unfused"]),
                "buckets": bridge.num_buckets,
                "fused_messages": counted["fused"][1],
                "unfused_messages": counted["unfused"][1],
                "bytes": counted["fused"][0],
                "planned_bytes": bridge.total_bytes,
                "peak_extra_bytes_of_rank_0": bridge.peak_extra_bytes,
            }
        )
    transport.close()
    if rank == 0:
        report(rows, args)
    dist.barrier()
    dist.destroy_process_group()


def report(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    print(f"\nmedian of {args.repetitions}, buckets of {args.bucket_mb:g} MB\n")
    print("| direction | fused ms | unfused ms | fused/unfused | buckets | messages | unfused | MB | planned MB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        row["ratio"] = row["fused_ms"] / row["unfused_ms"]
        print(
            f"| {row['direction']} | {row['fused_ms']:.1f} | {row['unfused_ms']:.1f} | {row['ratio']:.2f} | "
            f"{row['buckets']} | {row['fused_messages']} | {row['unfused_messages']} | {row['bytes'] / 1e6:.3f} | "
            f"{row['planned_bytes'] / 1e6:.3f} |"
        )
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(worker, (str(Path(folder) / "store"), args), nprocs=NUM_RANKS)


if __name__ == "__main__":
    main()
