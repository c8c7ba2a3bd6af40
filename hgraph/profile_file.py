"""Profile files: costs and memory of the schemes of one model on one kind of device, as YAML in and out.

`docs/profiles.md` is the page for users. Reading finds every fault of a file in one go
(`hgraph/profile_file_reader.py`); what was read and written reads as an equal value, and writes the same text. JSON is
YAML, so a profile may be written in it too.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from hgraph.errors import FileErrors
from hgraph.memory_model import DeviceSizes, MemoryModel, ModelSizes
from hgraph.profile_file_reader import VERSION, ProfileReport, read_profile_document
from hgraph.scheme_profile import FitError, ProfileFile, SchemeProfile
from hgraph.shipped import read_named, shipped_names
from hgraph.yaml_report import read_document

__all__ = [
    "FitError",
    "ProfileFile",
    "SchemeProfile",
    "check_profile_text",
    "known_profiles",
    "parse_profile_file",
    "profile_file_text",
    "read_profile_file",
    "write_profile_file",
]


def known_profiles() -> tuple[str, ...]:
    """Returns the names of the profiles that come with this package."""
    return shipped_names("profiles", ".yaml")


def read_profile_file(path_or_name: str | os.PathLike[str]) -> ProfileFile:
    """Returns the profile in the file at a path, or one that comes with this package, by name (`llama-32b.h20`).

    Raises `FileErrors` with every fault of the file, `InvalidInput` where there is neither such a file nor such a name.
    """
    text, is_name = read_named(path_or_name, "profiles", ".yaml", "profile", (".yaml", ".yml", ".json"))
    return parse_profile_file(text, f"{os.fspath(path_or_name)}.yaml" if is_name else os.fspath(path_or_name))


def parse_profile_file(text: str, name: str = "<text>") -> ProfileFile:
    """Returns the profile that `text` describes; `name` is what messages call it. Raises `FileErrors`."""
    report = check_profile_text(text, name)
    if report.profile is None:
        raise FileErrors(name, report.problems)
    return report.profile


def check_profile_text(text: str, name: str = "<text>") -> ProfileReport:
    """Returns everything there is to say about `text`: its faults, or the profile where there are none."""
    try:
        document = read_document(text, name)
    except FileErrors as error:
        return ProfileReport(name, None, error.problems)
    return read_profile_document(document)


def write_profile_file(path: str | os.PathLike[str], profile: ProfileFile) -> None:
    """Writes `profile` to `path` by renaming, so that no half file is ever seen; folders are made as needed."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    temporary.write_text(profile_file_text(profile), encoding="utf-8")
    temporary.replace(target)


def profile_file_text(profile: ProfileFile) -> str:
    """Returns the canonical text of `profile`; what has its default is left out."""
    entries = CommentedMap(version=VERSION)
    _put(entries, name=profile.name, source=profile.source, model=_model_entry(profile.model))
    _put(entries, device=_device_entry(profile.device))
    entries["schemes"] = CommentedMap((name, _scheme_entry(scheme)) for name, scheme in profile.schemes.items())
    _put(entries, memory=_memory_entry(profile.memory))
    _put(entries, bridge_ms=CommentedMap((name, float(ms)) for name, ms in profile.bridge_ms.items()))
    _put(entries, notes=list(profile.notes))
    writer = YAML()
    writer.width = 10_000
    writer.indent(mapping=2, sequence=4, offset=2)
    text = io.StringIO()
    writer.dump(entries, text)
    return text.getvalue()


def _put(entries: CommentedMap, **values: Any) -> None:
    """Adds what is there: no None, no empty text, list or mapping."""
    for key, value in values.items():
        if value is not None and value != "" and value != [] and value != {}:
            entries[key] = value


def _model_entry(model: ModelSizes | None) -> CommentedMap | None:
    if model is None:
        return None
    entry = CommentedMap(layers=model.layers, hidden=model.hidden, ffn_hidden=model.ffn_hidden)
    _put(entry, heads=model.heads, kv_heads=model.kv_heads, vocab=model.vocab)
    _put(entry, gated=None if model.gated else False, source=model.source)
    return entry


def _device_entry(device: DeviceSizes | None) -> CommentedMap | None:
    if device is None:
        return None
    entry = CommentedMap(name=device.name, memory_mib=_number(device.memory_mib), per_node=device.per_node)
    _put(entry, peak_tflops=None if device.peak_tflops is None else _number(device.peak_tflops), source=device.source)
    return entry


def _scheme_entry(scheme: SchemeProfile) -> CommentedMap:
    entry = CommentedMap(a=float(scheme.a), b=float(scheme.b), c=float(scheme.c), origin=scheme.origin)
    _put(entry, max_tokens=scheme.max_tokens)
    if scheme.memory:
        entry["fixed_bytes"] = _one_or_list([_number(stage.fixed_bytes) for stage in scheme.memory])
        entry["token_bytes"] = _one_or_list([_number(stage.token_bytes) for stage in scheme.memory])
    if scheme.fit is not None:
        fit = scheme.fit
        entry["fit"] = _on_one_line(CommentedMap(median=float(fit.median), worst=float(fit.worst), points=fit.points))
    return _on_one_line(entry)


def _memory_entry(memory: MemoryModel | None) -> CommentedMap | None:
    if memory is None:
        return None
    entry = CommentedMap()
    for key in ("budget_mib", "context_mib", "reserve_mib", "optimizer_bytes"):
        value = getattr(memory, key)
        _put(entry, **{key: _number(value) if value else None})
    _put(entry, token_multiple=None if memory.token_multiple == 1 else memory.token_multiple)
    closed = memory.transformer
    if closed is not None:
        entry["transformer"] = CommentedMap(
            activation_bytes=_on_one_line(
                CommentedMap((f"tp{tp}", _number(value)) for tp, value in closed.activation_bytes.items())
            ),
            state_bytes=_number(closed.state_bytes),
            optimizer_share=float(closed.optimizer_share),
            embedding_bytes=_number(closed.embedding_bytes),
            split_embedding_bytes=_number(closed.split_embedding_bytes),
        )
    _put(entry, source=memory.source)
    return entry


def _one_or_list(values: list[float | int]) -> Any:
    return values[0] if len(values) == 1 else _on_one_line(CommentedSeq(values))


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else float(value)


def _on_one_line(entries: Any) -> Any:
    assert isinstance(entries, CommentedMap | CommentedSeq)
    entries.fa.set_flow_style()
    return entries
