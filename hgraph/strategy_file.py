"""Strategy files: YAML in, a `Pool` out, and back.

`docs/strategy-files.md` is the page for users. Reading finds every fault of a file in one go
(`hgraph/strategy_file_reader.py`); writing is canonical: what was read and written reads as an equal pool, and writes
the same text again.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from hgraph.errors import FileErrors
from hgraph.model_facts import ModelFacts
from hgraph.strategy import Pool, Replica, Scheme, Stage, Strategy
from hgraph.strategy_file_reader import VERSION, PoolReport, read_pool
from hgraph.yaml_report import read_document, read_text

__all__ = ["check_pool_file", "check_pool_text", "load_pool", "parse_pool", "write_pool"]


def load_pool(
    path: str | os.PathLike[str],
    *,
    model: ModelFacts | None = None,
    refuse_idle: bool = False,
    trainable: bool = False,
) -> Pool:
    """Returns the pool that the file at `path` describes.

    With `model`, what depends on it is checked too: heads, layers, names and shapes. With `refuse_idle`, a strategy
    that leaves ranks idle is a fault. With `trainable`, so is what can be planned but not compiled yet: cp above 1.

    Raises `FileErrors` with every fault of the file, `InvalidInput` where there is no file to read.
    """
    text, name = read_text(os.fspath(path)), os.fspath(path)
    return parse_pool(text, name, model=model, refuse_idle=refuse_idle, trainable=trainable)


def parse_pool(
    text: str,
    name: str = "<text>",
    *,
    model: ModelFacts | None = None,
    refuse_idle: bool = False,
    trainable: bool = False,
) -> Pool:
    """Returns the pool that `text` describes; as `load_pool`, with `name` in place of the path."""
    report = check_pool_text(text, name, model=model, refuse_idle=refuse_idle, trainable=trainable)
    if report.pool is None:
        raise FileErrors(name, report.problems)
    return report.pool


def check_pool_file(
    path: str | os.PathLike[str],
    *,
    model: ModelFacts | None = None,
    refuse_idle: bool = False,
    trainable: bool = False,
) -> PoolReport:
    """Returns everything there is to say about the file at `path`: faults, notes, and the pool if there are no faults.

    Raises `InvalidInput` only where there is no file to read.
    """
    text, name = read_text(os.fspath(path)), os.fspath(path)
    return check_pool_text(text, name, model=model, refuse_idle=refuse_idle, trainable=trainable)


def check_pool_text(
    text: str,
    name: str = "<text>",
    *,
    model: ModelFacts | None = None,
    refuse_idle: bool = False,
    trainable: bool = False,
) -> PoolReport:
    """Returns everything there is to say about `text`; as `check_pool_file`."""
    try:
        document = read_document(text, name)
    except FileErrors as error:
        return PoolReport(name, None, error.problems)
    return read_pool(document, model, refuse_idle, trainable)


def write_pool(pool: Pool) -> str:
    """Returns the canonical text of `pool`.

    Defaults are left out; equal neighbouring replicas are one entry with a count; ranks are written, for all replicas
    of a strategy, only where they differ from 0, 1, 2 and so on in order.
    """
    entries = CommentedMap(version=VERSION, ranks=pool.num_ranks)
    entries["template"] = pool.template if isinstance(pool.template, str) else CommentedMap(pool.template)
    if pool.optimizer_layout != "spread":
        entries["optimizer_layout"] = pool.optimizer_layout
    entries["strategies"] = [_strategy_entry(strategy) for strategy in pool.strategies]
    writer = YAML()
    writer.width = 10_000
    writer.brace_single_entry_mapping_in_flow_sequence = True
    writer.indent(mapping=2, sequence=4, offset=2)
    text = io.StringIO()
    writer.dump(entries, text)
    return text.getvalue()


def _strategy_entry(strategy: Strategy) -> CommentedMap:
    in_order = [rank for replica in strategy.replicas for rank in replica.ranks]
    write_ranks = in_order != list(range(len(in_order)))
    groups = itertools.groupby(strategy.replicas, key=lambda replica: replica.scheme)
    replicas = [_replica_entry(scheme, list(group), write_ranks) for scheme, group in groups]
    return CommentedMap(name=strategy.name, replicas=replicas)


def _replica_entry(scheme: Scheme, replicas: Sequence[Replica], write_ranks: bool) -> CommentedMap:
    entry = _scheme_entry(scheme)
    if len(replicas) > 1:
        entry["count"] = len(replicas)
    if write_ranks:
        ranks = [list(replica.ranks) for replica in replicas]
        entry["ranks"] = _on_one_line(ranks if len(replicas) > 1 else ranks[0])
    if scheme.overrides:
        entry["overrides"] = CommentedMap((override.pattern, override.annotation) for override in scheme.overrides)
        return entry
    entry.fa.set_flow_style()
    return entry


def _scheme_entry(scheme: Scheme) -> CommentedMap:
    layers = [stage.layers for stage in scheme.stages if stage.layers is not None]
    if len({(stage.tp, stage.cp) for stage in scheme.stages}) == 1:
        entry = _stage_entry(Stage(scheme.stages[0].tp, None, scheme.stages[0].cp))
        if scheme.pp > 1:
            entry["pp"] = scheme.pp
        if layers:
            entry["layers"] = _on_one_line(layers)
    else:
        entry = CommentedMap(stages=_on_one_line([_stage_entry(stage) for stage in scheme.stages]))
    if scheme.schedule != "1f1b":
        entry["schedule"] = scheme.schedule
    return entry


def _stage_entry(stage: Stage) -> CommentedMap:
    entry = CommentedMap(tp=stage.tp)
    if stage.cp != 1:
        entry["cp"] = stage.cp
    if stage.layers is not None:
        entry["layers"] = stage.layers
    return entry


def _on_one_line(items: list[Any]) -> CommentedSeq:
    result = CommentedSeq(items)
    result.fa.set_flow_style()
    return result
