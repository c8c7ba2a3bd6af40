"""Strategies as values: scheme (one replica's layout), replica, strategy, pool.

Invariants
----------
- A scheme has one `Stage` per pipeline stage; each stage has at least one rank; layer counts are not negative and,
  where given for one stage, are given for all.
- A replica has as many distinct ranks as its scheme needs; stage by stage they are consecutive in `Replica.ranks`.
- A rank belongs to at most one replica of a strategy; all ranks lie below the pool's `num_ranks`; names are unique.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hgraph.errors import InvalidInput, NotSupported
from hgraph.placements import balanced_sizes

__all__ = ["Override", "Pool", "Replica", "ScheduleName", "Scheme", "Stage", "Strategy", "check_compilable"]

ScheduleName: TypeAlias = Literal["1f1b", "gpipe"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage of a replica: its tensor- and context-parallel degrees and, where fixed, its layers.

    Plans, profiles and simulations speak of any `cp`; compiling refuses all but 1 (`check_compilable`).
    """

    tp: int = 1
    layers: int | None = None
    cp: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.cp < 1:
            raise InvalidInput(f"stage: expected tp and cp of 1 or more, got tp={self.tp}, cp={self.cp}")
        if self.layers is not None and self.layers < 0:
            raise InvalidInput(f"stage: expected a layer count of 0 or more, got {self.layers}")

    @property
    def num_ranks(self) -> int:
        return self.tp * self.cp

    def __str__(self) -> str:
        """Short text of the degrees: `tp2`, `tp4.cp2`."""
        return f"tp{self.tp}" + (f".cp{self.cp}" if self.cp > 1 else "")


@dataclass(frozen=True, slots=True)
class Override:
    """An explicit annotation for what `pattern` names, over the template.

    `pattern` is a glob over parameter names (`layers.*.mlp.up.weight`) or over module paths (`layers.1.mlp`), which
    then means the module's output activation. `annotation` is canonical text on ranks counted from 0 within the
    replica (`0-1[S(0)] + 2[] @ S(0)`).
    """

    pattern: str
    annotation: str


@dataclass(frozen=True, slots=True)
class Scheme:
    """cp, tp, pp and the layer split of one replica, with its schedule and overrides; ranks are counted from 0."""

    stages: tuple[Stage, ...]
    schedule: ScheduleName = "1f1b"
    overrides: tuple[Override, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        object.__setattr__(self, "overrides", tuple(self.overrides))
        if not self.stages:
            raise InvalidInput("scheme: expected at least one stage, got none")
        given = [stage.layers is not None for stage in self.stages]
        if any(given) and not all(given):
            raise InvalidInput("scheme: expected a layer count for every stage or for none")
        if self.schedule not in ("1f1b", "gpipe"):
            raise InvalidInput(f"scheme: expected schedule '1f1b' or 'gpipe', got {self.schedule!r}")

    @staticmethod
    def uniform(
        tp: int = 1, pp: int = 1, layers: Sequence[int] | None = None, *, cp: int = 1, **options: object
    ) -> Scheme:
        """Returns the scheme of `pp` stages with the same `tp` and `cp`; `layers` gives the layers of each stage."""
        counts = [None] * pp if layers is None else list(layers)
        if len(counts) != pp:
            raise InvalidInput(f"scheme: expected {pp} layer counts for pp={pp}, got {len(counts)}")
        return Scheme(tuple(Stage(tp, count, cp) for count in counts), **options)  # type: ignore[arg-type]

    @property
    def pp(self) -> int:
        return len(self.stages)

    @property
    def num_ranks(self) -> int:
        return sum(stage.num_ranks for stage in self.stages)

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """Returns the ranks of a stage, counted from 0 within the replica."""
        first = sum(s.num_ranks for s in self.stages[:stage])
        return tuple(range(first, first + self.stages[stage].num_ranks))

    def layer_split(self, num_layers: int) -> tuple[int, ...]:
        """Returns the number of layers per stage for a model of `num_layers` layers (balanced where not given)."""
        counts = tuple(stage.layers for stage in self.stages)
        if any(count is None for count in counts):
            return balanced_sizes(num_layers, self.pp)
        return tuple(count for count in counts if count is not None)

    def __str__(self) -> str:
        """Short text, the key of profiles and caches: `tp2`, `tp4.cp2.pp2`, `tp1.pp2(3,1)`, `tp3+tp1(2,1)`.

        `hgraph.scheme_text.parse_scheme` reads it.
        """
        degrees = [str(stage) for stage in self.stages]
        if len(set(degrees)) == 1:
            text = degrees[0] + (f".pp{self.pp}" if self.pp > 1 else "")
        else:
            text = "+".join(degrees)
        if self.stages[0].layers is not None and self.pp > 1:
            text += f"({','.join(str(stage.layers) for stage in self.stages)})"
        if self.schedule != "1f1b":
            text += f":{self.schedule}"
        if self.overrides:
            text += "".join(f"[{o.pattern}={o.annotation}]" for o in self.overrides)
        return text


@dataclass(frozen=True, slots=True)
class Replica:
    """One model copy: a scheme on ordered global ranks (stage 0 first)."""

    scheme: Scheme
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        if len(self.ranks) != self.scheme.num_ranks or len(set(self.ranks)) != len(self.ranks):
            raise InvalidInput(
                f"replica {self.scheme}: expected {self.scheme.num_ranks} distinct ranks, got {list(self.ranks)}"
            )

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """Returns the global ranks of a stage."""
        return tuple(self.ranks[rank] for rank in self.scheme.stage_ranks(stage))


@dataclass(frozen=True, slots=True)
class Strategy:
    """The set of replicas of an iteration."""

    name: str
    replicas: tuple[Replica, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "replicas", tuple(self.replicas))
        if not self.replicas:
            raise InvalidInput(f"strategy {self.name}: expected at least one replica, got none")
        owner: dict[int, int] = {}
        for index, replica in enumerate(self.replicas):
            for rank in replica.ranks:
                if rank in owner:
                    raise InvalidInput(
                        f"strategy {self.name}: rank {rank} is in replica {owner[rank]} and in replica {index}"
                    )
                owner[rank] = index

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(rank for replica in self.replicas for rank in replica.ranks))

    def replica_of(self, rank: int) -> int | None:
        """Returns the index of the replica that holds `rank`, or None for an idle rank."""
        return next((index for index, replica in enumerate(self.replicas) if rank in replica.ranks), None)


@dataclass(frozen=True, slots=True)
class Pool:
    """The strategies compiled together, on ranks 0 to `num_ranks` - 1.

    `template` names the leaf annotations (`megatron`, `hf`) or gives them: glob over parameter names -> `column`,
    `row`, `vocab` or `replicate`. `optimizer_layout` is `spread` (dim 0 over all ranks).
    """

    num_ranks: int
    strategies: tuple[Strategy, ...]
    template: str | tuple[tuple[str, str], ...] = "megatron"
    optimizer_layout: str = "spread"

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategies", tuple(self.strategies))
        if not self.strategies:
            raise InvalidInput("pool: expected at least one strategy, got none")
        names = [strategy.name for strategy in self.strategies]
        for name in names:
            if names.count(name) > 1:
                raise InvalidInput(f"pool: strategy name {name!r} appears {names.count(name)} times")
        for strategy in self.strategies:
            for rank in strategy.ranks:
                if not 0 <= rank < self.num_ranks:
                    raise InvalidInput(
                        f"strategy {strategy.name}: rank {rank} is out of range; the pool has {self.num_ranks} ranks"
                    )

    def __getitem__(self, name: str) -> Strategy:
        for strategy in self.strategies:
            if strategy.name == name:
                return strategy
        raise InvalidInput(f"pool: no strategy {name!r}; there are {[s.name for s in self.strategies]}")

    def idle_ranks(self, name: str) -> tuple[int, ...]:
        """Returns the ranks that no replica of the strategy has."""
        named = set(self[name].ranks)
        return tuple(rank for rank in range(self.num_ranks) if rank not in named)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The distinct schemes, in order of first use."""
        return tuple(dict.fromkeys(replica.scheme for s in self.strategies for replica in s.replicas))


def check_compilable(scheme: Scheme) -> None:
    """Raises `NotSupported` for a scheme that plans may speak of but that nothing can run yet: cp above 1."""
    for stage in scheme.stages:
        if stage.cp != 1:
            raise NotSupported(f"context parallelism: cp={stage.cp} is not there yet; use cp: 1")
