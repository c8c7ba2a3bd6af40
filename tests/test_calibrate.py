"""Token limits from memory, and what calibration runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hgraph.data import Packed
from hgraph.errors import InvalidInput
from hgraph.profile import Profile
from hgraph.strategy import Replica, Scheme, Strategy
from runtime import calibrate as calibration
from runtime import measure
from runtime.calibrate import MemoryLimits, calibrate
from runtime.measure import micro_batch_counts
from runtime.memory import scheme_memory
from runtime.program import Program
from tests.captures import shared_capture, shared_compile_scheme, shared_normalized
from tests.models import gpt, language_loss, llama
from tests.small_pools import exact_program, pool, strategy

U = Scheme.uniform
UNEQUAL = pool(3, strategy("tp2, tp1", U(2), U()))


def measured(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, limits: MemoryLimits, **options: object
) -> tuple[Profile, dict[int, set[tuple[int, ...]]]]:
    """Calibrates; returns the profile, and the lengths that each replica was measured with."""
    ran: dict[int, set[tuple[int, ...]]] = {0: set(), 1: set()}
    run_once = measure._run_once

    def spy(program: Program, own: object, loads: list[tuple[int, ...]], chosen: object) -> tuple[list[float], float]:
        for index, load in enumerate(loads):
            ran[index].add(load)
        return run_once(program, own, loads, chosen)  # type: ignore[arg-type]

    monkeypatch.setattr(measure, "_run_once", spy)
    settings = {"profile": lambda program: calibrate(program, limits, lengths=(8, 16, 64), repeats=1)} | options
    return exact_program(model, language_loss, UNEQUAL, **settings).profile, ran


def test_a_scheme_with_a_small_limit_is_measured_beside_one_with_a_large_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = MemoryLimits(max_tokens={"tp1": 5, "tp2": 200})
    profile, ran = measured(monkeypatch, llama(layers=1, hidden=8, heads=2, kv_heads=1, ffn=5, vocab_size=7), limits)
    assert {name: cost.max_tokens for name, cost in profile.schemes.items()} == {"tp1": 5, "tp2": 200}
    assert all(cost.micro_batch_ms([5]) > 0 for cost in profile.schemes.values())
    assert ran[0] == {(8,), (16,), (64,), (8,) * 8}
    assert ran[1] == {(1,), (2,), (5,), (1,) * 5}


def test_no_sequence_is_longer_than_the_table_of_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = MemoryLimits(max_tokens={"tp1": 100, "tp2": 100})
    _, ran = measured(monkeypatch, gpt(layers=1, max_positions=40), limits)
    assert ran[0] == ran[1] == {(8,), (10,), (16,), (20,), (40,), (8,) * 8}


def test_what_was_measured_counts_until_calibration_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits, alone = MemoryLimits(max_tokens={"tp1": 9}), pool(1, strategy("one", U()))

    def kept(program: Program) -> Profile:
        return calibrate(program, limits, lengths=(2, 4, 9), repeats=1, cache=tmp_path)

    program = exact_program(gpt(layers=1), language_loss, alone, profile=kept)
    with monkeypatch.context() as patch:
        patch.setattr(measure, "_run_once", None)
        assert kept(program) == program.profile, "read, not measured"
    monkeypatch.setattr(calibration, "_VERSION", calibration._VERSION + 1)
    kept(program)
    assert len(list(tmp_path.glob("profile-*.yaml"))) == 2, "measured anew"


def test_fields_are_made_up() -> None:
    def loss(model: nn.Module, packed: Packed) -> Tensor:
        return language_loss(model, packed) + packed.fields["weight"].sum() + packed.fields["shift"].sum()

    example = {"weight": torch.ones(24, dtype=torch.float64), "shift": torch.ones(3, 2, dtype=torch.float64)}
    limits = MemoryLimits(max_tokens={"tp1": 9})
    program = exact_program(
        gpt(layers=1),
        loss,
        pool(1, strategy("one", U())),
        fields=example,
        profile=lambda program: calibrate(program, limits, lengths=(2, 4, 9), repeats=1),
    )
    assert program.profile.schemes["tp1"].max_tokens == 9


def test_gpipe_needs_a_limit_that_is_given() -> None:
    captured = shared_normalized(shared_capture(gpt(), language_loss))
    compiled = {name: shared_compile_scheme(captured, U(1, 2, schedule=name)) for name in ("1f1b", "gpipe")}
    kept = {name: [stage.in_flight for stage in scheme_memory(own, captured, 2)] for name, own in compiled.items()}
    assert kept == {"1f1b": [2, 1], "gpipe": [None, None]}
    both = pool(2, strategy("gpipe", U(1, 2, schedule="gpipe")))
    program = exact_program(gpt(), language_loss, both)
    (scheme,) = both.schemes
    text = r"memory: scheme tp1_?.?pp2.*gpipe: schedule gpipe keeps all micro-batches .* give .* memory\.max_tokens"
    with pytest.raises(InvalidInput, match=text):
        calibration.max_tokens_of(program, scheme, MemoryLimits())
    assert calibration.max_tokens_of(program, scheme, MemoryLimits(max_tokens={str(scheme): 12})) == 12
    alone = pool(1, strategy("gpipe", U(1, 1, schedule="gpipe")))
    assert calibration.max_tokens_of(exact_program(gpt(), language_loss, alone), alone.schemes[0], MemoryLimits()) > 0


def test_replicas_are_kept_busy_as_long_as_each_other() -> None:
    replicas = (
        Replica(Scheme.uniform(1, 2), (0, 1)),
        Replica(Scheme.uniform(1), (2,)),
        Replica(Scheme.uniform(2), (3, 4)),
    )
    unequal = Strategy("unequal", replicas)
    # 3 micro-batches of 100 tokens on 2 ranks are 150 a rank.
    assert micro_batch_counts(unequal, [(100,), (75,), (60, 40)]) == [3, 2, 3]
    assert micro_batch_counts(unequal, [(100,), (1,), (10_000,)]) == [8, 8, 1], "bounded where loads are very unequal"
