"""The settings of docs/results.md: models on clusters, length sets, context windows, tokens of a step; their pools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CLUSTER", "GROUPS", "VARIANTS", "Case", "Group", "cases"]

POOLS = Path(__file__).with_name("pools")
LENGTHS = ("commoncrawl-like", "github-like", "python-source", "web-docs")
WINDOWS = (16_384, 32_768)
CLUSTER = "8x8-a800"
VARIANTS = {
    "wider-tp": ("tp32",),
    "larger-schemes": ("tp4.cp2", "tp4.cp4", "tp8.cp2", "tp8.cp4", "tp16.cp2", "tp16.cp4", "tp32"),
}
"""Schemes for the longest sequences on 1,024 GPUs; nobody measured them, so their costs are analytic."""


@dataclass(frozen=True, slots=True)
class Group:
    """A model on a number of GPUs: tokens of a step, batches that are timed, and batches that a pool is proposed by."""

    name: str
    profile: str
    num_ranks: int
    tokens: tuple[int, ...]
    batches: int
    proposed_by: int


GROUPS = (
    Group("7b-32gpu", "llama-7b.a800-80gb", 32, (100_000, 200_000), 8, 64),
    Group("13b-32gpu", "llama-13b.a800-80gb", 32, (100_000, 200_000), 8, 64),
    Group("32b-64gpu", "llama-32b.a800-80gb", 64, (100_000, 200_000), 8, 64),
    Group("32b-1024gpu", "llama-32b.a800-80gb", 1_024, (1_600_000,), 4, 8),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One setting; `variant` names another pool of ours than the one proposed with the measured schemes."""

    group: Group
    lengths: str
    longest: int
    tokens: int
    variant: str = ""

    @property
    def name(self) -> str:
        return "/".join(
            part for part in (self.group.name, self.lengths, str(self.longest), str(self.tokens), self.variant) if part
        )

    @property
    def pool(self) -> Path:
        """The pool of our planner: proposed for this setting, or what `variant` says."""
        if self.variant == "published":
            return self.published
        window, tokens = f"{self.longest // 1024}k", f"{self.tokens // 1000}k"
        parts = (self.group.name, self.lengths, window, tokens, self.variant)
        return POOLS / "proposed" / f"{'.'.join(part for part in parts if part)}.yaml"

    @property
    def published(self) -> Path:
        """The published pool: one for the group, or one for each length set."""
        own = POOLS / f"{self.group.name}.{self.lengths}.published.yaml"
        return own if own.exists() else POOLS / f"{self.group.name}.published.yaml"

    @property
    def larger_schemes(self) -> tuple[str, ...]:
        """Schemes that are added to the measured ones."""
        return VARIANTS.get(self.variant, ())


def cases() -> Iterator[Case]:
    """Yields every setting of the page."""
    for group in GROUPS:
        for tokens in group.tokens:
            for longest in WINDOWS:
                for lengths in LENGTHS:
                    yield Case(group, lengths, longest, tokens)
                    if group.num_ranks == 1_024 and longest == WINDOWS[-1]:
                        for variant in ("published", *VARIANTS):
                            yield Case(group, lengths, longest, tokens, variant)
