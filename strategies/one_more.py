"""What one more strategy in the pool would gain for a batch: strategies near the taken one, tried by bound, then plan.

Tried are, of the schemes that the profile has costs for:
- uniform strategies: as many replicas of one scheme as the ranks hold;
- the taken strategy with one replica replaced by one or several equal ones on the same ranks;
- the taken strategy with 2, 4 or 8 equal replicas replaced by one of their size.

The bound says what a strategy cannot gain; those that might are planned for by the heuristic, least bound first, so
what they gain is a lower limit. Bridges are taken to last as long as those of the taken strategy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hgraph.errors import InvalidInput
from hgraph.plan import StepPlan
from hgraph.profile import Profile
from hgraph.scheme_text import parse_scheme
from hgraph.strategy import Pool, Replica, Scheme, Strategy
from strategies.options import PlannerOptions
from strategies.pricing import strategy_bound_ms

__all__ = ["OneMore", "OneMoreRow", "one_more", "schemes_text"]

MOST_PLANS = 12
"""Strategies that are planned for; the others are left at their bounds."""

MERGES = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class OneMoreRow:
    """A strategy that is not in the pool, and its time in ms for the batch (None where it was not planned for).

    `gain`: what it would save of the taken plan's time at least, and `most_gain`: at most, by its bound.
    """

    strategy: str
    bound_ms: float
    predicted_ms: float | None
    gain: float | None
    most_gain: float
    idle_ranks: int


@dataclass(frozen=True, slots=True)
class OneMore:
    """`rows` that gain, or might, best first; `num_tried` strategies in all, `best_bound_ms` the least of their bounds.

    `best_bound_ms` is inf where none can hold the batch.
    """

    rows: tuple[OneMoreRow, ...]
    num_tried: int
    best_bound_ms: float


def one_more(
    plan: StepPlan, pool: Pool, profile: Profile, lengths: Sequence[int], options: PlannerOptions | None = None
) -> OneMore:
    """Returns what the strategies near the taken one would gain for a batch of `lengths`."""
    bridge_ms = profile.bridge_ms.get(plan.strategy, 0.0)
    tried: list[tuple[float, Strategy]] = []
    for schemes in _candidates(pool[plan.strategy], pool, profile):
        strategy = _strategy(schemes)
        costs = replace(profile, bridge_ms={strategy.name: bridge_ms})
        tried.append((strategy_bound_ms(strategy, costs, lengths), strategy))
    tried.sort(key=lambda one: one[0])
    rows: list[OneMoreRow] = []
    for bound_ms, strategy in tried:
        if bound_ms >= plan.predicted_ms:
            break
        costs = replace(profile, bridge_ms={strategy.name: bridge_ms})
        predicted_ms = _planned_ms(strategy, pool, costs, lengths, options) if len(rows) < MOST_PLANS else None
        gain = None if predicted_ms is None else 1.0 - predicted_ms / plan.predicted_ms
        most_gain = 1.0 - bound_ms / plan.predicted_ms
        idle_ranks = pool.num_ranks - len(strategy.ranks)
        rows.append(OneMoreRow(strategy.name, bound_ms, predicted_ms, gain, most_gain, idle_ranks))
    rows.sort(key=lambda row: (row.predicted_ms is None, row.predicted_ms or row.bound_ms))
    return OneMore(tuple(rows), len(tried), min((bound_ms for bound_ms, _ in tried), default=float("inf")))


def schemes_text(schemes: Sequence[Scheme]) -> str:
    """Returns schemes with their counts: `tp8.pp3 + 10 x tp4`."""
    groups = [(text, len(list(own))) for text, own in groupby(map(str, schemes))]
    return " + ".join(text if count == 1 else f"{count} x {text}" for text, count in groups)


def _planned_ms(
    strategy: Strategy, pool: Pool, profile: Profile, lengths: Sequence[int], options: PlannerOptions | None
) -> float:
    from strategies.select import plan_step

    quick = replace(options or PlannerOptions(), program=False, only=None)
    return plan_step(Pool(pool.num_ranks, (strategy,)), profile, lengths, options=quick).predicted_ms


def _candidates(taken: Strategy, pool: Pool, profile: Profile) -> Iterator[tuple[Scheme, ...]]:
    """Yields sets of replicas, largest scheme first, each once and none that the pool has."""
    seen = {frozenset(Counter(_schemes(strategy)).items()) for strategy in pool.strategies}
    known = _known_schemes(pool, profile)
    for schemes in (*_uniform(known, pool.num_ranks), *_variations(_schemes(taken), known)):
        key = frozenset(Counter(schemes).items())
        if key not in seen:
            seen.add(key)
            yield tuple(sorted(schemes, key=lambda scheme: (-scheme.num_ranks, str(scheme))))


def _schemes(strategy: Strategy) -> tuple[Scheme, ...]:
    return tuple(replica.scheme for replica in strategy.replicas)


def _known_schemes(pool: Pool, profile: Profile) -> list[Scheme]:
    """Returns the schemes that have costs: those of the pool, and those that the profile's text says all about."""
    known = {str(scheme): scheme for scheme in pool.schemes if str(scheme) in profile.schemes}
    for text in profile.schemes:
        try:
            known.setdefault(text, parse_scheme(text))
        except InvalidInput:
            continue  # a name that is not a scheme's: nothing can be made of it
    return list(known.values())


def _uniform(known: Sequence[Scheme], num_ranks: int) -> Iterator[list[Scheme]]:
    for scheme in known:
        if scheme.num_ranks <= num_ranks:
            yield [scheme] * (num_ranks // scheme.num_ranks)


def _variations(taken: Sequence[Scheme], known: Sequence[Scheme]) -> Iterator[list[Scheme]]:
    for old, count in Counter(taken).items():
        rest = [scheme for scheme in taken if scheme != old]
        for new in known:
            if new == old:
                continue
            if old.num_ranks % new.num_ranks == 0:
                yield [*rest, *[old] * (count - 1), *[new] * (old.num_ranks // new.num_ranks)]
            for merged in MERGES:
                if merged <= count and new.num_ranks == merged * old.num_ranks:
                    yield [*rest, *[old] * (count - merged), new]


def _strategy(schemes: Sequence[Scheme]) -> Strategy:
    replicas, first = [], 0
    for scheme in schemes:
        replicas.append(Replica(scheme, tuple(range(first, first + scheme.num_ranks))))
        first += scheme.num_ranks
    return Strategy(schemes_text(schemes), tuple(replicas))
