"""The configuration of a training run: typed values, read from YAML and dotted overrides, written back as YAML.

`docs/configuration.md` lists every key. Building one of these values with something wrong raises `InvalidInput`;
`load_config` raises `FileErrors` with every fault of the file and of the overrides in one report.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar, dataclass_transform

import pydantic.dataclasses
from pydantic import Field, ValidationError
from ruamel.yaml import YAML

from hgraph.errors import FileErrors, InvalidInput, Problem
from hgraph.yaml_report import STRICT, Document, Key, key_text, problems_of, read_document, read_text, validate
from runtime.corpus.config import CorpusConfig
from runtime.models.llama_config import LlamaConfig
from strategies.ahead import PlanAhead
from strategies.options import PlannerOptions

if TYPE_CHECKING:
    from runtime.optimizer import AdamW

__all__ = [
    "BridgeConfig",
    "CalibrationConfig",
    "CheckpointConfig",
    "MemoryConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PlannerConfig",
    "RunConfig",
    "load_config",
    "parse_config",
    "write_config",
]

Positive: TypeAlias = Annotated[int, Field(ge=1)]
Count: TypeAlias = Annotated[int, Field(ge=0)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
AboveZero: TypeAlias = Annotated[float, Field(gt=0)]
ZeroOrMore: TypeAlias = Annotated[float, Field(ge=0)]

Settings = TypeVar("Settings")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def settings(cls: type[Settings]) -> type[Settings]:
    """Returns `cls` as a frozen dataclass that checks the types and bounds of its fields when it is built."""
    built: Any = pydantic.dataclasses.dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)(cls)
    build = built.__init__

    @functools.wraps(build)
    def checked(self: Settings, **values: object) -> None:
        try:
            build(self, **values)
        except ValidationError as error:
            faults = [": ".join(filter(None, [key_text(key), text])) for key, text in problems_of(error, built)]
            raise InvalidInput(f"{cls.__name__}: " + "; ".join(faults)) from None

    built.__init__ = checked
    return built


@settings
class ModelConfig:
    """The model: sizes of the Llama-style decoder that comes along, or a function of the user that makes one.

    `factory` is `module:function`; it is called with `arguments` and returns an `nn.Module`. `vocab_size` is said in
    both cases, to check token ids against it; a factory that needs it takes it from its own arguments.
    """

    vocab_size: Positive = 4096
    hidden: Positive = 256
    layers: Positive = 4
    heads: Positive = 8
    kv_heads: Positive = 4
    ffn: Positive = 688
    rope_base: AboveZero = 10_000.0
    norm_eps: AboveZero = 1e-5
    tie_embeddings: bool = False
    factory: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.factory is not None:
            self._check_factory(self.factory)
            return
        if self.arguments:
            raise InvalidInput("`arguments` are for `factory`, which is not given; the sizes are keys of their own")
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise InvalidInput(
                f"expected hidden to be an even multiple of heads, got hidden={self.hidden}, heads={self.heads}"
            )
        if self.heads % self.kv_heads:
            raise InvalidInput(
                f"expected heads to be a multiple of kv_heads, got heads={self.heads}, kv_heads={self.kv_heads}"
            )

    def _check_factory(self, factory: str) -> None:
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", factory):
            raise InvalidInput(f"expected a factory such as package.module:function, got {factory!r}")
        default = LlamaConfig()
        for item in fields(LlamaConfig):
            if item.name != "vocab_size" and getattr(self, item.name) != getattr(default, item.name):
                raise InvalidInput(f"`{item.name}` has no effect beside `factory`; give it under `arguments`")

    def llama(self) -> LlamaConfig:
        """Returns the sizes as what `Llama` is built from."""
        return LlamaConfig(**{item.name: getattr(self, item.name) for item in fields(LlamaConfig)})


@settings
class OptimizerConfig:
    """AdamW with a warm-up and a cosine: lr rises over `warmup_steps`, then falls to `min_lr_ratio` * lr.

    Without `warmup_steps`, a quarter of the run, at most 10 steps.

    `total_steps` is where the cosine ends (None: the steps of the run). `max_grad_norm` bounds the global gradient
    norm (None: no bound). `no_decay` are patterns of parameter names without weight decay.
    """

    lr: AboveZero = 1e-3
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: AboveZero = 1e-8
    weight_decay: ZeroOrMore = 0.1
    max_grad_norm: AboveZero | None = 1.0
    warmup_steps: Count | None = None
    total_steps: Positive | None = None
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    no_decay: tuple[str, ...] = ("*norm*", "*.bias")

    def __post_init__(self) -> None:
        warmup, total = self.warmup_steps, self.total_steps
        if warmup is not None and total is not None and warmup >= total:
            raise InvalidInput(
                f"expected warmup_steps below total_steps, got {self.warmup_steps} and {self.total_steps}"
            )

    def adamw(self, steps: int) -> AdamW:
        """Returns the settings as what the program takes, for a run of `steps` steps."""
        from runtime.optimizer import AdamW  # with torch, which reading a configuration needs not

        total_steps = steps if self.total_steps is None else self.total_steps
        warmup_steps = min(10, total_steps // 4) if self.warmup_steps is None else self.warmup_steps
        return AdamW(**{**asdict(self), "total_steps": total_steps, "warmup_steps": warmup_steps})


@settings
class MemoryConfig:
    """What bounds the tokens of a micro-batch: a budget per rank in MiB, and limits by scheme text (`tp2.pp2: 4096`).

    A scheme that is named in `max_tokens` has that limit; every other one has what the budget leaves room for.
    """

    budget_mib: AboveZero | None = 256.0
    max_tokens: dict[str, Positive] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.budget_mib is None and not self.max_tokens:
            raise InvalidInput("expected budget_mib or max_tokens, got neither; a micro-batch needs some limit")


@settings
class PlannerConfig:
    """How hard to plan (as `PlannerOptions`), and how far ahead, by how many processes at most (as `PlanAhead`).

    `wait`: a step waits for its `best` plan, or takes whatever is there, at worst the `first` (not reproducible).
    """

    depth: Positive = 2
    workers: Positive = 2
    wait: Literal["best", "first"] = "best"
    gap: ZeroOrMore = 0.005
    only: str | None = None
    program: bool = True
    max_nodes: Count = 20
    max_programs: Count = 4
    require_all_ranks: bool = False

    def options(self) -> PlannerOptions:
        """Returns the settings of one plan."""
        values = {key: value for key, value in asdict(self).items() if key not in ("depth", "workers", "wait")}
        return PlannerOptions(**values)

    def ahead(self) -> PlanAhead:
        """Returns the settings of planning ahead."""
        return PlanAhead(self.depth, self.workers, self.wait)


@settings
class CalibrationConfig:
    """How costs are measured before the first step: micro-batches of one sequence of each of `lengths` tokens.

    Each is run `repeats` times, but once where that takes a second. Results are kept under `cache` (a folder; None:
    measured anew in each run).
    """

    lengths: Annotated[tuple[Positive, ...], Field(min_length=3)] = (64, 256, 1024)
    repeats: Positive = 3
    cache: str | None = ".cache/hydraulis"

    def __post_init__(self) -> None:
        if len(set(self.lengths)) < len(self.lengths):
            raise InvalidInput(f"expected distinct lengths, got {list(self.lengths)}")


@settings
class CheckpointConfig:
    """A checkpoint after `every` so many steps and after the last one (None: none), of which the last `keep` stay.

    With `background` it is written while training goes on.
    """

    every: Positive | None = None
    keep: Positive | None = 2
    background: bool = False


@settings
class BridgeConfig:
    """How weights and gradients travel: in buckets of up to `bucket_mb` megabytes a rank, over the links of `cluster`.

    `cluster` is a file or a known name (`docs/clusters.md`); None: links are taken to be equal inside a node, and which
    ranks share one is what torchrun says.
    """

    bucket_mb: AboveZero = 25.0
    cluster: str | None = None


@settings
class RunConfig:
    """Everything that decides what a training run does.

    Paths that a file gives for what the run reads (`pool`, `data.paths`) are meant from the file's folder, those of
    overrides from the folder that the run is started in; so is what it writes (`output`, the caches).
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")] = "first-light"
    seed: Count = 0
    steps: Positive = 40
    num_processes: Positive = 4
    tokens_per_step: Positive = 8192
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    timeout_s: AboveZero = 120.0
    output: str = "runs"
    pool: str = "strategies.yaml"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: CorpusConfig = field(default_factory=CorpusConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    bridges: BridgeConfig = field(default_factory=BridgeConfig)

    def __post_init__(self) -> None:
        if self.data.vocab_size > self.model.vocab_size:
            raise InvalidInput(
                "expected model.vocab_size of at least data.vocab_size, "
                f"got {self.model.vocab_size} and {self.data.vocab_size}"
            )
        warmup = self.optimizer.warmup_steps
        if self.optimizer.total_steps is None and warmup is not None and warmup >= self.steps:
            raise InvalidInput(f"expected optimizer.warmup_steps below steps, got {warmup} and {self.steps}")

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return Path(self.output) / self.name

    @property
    def checkpoints(self) -> Path:
        """Where the run saves."""
        return self.folder / "checkpoints"


@dataclass(frozen=True, slots=True)
class _Override:
    """One setting of the command line; `number` counts from 1."""

    number: int
    key: Key
    value: Any

    def reaches(self, key: Key) -> bool:
        """Whether the value at `key` is, holds or lies in what this override sets."""
        common = min(len(key), len(self.key))
        return key[:common] == self.key[:common]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Returns the configuration in the file at `path`, changed by overrides such as `optimizer.lr=1e-3`.

    Values of overrides are YAML. Raises `FileErrors` with every fault of both, `InvalidInput` where there is no file.
    """
    return parse_config(read_text(str(path)), str(path), overrides, folder=Path(path).resolve().parent)


def parse_config(
    text: str, name: str = "<text>", overrides: Sequence[str] = (), *, folder: Path | None = None
) -> RunConfig:
    """Returns the configuration in `text`; as `load_config`, with `name` for messages and paths meant from `folder`."""
    document = read_document(text, name)
    if folder is not None:
        _resolve_paths(document.data, folder)
    parsed, problems = _parse_overrides(overrides)
    sound = [override for override in parsed if _apply(document.data, override, problems)]
    if folder is not None:
        _resolve_paths(document.data, Path.cwd())
    try:
        config = validate(RunConfig, document.data)
    except ValidationError as error:
        problems += [_located(document, sound, key, text) for key, text in problems_of(error, RunConfig)]
    if problems:
        raise FileErrors(name, problems)
    return config


def write_config(config: RunConfig) -> str:
    """Returns `config` as YAML with every key, defaults included; it reads as an equal configuration."""
    writer = YAML()
    writer.width = 10_000
    text = io.StringIO()
    writer.dump(_plain(asdict(config)), text)
    return text.getvalue()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _resolve_paths(data: Any, folder: Path) -> None:
    """Makes the paths of what a run reads independent of the folder that it is started in; wrong types are left."""
    if not isinstance(data, dict):
        return
    data["pool"] = _resolved(data.get("pool", "strategies.yaml"), folder)
    corpus = data.get("data")
    if isinstance(corpus, dict) and isinstance(corpus.get("paths"), list):
        corpus["paths"] = [_resolved(path, folder) for path in corpus["paths"]]


def _resolved(path: Any, folder: Path) -> Any:
    return str((folder / path).resolve()) if isinstance(path, str) else path


def _parse_overrides(texts: Iterable[str]) -> tuple[list[_Override], list[Problem]]:
    overrides, problems = [], []
    for number, text in enumerate(texts, start=1):
        key, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
            message = f"expected key=value, such as optimizer.lr=1e-3, got {text!r}"
            problems.append(Problem(0, f"override {number}", message))
            continue
        try:
            data = read_document(value, key).data if value.strip() else None
        except FileErrors as error:
            problems.extend(Problem(0, f"override {number}: {key}", problem.message) for problem in error.problems)
            continue
        overrides.append(_Override(number, tuple(key.split(".")), data))
    return overrides, problems


def _apply(data: Any, override: _Override, problems: list[Problem]) -> bool:
    """Sets what `override` says in `data`; returns whether there was a place for it."""
    for depth, part in enumerate(override.key[:-1]):
        data = data.setdefault(part, {}) if isinstance(data, dict) else None
        if not isinstance(data, dict):
            where = key_text(override.key[: depth + 1])
            message = f"expected a section at {where}, got a single value; set {where} itself"
            problems.append(Problem(0, f"override {override.number}: {key_text(override.key)}", message))
            return False
    if not isinstance(data, dict):
        return False
    data[override.key[-1]] = override.value
    return True


def _located(document: Document, overrides: Sequence[_Override], key: Key, message: str) -> Problem:
    """Returns a fault at `key` as one of the last override that reaches it, else as one of the file."""
    reaching = [override for override in overrides if key and override.reaches(key)]
    if reaching and (key not in document.lines or len(reaching[-1].key) <= len(key)):
        return Problem(0, f"override {reaching[-1].number}: {key_text(key)}", message)
    return Problem(document.line(key), key_text(key), message)
