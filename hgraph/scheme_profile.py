"""What a profile file says, as values: costs, origin and memory by scheme, and the profile of a job of n ranks.

Invariants
----------
- Keys are scheme texts (`str(Scheme)`); a, b, c are finite and 0 or more; `max_tokens`, where given, is 1 or more.
- The token limit of every scheme follows from `max_tokens`, from its own memory, or from the closed form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from hgraph.errors import InvalidInput
from hgraph.memory_model import MIB, DeviceSizes, MemoryModel, ModelSizes, SchemeMemory
from hgraph.profile import Profile, SchemeCost
from hgraph.scheme_text import parse_scheme

__all__ = ["FitError", "Origin", "ProfileFile", "SchemeProfile"]

Origin: TypeAlias = Literal["measured", "analytic"]


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative errors of a fit at `points` held-out points: 0.06 is 6 %."""

    median: float
    worst: float
    points: int

    def __post_init__(self) -> None:
        if not 0 <= self.median <= self.worst < float("inf") or self.points < 1:
            raise InvalidInput(
                "fit: expected 0 <= median <= worst and points of 1 or more, got "
                f"median {self.median}, worst {self.worst}, points {self.points}"
            )


@dataclass(frozen=True, slots=True)
class SchemeProfile:
    """Costs of one scheme as in `SchemeCost`, where they are from, and what bounds the tokens of a micro-batch.

    `memory` has an entry for each stage that may be the fullest.

    An explicit `max_tokens` counts before `memory`, and that before the file's closed form.
    """

    a: float
    b: float
    c: float
    origin: Origin = "measured"
    max_tokens: int | None = None
    memory: tuple[SchemeMemory, ...] = ()
    fit: FitError | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", tuple(self.memory))
        self.cost(1 if self.max_tokens is None else self.max_tokens)
        if self.origin not in ("measured", "analytic"):
            raise InvalidInput(f"scheme cost: expected origin 'measured' or 'analytic', got {self.origin!r}")

    def cost(self, max_tokens: int) -> SchemeCost:
        """Returns the costs with a token limit."""
        return SchemeCost(self.a, self.b, self.c, max_tokens)


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """Costs and memory by scheme text, and bridge times by strategy in ms, with the sizes they hold for."""

    schemes: Mapping[str, SchemeProfile]
    bridge_ms: Mapping[str, float] = field(default_factory=dict)
    name: str = ""
    model: ModelSizes | None = None
    device: DeviceSizes | None = None
    memory: MemoryModel | None = None
    source: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "notes", tuple(self.notes))
        if not self.schemes:
            raise InvalidInput("profile: expected at least one scheme, got none")
        for name in self.schemes:
            try:
                self.max_tokens(name, 1)
            except InvalidInput as error:
                raise InvalidInput(f"profile: {error}") from None

    @staticmethod
    def of(profile: Profile, **facts: object) -> ProfileFile:
        """Returns the file of a profile whose token limits are fixed."""
        schemes = {
            name: SchemeProfile(cost.a, cost.b, cost.c, max_tokens=cost.max_tokens)
            for name, cost in profile.schemes.items()
        }
        return ProfileFile(schemes, dict(profile.bridge_ms), **facts)  # type: ignore[arg-type]

    def max_tokens(self, scheme: object, num_ranks: int) -> int:
        """Returns the token limit of a scheme in a job of `num_ranks`; 0 or less where there is no room for a token."""
        name = str(scheme)
        if name not in self.schemes:
            raise InvalidInput(f"profile: no cost for scheme {name}; it has {sorted(self.schemes)}")
        own = self.schemes[name]
        if own.max_tokens is not None:
            return own.max_tokens
        if self.memory is None:
            raise InvalidInput(f"scheme {name} has no token limit: its memory is not known; give max_tokens")
        try:
            return self.memory.token_limit(parse_scheme(name), num_ranks, own.memory, self.model, self.device)
        except InvalidInput as error:
            raise InvalidInput(f"scheme {name} has no token limit: {error}") from None

    def profile(self, num_ranks: int) -> Profile:
        """Returns what planners take, for a job of `num_ranks` ranks over which optimizer states are spread.

        Schemes that leave no room for a token are not in it; `Profile.cost` says why.
        """
        if num_ranks < 1:
            raise InvalidInput(f"profile: expected num_ranks of 1 or more, got {num_ranks}")
        limits = {name: self.max_tokens(name, num_ranks) for name in self.schemes}
        fits = {name: own.cost(limits[name]) for name, own in self.schemes.items() if limits[name] >= 1}
        absent = {name: self._why_absent(num_ranks) for name, limit in limits.items() if limit < 1}
        return Profile(fits, dict(self.bridge_ms), absent)

    def _why_absent(self, num_ranks: int) -> str:
        assert self.memory is not None
        budget_mib = self.memory.budget_bytes(self.device) / MIB
        step = self.memory.token_multiple
        least = "a token" if step == 1 else f"the least micro-batch, {step} tokens,"
        return (
            f"states and weights leave no room for {least} in {budget_mib:,.0f} MiB per rank, with optimizer states "
            f"spread over {num_ranks} ranks"
        )
