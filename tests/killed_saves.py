"""Saves and is killed: `python -m tests.killed_saves FOLDER COUNT SEED [background]` prints, after each kill, the
checkpoint that is found and what lies in the folder that was being written.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from hgraph.strategy import Scheme
from runtime.program import Program
from tests.saved_runs import batches, model, program, state_of, train
from tests.small_pools import pool, strategy


def main(folder: Path, count: int, seed: int, *, background: bool) -> None:
    torch.set_num_threads(1)
    generator = random.Random(seed)
    run = program(pool(2, strategy("tp2", Scheme.uniform(2))), model(layers=1))
    states = {}
    for step in (3, 4):
        train(run, step)
        states[f"step-{step:06d}"] = _copied(run)
        run.save(folder if step == 3 else folder / "first", batches=batches())
    start_s = time.monotonic()
    _save(run, folder / "timed", background=background)
    duration_s = time.monotonic() - start_s
    for _ in range(count):
        run.load(folder / "first", batches=batches())
        _kill_a_save(run, folder, generator.uniform(0.0, 1.6 * duration_s), background=background)
        found = run.load(folder, batches=batches())
        print(found.name, *sorted(path.name for path in (folder / "step-000004.tmp").glob("*")), flush=True)
        own, expected = _copied(run), states[found.name]
        assert all(torch.equal(own[kind][name], t) for kind, tensors in expected.items() for name, t in tensors.items())
        if found.name == "step-000004":
            _remove(found)


def _copied(run: Program) -> dict[str, dict[str, Tensor]]:
    return {kind: {name: t.clone() for name, t in tensors.items()} for kind, tensors in state_of(run).items()}


def _save(run: Program, folder: Path, *, background: bool) -> None:
    """Saves; in the background, training goes on meanwhile and changes what is being written."""
    run.save(folder, batches=batches(), background=background)
    if background:
        train(run, 6)
        run.wait_for_save()


def _kill_a_save(run: Program, folder: Path, delay_s: float, *, background: bool) -> None:
    child = os.fork()
    if child == 0:
        _save(run, folder, background=background)
        os._exit(0)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _remove(checkpoint: Path) -> None:
    for path in checkpoint.iterdir():
        path.unlink()
    checkpoint.rmdir()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), background="background" in sys.argv[4:])
