"""Placements: what one axis of a device mesh does to a tensor.

The words are those of `torch.distributed.tensor` (`Shard`, `Replicate`, `Partial`), extended by explicit sizes and
kept free of torch, so that the planner's process need not import it.

Text form: `R`, `S(0)`, `S(0:3,2,2)` (explicit sizes, one per position along the axis), `P` (sum), `P(max)`.

Invariants
----------
- A dim is not negative; explicit sizes are not negative.
- `parse_placement(str(p)) == p`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hgraph.errors import InvalidAnnotation

__all__ = ["Partial", "Placement", "Replicate", "Shard", "balanced_sizes", "parse_placement"]

Reduce: TypeAlias = Literal["sum", "max"]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every position along the axis holds the same values."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Positions along the axis hold consecutive pieces of dim `dim`.

    `sizes` gives the length of each piece; without it the split is balanced (`balanced_sizes`).
    """

    dim: int
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise InvalidAnnotation(f"Shard: expected a dim of 0 or more, got {self.dim}; count dims from the front")
        if self.sizes is not None:
            object.__setattr__(self, "sizes", tuple(int(size) for size in self.sizes))
            if any(size < 0 for size in self.sizes):
                raise InvalidAnnotation(f"Shard({self.dim}): expected sizes of 0 or more, got {self.sizes}")

    def split(self, length: int, parts: int) -> tuple[int, ...]:
        """Returns the lengths of the `parts` pieces of a dim of `length` elements."""
        if self.sizes is None:
            return balanced_sizes(length, parts)
        if len(self.sizes) != parts or sum(self.sizes) != length:
            raise InvalidAnnotation(
                f"{self}: expected {parts} sizes that sum to {length}, "
                f"got {len(self.sizes)} sizes that sum to {sum(self.sizes)}"
            )
        return self.sizes

    def __str__(self) -> str:
        if self.sizes is None:
            return f"S({self.dim})"
        return f"S({self.dim}:{','.join(map(str, self.sizes))})"


@dataclass(frozen=True, slots=True)
class Partial:
    """Positions along the axis hold terms; the value is their reduction (`sum` or `max`)."""

    reduce: Reduce = "sum"

    def __post_init__(self) -> None:
        if self.reduce not in ("sum", "max"):
            raise InvalidAnnotation(f"Partial: expected a reduction 'sum' or 'max', got {self.reduce!r}")

    def __str__(self) -> str:
        return "P" if self.reduce == "sum" else f"P({self.reduce})"


Placement: TypeAlias = Replicate | Shard | Partial


def balanced_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Returns `parts` lengths that sum to `length`; the first `length % parts` are one longer (6 over 4: 2,2,1,1)."""
    quotient, remainder = divmod(length, parts)
    return tuple(quotient + (position < remainder) for position in range(parts))


_SHARD = re.compile(r"S\((\d+)(?::([\d,\s]+))?\)")


def parse_placement(text: str) -> Placement:
    """Returns the placement that `str` writes as `text`."""
    text = text.strip()
    if text == "R":
        return Replicate()
    if text in ("P", "P(sum)"):
        return Partial()
    if text == "P(max)":
        return Partial("max")
    if match := _SHARD.fullmatch(text):
        sizes = None if match[2] is None else tuple(int(part) for part in match[2].split(","))
        return Shard(int(match[1]), sizes)
    raise InvalidAnnotation(f"placement: expected R, S(dim), S(dim:sizes), P or P(max), got {text!r}")
