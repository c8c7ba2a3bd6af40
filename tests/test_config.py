"""The configuration of a run: typed, overridable, written back, and every fault in one report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from pathlib import Path

import pytest

from hgraph.errors import FileErrors, InvalidInput
from runtime.config import (
    CalibrationConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    PlannerConfig,
    RunConfig,
    load_config,
    parse_config,
    settings,
    write_config,
)
from runtime.models.llama import LlamaConfig
from runtime.optimizer import AdamW
from strategies.options import PlannerOptions

FULL = """\
name: short
steps: 3
dtype: float64
model: {hidden: 64, layers: 2, heads: 4, kv_heads: 2, ffn: 96, rope_base: 1e4, tie_embeddings: true}
data: {kind: jsonl, paths: [a.jsonl], max_length: null}
optimizer:
  betas: [0.9, 0.99]
  warmup_steps: 1
  max_grad_norm: null
memory:
  budget_mib: null
  max_tokens: {tp1: 1024, tp2.pp2: 4096}
planner: {depth: 3, gap: 0, only: tp4}
calibration: {lengths: [32, 64, 128], cache: null}
"""


def complaints(text: str, overrides: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(FileErrors) as error:
        parse_config(text, "run.yaml", overrides)
    return [str(problem) for problem in error.value.problems]


def test_a_file_reads_as_values_of_the_right_type() -> None:
    config = parse_config(FULL)
    assert config.name == "short" and config.steps == 3 and config.dtype == "float64"
    assert config.seed == 0 and config.num_processes == 4
    assert config.model.llama() == LlamaConfig(4096, 64, 2, 4, 2, 96, 10_000.0, 1e-5, True)
    assert config.data.paths == ("a.jsonl",) and config.data.max_length is None
    assert config.optimizer.betas == (0.9, 0.99) and config.optimizer.max_grad_norm is None
    assert config.memory == MemoryConfig(budget_mib=None, max_tokens={"tp1": 1024, "tp2.pp2": 4096})
    assert config.planner == PlannerConfig(depth=3, gap=0, only="tp4")
    assert config.calibration == CalibrationConfig(lengths=(32, 64, 128), cache=None)
    assert config.folder == Path("runs") / "short"


@pytest.mark.parametrize("config", [RunConfig(), parse_config(FULL)], ids=["defaults", "full"])
def test_what_is_written_reads_as_an_equal_configuration(config: RunConfig) -> None:
    text = write_config(config)
    assert parse_config(text) == config
    assert write_config(parse_config(text)) == text


def test_a_value_is_frozen_and_checked_however_it_is_built() -> None:
    config = RunConfig()
    with pytest.raises(FrozenInstanceError):
        config.steps = 5  # type: ignore[misc]
    with pytest.raises(InvalidInput, match="^RunConfig: steps: expected a value of 1 or more, got 0$"):
        replace(config, steps=0)
    with pytest.raises(
        InvalidInput, match="^OptimizerConfig: lr: expected a number, got text 'fast'; eps: expected a "
    ):
        OptimizerConfig(lr="fast", eps=0)  # type: ignore[arg-type]


def test_defaults_are_those_of_what_they_are_for() -> None:
    assert ModelConfig().llama() == LlamaConfig()
    assert PlannerConfig().options() == PlannerOptions()
    assert OptimizerConfig(lr=1.0).adamw(40) == AdamW(
        1.0, warmup_steps=10, total_steps=40, no_decay=("*norm*", "*.bias")
    )
    assert OptimizerConfig(total_steps=20).adamw(30).total_steps == 20
    assert {item.name for item in fields(LlamaConfig)} <= {item.name for item in fields(ModelConfig)}


def test_overrides_are_typed_like_the_file() -> None:
    overrides = (
        "optimizer.lr=1e-3",
        "steps=7",
        "model.layers=3",
        "calibration.lengths=[8, 16, 32]",
        "planner.only=null",
    )
    config = parse_config(FULL, overrides=(*overrides, "memory.max_tokens={tp1: 5}", "name=other", "steps=8"))
    assert config.optimizer.lr == 1e-3 and config.optimizer.betas == (0.9, 0.99)
    assert config.steps == 8 and config.model.layers == 3 and config.planner.only is None
    assert config.calibration.lengths == (8, 16, 32)
    assert config.memory.max_tokens == {"tp1": 5} and config.name == "other"


def test_paths_are_meant_from_where_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    (there / "run.yaml").write_text("pool: pools/small.yaml\ndata: {kind: text, paths: [notes, ../more.txt]}\n")
    config = load_config(there / "run.yaml")
    assert config.pool == str(there / "pools" / "small.yaml")
    assert config.data.paths == (str(there / "notes"), str(tmp_path / "more.txt"))
    assert config.output == "runs" and config.data.cache == ".cache/hydraulis"
    assert load_config(there / "run.yaml", ["pool=mine.yaml"]).pool == str(here / "mine.yaml")
    (there / "run.yaml").write_text("steps: 20\n")
    assert load_config(Path("..") / "there" / "run.yaml").pool == str(there / "strategies.yaml")
    (here / "again.yaml").write_text(write_config(config))
    assert load_config("again.yaml") == config


SECTION_FAULTS: list[tuple[Callable[[], object], str]] = [
    (
        lambda: ModelConfig(hidden=30),
        "ModelConfig: expected hidden to be an even multiple of heads, got hidden=30, heads=8",
    ),
    (
        lambda: ModelConfig(heads=8, kv_heads=3),
        "ModelConfig: expected heads to be a multiple of kv_heads, got heads=8, kv_heads=3",
    ),
    (
        lambda: ModelConfig(factory="my_models"),
        "ModelConfig: expected a factory such as package.module:function, got 'my_models'",
    ),
    (
        lambda: ModelConfig(factory="my.models:make", layers=3),
        "ModelConfig: `layers` has no effect beside `factory`; give it under `arguments`",
    ),
    (
        lambda: ModelConfig(arguments={"depth": 3}),
        "ModelConfig: `arguments` are for `factory`, which is not given; the sizes are keys of their own",
    ),
    (
        lambda: MemoryConfig(budget_mib=None),
        "MemoryConfig: expected budget_mib or max_tokens, got neither; a micro-batch needs some limit",
    ),
    (
        lambda: MemoryConfig(max_tokens={"tp1": 0}),
        "MemoryConfig: max_tokens.tp1: expected a value of 1 or more, got 0",
    ),
    (
        lambda: OptimizerConfig(warmup_steps=5, total_steps=4),
        "OptimizerConfig: expected warmup_steps below total_steps, got 5 and 4",
    ),
    (
        lambda: OptimizerConfig(betas=(0.9, 1.0)),
        "OptimizerConfig: betas[1]: expected a value below 1, got 1.0",
    ),
    (
        lambda: OptimizerConfig(lr=float("nan")),
        "OptimizerConfig: lr: expected a finite number, got nan",
    ),
    (
        lambda: CalibrationConfig(lengths=(8, 8, 16)),
        "CalibrationConfig: expected distinct lengths, got [8, 8, 16]",
    ),
    (
        lambda: RunConfig(steps=9, optimizer=OptimizerConfig(warmup_steps=10)),
        "RunConfig: expected optimizer.warmup_steps below steps, got 10 and 9",
    ),
    (
        lambda: RunConfig(model=ModelConfig(vocab_size=300)),
        "RunConfig: expected model.vocab_size of at least data.vocab_size, got 300 and 4000",
    ),
    (
        lambda: RunConfig(name="a/b"),
        "RunConfig: name: expected text that matches ^[A-Za-z0-9][\\w.-]*$, got text 'a/b'",
    ),
]


@pytest.mark.parametrize(("build", "message"), SECTION_FAULTS, ids=[message for _, message in SECTION_FAULTS])
def test_a_fault_of_a_value(build: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        build()
    assert str(error.value) == message


def test_a_factory_takes_arguments() -> None:
    config = parse_config("model: {factory: 'my.models:make', arguments: {depth: 3, names: [a]}, vocab_size: 5000}")
    assert config.model.factory == "my.models:make"
    assert config.model.arguments == {"depth": 3, "names": ["a"]}


FILE_FAULTS = [
    ("", "line 1: expected a mapping, got an empty file"),
    ("[]", "line 1: expected a mapping, got a list"),
    ("\nsteps: many", "line 2: steps: expected an integer, got text 'many'"),
    ("\nseed: -1", "line 2: seed: expected a value of 0 or more, got -1"),
    (
        "\n\ndtype: float16",
        "line 3: dtype: expected 'float32', 'float64' or 'bfloat16', got text 'float16'; "
        "did you mean 'bfloat16' or 'float64' or 'float32'?",
    ),
    ("optimizer:\n  lr: '1e-3'", "line 2: optimizer.lr: expected a number, got text '1e-3'; write it without quotes"),
    ("optimizer:\n  betas: [0.9]", "line 2: optimizer.betas[1]: expected a value here"),
    ("optimizer:\n  betas: [0.9, 0.9, 0.9]", "line 2: optimizer.betas: expected a list of 2 or fewer items, got 3"),
    ("model:\n  tie_embeddings: 1", "line 2: model.tie_embeddings: expected true or false, got 1"),
    ("model:\n  hidden: 30", "line 1: model: expected hidden to be an even multiple of heads, got hidden=30, heads=8"),
    ("data:\n  kind: text", "line 1: data: corpus: the kind text needs at least one path"),
    (
        "data: {kind: texts}",
        "line 1: data.kind: expected 'stdlib', 'jsonl', 'text' or 'tokens', got text 'texts'; did you mean 'text'?",
    ),
    (
        "planner:\n  node_limit: 5",
        "line 2: planner.node_limit: unknown key; the keys here are depth, workers, wait, gap, "
        "only, program, max_nodes, max_programs, require_all_ranks",
    ),
    ("planner:", "line 1: planner: expected a mapping, got nothing"),
    ("steps: 2\noptimizer: {warmup_steps: 10}", "line 1: expected optimizer.warmup_steps below steps, got 10 and 2"),
]


@pytest.mark.parametrize(("text", "message"), FILE_FAULTS)
def test_a_fault_of_a_file(text: str, message: str) -> None:
    assert complaints(text) == [message]


OVERRIDE_FAULTS = [
    ("steps", "override 1: expected key=value, such as optimizer.lr=1e-3, got 'steps'"),
    ("optimizer..lr=1", "override 1: expected key=value, such as optimizer.lr=1e-3, got 'optimizer..lr=1'"),
    ("steps=", "override 1: steps: expected an integer, got nothing"),
    ("steps=1.5", "override 1: steps: expected an integer, got 1.5"),
    (
        "optimiser.lr=1",
        "override 1: optimiser: unknown key; the keys here are name, seed, steps, num_processes, "
        "tokens_per_step, dtype, timeout_s, output, pool, model, data, optimizer, memory, planner, "
        "calibration, checkpoint, bridges; did you mean 'optimizer'?",
    ),
    (
        "optimizer.lrr=1",
        "override 1: optimizer.lrr: unknown key; the keys here are lr, betas, eps, weight_decay, "
        "max_grad_norm, warmup_steps, total_steps, min_lr_ratio, no_decay; did you mean 'lr'?",
    ),
    ("optimizer=3", "override 1: optimizer: expected a mapping, got 3"),
    ("seed.of=3", "override 1: seed.of: expected a section at seed, got a single value; set seed itself"),
    ("optimizer.betas=[0.9, x]", "override 1: optimizer.betas[1]: expected a number, got text 'x'"),
    (
        "seed=[1",
        "override 1: seed: YAML syntax, column 3: expected ',' or ']', but got '<stream end>' (while parsing a "
        "flow sequence that starts on line 1); check brackets, quotes, and that items of one list start in one "
        "column",
    ),
]


@pytest.mark.parametrize(("override", "message"), OVERRIDE_FAULTS)
def test_a_fault_of_an_override(override: str, message: str) -> None:
    assert complaints("name: a\nseed: 4\n", (override,)) == [message]


def test_every_fault_of_file_and_overrides_is_in_one_report() -> None:
    text = "steps: 0\noptimizer: {lr: -1}\nmodel:\n  headz: 4\n  headz: 5\n"
    with pytest.raises(FileErrors) as error:
        parse_config(text.replace("  headz: 5\n", ""), "run.yaml", ["seed=1", "planner.gap=-1", "nonsense"])
    assert str(error.value).splitlines() == [
        "run.yaml: 5 problems",
        "  run.yaml: override 2: planner.gap: expected a value of 0 or more, got -1",
        "  run.yaml: override 3: expected key=value, such as optimizer.lr=1e-3, got 'nonsense'",
        "  run.yaml: line 1: steps: expected a value of 1 or more, got 0",
        "  run.yaml: line 2: optimizer.lr: expected a value above 0, got -1",
        "  run.yaml: line 4: model.headz: unknown key; the keys here are vocab_size, hidden, layers, heads, kv_heads, "
        "ffn, rope_base, norm_eps, tie_embeddings, factory, arguments; did you mean 'heads' or 'kv_heads'?",
    ]
    assert complaints(text) == ["line 5: model.headz: the key appears twice; the first is on line 4"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as error:
        load_config(tmp_path / "run.yaml")
    assert (
        str(error.value) == f"{tmp_path / 'run.yaml'}: expected a file that can be read, got: No such file or directory"
    )


def table_rows(config: object, prefix: str = "") -> list[str]:
    """Returns the beginning of the row of each key in the page of the docs: its name and its default."""
    rows = []
    for item in fields(config):  # type: ignore[arg-type]
        value, key = getattr(config, item.name), prefix + item.name
        if is_dataclass(value):
            rows += table_rows(value, f"{key}.")
        else:
            rows.append(f"| `{key}` | `{value if isinstance(value, str) else json.dumps(value)}` |")
    return rows


def test_the_docs_name_every_key_with_its_default() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "configuration.md").read_text()
    assert [row for row in table_rows(RunConfig()) if row not in page] == []
    assert page.count("\n| `") == len(table_rows(RunConfig())), "a row of a key that is not there"


def test_settings_keep_what_a_dataclass_is() -> None:
    @settings
    class Small:
        """A value."""

        count: int = 1

    assert Small(count=2) == Small(count=2) and hash(Small()) == hash(Small())
    with pytest.raises(InvalidInput, match="Small: count: expected an integer, got true"):
        Small(count=True)
