"""Texts of schemes: read back, and what is no scheme; what can be planned and not compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hgraph.errors import FileErrors, InvalidInput, NotSupported
from hgraph.scheme_text import parse_scheme
from hgraph.strategy import Override, Scheme, Stage
from hgraph.strategy_file import load_pool
from runtime.cli.options import read_pool
from runtime.cli.train import check_pool
from runtime.config import parse_config
from runtime.program import compile
from tests.captures import shared_capture, shared_compile_scheme, shared_normalized
from tests.models import gpt, language_loss
from tests.small_pools import pool, strategy

U = Scheme.uniform
REFUSED = r"^context parallelism: cp=2 is not there yet; use cp: 1$"

WRITTEN = [
    (U(2), "tp2"),
    (U(4, cp=2), "tp4.cp2"),
    (U(4, 2, cp=2), "tp4.cp2.pp2"),
    (U(1, 2, [3, 1], cp=4), "tp1.cp4.pp2(3,1)"),
    (Scheme((Stage(3, 2), Stage(1, 1, 2))), "tp3+tp1.cp2(2,1)"),
    (U(2, 2, schedule="gpipe"), "tp2.pp2:gpipe"),
]


@pytest.mark.parametrize(("scheme", "text"), WRITTEN)
def test_texts(scheme: Scheme, text: str) -> None:
    assert str(scheme) == text
    assert parse_scheme(text) == scheme


stages = st.builds(Stage, st.integers(1, 16), st.none(), st.integers(1, 4))
overrides = st.builds(
    Override,
    st.sampled_from(["embed.weight", "layers.[12].mlp", "*"]),
    st.sampled_from(["0[]", "0-1[S(0)] + 2[] @ S(0)"]),
)


@given(
    st.lists(stages, min_size=1, max_size=3),
    st.sampled_from(["1f1b", "gpipe"]),
    st.lists(overrides, max_size=2),
    st.booleans(),
)
def test_what_is_written_is_read(found: list[Stage], schedule: str, given: list[Override], split: bool) -> None:
    chosen = [Stage(stage.tp, number if split else None, stage.cp) for number, stage in enumerate(found)]
    if split and len(chosen) == 1:
        chosen = found  # the layers of a single stage are all there are, and not written
    scheme = Scheme(tuple(chosen), schedule, tuple(given))  # type: ignore[arg-type]
    assert parse_scheme(str(scheme)) == scheme


@pytest.mark.parametrize(
    "text",
    [
        *("", "tp0", "tp2.pp0", "tp02", "pp2", "tp2.cp0", "cp2.tp2", "tp2.pp2(1)", "tp2(1,1)", "tp2+tp1(1)", "tp2 "),
        *("tp2:1f1b", "tp2[x]", "tp2[x=0[]", "tp2.pp99999"),
    ],
)
def test_what_is_no_scheme(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"^scheme: expected .*, got "):
        parse_scheme(text)


@pytest.mark.parametrize(("text", "better"), [("tp2.cp1", "tp2"), ("tp2.pp1", "tp2"), ("tp2+tp2", "tp2.pp2")])
def test_another_text_of_a_scheme_is_told(text: str, better: str) -> None:
    with pytest.raises(InvalidInput, match=f"did you mean '{better}'"):
        parse_scheme(text)


def test_cp_is_refused_where_a_scheme_is_compiled() -> None:
    with pytest.raises(NotSupported, match=REFUSED):
        shared_compile_scheme(shared_normalized(shared_capture(gpt(), language_loss)), U(1, cp=2))


def test_cp_is_refused_before_the_model_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.program.capture", None)
    with pytest.raises(NotSupported, match=REFUSED):
        compile(gpt(), language_loss, pool(2, strategy("long", U(1, cp=2))))


def test_training_refuses_a_pool_with_cp_before_any_process_is_started(tmp_path: Path) -> None:
    (tmp_path / "pool.yaml").write_text("version: 1\nranks: 2\nstrategies: [{name: long, replicas: [{cp: 2}]}]\n")
    config = parse_config("{num_processes: 2, pool: pool.yaml}", folder=tmp_path)
    text = r"line 3: strategies\[0\].replicas\[0\].cp: context parallelism is not there yet, got cp=2; use cp: 1"
    with pytest.raises(FileErrors, match=text):
        check_pool(config)
    with pytest.raises(FileErrors, match=text):
        read_pool(config, None)
    assert str(load_pool(config.pool).schemes[0]) == "tp1.cp2", "plans may speak of it"
