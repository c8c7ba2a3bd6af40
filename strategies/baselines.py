"""How other systems make micro-batches: packing and dispatch by rule, without a planner.

- *padded rows*: a row per sequence, in the order of the data; rows of a micro-batch are padded to its longest one.
- *padded*: packs filled up to the context window with padding, which costs b a token.
- *fixed-length packing*: first fit decreasing into packs of the context window, dealt to the replicas in turn (the
  practice of Megatron-LM, arXiv 1909.08053, and of most trainers).
- *balanced dispatch*: sequences, longest first, to the replica with the least work (arXiv 2412.07894 calls its use of
  the cost model workload-balanced), then packs of the context window within each replica.
- *fine-grained packing*: each replica's sequences in as many balanced micro-batches as take least time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TypeAlias

from hgraph.profile import Profile, SchemeCost
from hgraph.simulate import schedule_ms
from hgraph.step_parts import MicroBatch, Part
from hgraph.strategy import Replica, Strategy

__all__ = [
    "Assign",
    "assign_balanced",
    "assign_balanced_finely",
    "assign_packs",
    "assign_padded_packs",
    "assign_padded_rows",
    "balanced_packs",
    "dispatch_longest_first",
    "first_fit_decreasing",
]

Packs: TypeAlias = list[list[int]]
Assign: TypeAlias = Callable[[Strategy, Profile, Sequence[int], int], Part]
"""(equal replicas, profile, lengths, context window) -> what they run."""

MORE_PACKS = 20
"""How many numbers of micro-batches above the least are tried, ..."""
PATIENCE = 3
"""... and after how many that are no better the search ends."""


def _by_length(indices: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return sorted(indices, key=lambda index: (-lengths[index], index))


def first_fit_decreasing(indices: Sequence[int], lengths: Sequence[int], capacity: int) -> Packs:
    """Returns packs of at most `capacity` tokens: each sequence, longest first, into the first pack with room."""
    packs: Packs = []
    room: list[int] = []
    for index in _by_length(indices, lengths):
        length = lengths[index]
        place = next((number for number, left in enumerate(room) if left >= length), None)
        if place is None:
            packs.append([])
            room.append(capacity)
            place = len(packs) - 1
        packs[place].append(index)
        room[place] -= length
    return packs


def balanced_packs(indices: Sequence[int], lengths: Sequence[int], cost: SchemeCost, num_packs: int) -> Packs | None:
    """Returns packs within the limit of `cost`: each sequence, longest first, to the one with least work and room.

    None where a sequence finds no room.
    """
    packs: Packs = [[] for _ in range(num_packs)]
    work_ms, room = [0.0] * num_packs, [cost.max_tokens] * num_packs
    for index in _by_length(indices, lengths):
        open_packs = [number for number in range(num_packs) if room[number] >= lengths[index]]
        if not open_packs:
            return None
        place = min(open_packs, key=work_ms.__getitem__)
        packs[place].append(index)
        work_ms[place] += cost.sequence_ms(lengths[index])
        room[place] -= lengths[index]
    return [pack for pack in packs if pack]


def dispatch_longest_first(costs: Sequence[SchemeCost], lengths: Sequence[int]) -> Packs:
    """Returns the sequences of each of equal replicas: longest first to the one with the least work so far."""
    heap = [(0.0, replica) for replica in range(len(costs))]
    own: Packs = [[] for _ in costs]
    for index in _by_length(range(len(lengths)), lengths):
        work_ms, replica = heapq.heappop(heap)
        own[replica].append(index)
        heapq.heappush(heap, (work_ms + costs[replica].sequence_ms(lengths[index]), replica))
    return own


def _costs(strategy: Strategy, profile: Profile) -> list[SchemeCost]:
    return [profile.cost(replica.scheme) for replica in strategy.replicas]


def _micro_batch(pack: Sequence[int], lengths: Sequence[int], cost: SchemeCost, padding: int = 0) -> MicroBatch:
    own = [lengths[index] for index in pack]
    return MicroBatch(tuple(pack), sum(own) + padding, cost.micro_batch_ms(own) + cost.b * padding)


def _dealt(strategy: Strategy, profile: Profile, lengths: Sequence[int], packs: Packs, pad_to: int = 0) -> Part:
    """Returns the packs dealt to the replicas in turn, each filled up to `pad_to` tokens."""
    replicas: list[list[MicroBatch]] = [[] for _ in strategy.replicas]
    costs = _costs(strategy, profile)
    for number, pack in enumerate(packs):
        replica = number % len(replicas)
        padding = max(0, pad_to - sum(lengths[index] for index in pack))
        replicas[replica].append(_micro_batch(pack, lengths, costs[replica], padding))
    return Part(strategy, tuple(map(tuple, replicas)))


def assign_packs(strategy: Strategy, profile: Profile, lengths: Sequence[int], context: int) -> Part:
    """Fixed-length packing."""
    return _dealt(strategy, profile, lengths, first_fit_decreasing(range(len(lengths)), lengths, context))


def assign_padded_packs(strategy: Strategy, profile: Profile, lengths: Sequence[int], context: int) -> Part:
    """Fixed-length packing, packs filled up with padding."""
    packs = first_fit_decreasing(range(len(lengths)), lengths, context)
    return _dealt(strategy, profile, lengths, packs, pad_to=context)


def assign_padded_rows(strategy: Strategy, profile: Profile, lengths: Sequence[int], context: int) -> Part:
    """Padded rows: as many in a micro-batch as stay within the context window, padding included."""
    groups: Packs = []
    longest = 0
    for index, length in enumerate(lengths):
        if not groups or max(longest, length) * (len(groups[-1]) + 1) > context:
            groups.append([])
            longest = 0
        groups[-1].append(index)
        longest = max(longest, length)
    costs = _costs(strategy, profile)
    replicas: list[list[MicroBatch]] = [[] for _ in costs]
    for number, group in enumerate(groups):
        replica = number % len(costs)
        rows = [max(lengths[index] for index in group)] * len(group)
        replicas[replica].append(MicroBatch(tuple(group), sum(rows), costs[replica].micro_batch_ms(rows)))
    return Part(strategy, tuple(map(tuple, replicas)))


def assign_balanced(strategy: Strategy, profile: Profile, lengths: Sequence[int], context: int) -> Part:
    """Balanced dispatch, then fixed-length packing within each replica."""
    costs = _costs(strategy, profile)
    replicas = []
    for own, cost in zip(dispatch_longest_first(costs, lengths), costs, strict=True):
        packs = first_fit_decreasing(own, lengths, context)
        replicas.append(tuple(_micro_batch(pack, lengths, cost) for pack in packs))
    return Part(strategy, tuple(replicas))


def assign_balanced_finely(strategy: Strategy, profile: Profile, lengths: Sequence[int], context: int) -> Part:
    """Balanced dispatch, then the best number of balanced micro-batches of each replica; `context` does not matter."""
    costs = _costs(strategy, profile)
    own = dispatch_longest_first(costs, lengths)
    rows = zip(strategy.replicas, costs, own, strict=True)
    return Part(strategy, tuple(_finely_packed(replica, cost, mine, lengths) for replica, cost, mine in rows))


def _finely_packed(
    replica: Replica, cost: SchemeCost, indices: Sequence[int], lengths: Sequence[int]
) -> tuple[MicroBatch, ...]:
    """Returns the micro-batches of least simulated time, among balanced ones of the least number and a few more."""
    least = -(-sum(lengths[index] for index in indices) // cost.max_tokens)
    best: tuple[MicroBatch, ...] = ()
    best_ms, failures = float("inf"), 0
    for num_packs in range(least, max(least, min(len(indices), least + MORE_PACKS)) + 1) if indices else ():
        packs = balanced_packs(indices, lengths, cost, num_packs)
        if packs is None:
            continue
        if failures == PATIENCE:
            break
        found = tuple(_micro_batch(pack, lengths, cost) for pack in packs)
        found_ms = schedule_ms(replica.scheme.schedule, replica.scheme.pp, [one.ms for one in found])
        if found_ms < best_ms:
            best, best_ms, failures = found, found_ms, 0
        elif replica.scheme.pp == 1:
            break  # with one stage every further micro-batch costs c more
        else:
            failures += 1
    if indices and not best:
        best = tuple(
            _micro_batch(pack, lengths, cost) for pack in first_fit_decreasing(indices, lengths, cost.max_tokens)
        )
    return best
