"""The published planner, rebuilt from its description (Hydraulis, arXiv 2412.07894, sections 4 and 5).

Two stages for each strategy, then the choice:

1. Dispatch: sequences one after another to the replica whose estimate, sum f + (pp - 1) max f with f = a s^2 + b s, is
   then the least; of `ORDERS` shuffled orders the best. Neither c nor packing is seen.
2. Packing of each replica: the number v of micro-batches and their contents of least (pp - 1 + v) (max f + c): every
   micro-batch is charged as the longest.
3. The strategy whose greatest packing cost is the least.

Strategies that cannot hold the longest sequence, or that leave a replica without one, are not considered. Where the
description leaves it open: orders are shuffled within classes of lengths (powers of `CLASS`), longest class first; an
integer program packs there, here balanced packs and first fit decreasing for each v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hgraph.errors import InvalidInput
from hgraph.profile import Profile, SchemeCost
from hgraph.step_parts import MicroBatch, Part
from hgraph.strategy import Pool, Replica, Strategy
from strategies.baselines import MORE_PACKS, balanced_packs, first_fit_decreasing

__all__ = ["PublishedPlan", "published_plan"]

ORDERS = 50
PATIENCE = 5
"""Numbers of micro-batches that are no better, after which packing ends."""
CLASS = 16.0


@dataclass(frozen=True, slots=True)
class PublishedPlan:
    """What the algorithm runs, and its own two estimates in ms."""

    part: Part
    dispatch_ms: float
    packing_ms: float


def published_plan(pool: Pool, profile: Profile, lengths: Sequence[int], seed: int = 0) -> PublishedPlan:
    """Returns the plan of the published algorithm; raises `InvalidInput` where no strategy holds the longest sequence.

    Where every strategy that could hold it would leave a replica idle, idle replicas are allowed.
    """
    longest = max(lengths)
    able = [one for one in pool.strategies if max(cost.max_tokens for cost in _costs(one, profile)) >= longest]
    if not able:
        raise InvalidInput(f"published planner: no strategy holds the longest sequence, {longest:,} tokens")
    orders = _orders(lengths, seed)
    plans = [_plan(strategy, profile, lengths, orders) for strategy in able]
    busy = [plan for plan in plans if all(plan.part.replicas)]
    return min(busy or plans, key=lambda plan: plan.packing_ms)


def _costs(strategy: Strategy, profile: Profile) -> list[SchemeCost]:
    return [profile.cost(replica.scheme) for replica in strategy.replicas]


def _orders(lengths: Sequence[int], seed: int) -> NDArray[np.int64]:
    """Returns `ORDERS` rows of indices into the batch."""
    generator = np.random.default_rng(seed)
    sizes = np.array(lengths, dtype=np.float64)
    classes = np.floor(np.log(sizes) / np.log(CLASS))
    rows = []
    for _ in range(ORDERS):
        shuffled = generator.permutation(len(lengths))
        rows.append(shuffled[np.argsort(-classes[shuffled], kind="stable")])
    return np.array(rows, dtype=np.int64)


def _plan(strategy: Strategy, profile: Profile, lengths: Sequence[int], orders: NDArray[np.int64]) -> PublishedPlan:
    costs = _costs(strategy, profile)
    dispatch_ms, owners = _dispatch(strategy, costs, lengths, orders)
    replicas, packing_ms = [], 0.0
    for number, (replica, cost) in enumerate(zip(strategy.replicas, costs, strict=True)):
        own = [int(index) for index in np.flatnonzero(owners == number)]
        micro_batches, own_ms = _pack(replica, cost, own, lengths)
        replicas.append(micro_batches)
        packing_ms = max(packing_ms, own_ms)
    return PublishedPlan(Part(strategy, tuple(replicas)), dispatch_ms, packing_ms)


def _dispatch(
    strategy: Strategy, costs: Sequence[SchemeCost], lengths: Sequence[int], orders: NDArray[np.int64]
) -> tuple[float, NDArray[np.int64]]:
    """Returns the estimate and the replica of every sequence, of the best order; orders O run side by side."""
    sizes = np.array(lengths, dtype=np.float64)
    a_R, b_R, limit_R = (np.array([getattr(cost, name) for cost in costs]) for name in ("a", "b", "max_tokens"))
    ramp_R = np.array([replica.scheme.pp - 1 for replica in strategy.replicas])
    rows = np.arange(len(orders))
    sum_OR, max_OR = np.zeros((len(orders), len(costs))), np.zeros((len(orders), len(costs)))
    owners_OS = np.zeros(orders.shape, dtype=np.int64)
    for column in range(orders.shape[1]):
        index_O = orders[:, column]
        size_O1 = sizes[index_O][:, None]
        work_OR = (a_R * size_O1 + b_R) * size_O1
        then_OR = sum_OR + work_OR + ramp_R * np.maximum(max_OR, work_OR)
        chosen_O = np.where(size_O1 <= limit_R, then_OR, np.inf).argmin(axis=1)
        owners_OS[rows, index_O] = chosen_O
        sum_OR[rows, chosen_O] += work_OR[rows, chosen_O]
        max_OR[rows, chosen_O] = np.maximum(max_OR[rows, chosen_O], work_OR[rows, chosen_O])
    estimate_O = (sum_OR + ramp_R * max_OR).max(axis=1)
    best = int(estimate_O.argmin())
    return float(estimate_O[best]), owners_OS[best]


def _pack(
    replica: Replica, cost: SchemeCost, indices: Sequence[int], lengths: Sequence[int]
) -> tuple[tuple[MicroBatch, ...], float]:
    """Returns the micro-batches of least packing cost, and that cost; none and 0.0 for an idle replica."""
    if not indices:
        return (), 0.0
    best = _micro_batches(first_fit_decreasing(indices, lengths, cost.max_tokens), lengths, cost)
    best_ms = _packing_ms(replica, best)
    least = -(-sum(lengths[index] for index in indices) // cost.max_tokens)
    failures = 0
    for num_packs in range(least, min(len(indices), least + MORE_PACKS) + 1):
        packs = balanced_packs(indices, lengths, cost, num_packs) if failures < PATIENCE else None
        if packs is None:
            continue
        found = _micro_batches(packs, lengths, cost)
        failures += 1
        if _packing_ms(replica, found) < best_ms:
            best, best_ms, failures = found, _packing_ms(replica, found), 0
    return best, best_ms


def _micro_batches(packs: Sequence[Sequence[int]], lengths: Sequence[int], cost: SchemeCost) -> tuple[MicroBatch, ...]:
    own = [(tuple(pack), [lengths[index] for index in pack]) for pack in packs]
    return tuple(MicroBatch(pack, sum(tokens), cost.micro_batch_ms(tokens)) for pack, tokens in own)


def _packing_ms(replica: Replica, micro_batches: Sequence[MicroBatch]) -> float:
    """Returns (pp - 1 + v) times the longest, which includes c."""
    return (replica.scheme.pp - 1 + len(micro_batches)) * max(one.ms for one in micro_batches)
