"""Reads the overrides of a strategy document: patterns over names, with annotations as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hgraph.annotation import Annotation
from hgraph.errors import InvalidInput
from hgraph.model_facts import ModelFacts
from hgraph.shard_map import shard_map
from hgraph.strategy import Scheme
from hgraph.yaml_report import Key, Report, key_text, nearest

__all__ = ["FileOverride", "OverrideReader", "layout"]


@dataclass(frozen=True, slots=True)
class FileOverride:
    """An override as it stands in the file at `key`."""

    pattern: str
    annotation: Annotation
    key: Key


class OverrideReader:
    """Checks overrides against themselves, against the model where its facts are known, and against schemes."""

    def __init__(self, report: Report, model: ModelFacts | None) -> None:
        self.report = report
        self.model = model
        self.told: set[Key] = set()

    def read(self, items: object, key: Key) -> list[FileOverride]:
        """Returns the sound overrides of a mapping; faults of type are reported where the mapping is checked."""
        if not isinstance(items, Mapping):
            return []
        result = []
        for pattern, text in items.items():
            at = (*key, pattern)
            matched = self.parameters(pattern, at)
            annotation = self.annotation(text, at) if isinstance(text, str) else None
            if annotation is None:
                continue
            self.check_parameters(annotation, matched, at)
            result.append(FileOverride(pattern, annotation, at))
        return result

    def annotation(self, text: str, key: Key) -> Annotation | None:
        try:
            return Annotation.parse(text)
        except InvalidInput as error:
            self.report.add(key, str(error))
        except ValueError:
            self.report.add(key, f"annotation: expected text such as '0-1[S(0)] + 2[] @ R', got {text!r}")
        return None

    def parameters(self, pattern: str, key: Key) -> list[str]:
        """Returns the names of parameters that an override is for."""
        if self.model is None:
            return []
        names = (*self.model.parameter_names, *self.model.module_names)
        self.check_pattern(pattern, names, "parameter or module", key)
        return [name for name in self.model.parameter_names if fnmatchcase(name, pattern)]

    def check_pattern(self, pattern: str, names: Sequence[str], what: str, key: Key) -> None:
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = nearest(pattern.replace("*", "0"), names)
            self.report.add(key, f"the pattern matches no {what} of the model{hint}")

    def check_parameters(self, annotation: Annotation, names: Sequence[str], key: Key) -> None:
        shapes = {} if self.model is None else self.model.parameter_shapes
        if names and annotation.is_partial:
            self.report.add(key, f"expected a parameter {names[0]} without partial terms, got {annotation}")
        for shape in dict.fromkeys(shapes[name] for name in names if name in shapes):
            try:
                shard_map(annotation, shape)
            except InvalidInput as error:
                name = next(name for name in names if shapes.get(name) == shape)
                self.report.add(key, f"{error} (parameter {name} of shape {list(shape)})")

    def check_ranks(self, override: FileOverride, scheme: Scheme, key: Key) -> None:
        """Notes an override that names ranks which the replica at `key` does not have; once for each override."""
        beyond = [rank for rank in override.annotation.ranks if rank >= scheme.num_ranks]
        if not beyond or override.key in self.told:
            return
        self.told.add(override.key)
        message = f"rank {beyond[0]} is out of range; ranks here are counted from 0 within the replica, and "
        message += f"{key_text(key[2:])} ({layout(scheme)}) has {scheme.num_ranks}"
        shared = override.key[: len(key)] != key
        self.report.add(override.key, message + ("; move the override into the replica it is for" if shared else ""))


def layout(scheme: Scheme) -> str:
    """Returns the short text of a scheme without its overrides."""
    return str(Scheme(scheme.stages, scheme.schedule))
