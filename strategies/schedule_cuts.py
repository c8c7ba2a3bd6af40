"""How much work a replica can do in a given time, whatever its micro-batches and their order.

A cut of v micro-batches on P equal stages is a weight per position with `T >= sum_m w_m t_m` for all times t: an
average of paths through the schedule. With `t_m = c + w_m` and W the work without the fixed costs it says

    T >= sum c + least W + extra (long_ms - c)      for a micro-batch of at least `long_ms` at one position

`sum` being the sum of the weights, `least` the smallest and `extra` how much larger the long one's is. So W is at most
`(T - sum c - extra (long_ms - c)) / least`: the capacity. The weights of 1F1B are those of `schedule_cuts.json`, which
`tests/schedule_cuts_table.py` writes, and three that hold for every P and v (`docs/planner.md`):

    the last stage          (v + P - 1, 1, 0)        it works for all, waits for one to come and one to go back
    the long one            (v, 1/3, P - 1/3)        it passes all stages; parts of P - 1 before and after it hide
    half of each            (v + (P - 1)/2, 2/3, P/2 - 1/6)

GPipe has one: `(v + P - 1, 1, P - 1)`, and `(v + P - 1, 1 + (P - 1)/v, 0)` where nothing is known to be long.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hgraph.simulate import FORWARD_SHARE
from strategies.cost import ReplicaKind

__all__ = ["LAST_OF_TABLE", "best_times", "capacities_ms", "long_capacities_ms"]

Floats: TypeAlias = NDArray[np.float64]
Cut: TypeAlias = tuple[float, float, float]

LAST_OF_TABLE = 40


@dataclass(frozen=True, slots=True, eq=False)
class _Cuts:
    """Cuts [N] of v = 1 .. : those of one position of the long micro-batch lie together, and those of one v.

    `position_starts` are the first cuts of each position, `micro_batch_starts` the first positions of each v.
    """

    sum_N: Floats
    least_N: Floats
    extra_N: Floats
    position_starts: NDArray[np.intp]
    micro_batch_starts: NDArray[np.intp]

    @staticmethod
    def of(cuts: list[list[list[Cut]]]) -> _Cuts:
        """Returns the arrays of `cuts[v - 1][position]`."""
        flat = np.array([cut for own in cuts for position in own for cut in position])
        sizes = [len(position) for own in cuts for position in own]
        positions = [len(own) for own in cuts]
        starts = np.cumsum([0, *sizes[:-1]]), np.cumsum([0, *positions[:-1]])
        return _Cuts(flat[:, 0], np.maximum(flat[:, 1], 1e-300), flat[:, 2], *starts)

    def capacities_ms(self, time_ms: float, fixed_ms: float, long_ms_I: Floats) -> Floats:
        """Returns the capacity [I, v] in ms for each `long_ms`: the largest over positions of the least over cuts."""
        extra_ms_I = np.maximum(long_ms_I - fixed_ms, 0.0)
        room_IN = (time_ms - self.sum_N * fixed_ms)[None, :] - extra_ms_I[:, None] * self.extra_N[None, :]
        capacity_IN = room_IN / self.least_N
        by_position = np.minimum.reduceat(capacity_IN, self.position_starts, axis=1)
        return np.asarray(np.maximum.reduceat(by_position, self.micro_batch_starts, axis=1))


def capacities_ms(kind: ReplicaKind, time_ms: float, most: int, shortest_ms: float = 0.0) -> Floats:
    """Returns the most work in ms that v = 1 .. `most` micro-batches of `kind` hold in `time_ms`; negative: none.

    Every micro-batch has at least `shortest_ms` of work, which counts like a fixed cost.
    """
    v = np.arange(1, most + 1)
    stages, fixed_ms = kind.pp, kind.cost.c + shortest_ms
    if kind.pp == 1:
        return np.asarray(time_ms - kind.cost.c * v)
    beyond = time_ms - fixed_ms * (v + stages - 1)
    if kind.schedule == "gpipe":
        return np.asarray(beyond * v / (v + stages - 1) + shortest_ms * v)
    known = _short_cuts(stages).capacities_ms(time_ms, fixed_ms, np.zeros(1))[0][:most]
    return np.concatenate([known, beyond[len(known) :]]) + shortest_ms * v


def long_capacities_ms(
    kind: ReplicaKind, time_ms: float, most: int, long_ms_I: Floats, shortest_ms: float = 0.0
) -> Floats:
    """Returns the same [I, v] where one micro-batch takes at least `long_ms`, fixed cost included."""
    stages, fixed_ms = kind.pp, kind.cost.c + shortest_ms
    v = np.arange(1, most + 1)
    short = capacities_ms(kind, time_ms, most, shortest_ms) - shortest_ms * v
    capacity = np.repeat(short[None, :], len(long_ms_I), axis=0)
    extra_ms = np.maximum(long_ms_I - fixed_ms, 0.0)[:, None]
    if kind.pp > 1 and kind.schedule == "gpipe":
        capacity = np.minimum(capacity, time_ms - fixed_ms * (v + stages - 1) - (stages - 1) * extra_ms)
    if kind.pp > 1 and kind.schedule == "1f1b":
        for total, least, extra in _general_cuts(stages, v.astype(np.float64)):
            capacity = np.minimum(capacity, (time_ms - total * fixed_ms - extra * extra_ms) / least)
        known = _long_cuts(stages)
        if known is not None:
            table = known.capacities_ms(time_ms, fixed_ms, long_ms_I)[:, :most]
            capacity[:, : table.shape[1]] = np.minimum(capacity[:, : table.shape[1]], table)
    return np.asarray(capacity + shortest_ms * v)


def best_times(kind: ReplicaKind, num_micro_batches: int) -> tuple[float, ...] | None:
    """Returns the shares of the sum that v micro-batches should take in running order; None where not in the table."""
    if kind.schedule != "1f1b" or kind.pp == 1:
        return None
    return _shapes(kind.pp).get(num_micro_batches)


def _general_cuts(stages: int, v: Floats) -> list[tuple[Floats, float, float]]:
    """Returns the cuts of 1F1B that hold for every P and v: the last stage, half of each, the long one."""
    ends, hidden = stages - 1, 1.0 - FORWARD_SHARE
    return [(v + share * ends, 1.0 - (1.0 - share) * hidden, (1.0 - share) * (ends + hidden)) for share in (1, 0.5, 0)]


@cache
def _table(stages: int) -> dict[str, list[list[object]]]:
    text = files("strategies").joinpath("schedule_cuts.json").read_text(encoding="utf-8")
    return dict(json.loads(text).get(str(stages), {"short": [], "long": []}))


@cache
def _shapes(stages: int) -> dict[int, tuple[float, ...]]:
    rows: list[list[float]] = _table(stages).get("shape", [])  # type: ignore[assignment]
    return {len(row): tuple(row) for row in rows}


@cache
def _short_cuts(stages: int) -> _Cuts:
    """Returns the table's cuts without a long micro-batch, with one position for each v.

    Those with a smallest weight below 1 are left out, so that a capacity never grows faster than the time.
    """
    known: list[list[tuple[float, float]]] = _table(stages)["short"] or [[]]  # type: ignore[assignment]
    last_stage = [(v + stages - 1.0, 1.0, 0.0) for v in range(1, len(known) + 1)]
    steeper = [[(total, least, 0.0) for total, least in own if least >= 1.0] for own in known]
    steeper[0] = [(float(stages), float(stages), 0.0)]
    return _Cuts.of([[[first, *own]] for first, own in zip(last_stage, steeper, strict=True)])


@cache
def _long_cuts(stages: int) -> _Cuts | None:
    known: list[list[list[Cut]]] = _table(stages)["long"]  # type: ignore[assignment]
    return _Cuts.of(known) if known else None
