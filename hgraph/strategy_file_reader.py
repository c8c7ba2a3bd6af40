"""Reads a strategy document into a `Pool`, or finds everything that is wrong with it.

A fault in one entry does not hide the others: each strategy, replica and stage is checked on its own, and checks that
need several of them run on those that are sound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from hgraph.errors import Problem
from hgraph.model_facts import ModelFacts
from hgraph.strategy import Override, Pool, Replica, ScheduleName, Scheme, Stage, Strategy
from hgraph.strategy_file_overrides import FileOverride, OverrideReader, layout
from hgraph.yaml_report import STRICT, Document, Key, Report, describe, key_text, nearest

__all__ = ["VERSION", "PoolReport", "read_pool"]

VERSION = 1
TEMPLATES = ("megatron", "hf")
TEMPLATE_KINDS = ("column", "row", "vocab", "replicate")

Degree: TypeAlias = Annotated[int, Field(ge=1)]
Layers: TypeAlias = Annotated[int, Field(ge=0)]
NonEmpty: TypeAlias = Annotated[tuple[Any, ...], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class PoolReport:
    """What was found in a strategy file: the pool (None if there are faults), the faults, and notes.

    Notes are no faults: they name what a file allows but its user may not have meant, such as idle ranks.
    """

    path: str
    pool: Pool | None
    problems: tuple[Problem, ...] = ()
    notes: tuple[Problem, ...] = ()

    def __str__(self) -> str:
        count = len(self.problems)
        head = f"{self.path}: {count or 'no'} problem{'' if count == 1 else 's'}"
        if self.pool is not None:
            head += f"; strategies: {len(self.pool.strategies)}, ranks: {self.pool.num_ranks}"
        problems = [f"  {self.path}: {problem}" for problem in self.problems]
        return "\n".join([head, *problems, *(f"  {self.path}: note: {note}" for note in self.notes)])


@checked_dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class _PoolEntry:
    version: int
    ranks: Degree
    template: Any = "megatron"
    optimizer_layout: Literal["spread"] = "spread"
    strategies: NonEmpty


@checked_dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class _StrategyEntry:
    name: Annotated[str, Field(min_length=1)]
    replicas: NonEmpty
    overrides: dict[str, str] = field(default_factory=dict)


@checked_dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class _ReplicaEntry:
    tp: Degree | None = None
    pp: Degree | None = None
    cp: Degree | None = None
    layers: tuple[Layers, ...] | None = None
    stages: NonEmpty | None = None
    schedule: ScheduleName = "1f1b"
    count: Degree | None = None
    ranks: NonEmpty | None = None
    overrides: dict[str, str] = field(default_factory=dict)


@checked_dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class _StageEntry:
    tp: Degree = 1
    cp: Degree = 1
    layers: Layers | None = None


@dataclass(frozen=True, slots=True)
class _Copies:
    """`count` replicas of one scheme, from the entry at `key`; `ranks` of each copy where the file gives them."""

    scheme: Scheme
    count: int
    ranks: tuple[tuple[int, ...], ...] | None
    key: Key


def read_pool(document: Document, model: ModelFacts | None, refuse_idle: bool, trainable: bool = False) -> PoolReport:
    """Returns the pool that `document` describes, with everything found on the way.

    With `trainable`, schemes that can be planned but not compiled are faults.
    """
    reader = _PoolReader(document, model, refuse_idle, trainable)
    pool = reader.pool()
    problems = sorted(reader.report.problems, key=lambda problem: (problem.line, problem.key))
    return PoolReport(document.path, None if problems else pool, tuple(problems), tuple(reader.notes.problems))


class _PoolReader:
    def __init__(self, document: Document, model: ModelFacts | None, refuse_idle: bool, trainable: bool) -> None:
        self.data = document.data
        self.report = Report(document)
        self.notes = Report(document)
        self.model = model
        self.refuse_idle = refuse_idle
        self.trainable = trainable
        self.overrides = OverrideReader(self.report, model)
        self.num_ranks: int | None = None
        self.owner: dict[int, Key] = {}  # of the strategy at hand: where the file names a rank

    def pool(self) -> Pool | None:
        entry = self.report.check(_PoolEntry, self.data, ())
        if not isinstance(self.data, Mapping):
            return None
        version = self.data.get("version")
        if type(version) is int and version != VERSION:
            self.report.add(("version",), f"expected version {VERSION}, got {version}; this release reads no other")
        self.num_ranks = _count(self.data.get("ranks"))
        template = self.template(self.data.get("template", "megatron"))
        entries = _items(self.data.get("strategies"))
        strategies = [self.strategy(item, ("strategies", index)) for index, item in enumerate(entries)]
        self.check_names(entries)
        if entry is None or self.report.problems:
            return None
        return Pool(entry.ranks, tuple(filter(None, strategies)), template, entry.optimizer_layout)

    def template(self, value: object) -> str | tuple[tuple[str, str], ...]:
        key: Key = ("template",)
        expected = "'megatron', 'hf', or a mapping of parameter-name patterns"
        if isinstance(value, str):
            if value not in TEMPLATES:
                self.report.add(key, f"expected {expected}, got {describe(value)}{nearest(value, TEMPLATES)}")
            return value
        if not isinstance(value, Mapping) or not value:
            got = "an empty mapping" if isinstance(value, Mapping) else describe(value)
            self.report.add(key, f"expected {expected}, got {got}")
            return "megatron"
        for pattern, kind in value.items():
            if kind not in TEMPLATE_KINDS:
                hint = nearest(kind, TEMPLATE_KINDS) if isinstance(kind, str) else ""
                got = f"{describe(kind)}{hint}"
                self.report.add((*key, pattern), f"expected column, row, vocab or replicate, got {got}")
            if self.model is not None:
                self.overrides.check_pattern(pattern, self.model.parameter_names, "parameter", (*key, pattern))
        return tuple((pattern, str(kind)) for pattern, kind in value.items())

    def check_names(self, entries: Sequence[object]) -> None:
        first: dict[str, Key] = {}
        for index, item in enumerate(entries):
            name = item.get("name") if isinstance(item, Mapping) else None
            key: Key = ("strategies", index, "name")
            if not isinstance(name, str) or not name:
                continue
            if name in first:
                line = self.report.document.line(first[name])
                self.report.add(key, f"the name {name!r} is taken by the strategy on line {line}; choose another")
            first.setdefault(name, key)

    def strategy(self, item: object, key: Key) -> Strategy | None:
        entry = self.report.check(_StrategyEntry, item, key)
        if not isinstance(item, Mapping):
            return None
        self.owner.clear()
        shared = self.overrides.read(item.get("overrides"), (*key, "overrides"))
        found = [
            self.copies(replica, (*key, "replicas", index), shared)
            for index, replica in enumerate(_items(item.get("replicas")))
        ]
        sound = [copies for copies in found if copies is not None]
        replicas = self.placed(sound, key, complete=bool(sound) and len(sound) == len(found))
        return Strategy(entry.name, replicas) if entry is not None and replicas else None

    def copies(self, item: object, key: Key, shared: Sequence[FileOverride]) -> _Copies | None:
        """Returns the replicas of one entry; `shared` are the overrides of the whole strategy."""
        entry = self.report.check(_ReplicaEntry, item, key)
        own_item = item.get("overrides") if isinstance(item, Mapping) else None
        own = self.overrides.read(own_item, (*key, "overrides"))
        if entry is None:
            return None
        stages = self.stages(entry, key)
        if stages is None:
            return None
        overridden = {override.pattern: override for override in (*shared, *own)}
        scheme = Scheme(
            stages,
            entry.schedule,
            tuple(Override(override.pattern, str(override.annotation)) for override in overridden.values()),
        )
        self.check_layers(scheme, key)
        for override in overridden.values():
            self.overrides.check_ranks(override, scheme, key)
        ranks = None if entry.ranks is None else self.ranks(entry.ranks, entry.count, scheme, (*key, "ranks"))
        if entry.ranks is not None and ranks is None:
            return None
        return _Copies(scheme, entry.count or len(ranks or [()]), ranks, key)

    def stages(self, entry: _ReplicaEntry, key: Key) -> tuple[Stage, ...] | None:
        if entry.stages is None:
            return self.equal_stages(entry, key)
        for name in ("tp", "pp", "cp", "layers"):
            if getattr(entry, name) is not None:
                self.report.add((*key, name), f"expected either `stages` or `{name}`, got both; say it in each stage")
        found = [
            self.report.check(_StageEntry, item, (*key, "stages", index)) for index, item in enumerate(entry.stages)
        ]
        for index, stage in enumerate(found):
            self.check_tp(stage.tp if stage is not None else 1, (*key, "stages", index))
        stages = [stage for stage in found if stage is not None]
        given = [stage.layers is not None for stage in stages]
        if any(given) and not all(given):
            self.report.add((*key, "stages"), "expected `layers` in every stage or in none, got it in some")
            return None
        fine = [self.check_cp(stage.cp, (*key, "stages", index)) for index, stage in enumerate(stages)]
        if not all(fine) or len(stages) < len(found):
            return None
        return tuple(Stage(stage.tp, stage.layers, stage.cp) for stage in stages)

    def equal_stages(self, entry: _ReplicaEntry, key: Key) -> tuple[Stage, ...] | None:
        self.check_tp(entry.tp or 1, key)
        pp = entry.pp or (1 if entry.layers is None else len(entry.layers) or 1)
        if entry.layers is not None and len(entry.layers) != pp:
            got = f"{len(entry.layers)}: {list(entry.layers)}"
            self.report.add((*key, "layers"), f"expected {pp} layer counts, one per stage of pp={pp}, got {got}")
            return None
        if not self.check_cp(entry.cp or 1, key):
            return None
        return tuple(Stage(entry.tp or 1, count, entry.cp or 1) for count in entry.layers or [None] * pp)

    def check_cp(self, cp: int, key: Key) -> bool:
        if cp == 1 or not self.trainable:
            return True
        self.report.add((*key, "cp"), f"context parallelism is not there yet, got cp={cp}; use cp: 1")
        return False

    def check_tp(self, tp: int, key: Key) -> None:
        if self.model is None or tp <= self.model.num_query_heads:
            return
        message = f"expected tp of at most {self.model.num_query_heads}, the model's query heads, got {tp}"
        self.report.add((*key, "tp"), f"{message}; use a smaller tp, or more stages")

    def check_layers(self, scheme: Scheme, key: Key) -> None:
        if self.model is None:
            return
        num_layers = self.model.num_layers
        given = "stages" if (*key, "stages") in self.report.document.lines else None
        split = scheme.layer_split(num_layers)
        if scheme.pp > num_layers:
            message = f"expected at most {num_layers} stages, the model's layers, got pp={scheme.pp}"
            self.report.add((*key, given or "pp"), f"{message}; use fewer stages")
        elif sum(split) != num_layers:
            message = f"expected layer counts that sum to the model's {num_layers} layers, got {list(split)}"
            self.report.add((*key, given or "layers"), f"{message}, which sum to {sum(split)}")

    def ranks(
        self, items: Sequence[object], count: int | None, scheme: Scheme, key: Key
    ) -> tuple[tuple[int, ...], ...] | None:
        """Returns the ranks of each copy: `[0, 1]` is one copy, `[[0, 1], [2, 3]]` are two."""
        nested = [isinstance(item, list) for item in items]
        if any(nested) and not all(nested):
            self.report.add(key, "expected a list of ranks, or a list of such lists, one per copy; got a mix of both")
            return None
        lists = [list(item) for item in items if isinstance(item, list)] if any(nested) else [list(items)]
        keys: list[Key] = [(*key, index) for index in range(len(lists))] if any(nested) else [key]
        fine = True
        if count is not None and len(lists) != count:
            message = f"expected {count} lists of ranks, one for each of count: {count}, got {len(lists)}"
            self.report.add(key, f"{message}; write [[...], [...]]")
            fine = False
        for ranks, at in zip(lists, keys, strict=True):
            fine = self.check_rank_list(ranks, scheme, at) and fine
        return tuple(map(tuple, lists)) if fine else None

    def check_rank_list(self, ranks: Sequence[object], scheme: Scheme, key: Key) -> bool:
        before = len(self.report.problems)
        for index, rank in enumerate(ranks):
            at = (*key, index)
            if type(rank) is not int:
                self.report.add(at, f"expected a rank, got {describe(rank)}")
            elif rank < 0 or (self.num_ranks is not None and rank >= self.num_ranks):
                allowed = "0 or more" if self.num_ranks is None else f"0 to {self.num_ranks - 1}, as `ranks` says"
                self.report.add(at, f"rank {rank} is out of range; expected {allowed}")
            elif rank in self.owner:
                first = key_text(self.owner[rank][2:])
                self.report.add(at, f"rank {rank} is in {first} already; a rank belongs to one replica")
            else:
                self.owner[rank] = at
        if len(ranks) != scheme.num_ranks:
            self.report.add(key, f"expected {scheme.num_ranks} ranks, as {layout(scheme)} needs, got {len(ranks)}")
        return len(self.report.problems) == before

    def placed(self, found: Sequence[_Copies], key: Key, complete: bool) -> tuple[Replica, ...]:
        """Returns the replicas on their ranks; those without ranks of their own take the lowest free ones, in order.

        If not `complete`, some entry is faulty and nothing is placed.
        """
        if not complete or self.num_ranks is None:
            return ()
        needed = sum(copies.scheme.num_ranks * copies.count for copies in found)
        if needed > self.num_ranks:
            message = f"the strategy needs {needed} ranks, the pool has {self.num_ranks}"
            self.report.add(key, f"{message}; use fewer or smaller replicas, or set `ranks: {needed}`")
            return ()
        free = iter([rank for rank in range(self.num_ranks) if rank not in self.owner])
        replicas = [
            (copies.scheme, copies.ranks[copy] if copies.ranks else tuple(islice(free, copies.scheme.num_ranks)))
            for copies in found
            for copy in range(copies.count)
        ]
        self.tell_idle(free, key)
        return tuple(Replica(*replica) for replica in replicas)

    def tell_idle(self, free: Iterable[int], key: Key) -> None:
        idle = list(free)
        if not idle:
            return
        text = f"rank{'s' if len(idle) > 1 else ''} {', '.join(map(str, idle))} {'are' if len(idle) > 1 else 'is'} idle"
        if self.refuse_idle:
            self.report.add(key, f"{text}, and idle ranks are refused; add a replica, or enlarge one")
        else:
            self.notes.add(key, text)


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 1 else None
