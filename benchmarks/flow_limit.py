"""How far below published plans any plan can be: the least flow time of every case, proved by integer programs.

    python benchmarks/flow_limit.py FOLDER --cases 32b-64gpu

FOLDER is that of planner_published.py. Each batch is planned by flow time; then integer programs of scipy's HiGHS look
for a faster plan of any strategy of the pool, in a relaxation that shares nothing with the planner and its bounds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the packages and `benchmarks` itself, from anywhere

from benchmarks.planner_published import pool_of_case, profile_of_case
from strategies.cost import ReplicaKind, replica_kinds
from strategies.options import PlannerOptions
from strategies.planner import Planner

NUM_LONG = 12
"""So many of the longest lengths are told apart as the longest of a replica; the shorter ones are one group."""
EQUAL, PRECISION = 1e-6, 1e-4
TIME_LIMIT_S = 60.0
INFEASIBLE = 2
"""`status` of `scipy.optimize.milp` where there is proof that no point exists; all else counts as "may fit"."""


@dataclass(frozen=True, slots=True)
class Option:
    """What a replica of a kind may run with so many micro-batches: the longest sequence, work in ms, and tokens."""

    kind: ReplicaKind
    longest: int
    room_ms: float
    max_tokens: int


def options(kind: ReplicaKind, lengths: Sequence[int], step_ms: float) -> Iterator[Option]:
    """Yields what a busy replica may be within a flow time of `step_ms`, without those that allow less than another.

    With v micro-batches, work F (the sum of a s^2 + b s) and longest sequence l, the flow time is at least both
    (F + v c) (1 + (pp - 1) / v), the largest being at least the mean, and F + v c + (pp - 1) (f(l) + c).
    The room for work is concave in v, so once it and the tokens are no more than before, they stay so.
    """
    cost, ramps = kind.cost, kind.pp - 1
    held = sorted({s for s in lengths if s <= cost.max_tokens})
    if not held:
        return
    firsts = [*held[:1], *held[1:][-NUM_LONG:]] if ramps else held[:1]
    for first, following in zip(firsts, [*firsts[1:], float("inf")], strict=True):
        kept: list[tuple[float, float]] = []
        for v in range(1, len(lengths) + 1):
            left_ms = step_ms - v * cost.c - ramps * cost.c
            able = [s for s in held if s < following and (1 + ramps) * cost.sequence_ms(s) <= left_ms]
            if not able:
                break
            room_ms = min(step_ms / (1 + ramps / v) - v * cost.c, left_ms - ramps * cost.sequence_ms(first))
            tokens = min(v * cost.max_tokens, room_ms / cost.b if cost.b > 0 else float("inf"))
            if room_ms < 0:
                continue
            if any(room_ms <= ms and tokens <= most for ms, most in kept):
                break
            kept.append((room_ms, tokens))
            yield Option(kind, able[-1], room_ms, v * cost.max_tokens)


def may_fit(kinds: Sequence[ReplicaKind], lengths: Sequence[int], step_ms: float) -> bool:
    """Returns False only if it is proved that no plan of these replicas has a flow time of `step_ms` or less.

    Whole numbers: how many replicas are of each option. Free: how much of each class of equal lengths they run. A row
    per option bounds its work, one its tokens; two say that a replica runs at most one sequence of more than half of
    its room, and at most two of more than a third.
    """
    counts = Counter(lengths)
    classes, num_K = np.array(sorted(counts)), np.array([counts[s] for s in sorted(counts)])
    replicas = Counter(kinds)
    own = [option for kind in replicas for option in options(kind, lengths, step_ms)]
    rows: list[tuple[list[int], list[float], float, float]] = []
    shares = np.arange(len(own) * len(classes)).reshape(len(own), len(classes))
    upper = np.zeros((len(own), len(classes)))
    for o, option in enumerate(own):
        number = shares.size + o
        cost = option.kind.cost
        work = (cost.a * classes + cost.b) * classes
        upper[o] = np.where(classes <= option.longest, num_K, 0)
        limits = [(work, option.room_ms), (classes, option.max_tokens)]
        limits += [(work > option.room_ms / k * (1 + 1e-9), k - 1) for k in (2, 3)]
        for weights, room in limits:
            rows.append(([*shares[o], number], [*map(float, weights), -float(room)], -np.inf, 0.0))
    for k, count in enumerate(num_K):
        rows.append((list(shares[:, k]), [1.0] * len(own), count, count))
    for kind, number in replicas.items():
        mine = [shares.size + o for o, option in enumerate(own) if option.kind == kind]
        rows.append((mine, [1.0] * len(mine), 0.0, number))
    if not own:
        return False
    return _solve(rows, upper.ravel(), [replicas[option.kind] for option in own])


def _solve(rows: Sequence[tuple[list[int], list[float], float, float]], upper: np.ndarray, most: list[int]) -> bool:
    """Returns whether the rows may have a common point; the last columns, up to `most`, are whole numbers."""
    index = np.repeat(np.arange(len(rows)), [len(columns) for columns, *_ in rows])
    columns, values = (np.concatenate([np.array(row[i], float) for row in rows]) for i in (0, 1))
    matrix = coo_matrix((values, (index, columns.astype(int))), (len(rows), len(upper) + len(most))).tocsr()
    answer = milp(
        np.zeros(len(upper) + len(most)),
        integrality=np.repeat([0, 1], [len(upper), len(most)]),
        bounds=Bounds(0, np.concatenate([upper, most])),
        constraints=LinearConstraint(matrix, [row[2] for row in rows], [row[3] for row in rows]),
        options={"time_limit": TIME_LIMIT_S},
    )
    return bool(answer.status != INFEASIBLE)


def least_flow_ms(kinds: Sequence[ReplicaKind], lengths: Sequence[int], known_ms: float) -> float:
    """Returns a flow time that every plan of these replicas needs, as far as `may_fit` tells; at most `known_ms`.

    `known_ms`: the flow time of some plan, beyond which nobody asks. The answer is within `PRECISION` of it.
    """
    if not may_fit(kinds, lengths, known_ms * (1 - EQUAL)):
        return known_ms * (1 - EQUAL)
    low, high = 0.0, PRECISION
    while high < 1 and may_fit(kinds, lengths, known_ms * (1 - high)):
        low, high = high, 2 * high
    while high - low > PRECISION and high < 1:
        middle = (low + high) / 2
        low, high = (middle, high) if may_fit(kinds, lengths, known_ms * (1 - middle)) else (low, middle)
    return known_ms * max(0.0, 1 - high)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of published_plans.json and profiles/")
    parser.add_argument("--cases", default="", help="only cases whose id contains this")
    arguments = parser.parse_args()
    data = json.loads((arguments.folder / "published_plans.json").read_text())
    cases = [case for case in data["cases"] if arguments.cases in case["id"]]
    if not cases:
        parser.error(f"no case contains {arguments.cases!r}; there are {', '.join(c['id'] for c in data['cases'])}")
    table = Table("case", "published ms", "ours ms", "lower", "no plan below ms", "lower at most")
    gains = []
    for case in tqdm(cases, disable=not sys.stderr.isatty()):
        pool, profile = pool_of_case(case, data["pools"]), profile_of_case(case, arguments.folder)
        lengths, published_ms = case["batch"], case["published"]["flow_ms"]
        ours_ms = Planner(pool, profile, PlannerOptions(objective="flow")).plan(lengths).flow_ms
        least_ms = ours_ms
        for strategy in pool.strategies:
            least_ms = least_flow_ms(replica_kinds(strategy, profile), lengths, least_ms)
        gains.append((1 - ours_ms / published_ms, 1 - least_ms / published_ms))
        times = (f"{published_ms:,.1f}", f"{ours_ms:,.1f}", f"{least_ms:,.1f}")
        table.add_row(case["id"], *times[:2], f"{gains[-1][0]:.2%}", times[2], f"{gains[-1][1]:.2%}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    ours, most = (mean(column) for column in zip(*gains, strict=True))
    console.print(f"mean: {ours:.2%} lower; no plans are more than {most:.2%} lower")


if __name__ == "__main__":
    main()
