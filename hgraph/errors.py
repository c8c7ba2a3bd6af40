"""The one family of exceptions.

`HydraulisError` is the root. What a user gave wrongly is also a `ValueError` (`InvalidInput` and below), so that
callers who know nothing of this package still catch it. Our own slips are plain `assert`s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "CaptureError",
    "FileErrors",
    "HydraulisError",
    "InvalidAnnotation",
    "InvalidInput",
    "NonFiniteLoss",
    "NotSupported",
    "PlanError",
    "Problem",
    "RankFailed",
    "RuleError",
    "VerificationError",
]


class HydraulisError(Exception):
    """Root of every error this package raises on purpose."""


class InvalidInput(HydraulisError, ValueError):
    """A value, file or setting that the user gave is wrong; the text says what was expected and what was got."""


class InvalidAnnotation(InvalidInput):
    """An annotation that breaks one of its invariants (`docs/concepts.md`)."""


class CaptureError(InvalidInput):
    """The model or loss cannot be traced into one graph that holds for every batch; names the module and line."""


class RuleError(InvalidInput):
    """An operator without a sharding rule, or one that its rule refuses; names the op, module and line."""


class NotSupported(HydraulisError, NotImplementedError):
    """Something that is meant to exist later and is not there yet."""


class PlanError(HydraulisError):
    """A step plan, reshard plan or schedule breaks a property that its checker proves; names the property."""


class VerificationError(HydraulisError):
    """A graph breaks an invariant between two passes, or a result differs from the reference."""


class NonFiniteLoss(HydraulisError):
    """The loss or a gradient is not finite; state is as before the step. Names step, strategy, replica and ids."""


class RankFailed(HydraulisError):
    """Another rank failed or died; names the rank and, where known, its first error."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a file: where it is (`line` from 1, `key` as a dotted path) and what to do about it.

    Line 0 is for what was not written in the file, such as a setting of the command line.
    """

    line: int
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (f"line {self.line}" if self.line else "", self.key, self.message) if part)


class FileErrors(InvalidInput):
    """Every fault of one file in one report.

    Attributes: `path` of the file as the user wrote it, `problems` in order of line.
    """

    def __init__(self, path: str, problems: Sequence[Problem]) -> None:
        self.path = path
        self.problems = tuple(sorted(problems, key=lambda problem: (problem.line, problem.key)))
        count = len(self.problems)
        head = f"{path}: {count} problem{'s' if count != 1 else ''}"
        super().__init__("\n".join([head, *(f"  {path}: {problem}" for problem in self.problems)]))
