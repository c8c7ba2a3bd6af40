"""Rows of the tables that commands print."""

from __future__ import annotations

from itertools import groupby

from hgraph.annotation import replicated
from hgraph.strategy import Pool, Replica, Strategy

__all__ = ["STRATEGY_HEADERS", "ranks_text", "replicas_text", "strategy_rows"]

STRATEGY_HEADERS = ("strategy", "replicas", "ranks", "idle ranks")


def strategy_rows(pool: Pool) -> list[tuple[str, ...]]:
    """Returns one row per strategy, for `STRATEGY_HEADERS`."""
    rows = []
    for strategy in pool.strategies:
        idle = tuple(rank for rank in range(pool.num_ranks) if rank not in strategy.ranks)
        ranks = " | ".join(ranks_text(replica.ranks) for replica in strategy.replicas)
        rows.append((strategy.name, replicas_text(strategy), ranks, ranks_text(idle) if idle else "-"))
    return rows


def replicas_text(strategy: Strategy) -> str:
    """Returns the schemes of a strategy with their counts: `tp2 + 2 x tp1`."""
    groups = [(scheme, len(list(own))) for scheme, own in groupby(strategy.replicas, key=_scheme_text)]
    return " + ".join(scheme if count == 1 else f"{count} x {scheme}" for scheme, count in groups)


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Returns ranks as annotations write them: `0-3,6`."""
    return str(replicated(ranks)).partition("[")[0]


def _scheme_text(replica: Replica) -> str:
    return str(replica.scheme)

