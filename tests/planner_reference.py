"""Pools to plan for, and planning done again by other means: events, linear programs of scipy, enumeration."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import permutations
from random import Random

import numpy as np
from scipy.optimize import linprog

from hgraph.profile import Profile, SchemeCost
from hgraph.strategy import Pool, Replica, Scheme, Strategy
from strategies.cost import ReplicaKind

UNIFORM = Scheme.uniform
INF = float("inf")


def strategy(name: str, *schemes: Scheme) -> Strategy:
    replicas, first = [], 0
    for scheme in schemes:
        replicas.append(Replica(scheme, tuple(range(first, first + scheme.num_ranks))))
        first += scheme.num_ranks
    return Strategy(name, tuple(replicas))


def pool_of(*strategies: Strategy) -> Pool:
    return Pool(max(len(one.ranks) for one in strategies), strategies)


def profile_of(**costs: tuple[float, float, float, int]) -> Profile:
    return Profile({name.replace("_", "."): SchemeCost(*cost) for name, cost in costs.items()}, {})


def laptop() -> tuple[Pool, Profile]:
    """Four ranks, six strategies, limits and times like those of a small model on CPUs."""
    pool = pool_of(
        strategy("tp4", UNIFORM(4)),
        strategy("tp2+tp1x2", UNIFORM(2), UNIFORM(), UNIFORM()),
        strategy("tp2.pp2", UNIFORM(2, 2)),
        strategy("pp2+tp1x2", UNIFORM(1, 2, (3, 1)), UNIFORM(), UNIFORM()),
        strategy("tp1x4", UNIFORM(), UNIFORM(), UNIFORM(), UNIFORM()),
        strategy("tp2x2", UNIFORM(2), UNIFORM(2)),
    )
    costs = {
        "tp4": SchemeCost(2.0e-5, 0.12, 20.0, 4096),
        "tp2": SchemeCost(3.2e-5, 0.19, 15.0, 2048),
        "tp1": SchemeCost(6.0e-5, 0.34, 10.0, 1024),
        "tp2.pp2": SchemeCost(1.7e-5, 0.10, 10.0, 4096),
        "tp1.pp2(3,1)": SchemeCost(3.5e-5, 0.20, 7.0, 2048),
    }
    bridges = {"tp4": 6.0, "tp2+tp1x2": 4.0, "tp2.pp2": 5.0, "pp2+tp1x2": 4.5, "tp1x4": 3.0, "tp2x2": 5.0}
    return pool, Profile(costs, bridges)


def cluster() -> tuple[Pool, Profile]:
    """64 ranks and seven strategies with published constants of a 32B model (Hydraulis, arXiv 2412.07894)."""
    pool = pool_of(
        strategy("16x4", *[UNIFORM(16)] * 4),
        strategy("16+8.3x2", UNIFORM(16), UNIFORM(8, 3), UNIFORM(8, 3)),
        strategy("16+8x6", UNIFORM(16), *[UNIFORM(8)] * 6),
        strategy("16+4x12", UNIFORM(16), *[UNIFORM(4)] * 12),
        strategy("8.3+4x10", UNIFORM(8, 3), *[UNIFORM(4)] * 10),
        strategy("8+4x14", UNIFORM(8), *[UNIFORM(4)] * 14),
        strategy("4.2x8", *[UNIFORM(4, 2)] * 8),
    )
    return pool, profile_of(
        tp16=(1.37779723e-06, 0.102435387, 145.747611, 43520),
        tp8_pp3=(6.85518086e-07, 0.0482754236, 38.0697298, 27264),
        tp8=(2.12548718e-06, 0.141411593, 122.910213, 21888),
        tp4=(3.86950049e-06, 0.238996833, 120.694765, 7808),
        tp4_pp2=(2.04563898e-06, 0.118301177, 65.4239196, 12416),
    )


def batch(seed: int, tokens: int, longest: int, median: float = 200.0, spread: float = 1.0) -> list[int]:
    """Returns heavy-tailed lengths that sum to `tokens` or a little more."""
    random, lengths = Random(seed), list[int]()
    while sum(lengths) < tokens:
        lengths.append(max(1, min(longest, int(random.lognormvariate(np.log(median), spread)))))
    return lengths


def random_kind(
    random: Random, pipelines: Sequence[int] = (1, 2, 3), schedules: Sequence[str] = ("1f1b",)
) -> ReplicaKind:
    cost = SchemeCost(
        random.choice([0.0, 1e-5, 2e-4]),
        random.choice([0.0, 0.05, 0.3]),
        random.choice([0.0, 2.0, 40.0]),
        random.randint(30, 400),
    )
    return ReplicaKind(random.choice(list(pipelines)), random.choice(list(schedules)), cost)


def random_small_problem(
    seed: int, most: int, pipelines: Sequence[int] = (1, 2, 3)
) -> tuple[list[ReplicaKind], list[int]]:
    """Returns up to three kinds of replica and up to `most` lengths that at least one of them can hold."""
    random = Random(seed)
    kinds = [random_kind(random, pipelines) for _ in range(random.randint(1, 3))]
    limit = max(kind.max_tokens for kind in kinds)
    lengths = [
        random.randint(1, limit) if random.random() < 0.3 else random.randint(1, 60)
        for _ in range(random.randint(1, most))
    ]
    return kinds, [min(length, limit) for length in lengths]


def event_driven_ms(schedule: str, num_stages: int, times_ms: Sequence[float]) -> float:
    """Returns the time of a pipeline by playing events: a stage starts its next action when its input has come."""
    count = len(times_ms)
    order = _stage_orders(schedule, num_stages, count)
    arrived = {("F", 0, m) for m in range(count)}
    position, busy, now = [0] * num_stages, [False] * num_stages, 0.0
    events: list[tuple[float, int, str, int]] = []

    def ready(stage: int) -> bool:
        if busy[stage] or position[stage] == len(order[stage]):
            return False
        kind, m = order[stage][position[stage]]
        return (kind, stage, m) in arrived

    while True:
        for stage in filter(ready, range(num_stages)):
            kind, m = order[stage][position[stage]]
            busy[stage] = True
            heapq.heappush(events, (now + times_ms[m] * (1 / 3 if kind == "F" else 2 / 3), stage, kind, m))
        if not events:
            assert all(position[stage] == len(order[stage]) for stage in range(num_stages))
            return now
        now, stage, kind, m = heapq.heappop(events)
        busy[stage] = False
        position[stage] += 1
        last = stage == num_stages - 1
        follower = ("B", stage, m) if kind == "F" and last else (kind, stage + 1 if kind == "F" else stage - 1, m)
        arrived.add(follower)


def _stage_orders(schedule: str, num_stages: int, count: int) -> list[list[tuple[str, int]]]:
    """Returns per stage its actions (kind, micro-batch) in the order they run."""
    orders: list[list[tuple[str, int]]] = []
    for stage in range(num_stages):
        warm = count if schedule == "gpipe" else min(count, num_stages - stage)
        actions = [("F", m) for m in range(warm)]
        for m in range(count):
            actions.append(("B", m))
            if warm + m < count:
                actions.append(("F", warm + m))
        orders.append(actions)
    return orders


def every_order_ms(schedule: str, num_stages: int, times_ms: Sequence[float]) -> float:
    """Returns the least time over all orders of the micro-batches, all played together, as `event_driven_ms` would."""
    table = np.array(times_ms)[_orders(len(times_ms))]
    orders, done = _stage_orders(schedule, num_stages, len(times_ms)), {}
    position, free = [0] * num_stages, [np.zeros(len(table)) for _ in range(num_stages)]
    while any(position[stage] < len(orders[stage]) for stage in range(num_stages)):
        for stage in range(num_stages):
            if position[stage] == len(orders[stage]):
                continue
            kind, m = orders[stage][position[stage]]
            before = (kind, stage - 1, m) if kind == "F" else (kind, stage + 1, m)
            first = stage == 0 if kind == "F" else stage == num_stages - 1
            if not first and before not in done:
                continue
            start = free[stage] if first else np.maximum(free[stage], done[before])
            free[stage] = done[kind, stage, m] = start + table[:, m] * (1 / 3 if kind == "F" else 2 / 3)
            position[stage] += 1
    return float(np.max(free, axis=0).min())


@cache
def _orders(count: int) -> np.ndarray:
    """Returns every order of `count` things, a row each."""
    return np.array(list(permutations(range(count))))


def linear_bound_ms(kinds: Sequence[ReplicaKind], lengths: Sequence[int]) -> float:
    """Returns the documented bound: the least T at which the fractional assignment exists, by scipy, by thresholds."""
    classes = sorted(Counter(lengths).items())
    groups = list(Counter(kinds).items())
    limits = sorted({k.pp * k.cost.micro_batch_ms([s]) for k, _ in groups for s, _ in classes if s <= k.max_tokens})
    for index, at_least in enumerate(limits):
        value = _fixed_eligibility_ms(groups, classes, at_least)
        following = limits[index + 1] if index + 1 < len(limits) else float("inf")
        if value < following:
            return max(at_least, value)
    raise AssertionError("no replica can hold a sequence")


def _fixed_eligibility_ms(
    groups: Sequence[tuple[ReplicaKind, int]], classes: Sequence[tuple[int, int]], time_ms: float
) -> float:
    pairs = [
        (k, t)
        for k, (length, _) in enumerate(classes)
        for t, (kind, _) in enumerate(groups)
        if length <= kind.max_tokens and kind.pp * kind.cost.micro_batch_ms([length]) <= time_ms
    ]
    if {k for k, _ in pairs} != set(range(len(classes))):
        return float("inf")
    rows, right = [], []
    for t, (kind, number) in enumerate(groups):
        if all(other != t for _, other in pairs):
            continue
        c, limit = kind.cost.c, kind.max_tokens
        ramp = (kind.pp - 1) * kind.cost.micro_batch_ms([classes[0][0]])
        whole = -(-sum(s * n for s, n in classes) // limit) - sum(s * n for s, n in classes) / limit
        extra = whole * c / number if len(groups) == 1 else 0.0
        for fixed, share in (
            (c, lambda s: 0.0),
            (extra, lambda s, limit=limit: s / limit),
            (0.0, lambda s, limit=limit: s > limit / 2),
        ):
            row = [
                kind.cost.sequence_ms(classes[k][0]) + c * share(classes[k][0]) if other == t else 0.0
                for k, other in pairs
            ]
            rows.append([*row, -number])
            right.append(-number * (ramp + fixed))
    equal = [[float(k == own) for own, _ in pairs] + [0.0] for k in range(len(classes))]
    answer = linprog([0.0] * len(pairs) + [1.0], rows, right, equal, [n for _, n in classes], method="highs")
    return float(answer.fun)


def option_bound_ms(kinds: Sequence[ReplicaKind], lengths: Sequence[int]) -> float:
    """Returns the documented bound of replicas with pp = 1 by number of micro-batches, by scipy and bisection."""
    classes = sorted(Counter(lengths).items())
    groups = list(Counter(kinds).items())
    low = max(
        min(kind.pp * kind.cost.micro_batch_ms([s]) for kind, _ in groups if s <= kind.max_tokens) for s, _ in classes
    )
    high = 2.0 * low
    while _share_of_batch(groups, classes, high) < 1.0:
        low, high = high, 2.0 * high
    while high > low * (1 + 1e-5):
        middle = (low + high) / 2
        low, high = (middle, high) if _share_of_batch(groups, classes, middle) < 1.0 - 1e-7 else (low, middle)
    return low


def _share_of_batch(
    groups: Sequence[tuple[ReplicaKind, int]], classes: Sequence[tuple[int, int]], time_ms: float
) -> float:
    """Returns how much of the batch fits fractionally into a step; columns: [kind, v, class], [kind, v], the share."""
    most = sum(count for _, count in classes)
    options = [(kind, v, t) for t, (kind, _) in enumerate(groups) for v in range(1, most + 1)]
    num, width = len(classes), len(classes) + 1
    rows, right, equal = [], [], []
    bounds: list[tuple[float, float]] = []
    for o, (kind, v, _) in enumerate(options):
        capacity_ms = time_ms - kind.cost.c * v
        limits = (
            (kind.cost.sequence_ms, max(0.0, capacity_ms)),
            (float, float(kind.max_tokens * v)),
            (lambda s, kind=kind: float(2 * s > kind.max_tokens), float(v)),
        )
        for per_sequence, room in limits:
            row = [0.0] * (len(options) * width + 1)
            row[o * width : o * width + num] = [per_sequence(s) for s, _ in classes]
            row[o * width + num] = -room
            rows.append(row)
            right.append(0.0)
        for k, (s, count) in enumerate(classes):
            own = kind.cost.sequence_ms(s)
            held = min(count, int(capacity_ms * (1 + 1e-9) / own + 1e-9)) if own > 0 else count
            may = s <= kind.max_tokens and kind.cost.micro_batch_ms([s]) <= time_ms and capacity_ms >= 0
            row = [0.0] * (len(options) * width + 1)
            row[o * width + k], row[o * width + num] = 1.0, -float(held)
            rows.append(row)
            right.append(0.0)
            bounds.append((0.0, 2.0 * count if may else 0.0))
        bounds.append((0.0, float("inf")))
    for t, (_, number) in enumerate(groups):
        row = [0.0] * (len(options) * width + 1)
        for o, (_, _, own_kind) in enumerate(options):
            row[o * width + num] = float(own_kind == t)
        rows.append(row)
        right.append(float(number))
    for k, (_, count) in enumerate(classes):
        row = [0.0] * (len(options) * width + 1)
        row = [1.0 if i % width == k and i < len(options) * width else 0.0 for i in range(len(row))]
        row[-1] = -float(count)
        equal.append(row)
    cost = [0.0] * (len(options) * width) + [-1.0]
    answer = linprog(cost, rows, right, equal, [0.0] * num, bounds=[*bounds, (0.0, 2.0)], method="highs")
    return float(-answer.fun)


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Yields every partition of `items` into non-empty groups."""
    if not items:
        yield []
        return
    for smaller in partitions(items[1:]):
        yield [[items[0]], *smaller]
        for index in range(len(smaller)):
            yield [*smaller[:index], [items[0], *smaller[index]], *smaller[index + 1 :]]


def best_replica_ms(kind: ReplicaKind, lengths: Sequence[int], simulated: bool, enough_ms: float = INF) -> float:
    """Returns the least time of one replica over all packings: simulated over all orders, or flow.

    Where it is above `enough_ms`, inf may be returned.
    """
    packings = _packings(kind, tuple(lengths))
    if not simulated or kind.pp == 1:
        return min((sum(times_ms) + (kind.pp - 1) * max(times_ms, default=0.0) for times_ms in packings), default=INF)
    best = 0.0 if not lengths else INF
    for least_ms, times_ms in sorted((_at_least_ms(kind, times_ms), times_ms) for times_ms in packings if times_ms):
        if least_ms >= best or least_ms > enough_ms * (1 + 1e-9):
            break
        best = min(best, every_order_ms(kind.schedule, kind.pp, times_ms))
    return best


@lru_cache(maxsize=2_000)
def _packings(kind: ReplicaKind, lengths: tuple[int, ...]) -> set[tuple[float, ...]]:
    """Returns the times of the micro-batches of every packing within the token limit, each rising."""
    cost = kind.cost
    return {
        tuple(sorted(cost.micro_batch_ms(group) for group in groups))
        for groups in partitions(lengths)
        if all(sum(group) <= cost.max_tokens for group in groups)
    }


def _at_least_ms(kind: ReplicaKind, times_ms: tuple[float, ...]) -> float:
    """Returns what rising times need in any order: the last stage's work between the two smallest, or the largest."""
    first = times_ms[1] if len(times_ms) > 1 else times_ms[0]
    ends = first / 3 + times_ms[0] * 2 / 3
    return max(sum(times_ms) + (kind.pp - 1) * ends, kind.pp * times_ms[-1])


def best_step_ms(kinds: Sequence[ReplicaKind], lengths: Sequence[int], simulated: bool) -> float:
    """Returns the least step time over all assignments and packings, by enumeration.

    A simulated time is at most the flow time of the same packing; what is slower than the least flow time is left out.
    """
    enough_ms = best_step_ms(kinds, lengths, simulated=False) if simulated else INF
    full = (1 << len(lengths)) - 1
    best = {0: 0.0}
    for kind in kinds:
        own = {
            mask: best_replica_ms(kind, [s for i, s in enumerate(lengths) if mask >> i & 1], simulated, enough_ms)
            for mask in range(full + 1)
        }
        following: dict[int, float] = {}
        for done, slowest in best.items():
            rest = full & ~done
            mask = rest
            while True:
                ms = max(slowest, own[mask])
                if ms < following.get(done | mask, float("inf")):
                    following[done | mask] = ms
                if mask == 0:
                    break
                mask = (mask - 1) & rest
        best = following
    return best.get(full, float("inf"))
