"""Longest first: each sequence goes to the replica that is then done first, by the closed form of its time.

Equal replicas are interchangeable, so a heap per kind gives the one that is done first now; one evaluation per kind and
sequence is left, whatever the number of replicas.
"""

from __future__ import annotations

from heapq import heapreplace
from math import ceil

from strategies.fleet import Fleet, load_ms

__all__ = ["dispatch"]


def dispatch(fleet: Fleet) -> list[int]:
    """Returns the replica of each sequence; every sequence fits some replica. Ties: the earlier kind, then replica."""
    heaps: list[list[tuple[float, int]]] = [[] for _ in fleet.kinds]
    for replica, kind in enumerate(fleet.kind_R.tolist()):
        heaps[kind].append((0.0, replica))
    works: list[list[float]] = fleet.work_TM.tolist()
    work_ms, tokens, longest_ms = ([0.0] * fleet.num_replicas for _ in range(3))
    chosen: list[int] = []
    facts = [(kind, kind.max_tokens, kind.cost.c, kind.pp > 1) for kind in fleet.kinds]
    for index, length in enumerate(fleet.lengths):
        best_ms, best_kind = float("inf"), -1
        for position, (kind, limit, fixed_ms, is_pipelined) in enumerate(facts):
            if length > limit:
                continue
            replica, own_ms = heaps[position][0][1], works[position][index]
            if is_pipelined:
                longest = longest_ms[replica] or own_ms
                ms = load_ms(kind, work_ms[replica] + own_ms, tokens[replica] + length, longest)
            else:
                ms = work_ms[replica] + own_ms + fixed_ms * ceil((tokens[replica] + length) / limit)
            if ms < best_ms:
                best_ms, best_kind = ms, position
        replica, own_ms = heaps[best_kind][0][1], works[best_kind][index]
        heapreplace(heaps[best_kind], (best_ms, replica))
        work_ms[replica] += own_ms
        tokens[replica] += length
        # Falling lengths: the first sequence of a replica is its longest.
        longest_ms[replica] = longest_ms[replica] or own_ms
        chosen.append(replica)
    return chosen
