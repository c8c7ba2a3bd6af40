"""Rows of the tables of strategies that several commands print."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from hgraph.annotation import ranks_text
from hgraph.strategy import Pool, Replica, Strategy

__all__ = ["LIMIT_HEADERS", "STRATEGY_HEADERS", "limit_rows", "strategy_rows"]

STRATEGY_HEADERS = ("strategy", "replicas", "ranks", "idle ranks")
LIMIT_HEADERS = (*STRATEGY_HEADERS, "tokens per micro-batch")


def strategy_rows(pool: Pool) -> list[tuple[str, ...]]:
    """Returns one row per strategy, for `STRATEGY_HEADERS`."""
    rows: list[tuple[str, ...]] = []
    for strategy in pool.strategies:
        idle = pool.idle_ranks(strategy.name)
        ranks = " | ".join(ranks_text(replica.ranks) for replica in strategy.replicas)
        rows.append((strategy.name, _replicas_text(strategy), ranks, ranks_text(idle) if idle else "-"))
    return rows


def limit_rows(pool: Pool, max_tokens: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Returns one row per strategy, for `LIMIT_HEADERS`; `max_tokens` by scheme."""
    rows = []
    for strategy, row in zip(pool.strategies, strategy_rows(pool), strict=True):
        schemes = dict.fromkeys(str(replica.scheme) for replica in strategy.replicas)
        limits = [f"{max_tokens[name]:,}" for name in schemes if name in max_tokens]
        rows.append((*row, " | ".join(limits) or "-"))
    return rows


def _replicas_text(strategy: Strategy) -> str:
    """Returns the schemes of a strategy with their counts: `tp2 + 2 x tp1`."""
    groups = [(scheme, len(list(own))) for scheme, own in groupby(strategy.replicas, key=_scheme_text)]
    return " + ".join(scheme if count == 1 else f"{count} x {scheme}" for scheme, count in groups)


def _scheme_text(replica: Replica) -> str:
    return str(replica.scheme)
