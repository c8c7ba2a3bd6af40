"""Cost profiles as values: what a micro-batch costs under a scheme, and how many tokens it may hold.

Cost of a micro-batch M, per stage slot, forward and backward together (Hydraulis, arXiv 2412.07894, section 4):
`t_M = sum over s in M of (a s^2 + b s) + c`, in ms, s in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hgraph.errors import InvalidInput

__all__ = ["Profile", "SchemeCost"]


@dataclass(frozen=True, slots=True)
class SchemeCost:
    """Coefficients of one scheme: a [ms/token^2], b [ms/token], c [ms/micro-batch]; `max_tokens` per micro-batch."""

    a: float
    b: float
    c: float
    max_tokens: int

    def __post_init__(self) -> None:
        if min(self.a, self.b, self.c) < 0 or not all(x < float("inf") for x in (self.a, self.b, self.c)):
            raise InvalidInput(f"scheme cost: expected finite a, b, c of 0 or more, got {self.a}, {self.b}, {self.c}")
        if self.max_tokens < 1:
            raise InvalidInput(f"scheme cost: expected max_tokens of 1 or more, got {self.max_tokens}")

    def sequence_ms(self, length: int) -> float:
        """Returns what a sequence of `length` tokens adds to its micro-batch."""
        return (self.a * length + self.b) * length

    def micro_batch_ms(self, lengths: Sequence[int]) -> float:
        """Returns the time of one micro-batch in one stage slot."""
        return sum(map(self.sequence_ms, lengths)) + self.c


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs by scheme text (`str(Scheme)`), and the bridge time of each strategy in ms (0 where unknown).

    `absent` says of schemes that were profiled, but that no micro-batch can run, why that is so.
    """

    schemes: Mapping[str, SchemeCost]
    bridge_ms: Mapping[str, float]
    absent: Mapping[str, str] = field(default_factory=dict)

    def cost(self, scheme: object) -> SchemeCost:
        """Returns the cost of a scheme; an error names the schemes there are, or says why this one is not there."""
        try:
            return self.schemes[str(scheme)]
        except KeyError:
            why = self.absent.get(str(scheme))
            text = f"scheme {scheme} cannot be used: {why}" if why is not None else f"no cost for scheme {scheme}"
            raise InvalidInput(f"profile: {text}; it has {sorted(self.schemes)}") from None
