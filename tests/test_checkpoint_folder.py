"""Folders of checkpoints: whole or not there; the last good one is found; changed models and data are named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hgraph.data import TokenDataset, global_batches
from hgraph.errors import InvalidInput
from hgraph.strategy import Pool, Scheme
from runtime.checkpoint.folder import begin, checkpoints_in, complete, find_checkpoint, keep_last, publish, temporary
from runtime.optimizer import AdamW
from runtime.program import Program
from tests.saved_runs import OPTIMIZER, assert_same_state, batches, state_of, train
from tests.saved_runs import model as saved_model
from tests.saved_runs import program as program_of
from tests.small_pools import pool, strategy

ONE, TWO = pool(1, strategy("tp1", Scheme.uniform())), pool(2, strategy("tp2", Scheme.uniform(2)))


def model(**sizes: object) -> nn.Module:
    """Returns a model of one layer, which is traced quickly."""
    return saved_model(**({"layers": 1} | sizes))


def program(pool: Pool, own: nn.Module | None = None, optimizer: AdamW = OPTIMIZER, **options: Any) -> Program:
    return program_of(pool, model() if own is None else own, optimizer, **options)


def write(folder: Path, step: int) -> Path:
    target = complete(folder, step)
    begin(target)
    (temporary(target) / "boxes").write_bytes(b"12345")
    publish(target, facts_after(step))
    return target


def facts_after(step: int) -> dict[str, Any]:
    """Returns the least that a checkpoint says beside its boxes."""
    integers = {"version": 1, "step_count": step, "optimizer_steps": step, "seed": 0}
    return {**integers, "next_batch": {}, "optimizer": {}, "model": {}, "data": None}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_last_complete_one_is_found(tmp_path: Path) -> None:
    written = [write(tmp_path, step) for step in (3, 12, 1_000_000, 6)]
    assert checkpoints_in(tmp_path) == [written[0], written[3], written[1], written[2]]
    assert find_checkpoint(tmp_path) == written[2]
    assert find_checkpoint(written[0]) == written[0]


def _cut(checkpoint: Path) -> None:
    (checkpoint / "boxes").write_bytes(b"123")


def _lose_boxes(checkpoint: Path) -> None:
    (checkpoint / "boxes").unlink()


def _lose_facts(checkpoint: Path) -> None:
    (checkpoint / "checkpoint.json").unlink()


def _cut_facts(checkpoint: Path) -> None:
    (checkpoint / "checkpoint.json").write_text('{"step_count": 6, "fil')


HARM = [
    (_cut, "boxes: expected 5 bytes, got 3"),
    (_lose_boxes, "boxes: expected 5 bytes, it is missing"),
    (_lose_facts, "there is no sound checkpoint.json"),
    (_cut_facts, "there is no sound checkpoint.json"),
]


@pytest.mark.parametrize(("harm", "text"), HARM)
def test_a_damaged_one_is_passed_over_and_refused_where_it_is_named(
    tmp_path: Path, harm: Callable[[Path], None], text: str
) -> None:
    good, bad = write(tmp_path, 3), write(tmp_path, 6)
    harm(bad)
    assert find_checkpoint(tmp_path) == good
    with pytest.raises(InvalidInput) as caught:
        find_checkpoint(bad)
    assert str(caught.value) == f"{bad} is not a complete checkpoint: {text}; name another one, or their folder"


FILES = {"boxes": 5}
OTHER_SHAPES: list[tuple[object, str]] = [
    ([1], "expected a mapping, got a list"),
    ("files", "expected a mapping, got text 'files'"),
    (None, "expected a mapping, got nothing"),
    ({}, "files: expected a mapping of names to sizes in bytes, got nothing"),
    ({"files": 3}, "files: expected a mapping of names to sizes in bytes, got 3"),
    ({"files": [1]}, "files: expected a mapping of names to sizes in bytes, got a list"),
    ({"files": {}}, "files: expected the files of the checkpoint, got none"),
    ({"files": {}, "version": 1}, "files: expected the files of the checkpoint, got none"),
    ({"files": {"boxes": "5"}}, "files: boxes: expected a size in bytes, got text '5'"),
    ({"files": {"boxes": True}}, "files: boxes: expected a size in bytes, got true"),
    ({"files": FILES}, "version: expected an integer, got nothing"),
    ({"files": FILES, "version": 1}, "step_count: expected an integer, got nothing"),
    ({"files": FILES, "version": 2, "step_count": "6"}, "step_count: expected an integer, got text '6'"),
    ({**facts_after(6), "files": FILES, "seed": None}, "seed: expected an integer, got nothing"),
    ({**facts_after(6), "files": FILES, "model": [1]}, "model: expected a mapping, got a list"),
    ({**facts_after(6), "files": FILES, "data": 3}, "data: expected a mapping or null, got 3"),
]


@pytest.mark.parametrize(("content", "reason"), OTHER_SHAPES)
def test_sound_json_of_another_shape_never_hides_the_good_one(tmp_path: Path, content: object, reason: str) -> None:
    good, bad = write(tmp_path, 3), write(tmp_path, 6)
    (bad / "checkpoint.json").write_text(json.dumps(content))
    assert find_checkpoint(tmp_path) == good
    assert checkpoints_in(tmp_path) == [good] and keep_last(tmp_path, 1) == []
    with pytest.raises(InvalidInput) as caught:
        find_checkpoint(bad)
    fault = f"checkpoint.json: {reason}"
    assert str(caught.value) == f"{bad} is not a complete checkpoint: {fault}; name another one, or their folder"
    shutil.rmtree(good)
    with pytest.raises(InvalidInput) as caught:
        find_checkpoint(tmp_path)
    assert str(caught.value) == (
        f"expected a checkpoint (step-NNNNNN) or a folder of some, but {tmp_path} holds none\n"
        f"  step-000006 is not complete: {fault}"
    )


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "../nothing"])
def test_names_that_no_file_has_are_missing(tmp_path: Path, name: str) -> None:
    bad = write(tmp_path, 6)
    (bad / "checkpoint.json").write_text(json.dumps({**facts_after(6), "files": {name: 5}}))
    with pytest.raises(InvalidInput, match="expected 5 bytes, it is missing"):
        find_checkpoint(bad)


def test_json_nested_too_deep_is_not_sound(tmp_path: Path) -> None:
    good, bad = write(tmp_path, 3), write(tmp_path, 6)
    (bad / "checkpoint.json").write_text("[" * 100_000 + "]" * 100_000)
    assert find_checkpoint(tmp_path) == good


def test_a_half_written_one_is_never_found(tmp_path: Path) -> None:
    target = complete(tmp_path, 6)
    begin(target)
    (temporary(target) / "boxes").write_bytes(b"12345")
    assert checkpoints_in(tmp_path) == []
    with pytest.raises(InvalidInput, match="expected a checkpoint .* or a folder of some, but .* holds none"):
        find_checkpoint(tmp_path)
    with pytest.raises(InvalidInput, match="not a complete checkpoint: it was not written to its end"):
        find_checkpoint(temporary(target))
    with pytest.raises(InvalidInput, match="is no folder"):
        find_checkpoint(tmp_path / "nowhere")
    begin(target)
    assert not list(temporary(target).iterdir()), "what was left of it is cleared"


def test_a_complete_one_is_not_written_over(tmp_path: Path) -> None:
    target = write(tmp_path, 3)
    with pytest.raises(InvalidInput, match="is there already; save into another folder, or remove it"):
        begin(target)


def test_the_last_ones_are_kept_and_others_left_alone(tmp_path: Path) -> None:
    for step in (3, 6, 9):
        write(tmp_path, step)
    begin(complete(tmp_path, 12))
    (tmp_path / "notes").mkdir()
    assert [path.name for path in keep_last(tmp_path, 2)] == ["step-000003"]
    assert names(tmp_path) == ["notes", "step-000006", "step-000009", "step-000012.tmp"]
    assert keep_last(tmp_path, 2) == []


def test_an_interrupted_removal_leaves_no_checkpoint_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (3, 6):
        write(tmp_path, step)

    def interrupted(path: Path) -> None:
        (path / "boxes").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        keep_last(tmp_path, 1)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-000006"]


@pytest.mark.parametrize("fails", ["json", "rename"])
def test_a_save_that_fails_late_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    target = write(tmp_path, 3)
    begin(complete(tmp_path, 6))

    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    if fails == "json":
        monkeypatch.setattr(json, "dump", full)
    else:
        monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space"):
        publish(complete(tmp_path, 6), {})
    assert find_checkpoint(tmp_path) == target


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after one step on two ranks."""
    folder, run = tmp_path_factory.mktemp("saved"), program(TWO)
    train(run, 1)
    return run.save(folder, batches=batches())


@pytest.fixture(scope="module")
def same() -> Program:
    return program(ONE)


def refusal(checkpoint: Path, run: Program, **options: Any) -> str:
    before = state_of(run)
    with pytest.raises(InvalidInput) as caught:
        run.load(checkpoint, **options)
    assert run.step_count == 0
    after = state_of(run)
    for kind, tensors in before.items():
        assert all(torch.equal(after[kind][name], tensor) for name, tensor in tensors.items())
    return str(caught.value).replace(str(checkpoint), "CHECKPOINT")


def _frozen() -> nn.Module:
    own = model()
    own.embed.weight.requires_grad_(False)
    return own


MODELS = [
    (lambda: model(ffn=26), ["layers.0.mlp.gate_proj.weight: shape [25, 24] in the checkpoint, [26, 24] in the model"]),
    (
        lambda: model(layers=0),
        ["layers.0.mlp.up_proj.weight: [25, 24] in the checkpoint, the model has no such parameter"],
    ),
    pytest.param(
        lambda: model(layers=2),
        ["layers.1.mlp.up_proj.weight: [25, 24] in the model, the checkpoint has no such parameter"],
        marks=pytest.mark.long,
    ),
    (_frozen, ["embed.weight: trained in the checkpoint, frozen in the model"]),
]


@pytest.mark.parametrize(("build", "lines"), MODELS)
def test_what_changed_in_the_model_is_named(saved: Path, build: Callable[[], nn.Module], lines: list[str]) -> None:
    text = refusal(saved, program(ONE, build()))
    assert text.startswith("CHECKPOINT is of another model:\n  ")
    for line in lines:
        assert f"\n  {line}" in text


@pytest.mark.case(103, 106)
def test_ties_on_one_side_alone_are_refused_with_both_names_and_the_ways_out(saved: Path, tmp_path: Path) -> None:
    tied = program(ONE, model(tie_embeddings=True))
    assert refusal(saved, tied) == (
        "CHECKPOINT is of another model:\n"
        "  embed.weight and head.weight: several parameters in the checkpoint, one (tied) in the model; leave them "
        "apart in the model too, or start anew from exported weights after choosing which of them to keep"
    )
    checkpoint = tied.save(tmp_path)
    assert refusal(checkpoint, program(ONE)) == (
        "CHECKPOINT is of another model:\n"
        "  embed.weight and head.weight: one parameter (tied) in the checkpoint, several in the model; tie them in "
        "the model too (assign one to the other), or start anew from weights that `export_weights` wrote from "
        "the tied model"
    )


def test_other_arithmetic_is_refused(saved: Path) -> None:
    single = program(ONE, model().float(), exact=False)
    text = refusal(saved, single)
    assert "master weights: torch.float64 in the checkpoint, torch.float32 now" in text


DATA = [
    (batches(seed=4), "seed: 3 in the checkpoint, 4 now"),
    (batches(length=24), "sequences: 25 in the checkpoint, 24 now"),
    (batches(first_token=2), "contents: "),
]


@pytest.mark.case(111)
@pytest.mark.parametrize(("other", "line"), DATA)
def test_what_changed_in_the_data_is_named(saved: Path, same: Program, other: Any, line: str) -> None:
    text = refusal(saved, same, batches=other)
    assert text.startswith("CHECKPOINT was trained on other data:\n  ")
    assert f"\n  {line}" in text


def test_batches_of_another_size_may_follow(saved: Path, tmp_path: Path) -> None:
    run, dataset = program(ONE), batches().dataset
    larger = global_batches(dataset, tokens_per_step=100, seed=3)
    run.load(saved, batches=larger)
    larger.start = run.next_batch
    first = next(iter(larger))
    assert first.ids == tuple(batches().order(0)[4 : 4 + len(first)].tolist())


def test_a_checkpoint_that_says_nothing_of_the_data_is_not_taken_for_the_same(tmp_path: Path) -> None:
    run = program(ONE)
    checkpoint = run.save(tmp_path)
    assert "was saved without `batches`" in refusal(checkpoint, run, batches=batches())
    run.load(checkpoint)


def test_another_version_is_refused(saved: Path, same: Program, tmp_path: Path) -> None:
    other = tmp_path / "step-000001"
    shutil.copytree(saved, other)
    facts = json.loads((other / "checkpoint.json").read_text())
    (other / "checkpoint.json").write_text(json.dumps({**facts, "version": 2}))
    assert refusal(other, same) == "CHECKPOINT: expected format version 1, got 2"


@pytest.mark.parametrize("harm", [{"next_batch": {"epoch": 0, "page": 1}}, {"model": {"dtype": "torch.float64"}}])
def test_entries_of_another_shape_leave_the_program_as_it_was(
    saved: Path, same: Program, tmp_path: Path, harm: dict[str, Any]
) -> None:
    other = tmp_path / "step-000001"
    shutil.copytree(saved, other)
    facts = json.loads((other / "checkpoint.json").read_text())
    (other / "checkpoint.json").write_text(json.dumps({**facts, **harm}))
    text = refusal(other, same)
    assert text.startswith("CHECKPOINT/checkpoint.json: expected what `save` writes, got something else (")
    assert text.endswith("; load another checkpoint")


def test_boxes_that_are_missing_leave_the_program_as_it_was(saved: Path, same: Program, tmp_path: Path) -> None:
    import pickle

    other = tmp_path / "step-000001"
    shutil.copytree(saved, other)
    metadata = pickle.loads((other / ".metadata").read_bytes())
    metadata.state_dict_metadata["exp_avg.embed.weight"].chunks.pop()
    (other / ".metadata").write_bytes(pickle.dumps(metadata))
    facts = json.loads((other / "checkpoint.json").read_text())
    facts["files"][".metadata"] = (other / ".metadata").stat().st_size
    (other / "checkpoint.json").write_text(json.dumps(facts))
    text = refusal(other, same)
    assert text == "checkpoint: exp_avg.embed.weight: 360 elements of ((0, 31), (0, 24)) are missing"


def test_settings_that_may_differ_are_told(saved: Path) -> None:
    run = program(ONE, model(rope_base=500.0), AdamW(lr=5e-4, warmup_steps=2, total_steps=9, no_decay=("*norm*",)))
    with pytest.warns(UserWarning) as caught:
        run.load(saved)
    (warning,) = caught
    lines = str(warning.message).splitlines()
    assert lines == [
        f"{saved}: what holds now differs:",
        "  optimizer lr: 0.001 in the checkpoint, 0.0005 now",
        "  optimizer max_grad_norm: 0.5 in the checkpoint, 1.0 now",
        "  the model or the loss computes something else than when the checkpoint was saved",
    ]
    assert OPTIMIZER.lr == 1e-3


def test_a_content_of_the_file_beside_the_boxes(saved: Path) -> None:
    facts = json.loads((saved / "checkpoint.json").read_text())
    assert list(facts) == [
        "version",
        "step_count",
        "optimizer_steps",
        "seed",
        "next_batch",
        "saved_by",
        "optimizer",
        "model",
        "data",
        "files",
    ]
    assert facts["next_batch"] == {"epoch": 0, "position": 4, "index": 1}
    assert set(facts["files"]) == {".metadata", "__0_0.distcp"}


def kill_while_saving(folder: Path, count: int, seed: int, *how: str) -> list[str]:
    """Has a process save again and again and kills it, `count` times; returns what was found after each."""
    command = [sys.executable, "-m", "tests.killed_saves", str(folder), str(count), str(seed), *how]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("count", "how"),
    [
        pytest.param(6, ("background",), marks=pytest.mark.long),
        pytest.param(40, (), marks=pytest.mark.long),
        pytest.param(40, ("background",), marks=pytest.mark.long),
    ],
)
def test_a_save_killed_at_any_moment_leaves_the_one_before(tmp_path: Path, count: int, how: tuple[str, ...]) -> None:
    lines = [line.split() for line in kill_while_saving(tmp_path, count, count, *how)]
    found, left = [line[0] for line in lines], {tuple(line[1:]) for line in lines}
    assert len(found) == count and set(found) <= {"step-000003", "step-000004"}
    assert "step-000003" in found, "some were killed before the end"
    assert count < 20 or len(left) > 1, "at several stages of the save"
    run = program(TWO)
    run.load(tmp_path, batches=batches())
    expected = program(ONE)
    train(expected, run.step_count)
    assert_same_state(state_of(run), state_of(expected))


def test_two_steps_are_not_equal() -> None:
    """The comparison above can fail."""
    first, second = program(ONE), program(ONE)
    train(first, 1)
    train(second, 2)
    with pytest.raises(AssertionError):
        assert_same_state(state_of(first), state_of(second))


def test_labels_of_the_data_count(saved: Path) -> None:
    rows = [batches().dataset.tokens(index).tolist() for index in range(25)]
    labelled = global_batches(TokenDataset(rows, rows), sequences_per_step=4, seed=3)
    assert "contents: " in refusal(saved, program(ONE), batches=labelled)
