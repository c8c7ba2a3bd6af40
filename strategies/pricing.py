"""Times of given plans under given costs, and bounds of strategies without planning for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hgraph.plan import ReplicaPlan, StepPlan
from hgraph.profile import Profile
from hgraph.strategy import Pool, Strategy
from strategies.bound import bound_problem, closed_form_ms, least_time_ms
from strategies.cost import ReplicaKind, replica_kinds

__all__ = ["pool_bound_ms", "priced", "strategy_bound_ms"]


def strategy_bound_ms(strategy: Strategy, profile: Profile, lengths: Sequence[int]) -> float:
    """Returns a lower bound in ms on any plan of `strategy`, bridges included; inf where it cannot hold a sequence."""
    kinds = replica_kinds(strategy, profile)
    if not lengths:
        return profile.bridge_ms.get(strategy.name, 0.0)
    if max(lengths) > max(kind.max_tokens for kind in kinds):
        return float("inf")
    return least_time_ms(bound_problem(kinds, lengths), closed_form_ms) + profile.bridge_ms.get(strategy.name, 0.0)


def pool_bound_ms(pool: Pool, profile: Profile, lengths: Sequence[int]) -> float:
    """Returns the least bound in ms of the pool's strategies."""
    return min(strategy_bound_ms(strategy, profile, lengths) for strategy in pool.strategies)


def priced(plan: StepPlan, pool: Pool, profile: Profile, lengths: Sequence[int]) -> StepPlan:
    """Returns the same assignment with its times under these costs; candidates, which had others, are left out."""
    strategy = pool[plan.strategy]
    kinds = replica_kinds(strategy, profile)
    replicas = tuple(_priced_replica(own, kind, lengths) for own, kind in zip(plan.replicas, kinds, strict=True))
    predicted_ms = max(replica.predicted_ms for replica in replicas) + profile.bridge_ms.get(strategy.name, 0.0)
    # Bound and plan add the same times in different order: a bound is never above a plan.
    bound_ms = min(pool_bound_ms(pool, profile, lengths), predicted_ms)
    gap = predicted_ms / bound_ms - 1.0 if bound_ms > 0 else 0.0
    return replace(
        plan,
        replicas=replicas,
        predicted_ms=predicted_ms,
        bound_ms=bound_ms,
        gap=gap,
        candidates=(),
        plan_ms=0.0,
        flow_ms=max(kind.flow_ms(_times_ms(own, kind, lengths)) for own, kind in zip(replicas, kinds, strict=True)),
    )


def _priced_replica(planned: ReplicaPlan, kind: ReplicaKind, lengths: Sequence[int]) -> ReplicaPlan:
    return replace(planned, predicted_ms=kind.schedule_ms(_times_ms(planned, kind, lengths)))


def _times_ms(planned: ReplicaPlan, kind: ReplicaKind, lengths: Sequence[int]) -> list[float]:
    return kind.micro_batch_ms([lengths[index] for index in own] for own in planned.micro_batches)
