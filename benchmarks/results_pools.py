"""Pools of the settings of docs/results.md, made by `hgraph propose` as a user would, and what making them took."""

from __future__ import annotations

import contextlib
import io
import json
import time
from typing import Any

from benchmarks.results_cases import CLUSTER, Case
from runtime.cli.propose import command

__all__ = ["propose_pool"]


def propose_pool(case: Case) -> dict[str, Any]:
    """Writes the pool of a case and returns the CPU time in s, the batches, and the means in ms it was chosen by."""
    case.pool.parent.mkdir(parents=True, exist_ok=True)
    arguments = {
        "--profile": case.group.profile,
        "--cluster": CLUSTER,
        "--ranks": case.group.num_ranks,
        "--lengths": case.lengths,
        "--tokens": case.tokens,
        "--longest": case.longest,
        "--batches": case.group.proposed_by,
        "--communication": "overlapped",
        "--out": case.pool,
    }
    flags = ["--force", "--json"]
    if case.larger_schemes:
        flags += ["--also", ",".join(case.larger_schemes), "--with-cp", "--across-nodes"]
    printed = io.StringIO()
    start_s = time.process_time()
    with contextlib.redirect_stdout(printed):
        command.main([*(str(one) for pair in arguments.items() for one in pair), *flags], standalone_mode=False)
    answer = json.loads(printed.getvalue())
    return {
        "cpu_s": time.process_time() - start_s,
        **{name: answer[name] for name in ("num_batches", "mean_ms", "means_ms", "static", "static_ms", "every_ms")},
    }
