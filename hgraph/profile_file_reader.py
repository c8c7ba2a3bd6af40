"""Reads a profile document into a `ProfileFile`, or finds everything that is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from hgraph.errors import InvalidInput, Problem
from hgraph.memory_model import DeviceSizes, MemoryModel, ModelSizes, SchemeMemory, TransformerMemory
from hgraph.scheme_profile import FitError, Origin, ProfileFile, SchemeProfile
from hgraph.scheme_text import parse_scheme
from hgraph.yaml_report import STRICT, Document, Key, Report, describe

__all__ = ["VERSION", "ProfileReport", "read_profile_document"]

VERSION = 1

Count: TypeAlias = Annotated[int, Field(ge=1)]
AboveZero: TypeAlias = Annotated[float, Field(gt=0)]
ZeroOrMore: TypeAlias = Annotated[float, Field(ge=0)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """What was found in a profile file: the profile (None if there are faults) and the faults."""

    path: str
    profile: ProfileFile | None
    problems: tuple[Problem, ...] = ()


@checked_dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class _ProfileEntry:
    version: int
    name: str = ""
    source: str = ""
    model: Any = None
    device: Any = None
    schemes: Any
    memory: Any = None
    bridge_ms: dict[str, ZeroOrMore] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@checked_dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class _ModelEntry:
    layers: Count
    hidden: Count
    ffn_hidden: Count
    heads: Count
    vocab: Count
    kv_heads: Count | None = None
    gated: bool = True
    source: str = ""


@checked_dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class _DeviceEntry:
    name: str
    memory_mib: AboveZero
    per_node: Count
    peak_tflops: AboveZero | None = None
    source: str = ""


@checked_dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class _FitEntry:
    median: ZeroOrMore
    worst: ZeroOrMore
    points: Count


@checked_dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class _SchemeEntry:
    a: ZeroOrMore
    b: ZeroOrMore
    c: ZeroOrMore
    origin: Origin = "measured"
    max_tokens: Count | None = None
    fixed_bytes: Any = None
    token_bytes: Any = None
    fit: _FitEntry | None = None


@checked_dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class _TransformerEntry:
    activation_bytes: Annotated[dict[str, AboveZero], Field(min_length=1)]
    state_bytes: AboveZero
    optimizer_share: Share
    embedding_bytes: AboveZero
    split_embedding_bytes: AboveZero


@checked_dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class _MemoryEntry:
    budget_mib: AboveZero | None = None
    context_mib: ZeroOrMore = 0.0
    reserve_mib: ZeroOrMore = 0.0
    token_multiple: Count = 1
    optimizer_bytes: AboveZero | None = None
    transformer: _TransformerEntry | None = None
    source: str = ""


def read_profile_document(document: Document) -> ProfileReport:
    """Returns the profile that `document` describes, or all its faults."""
    reader = _ProfileReader(document)
    profile = reader.profile()
    problems = sorted(reader.report.problems, key=lambda problem: (problem.line, problem.key))
    return ProfileReport(document.path, None if problems else profile, tuple(problems))


class _ProfileReader:
    def __init__(self, document: Document) -> None:
        self.data = document.data
        self.report = Report(document)

    def profile(self) -> ProfileFile | None:
        entry = self.report.check(_ProfileEntry, self.data, ())
        if not isinstance(self.data, Mapping):
            return None
        version = self.data.get("version")
        if type(version) is int and version != VERSION:
            self.report.add(("version",), f"expected version {VERSION}, got {version}; this release reads no other")
        model, device, memory = self.model(), self.device(), self.memory()
        schemes = self.schemes()
        if entry is None or self.report.problems:
            return None
        for name, scheme in schemes.items():
            try:
                ProfileFile({name: scheme}, {}, "", model, device, memory)
            except InvalidInput as error:
                self.report.add(("schemes", name), str(error).removeprefix("profile: "))
        if self.report.problems:
            return None
        return ProfileFile(
            schemes, entry.bridge_ms, entry.name, model, device, memory, entry.source, tuple(entry.notes)
        )  # fmt: skip

    def model(self) -> ModelSizes | None:
        if self.data.get("model") is None:
            return None
        entry = self.report.check(_ModelEntry, self.data["model"], ("model",))
        if entry is None:
            return None
        return ModelSizes(
            entry.layers, entry.hidden, entry.ffn_hidden, entry.heads, entry.vocab,
            entry.kv_heads, entry.gated, entry.source,
        )  # fmt: skip

    def device(self) -> DeviceSizes | None:
        if self.data.get("device") is None:
            return None
        entry = self.report.check(_DeviceEntry, self.data["device"], ("device",))
        if entry is None:
            return None
        return DeviceSizes(entry.name, entry.memory_mib, entry.per_node, entry.peak_tflops, entry.source)

    def memory(self) -> MemoryModel | None:
        if self.data.get("memory") is None:
            return None
        entry = self.report.check(_MemoryEntry, self.data["memory"], ("memory",))
        if entry is None:
            return None
        if entry.budget_mib is None and self.data.get("device") is None:
            self.report.add(
                ("memory",), "expected budget_mib, or a `device` whose memory_mib is the budget, got neither"
            )
        if entry.transformer is not None and self.data.get("model") is None:
            self.report.add(("memory", "transformer"), "expected `model` with the sizes that this form needs, got none")
        return MemoryModel(
            entry.budget_mib, entry.context_mib, entry.reserve_mib, entry.token_multiple, entry.optimizer_bytes,
            self.transformer(entry.transformer), entry.source,
        )  # fmt: skip

    def transformer(self, entry: _TransformerEntry | None) -> TransformerMemory | None:
        if entry is None:
            return None
        activations: dict[int, float] = {}
        for name, value in entry.activation_bytes.items():
            if re.fullmatch(r"tp[1-9]\d{0,5}", name):
                activations[int(name[2:])] = value
                continue
            key = ("memory", "transformer", "activation_bytes", name)
            self.report.add(key, f"expected a tensor-parallel degree such as tp2, got {name!r}")
        if not activations:
            return None
        return TransformerMemory(
            activations, entry.state_bytes, entry.optimizer_share, entry.embedding_bytes, entry.split_embedding_bytes
        )

    def schemes(self) -> dict[str, SchemeProfile]:
        data = self.data.get("schemes")
        if "schemes" not in self.data:
            return {}
        if not isinstance(data, Mapping) or not data:
            got = "an empty mapping" if isinstance(data, Mapping) else describe(data)
            self.report.add(
                ("schemes",), f"expected costs by scheme, such as tp2: {{a: ..., b: ..., c: ...}}, got {got}"
            )
            return {}
        found = {name: self.scheme(name, item, ("schemes", name)) for name, item in data.items()}
        return {name: scheme for name, scheme in found.items() if scheme is not None}

    def scheme(self, name: str, item: object, key: Key) -> SchemeProfile | None:
        try:
            parse_scheme(name)
        except InvalidInput as error:
            self.report.add(key, str(error).removeprefix("scheme: "))
        entry = self.report.check(_SchemeEntry, item, key)
        if entry is None:
            return None
        memory = self.stages(entry, key)
        if memory is None:
            return None
        return SchemeProfile(
            entry.a, entry.b, entry.c, entry.origin, entry.max_tokens, memory, self.fit(entry.fit, key)
        )  # fmt: skip

    def stages(self, entry: _SchemeEntry, key: Key) -> tuple[SchemeMemory, ...] | None:
        """Returns the memory of each stage that the file gives, or None where something is wrong with it."""
        before = len(self.report.problems)
        fixed = self.amounts(entry.fixed_bytes, (*key, "fixed_bytes"), "0 or more", 0.0)
        per_token = self.amounts(entry.token_bytes, (*key, "token_bytes"), "above 0", 5e-324)
        if len(fixed) != len(per_token):
            expected = "expected fixed_bytes and token_bytes for the same stages, or neither"
            self.report.add(key, f"{expected}, got {len(fixed)} and {len(per_token)}")
        if len(self.report.problems) > before:
            return None
        return tuple(map(SchemeMemory, fixed, per_token))

    def amounts(self, value: Any, key: Key, bound: str, least: float) -> list[float]:
        """Returns a number, or a list of them, as a list; none where there is none."""
        if value is None:
            return []
        items = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
        for index, item in items:
            if type(item) not in (int, float) or not least <= item < float("inf"):
                at = key if index is None else (*key, index)
                self.report.add(at, f"expected a number of bytes, {bound}, got {describe(item)}")
        return [item for _, item in items]

    def fit(self, entry: _FitEntry | None, key: Key) -> FitError | None:
        if entry is None:
            return None
        if entry.worst < entry.median:
            self.report.add((*key, "fit"), f"expected worst of at least median, {entry.median}, got {entry.worst}")
            return None
        return FitError(entry.median, entry.worst, entry.points)
