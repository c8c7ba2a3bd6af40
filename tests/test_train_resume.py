"""`hgraph train --resume`: interrupted on four ranks, gone on with on two, as if it had never stopped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hgraph.errors import InvalidInput
from runtime.cli.train import command
from runtime.config import CheckpointConfig, RunConfig
from runtime.recorder import Recorder

CONFIG = """\
name: tiny
steps: 6
num_processes: 4
tokens_per_step: 400
dtype: float64
pool: pool.yaml
model: {vocab_size: 300, hidden: 16, layers: 2, heads: 4, kv_heads: 2, ffn: 32}
data: {kind: tokens, paths: [data.jsonl], vocab_size: 300, max_length: 512, policy: cut}
optimizer: {warmup_steps: 2}
memory: {budget_mib: 64, max_tokens: {tp1: 512, tp2: 512}}
calibration: {lengths: [16, 64, 128], repeats: 1, cache: cache}
checkpoint: {every: 2, keep: 2}
"""
POOL = """\
version: 1
ranks: 4
template: megatron
strategies:
  - name: tp2+tp1x2
    replicas:
      - {tp: 2}
      - {tp: 1, count: 2}
"""
OTHER_POOL = """\
version: 1
ranks: 2
template: megatron
strategies:
  - name: pp2
    replicas:
      - {pp: 2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "pool.yaml").write_text(POOL)
    (tmp_path / "other.yaml").write_text(OTHER_POOL)
    rows = [json.dumps({"tokens": [(7 * i + j) % 300 for j in range(20 + 13 * i % 170)]}) for i in range(24)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path


def train(folder: Path, num_ranks: int, processes: bool, *arguments: str) -> str:
    """Trains over so many processes, or on as many simulated ranks in this one."""
    count = num_ranks if processes else 1
    words = ["config.yaml", f"num_processes={count}", *arguments]
    if not processes:
        return CliRunner().invoke(command, words, catch_exceptions=False).output
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-m", "runtime.cli", "train", *words]
    job = subprocess.run(start, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert job.returncode == 0, job.stderr
    return job.stdout


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "processes", [False, pytest.param(True, marks=[pytest.mark.gloo, pytest.mark.long])], ids=["simulated", "processes"]
)
def test_a_run_goes_on_under_another_pool(folder: Path, monkeypatch: pytest.MonkeyPatch, processes: bool) -> None:
    monkeypatch.chdir(folder)
    out = train(folder, 4, processes, "checkpoint.background=true")
    run = folder / "runs" / "tiny"
    summary = (run / "summary.txt").read_text()
    assert "steps per strategy" in summary and "tp2+tp1x2" in summary and "\x1b" not in summary
    last = "metrics, plans, configuration and this summary: runs/tiny\n"
    assert summary.endswith(last) and last in out
    checkpoints = run / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000004", "step-000006"]
    unbroken = lines(run / "metrics.jsonl")
    # As if it had been killed after step 5, while it wrote a line.
    shutil.rmtree(checkpoints / "step-000006")
    (checkpoints / "step-000006.tmp").mkdir()
    text = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(text[:5]) + text[5][:20])
    out = train(folder, 2, processes, "pool=other.yaml", "memory.max_tokens={tp1.pp2: 512}", "--resume")
    assert "resumed from runs/tiny/checkpoints/step-000004" in out
    assert "step   5 " in out and "step   4 " not in out
    resumed = lines(run / "metrics.jsonl")
    assert [line["step"] for line in resumed] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines(run / "plans.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert resumed[:4] == unbroken[:4]
    assert {line["strategy"] for line in resumed[4:]} == {"pp2"}
    for ours, theirs in zip(resumed[4:], unbroken[4:], strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-10, abs=0)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-10, abs=0)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000004", "step-000006"]


def failure(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.chdir(folder)
    with pytest.raises(InvalidInput) as caught:
        CliRunner().invoke(command, ["config.yaml", "num_processes=1", *arguments], catch_exceptions=False)
    return str(caught.value)


def checkpoint_of(folder: Path, step: int) -> Path:
    path = folder / "runs" / "tiny" / "checkpoints" / f"step-{step:06d}"
    path.mkdir(parents=True)
    (path / "weights").write_bytes(b"0123")
    facts = {"version": 1, "step_count": step, "optimizer_steps": step, "seed": 0, "files": {"weights": 4}}
    (path / "checkpoint.json").write_text(json.dumps(facts | {"next_batch": {}, "optimizer": {}, "model": {}}))
    return path


def test_what_cannot_be_resumed_is_said_before_anything_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert failure(folder, monkeypatch, "--resume") == (
        "expected a checkpoint (step-NNNNNN) or a folder of some, but runs/tiny/checkpoints is no folder"
    )
    assert "'steps=9'; put --resume last, or write --resume=FOLDER" in failure(
        folder, monkeypatch, "--resume", "steps=9"
    )
    first, last = checkpoint_of(folder, 4), checkpoint_of(folder, 6)
    assert failure(folder, monkeypatch, "--resume") == (
        "runs/tiny/checkpoints/step-000006 has 6 steps behind it, and the run has 6; say steps=N"
    )
    assert f"has later checkpoints than {first}: {last.name}; remove them, or give the run another --name" in failure(
        folder, monkeypatch, f"--resume={first}"
    )


def test_a_run_does_not_begin_where_checkpoints_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_of(folder, 4)
    assert failure(folder, monkeypatch) == (
        "runs/tiny/checkpoints has checkpoints of an earlier run: step-000004; go on with --resume, remove them, or "
        "give the run another --name"
    )


def test_the_recorder_keeps_what_was_before(tmp_path: Path) -> None:
    config = RunConfig(output=str(tmp_path), name="run")
    config.folder.mkdir()
    for name, first in (("metrics", 1), ("plans", 1)):
        text = "".join(f'{{"step": {first + index}}}\n' for index in range(4))
        (config.folder / f"{name}.jsonl").write_text(text + '{"st')
    with Recorder(config, is_writer=True, steps_done=2) as recorder:
        recorder.open()
    assert lines(config.folder / "metrics.jsonl") == [{"step": 1}, {"step": 2}]
    assert lines(config.folder / "plans.jsonl") == [{"step": 1}, {"step": 2}]
    with Recorder(config, is_writer=True) as recorder:
        recorder.open()
    assert not (config.folder / "metrics.jsonl").read_text()


def test_nothing_is_saved_unless_asked_for() -> None:
    assert RunConfig().checkpoint == CheckpointConfig(every=None, keep=2, background=False)
    with pytest.raises(InvalidInput, match="every"):
        CheckpointConfig(every=0)
