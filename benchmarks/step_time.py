"""Times a training step of this project, and beside it, in the same run, of another program that does the same.

    python benchmarks/step_time.py --layouts single,tp2,ddp2 --model tiny --repetitions 3
    python benchmarks/step_time.py --layouts tp2 --baseline path/to/other.py --json result.json

The other program is run by torchrun with the same options (--layout, --model, --tokens-per-step, --steps, --warmup,
--seed, --json), prints nothing we read, and leaves in its --json file {"steps": [{"loss", "wall"}, ...]}. Losses must
agree to 1e-4 (float32); repetitions alternate, and medians are compared. Step times include all between two steps.

Model and data: a Llama with RMSNorm (eps 1e-5), rotary positions and grouped-query attention. Weights are 0.02 *
numpy default_rng([seed, crc32(name)]).standard_normal, norms 1. Each step draws lognormal lengths (median 256, sigma 1,
at most 2048) until it has exactly the token budget; ids are floor(vocab * u^3), u from default_rng([seed, step, j]).
AdamW (lr 1e-3, betas 0.9 0.95, eps 1e-8, decay 0.1 on everything), no clipping.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np

SIZES = {
    "tiny": {"hidden": 128, "layers": 4, "heads": 8, "kv_heads": 4, "ffn": 352, "vocab_size": 1024},
    "small": {"hidden": 384, "layers": 6, "heads": 8, "kv_heads": 4, "ffn": 1024, "vocab_size": 8192},
}
LAYOUTS = {
    "single": ["{tp: 1}"],
    "tp2": ["{tp: 2}"],
    "tp4": ["{tp: 4}"],
    "pp2": ["{tp: 1, pp: 2}"],
    "ddp2": ["{tp: 1, count: 2}"],
    "ddp4": ["{tp: 1, count: 4}"],
    "tp2ddp2": ["{tp: 2, count: 2}"],
}
THEIR_NAMES = {
    "attention_norm": "attn_norm",
    "attention.q_proj": "wq",
    "attention.k_proj": "wk",
    "attention.v_proj": "wv",
    "attention.o_proj": "wo",
    "mlp.gate_proj": "w1",
    "mlp.up_proj": "w3",
    "mlp.down_proj": "w2",
}


def num_ranks(layout: str) -> int:
    product = 1
    for digit in layout:
        product *= int(digit) if digit.isdigit() else 1
    return product


def draw_lengths(args: argparse.Namespace) -> list[list[int]]:
    rng = np.random.default_rng([args.seed, 1])
    steps: list[list[int]] = []
    for _ in range(args.warmup + args.steps):
        steps.append([])
        while (left := args.tokens_per_step - sum(steps[-1])) > 0:
            steps[-1].append(min(max(16, int(rng.lognormal(math.log(256), 1.0))), 2048, left))
    return steps


def draw_tokens(args: argparse.Namespace, step: int, lengths: list[int]) -> list[np.ndarray]:
    vocab = SIZES[args.model]["vocab_size"]
    rows = [np.random.default_rng([args.seed, step, j]).random(length) for j, length in enumerate(lengths)]
    return [(vocab * row**3).astype(np.int64) for row in rows]


def worker(args: argparse.Namespace) -> None:
    """One rank: trains, and leaves losses and step times."""
    import torch

    import hgraph as hg
    from hgraph.data.batches import make_batch
    from runtime.models.build import llama_loss
    from runtime.models.llama import Llama, LlamaConfig

    torch.set_num_threads(1)
    model = Llama(LlamaConfig(**SIZES[args.model]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(initial_weight(args, name, tuple(parameter.shape))))
    replicas = ", ".join(LAYOUTS[args.layout])
    pool = f"{{version: 1, ranks: {num_ranks(args.layout)}, strategies: [{{name: all, replicas: [{replicas}]}}]}}"
    optimizer = hg.AdamW(lr=1e-3, weight_decay=0.1, max_grad_norm=None)
    # A pipeline needs several micro-batches; a sequence is at most 2,048 tokens.
    limit = 2048 if "pp" in args.layout else args.tokens_per_step
    limits = hg.MemoryLimits(budget_mib=None, max_tokens={str(s): limit for s in hg.parse_pool(pool, "layout").schemes})
    rows = []
    with hg.compile(model, llama_loss, hg.parse_pool(pool, "layout"), optimizer=optimizer, limits=limits) as program:
        batches = [
            make_batch([torch.from_numpy(row) for row in draw_tokens(args, step, lengths)], index=step)
            for step, lengths in enumerate(draw_lengths(args))
        ]
        for batch in program.ahead(batches):
            start = time.perf_counter()
            out = program.step(batch)
            rows.append({"loss": out.loss, "wall": time.perf_counter() - start})
        if program.is_main:
            Path(args.json).write_text(json.dumps({"steps": rows}))


def initial_weight(args: argparse.Namespace, name: str, shape: tuple[int, ...]) -> np.ndarray:
    name = name.removesuffix(".weight")
    for ours, theirs in THEIR_NAMES.items():
        if name.endswith(ours):
            name = name.removesuffix(ours) + theirs
            break
    if name.endswith("norm"):
        return np.ones(shape)
    return 0.02 * np.random.default_rng([args.seed, zlib.crc32(name.encode())]).standard_normal(shape)


def run(script: str, args: argparse.Namespace, layout: str, extra: list[str]) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        options = ["--layout", layout, "--model", args.model, "--tokens-per-step", str(args.tokens_per_step)]
        options += ["--steps", str(args.steps), "--warmup", str(args.warmup), "--seed", str(args.seed)]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(num_ranks(layout)), script, *options, "--json", str(result), *extra]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        steps = json.loads(result.read_text())["steps"]
    return {"loss": [row["loss"] for row in steps], "wall": [row["wall"] for row in steps[args.warmup :]]}


def compare(args: argparse.Namespace) -> list[dict[str, object]]:
    """Medians over all repetitions of each layout, ours and the other's, run in turn."""
    table = []
    for layout in args.layouts.split(","):
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(args.repetitions):
            mine = run(__file__, args, layout, ["--worker"])
            ours += mine["wall"]
            if args.baseline is not None:
                other = run(args.baseline, args, layout, [])
                theirs += other["wall"]
                worst = max(abs(a - b) / abs(b) for a, b in zip(mine["loss"], other["loss"], strict=True))
                if worst > 1e-4:
                    raise SystemExit(f"{layout}: losses differ by {worst:.1e}: {mine['loss']} and {other['loss']}")
        row: dict[str, object] = {"layout": layout, "ours_s": statistics.median(ours)}
        if theirs:
            row |= {"other_s": statistics.median(theirs), "ratio": statistics.median(ours) / statistics.median(theirs)}
        print(json.dumps(row), flush=True)
        table.append(row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default="single,tp2,ddp2")
    parser.add_argument("--layout", choices=LAYOUTS, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", choices=SIZES, default="tiny")
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--baseline", help="the other program")
    parser.add_argument("--json", help="where the table goes")
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    table = compare(args)
    if args.json is not None:
        Path(args.json).write_text(json.dumps({"settings": vars(args), "table": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
