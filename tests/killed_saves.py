"""Saves and is killed: `python -m tests.killed_saves FOLDER COUNT SEED` prints, after each kill, the checkpoint that
is found and what lies in the folder that was being written.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from hgraph.strategy import Scheme
from runtime.program import Program
from tests.saved_runs import batches, program, state_of, train
from tests.small_pools import pool, strategy


def main(folder: Path, count: int, seed: int) -> None:
    torch.set_num_threads(1)
    generator = random.Random(seed)
    run = program(pool(2, strategy("tp2", Scheme.uniform(2))))
    train(run, 3)
    run.save(folder, batches=batches())
    before = state_of(run)
    train(run, 4)
    run.save(folder / "first", batches=batches())
    start_s = time.monotonic()
    run.save(folder / "timed", batches=batches())
    duration_s = time.monotonic() - start_s
    for _ in range(count):
        _kill_a_save(run, folder, generator.uniform(0.0, 1.6 * duration_s))
        found = run.load(folder, batches=batches())
        print(found.name, *sorted(path.name for path in (folder / "step-000004.tmp").glob("*")), flush=True)
        if found.name == "step-000004":
            _remove(found)
            continue
        after = state_of(run)
        assert all(torch.equal(after[kind][name], t) for kind, own in before.items() for name, t in own.items())
        train(run, 4)


def _kill_a_save(run: Program, folder: Path, delay_s: float) -> None:
    child = os.fork()
    if child == 0:
        run.save(folder, batches=batches())
        os._exit(0)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _remove(checkpoint: Path) -> None:
    for path in checkpoint.iterdir():
        path.unlink()
    checkpoint.rmdir()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
