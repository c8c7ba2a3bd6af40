"""What a proposal is asked for, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from hgraph.errors import InvalidInput
from hgraph.strategy import Pool
from strategies.scheme_table import Layout

__all__ = ["Proposal", "ProposalOptions", "ProposedStrategy", "usual_batches"]


@dataclass(frozen=True, slots=True)
class ProposalOptions:
    """How large a pool, and how hard to look for it.

    `size`: strategies in the pool, exactly where so many help; None: as many as gain, `most` at most. `gain`: the share
    of the mean step time that one more strategy has to save. `kept`: candidates kept of each batch. `finalists`: how
    many candidates the planner judges. `reach`: it plans those whose estimate is at most this above the least (0.05 =
    5 %), as long as replicas times sequences of all plans together are below `max_work`; what remains is judged by its
    estimate.
    """

    size: int | None = None
    most: int = 8
    gain: float = 0.001
    kept: int = 12
    finalists: int = 24
    reach: float = 0.05
    max_work: int = 10_000_000

    def __post_init__(self) -> None:
        for name, value in (("size", self.size), ("most", self.most), ("kept", self.kept)):
            if value is not None and value < 1:
                raise InvalidInput(f"propose: expected {name} of 1 or more, got {value}")
        for name in ("gain", "reach", "finalists", "max_work"):
            if not getattr(self, name) >= 0:
                raise InvalidInput(f"propose: expected {name} of 0 or more, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class ProposedStrategy:
    """One strategy of the pool: the share of the batches in which it is the fastest, and the mean in ms without it.

    None where the others cannot hold every batch.
    """

    name: str
    layout: Layout
    longest: int
    share: float
    without_ms: float | None


@dataclass(frozen=True, slots=True)
class Proposal:
    """A pool and what was found about it; all times are means over the sampled batches, in ms, without bridges.

    `means_ms`: of the best pool of 1, 2, ... strategies. `static_ms`: of the best single layout of equal replicas,
    named `static`; None where none holds every batch. `every_ms`: of all candidates together, as estimated.
    `num_planned` counts plans of the planner, `idle` ranks that no replica can use.
    """

    pool: Pool
    strategies: tuple[ProposedStrategy, ...]
    mean_ms: float
    means_ms: tuple[float, ...]
    static: str
    static_ms: float | None
    every_ms: float
    num_batches: int
    num_candidates: int
    num_planned: int
    idle: int = 0
    interrupted: bool = False


def usual_batches(tokens: int) -> int:
    """Returns how many batches of `tokens` tokens to sample: together 25.6 million tokens, but 16 to 128 batches."""
    return min(max(25_600_000 // tokens, 16), 128)
