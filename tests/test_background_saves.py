"""Saves that go on while training does: what was there at the call is written, whole or not at all; errors surface."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hgraph.data import BatchState
from hgraph.errors import InvalidInput, RankFailed
from hgraph.strategy import Scheme
from runtime.checkpoint import run as checkpoints
from runtime.checkpoint.boxes import HeldBox
from runtime.checkpoint.folder import find_checkpoint
from runtime.program import Program
from tests.gloo_workers import DEAD, GlooPool, WorkersFailed
from tests.saved_runs import assert_same_state, batches, model, program, state_of, train
from tests.small_pools import pool, strategy

ONE = pool(1, strategy("tp1", Scheme.uniform()))
TWO = pool(2, strategy("tp2", Scheme.uniform(2)))


class Gate:
    """Holds writes back until it is opened, or makes them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open, self._write = threading.Event(), checkpoints.write_boxes
        self.error: Exception | None = None
        monkeypatch.setattr(checkpoints, "write_boxes", self.write)

    def write(self, folder: Path, boxes: Iterable[HeldBox], **options: object) -> None:
        assert self._open.wait(100.0)
        if self.error is not None:
            raise self.error
        self._write(folder, boxes, **options)  # type: ignore[arg-type]

    def open(self) -> None:
        self._open.set()

    def shut(self) -> None:
        self._open.clear()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture(scope="module")
def trained() -> Program:
    """A program that the tests go on training and saving, each in a folder of its own."""
    run = program(TWO)
    train(run, 3)
    return run


@pytest.fixture(scope="module")
def other() -> Program:
    return program(ONE, model(seed=1))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def copied(run: Program) -> dict[str, dict[str, Tensor]]:
    return {kind: {name: t.clone() for name, t in own.items()} for kind, own in state_of(run).items()}


def assert_same_bits(run: Program, expected: dict[str, dict[str, Tensor]]) -> None:
    got = state_of(run)
    assert all(torch.equal(got[kind][name], t) for kind, own in expected.items() for name, t in own.items())


def test_what_training_changes_after_the_call_is_not_written(gate: Gate, other: Program, tmp_path: Path) -> None:
    run = program(TWO)
    train(run, 3)
    before = copied(run)
    target = run.save(tmp_path, batches=batches(), background=True)
    assert target == tmp_path / "step-000003"
    after = train(run, 5)
    assert names(tmp_path) == ["step-000003.tmp"]
    with pytest.raises(InvalidInput, match="holds none"):
        find_checkpoint(tmp_path)
    gate.open()
    run.wait_for_save()
    assert names(tmp_path) == ["step-000003"]
    assert other.load(tmp_path, batches=batches()) == target
    assert (other.step_count, other.next_batch) == (3, BatchState(epoch=0, position=12, index=3))
    assert_same_bits(other, before)
    assert [step.loss for step in train(other, 5)] == pytest.approx([step.loss for step in after], rel=1e-10, abs=0)
    run.close()


def test_the_next_save_waits_and_only_complete_ones_are_kept(gate: Gate, trained: Program, tmp_path: Path) -> None:
    first = trained.step_count
    gate.open()
    trained.save(tmp_path, keep=1, background=True)
    trained.wait_for_save()
    gate.shut()
    train(trained, first + 1)
    trained.save(tmp_path, keep=1, background=True)
    assert names(tmp_path) == [f"step-{first:06d}", f"step-{first + 1:06d}.tmp"], "one is complete, and stays"
    assert find_checkpoint(tmp_path).name == f"step-{first:06d}"
    train(trained, first + 2)
    threading.Timer(0.3, gate.open).start()
    trained.save(tmp_path, keep=2)
    assert names(tmp_path) == [f"step-{first + 1:06d}", f"step-{first + 2:06d}"]


def save_again(run: Program, folder: Path) -> None:
    run.save(folder / "elsewhere")


def load(run: Program, folder: Path) -> None:
    run.load(folder)


def wait(run: Program, folder: Path) -> None:
    del folder
    run.wait_for_save()


def close(run: Program, folder: Path) -> None:
    del folder
    run.close()


@pytest.mark.parametrize("call", [save_again, load, wait, close])
def test_an_error_is_raised_by_the_next_call_with_its_path(
    gate: Gate, trained: Program, tmp_path: Path, call: Callable[[Program, Path], None]
) -> None:
    gate.open()
    gate.error = OSError(28, "No space left on device")
    target = trained.save(tmp_path, background=True)
    train(trained, trained.step_count + 1)
    with pytest.raises(RankFailed) as caught:
        call(trained, tmp_path)
    assert str(caught.value) == (
        f"{target} was not saved (in the background): OSError: [Errno 28] No space left on device"
    )
    gate.error = None
    trained.close()
    trained.save(tmp_path, background=True)
    trained.wait_for_save()
    assert find_checkpoint(tmp_path).name == f"step-{trained.step_count:06d}", "told once; the next one succeeds"


def test_an_error_that_ends_the_program_comes_first(gate: Gate, trained: Program, tmp_path: Path) -> None:
    gate.open()
    gate.error = OSError(28, "No space left on device")
    with pytest.raises(ZeroDivisionError) as caught, trained:
        trained.save(tmp_path, background=True)
        raise ZeroDivisionError
    assert "was not saved (in the background)" in caught.value.__notes__[0]


SCRIPT = """
import sys, time
from pathlib import Path
from runtime.checkpoint.background import BackgroundWrite

def write():
    time.sleep(0.5)
    Path(sys.argv[1]).touch()
    raise OSError("the disk is full")

background = BackgroundWrite()
background.start(Path("runs/step-000003"), write)
"""


def test_the_interpreter_waits_and_tells_an_error_that_nobody_asked_for(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "written")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parent.parent)
    assert (tmp_path / "written").exists()
    assert done.stderr == "runs/step-000003 was not saved (in the background): OSError: the disk is full\n"


def save_beside_training(folder: str) -> tuple[list[float], list[float], str, str]:
    """On each of two processes: saves both ways, trains meanwhile, resumes; then one cannot write."""
    torch.set_num_threads(1)
    run = program(TWO)
    train(run, 2)
    run.save(f"{folder}/plain", batches=batches())
    run.save(f"{folder}/beside", batches=batches(), background=True)
    losses = [step.loss for step in train(run, 4)]
    run.load(f"{folder}/beside", batches=batches())
    again = [step.loss for step in train(run, 4)]
    texts = [_fault(run, lambda: run.save(f"{folder}/later"), broken=not run.is_main, folder=folder)]
    texts.append(_fault(run, run.close, broken=not run.is_main, folder=folder))
    return losses, again, texts[0], texts[1]


def _fault(run: Program, call: Callable[[], object], *, broken: bool, folder: str) -> str:
    import torch.distributed.checkpoint.filesystem as filesystem

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    write = filesystem.FileSystem.create_stream
    if broken:
        filesystem.FileSystem.create_stream = full  # type: ignore[method-assign]
    run.save(f"{folder}/full", background=True)
    run.background._thread.join()  # type: ignore[union-attr]
    filesystem.FileSystem.create_stream = write  # type: ignore[method-assign]
    try:
        call()
    except RankFailed as error:
        return str(error)
    return "no error"


def save_every_step(folder: str, background: bool) -> None:
    torch.set_num_threads(1)
    run = program(TWO)
    for step in range(1, 1000):
        train(run, step)
        run.save(folder, batches=batches(), keep=2, background=background)


@pytest.mark.long
@pytest.mark.gloo
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_process_that_is_killed_leaves_the_last_complete_one(
    gloo: GlooPool, other: Program, tmp_path: Path, seed: int, background: bool
) -> None:
    generator = random.Random(seed)
    rank, delay_s = generator.randrange(2), generator.uniform(0.0, 1.0)

    def kill() -> None:
        while not (tmp_path / "step-000002").exists():
            time.sleep(0.01)
        time.sleep(delay_s)
        process = gloo._processes[rank].pid
        assert process is not None
        os.kill(process, signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with pytest.raises(WorkersFailed) as failed:
        gloo.run(save_every_step, str(tmp_path), background, num_ranks=2, timeout_s=200.0)
    killer.join()
    assert failed.value.texts[rank] == DEAD
    other.load(tmp_path, batches=batches())
    expected = program(ONE)
    train(expected, other.step_count)
    assert_same_state(state_of(other), state_of(expected))


@pytest.mark.long
@pytest.mark.gloo
def test_processes_write_beside_training(gloo: GlooPool, tmp_path: Path) -> None:
    results = gloo.run(save_beside_training, str(tmp_path), num_ranks=2, timeout_s=150.0)
    for losses, again, at_save, at_close in results:
        assert again == losses == results[0][0], "to the bit"
        assert (
            at_save
            == at_close
            == (
                f"{tmp_path}/full/step-000004 was not saved (in the background): RankFailed: save to "
                f"{tmp_path}/full/step-000004.tmp: rank 1: OSError: [Errno 28] No space left on device"
            )
        )
    for path in (tmp_path / "plain" / "step-000002").glob("*.distcp"):
        assert (tmp_path / "beside" / "step-000002" / path.name).read_bytes() == path.read_bytes()
    with pytest.raises(InvalidInput, match="holds none"):
        find_checkpoint(tmp_path / "full")
    assert not (tmp_path / "later").exists()
