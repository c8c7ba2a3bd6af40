"""Packing: which micro-batches one replica makes of its sequences, and in which order it runs them.

With pp = 1 only the number of micro-batches matters (each costs c), so it is made as small as the two packers get it.
With pp > 1 more micro-batches cost c each and shorten the pipeline's ramp: several numbers are tried from the smallest
upward, each balanced longest-first under the token limit, and ordered by simulating the schedule in use.
All choices are deterministic; ties go to the lower position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from strategies.cost import ReplicaKind

__all__ = ["Packer", "Packing", "fewest_bins", "fewest_bins_bound", "ordered", "refine"]

PATIENCE = 3
MAX_REFINED_SIZE = 400
MAX_ORDERED = 8
IMPROVEMENT = 1.0 - 1e-12

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Packing:
    """Micro-batches in running order, each of positions into the packed lengths, and their simulated time in ms."""

    groups: Groups
    ms: float


class Packer:
    """Packs and remembers: replicas of one kind with the same lengths have the same packing."""

    def __init__(self) -> None:
        self._known: dict[tuple[ReplicaKind, tuple[int, ...]], Packing] = {}

    def pack(self, kind: ReplicaKind, lengths: tuple[int, ...]) -> Packing:
        """Returns the packing of `lengths`, which are in descending order and none above the kind's limit."""
        key = (kind, lengths)
        if key not in self._known:
            self._known[key] = _pack(kind, lengths)
        return self._known[key]


def _pack(kind: ReplicaKind, lengths: tuple[int, ...]) -> Packing:
    assert not lengths or lengths[0] <= kind.max_tokens, (lengths[0], kind.max_tokens)
    assert all(longer >= shorter for longer, shorter in pairwise(lengths)), lengths
    bins = fewest_bins(lengths, kind.max_tokens)
    if kind.pp == 1 or not bins:
        return ordered(kind, lengths, bins)
    best = ordered(kind, lengths, bins)
    total_ms = sum(map(kind.cost.sequence_ms, lengths))
    ramp_ms = (kind.pp - 1) * kind.cost.micro_batch_ms(lengths[-1:])
    failures = 0
    for num_bins in range(len(bins), len(lengths) + 1):
        if failures >= PATIENCE or total_ms + num_bins * kind.cost.c + ramp_ms >= best.ms:
            break
        balanced = _balanced_bins(kind, lengths, num_bins)
        candidate = ordered(kind, lengths, balanced) if balanced is not None else best
        failures = 0 if candidate.ms < best.ms * IMPROVEMENT else failures + 1
        best = candidate if candidate.ms < best.ms * IMPROVEMENT else best
    return best


def fewest_bins_bound(lengths: Sequence[int], limit: int) -> int:
    """Returns a lower bound on the number of micro-batches: by tokens, and by sequences longer than half the limit."""
    return max(-(-sum(lengths) // limit), sum(1 for length in lengths if 2 * length > limit))


def fewest_bins(lengths: Sequence[int], limit: int) -> Groups:
    """Returns bins of positions holding at most `limit` tokens each, as few as two packers get them.

    `lengths` are in descending order. Best fit decreasing, and where that misses the lower bound, bins filled one after
    the other as full as can be (exact subset sums).
    """
    best = _best_fit(lengths, limit)
    if len(best) > fewest_bins_bound(lengths, limit):
        filled = _fill_in_turn(lengths, limit)
        best = filled if len(filled) < len(best) else best
    return best


def _best_fit(lengths: Sequence[int], limit: int) -> Groups:
    bins: list[list[int]] = []
    room: list[int] = []
    for position, length in enumerate(lengths):
        fitting = [(left, index) for index, left in enumerate(room) if left >= length]
        if not fitting:
            bins.append([position])
            room.append(limit - length)
            continue
        _, index = min(fitting)
        bins[index].append(position)
        room[index] -= length
    return tuple(map(tuple, bins))


def _fill_in_turn(lengths: Sequence[int], limit: int) -> Groups:
    remaining = list(range(len(lengths)))
    bins: list[tuple[int, ...]] = []
    while remaining:
        first, rest = remaining[0], remaining[1:]
        chosen = _fullest_subset([lengths[position] for position in rest], limit - lengths[first])
        bins.append((first, *(rest[index] for index in chosen)))
        taken = set(chosen)
        remaining = [position for index, position in enumerate(rest) if index not in taken]
    return tuple(bins)


def _fullest_subset(lengths: Sequence[int], room: int) -> list[int]:
    """Returns the indices of a subset whose sum is the largest at most `room`; bit s of `reachable` means sum s."""
    mask = (1 << (room + 1)) - 1
    reachable = [1]
    for length in lengths:
        reachable.append((reachable[-1] | reachable[-1] << length) & mask if length <= room else reachable[-1])
    target = reachable[-1].bit_length() - 1
    chosen: list[int] = []
    for index in range(len(lengths) - 1, -1, -1):
        if not reachable[index] >> target & 1:
            chosen.append(index)
            target -= lengths[index]
    return chosen[::-1]


def _balanced_bins(kind: ReplicaKind, lengths: Sequence[int], num_bins: int) -> Groups | None:
    """Returns `num_bins` bins, longest first into the cheapest one with room; None where a sequence finds no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    load_ms = [0.0] * num_bins
    room = [kind.max_tokens] * num_bins
    for position, length in enumerate(lengths):
        index = min((i for i in range(num_bins) if room[i] >= length), key=load_ms.__getitem__, default=None)
        if index is None:
            return None
        bins[index].append(position)
        load_ms[index] += kind.cost.sequence_ms(length)
        room[index] -= length
    return tuple(tuple(group) for group in bins if group)


def ordered(kind: ReplicaKind, lengths: Sequence[int], groups: Groups) -> Packing:
    """Returns the packing of `groups` in the best of a few orders of their times."""
    times_ms = kind.micro_batch_ms([lengths[position] for position in group] for group in groups)
    descending = sorted(range(len(groups)), key=lambda index: (-times_ms[index], index))
    best_order, best_ms = descending, kind.schedule_ms([times_ms[index] for index in descending])
    if kind.pp == 1 or kind.schedule == "gpipe":
        return Packing(tuple(groups[index] for index in best_order), best_ms)
    for order in _orders(descending):
        ms = kind.schedule_ms([times_ms[index] for index in order])
        if ms < best_ms * IMPROVEMENT:
            best_order, best_ms = order, ms
    return Packing(tuple(groups[index] for index in best_order), best_ms)


def _orders(descending: list[int]) -> Iterator[list[int]]:
    """Yields orders that keep neighbours alike or ends small, given the order from longest to shortest."""
    ascending = descending[::-1]
    yield ascending
    if len(descending) < 3:
        return
    yield [ascending[0], *descending[:-1]]
    yield [*ascending[1:], ascending[0]]
    yield ascending[::2] + ascending[1::2][::-1]
    yield ascending[1::2] + ascending[::2][::-1]


def refine(kind: ReplicaKind, lengths: Sequence[int], packing: Packing) -> Packing:
    """Returns `packing`, or a better one reached by moving single sequences and swapping micro-batches in the order.

    Only where the pipeline's ramp depends on them (1F1B, pp > 1), and only while sequences times micro-batches is at
    most `MAX_REFINED_SIZE`.
    """
    if kind.pp == 1 or kind.schedule == "gpipe" or len(lengths) * len(packing.groups) > MAX_REFINED_SIZE:
        return packing
    best, improved = packing, True
    while improved:
        improved = False
        for groups in _neighbours(kind, lengths, best.groups):
            ms = kind.replica_ms([lengths[position] for position in group] for group in groups)
            if ms < best.ms * (1.0 - 1e-6):
                best, improved = Packing(groups, ms), True
                break
    return best


def _neighbours(kind: ReplicaKind, lengths: Sequence[int], groups: Groups) -> Iterator[Groups]:
    count = len(groups)
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    for i, j in pairs:
        if i < j and count <= MAX_ORDERED:
            swapped = list(groups)
            swapped[i], swapped[j] = groups[j], groups[i]
            yield tuple(swapped)
    for i, j in pairs:
        room = kind.max_tokens - sum(lengths[position] for position in groups[j])
        for position in groups[i]:
            if lengths[position] > room:
                continue
            moved = list(groups)
            moved[i] = tuple(other for other in groups[i] if other != position)
            moved[j] = tuple(sorted((*groups[j], position)))
            yield tuple(group for group in moved if group)
