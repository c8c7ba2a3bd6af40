"""The replicas of one strategy and the sequences of one batch, as arrays; and the time of a load in closed form.

A load of work w (ms), n tokens and longest sequence l (ms) on a replica with pp = 1 takes w + c v, v = ceil(n / L), as
long as its sequences pack into v micro-batches. With pp > 1 it is taken to make v equal micro-batches, as many as
balance the fixed cost and the ramp, sqrt((pp - 1) w / c), but no more than leave the longest sequence below the mean,
and no fewer than the tokens need: w + c v + (pp - 1) (max(w / v, l) + c). What packing really gives is found later; the
difference is carried as a correction.

Symbols: R replicas, T distinct kinds of replica, M sequences, longest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from strategies.cost import ReplicaKind

__all__ = ["Fleet", "Floats", "Ints", "load_ms", "loads_ms"]

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Numbers: TypeAlias = Floats | Ints | float


@dataclass(frozen=True, slots=True, eq=False)
class Fleet:
    """One strategy and one batch: `kind_R[r]` is the position in `kinds` of replica r's kind; `work_TM` in ms.

    `lengths` fall; `fixed_R` is c in ms, `ramp_R` is pp - 1 and `limit_R` the token limit.
    """

    kinds: tuple[ReplicaKind, ...]
    kind_R: Ints
    lengths: tuple[int, ...]
    length_M: Floats
    work_TM: Floats
    limit_R: Floats
    fixed_R: Floats
    ramp_R: Floats

    @staticmethod
    def of(replica_kinds: Sequence[ReplicaKind], lengths: Sequence[int]) -> Fleet:
        """Returns the arrays for replicas of these kinds; `lengths` are in falling order."""
        kinds = tuple(dict.fromkeys(replica_kinds))
        position = {kind: index for index, kind in enumerate(kinds)}
        length_M = np.array(lengths, dtype=np.float64)
        work_TM = np.array([(kind.cost.a * length_M + kind.cost.b) * length_M for kind in kinds])
        return Fleet(
            kinds,
            np.array([position[kind] for kind in replica_kinds], dtype=np.int64),
            tuple(lengths),
            length_M,
            work_TM,
            np.array([kind.max_tokens for kind in replica_kinds], dtype=np.float64),
            np.array([kind.cost.c for kind in replica_kinds]),
            np.array([kind.pp - 1 for kind in replica_kinds], dtype=np.float64),
        )

    @property
    def num_replicas(self) -> int:
        return len(self.kind_R)

    @property
    def is_pipelined(self) -> bool:
        """Whether any replica has a ramp."""
        return bool(self.ramp_R.any())

    def kind_of(self, replica: int) -> ReplicaKind:
        return self.kinds[self.kind_R[replica]]


def load_ms(kind: ReplicaKind, work_ms: float, tokens: float, longest_ms: float) -> float:
    """Returns the closed form of one non-empty load in ms."""
    c, ramp = kind.cost.c, kind.pp - 1
    fewest = max(1, ceil(tokens / kind.max_tokens))
    if ramp == 0:
        return work_ms + c * fewest
    most = work_ms / longest_ms if longest_ms > 0 else 1.0
    ideal = sqrt(ramp * work_ms / c) if c > 0 else most
    num = max(float(fewest), min(ideal, most))
    return work_ms + c * num + ramp * (max(work_ms / num, longest_ms) + c)


def loads_ms(
    fixed: Numbers,
    ramp: Numbers,
    limit: Numbers,
    work: Numbers,
    tokens: Numbers,
    longest: Floats | None,
) -> Floats:
    """Returns `load_ms` of many loads at once, 0.0 for empty ones; `longest` is None where no replica has a ramp."""
    num = np.ceil(tokens / limit)
    if longest is None:
        return np.asarray(work + fixed * num)
    work = np.maximum(work, 0.0)
    most = work / np.maximum(longest, 1e-300)
    ideal = np.sqrt(ramp * work / np.maximum(fixed, 1e-300))
    num = np.maximum(np.maximum(num, 1.0), np.where(ramp > 0, np.minimum(ideal, most), 0.0))
    times = work + fixed * num + ramp * (np.maximum(work / num, longest) + fixed)
    return np.asarray(np.where(tokens > 0, times, 0.0))
