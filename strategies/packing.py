"""Packing: which micro-batches one replica makes of its sequences, and in which order it runs them.

With pp = 1 only the number of micro-batches matters (each costs c), so it is made as small as the two packers get it;
what the finished plan runs is evened out (`evened`).
With pp > 1 more micro-batches cost c each and shorten the pipeline's ramp: numbers around the one that the closed form
of a load names are tried, up and down as long as that helps: balanced longest first under the token limit and ordered
by simulating the schedule in use, and in the shape that 1F1B runs fastest (`strategies/shapes.py`). All choices are
deterministic; ties go to the lower position.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from math import sqrt
from typing import TypeAlias

import numpy as np

from hgraph.simulate import schedules_ms
from strategies.cost import ReplicaKind
from strategies.shapes import shaped_bins

__all__ = ["Packer", "Packing", "evened", "fewest_bins", "fewest_bins_bound", "ordered", "refine"]

MAX_REFINED_SIZE = 400
MAX_SWAPPED = 24
IMPROVEMENT = 1.0 - 1e-12
MAX_HELD = 300_000
PATIENCE = 2

Groups: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Packing:
    """Micro-batches in running order, each of positions into the packed lengths; simulated and flow time in ms."""

    groups: Groups
    ms: float
    flow_ms: float


class Packer:
    """Packs and remembers: replicas of one kind with the same lengths have the same packing.

    `by_flow` packs for the flow time, else for the simulated one. Packings of at most `MAX_HELD` sequences in all are
    remembered.
    """

    def __init__(self, by_flow: bool = False) -> None:
        self.by_flow = by_flow
        self._known: dict[tuple[ReplicaKind, tuple[int, ...]], Packing] = {}
        self._num_held = 0

    def value_ms(self, packing: Packing) -> float:
        """Returns the time in ms that packings are compared by."""
        return packing.flow_ms if self.by_flow else packing.ms

    def pack(self, kind: ReplicaKind, lengths: tuple[int, ...]) -> Packing:
        """Returns the packing of `lengths`, which are in descending order and none above the kind's limit."""
        key = (kind, lengths)
        known = self._known.get(key)
        if known is None:
            if self._num_held > MAX_HELD:
                self._known.clear()
                self._num_held = 0
            self._num_held += len(lengths)
            known = self._known[key] = self._pack(kind, lengths)
        return known

    def _pack(self, kind: ReplicaKind, lengths: tuple[int, ...]) -> Packing:
        assert not lengths or lengths[0] <= kind.max_tokens, (lengths[0], kind.max_tokens)
        assert all(longer >= shorter for longer, shorter in pairwise(lengths)), lengths
        bins = fewest_bins(lengths, kind.max_tokens)
        best = ordered(kind, lengths, bins)
        if kind.pp == 1 or len(lengths) <= len(bins):
            return best
        work_ms = [kind.cost.sequence_ms(length) for length in lengths]
        at = min(max(_likely_number(kind, work_ms), len(bins)), len(lengths))
        best = self._better(best, kind, lengths, work_ms, at)
        for numbers in (range(at + 1, len(lengths) + 1), range(at - 1, len(bins) - 1, -1)):
            failures = 0
            for num_bins in numbers:
                following = self._better(best, kind, lengths, work_ms, num_bins)
                failures = failures + 1 if following is best else 0
                if failures == PATIENCE:
                    break
                best = following
        return best

    def _better(
        self, best: Packing, kind: ReplicaKind, lengths: Sequence[int], work_ms: Sequence[float], num_bins: int
    ) -> Packing:
        """Returns the better of `best` itself and the packings in `num_bins` balanced or shaped micro-batches."""
        least_ms = sum(work_ms) + num_bins * kind.cost.c + (kind.pp - 1) * (work_ms[-1] + kind.cost.c)
        if least_ms >= self.value_ms(best):
            return best
        balanced = _balanced_bins(kind, lengths, work_ms, num_bins)
        shaped = None if self.by_flow else shaped_bins(kind, lengths, work_ms, num_bins)
        found = [ordered(kind, lengths, balanced)] if balanced is not None else []
        found += [in_order(kind, lengths, shaped)] if shaped is not None else []
        for candidate in found:
            best = candidate if self.value_ms(candidate) < self.value_ms(best) * IMPROVEMENT else best
        return best


def _likely_number(kind: ReplicaKind, work_ms: Sequence[float]) -> int:
    """Returns the number of equal micro-batches that balances the fixed cost and the ramp, the longest below them."""
    total_ms, longest_ms = sum(work_ms), work_ms[0]
    most = total_ms / longest_ms if longest_ms > 0 else 1.0
    ideal = sqrt((kind.pp - 1) * total_ms / kind.cost.c) if kind.cost.c > 0 else most
    return max(1, round(min(ideal, most)))


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
    if sum(lengths) <= limit:
        return (tuple(range(len(lengths))),) if lengths else ()
    bins: list[list[int]] = []
    by_room: list[tuple[int, int]] = []
    for position, length in enumerate(lengths):
        at = bisect_left(by_room, (length, -1))
        if at == len(by_room):
            room, index = limit, len(bins)
            bins.append([])
        else:
            room, index = by_room.pop(at)
        bins[index].append(position)
        insort(by_room, (room - length, index))
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


def _balanced_bins(kind: ReplicaKind, lengths: Sequence[int], work_ms: Sequence[float], num_bins: int) -> Groups | None:
    """Returns `num_bins` bins, longest first into the cheapest one with room; None where a sequence finds no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [kind.max_tokens] * num_bins
    heap = [(0.0, index) for index in range(num_bins)]
    for position, length in enumerate(lengths):
        passed = []
        while heap and room[heap[0][1]] < length:
            passed.append(heappop(heap))
        if not heap:
            return None
        load_ms, index = heappop(heap)
        bins[index].append(position)
        room[index] -= length
        # Lengths fall: a bin that is too full now may have room for a later sequence.
        for entry in passed:
            heappush(heap, entry)
        heappush(heap, (load_ms + work_ms[position], index))
    return tuple(tuple(group) for group in bins if group)


def ordered(kind: ReplicaKind, lengths: Sequence[int], groups: Groups) -> Packing:
    """Returns the packing of `groups` in the best of a few orders of their times."""
    times_ms = kind.micro_batch_ms([lengths[position] for position in group] for group in groups)
    descending = sorted(range(len(groups)), key=lambda index: (-times_ms[index], index))
    best_order, best_ms = descending, kind.schedule_ms([times_ms[index] for index in descending])
    if kind.pp > 1 and kind.schedule != "gpipe" and len(groups) > 1:
        for order in _orders(descending):
            ms = kind.schedule_ms([times_ms[index] for index in order])
            if ms < best_ms * IMPROVEMENT:
                best_order, best_ms = order, ms
    return Packing(tuple(groups[index] for index in best_order), best_ms, kind.flow_ms(times_ms))


def in_order(kind: ReplicaKind, lengths: Sequence[int], groups: Groups) -> Packing:
    """Returns the packing of `groups` in the order they are in."""
    times_ms = kind.micro_batch_ms([lengths[position] for position in group] for group in groups)
    return Packing(groups, kind.schedule_ms(times_ms), kind.flow_ms(times_ms))


def _orders(descending: list[int]) -> Iterator[list[int]]:
    """Yields orders in which neighbours are alike and the ends small, given the order from longest to shortest."""
    ascending = descending[::-1]
    if len(descending) < 3:
        yield ascending
        return
    yield ascending[::2] + ascending[1::2][::-1]
    yield ascending[1::2] + ascending[::2][::-1]
    yield [ascending[0], *descending[:-1]]
    yield [*ascending[1:], ascending[0]]


def refine(kind: ReplicaKind, lengths: Sequence[int], packing: Packing) -> Packing:
    """Returns `packing`, or one of less simulated time reached by swaps in the order and moves of single sequences.

    Only where the order matters (1F1B, pp > 1), and only while sequences times micro-batches is at most
    `MAX_REFINED_SIZE`.
    """
    if kind.pp == 1 or kind.schedule == "gpipe" or len(lengths) * len(packing.groups) > MAX_REFINED_SIZE:
        return packing
    best = _reordered(kind, lengths, packing)
    improved = True
    while improved:
        improved = False
        for groups, times_ms in _moves(kind, lengths, best.groups):
            ms = kind.schedule_ms(times_ms)
            if ms < best.ms * (1.0 - 1e-6):
                best, improved = _reordered(kind, lengths, Packing(groups, ms, kind.flow_ms(times_ms))), True
                break
    return best


def evened(kind: ReplicaKind, lengths: Sequence[int], packing: Packing) -> Packing:
    """Returns a packing of one stage in as many micro-batches of about equal time, the two longest at the ends.

    It takes as long, since with pp = 1 only their number matters. But bridges hide behind computation: parameters
    arrive during the first forward pass and gradients leave during the last backward pass, so neither should be short.
    Packings of several stages, and those whose sequences find no room this way, keep their micro-batches.
    """
    count = len(packing.groups)
    if kind.pp > 1 or count < 2:
        return packing
    groups = _balanced_bins(kind, lengths, [kind.cost.sequence_ms(length) for length in lengths], count)
    if groups is None or len(groups) < count:
        groups = packing.groups
    times_ms = kind.micro_batch_ms([lengths[position] for position in group] for group in groups)
    *others, second, longest = sorted(range(count), key=lambda index: (times_ms[index], index))
    return Packing(tuple(groups[index] for index in (second, *others, longest)), packing.ms, packing.flow_ms)


def _reordered(kind: ReplicaKind, lengths: Sequence[int], packing: Packing) -> Packing:
    """Returns the packing after the best swaps of two micro-batches in the order, until none helps."""
    count = len(packing.groups)
    if not 2 < count <= MAX_SWAPPED:
        return packing
    times_ms = np.array(kind.micro_batch_ms([lengths[position] for position in group] for group in packing.groups))
    first, second = np.triu_indices(count, 1)
    swap_NV = np.tile(np.arange(count), (len(first), 1))
    swap_NV[np.arange(len(first)), first], swap_NV[np.arange(len(first)), second] = second, first
    order, best_ms = np.arange(count), packing.ms
    while True:
        all_ms = schedules_ms(kind.schedule, kind.pp, times_ms[order][swap_NV])
        at = int(all_ms.argmin())
        if all_ms[at] >= best_ms * (1.0 - 1e-6):
            break
        order, best_ms = order[swap_NV[at]], float(all_ms[at])
    if best_ms >= packing.ms:
        return packing
    # The same arithmetic as everywhere else, so that a time is one number wherever it is computed.
    return Packing(
        tuple(packing.groups[index] for index in order), kind.schedule_ms(times_ms[order].tolist()), packing.flow_ms
    )


def _moves(kind: ReplicaKind, lengths: Sequence[int], groups: Groups) -> Iterator[tuple[Groups, list[float]]]:
    """Yields the groups after each move of one sequence to another one with room, with their times in ms."""
    count = len(groups)
    times_ms = kind.micro_batch_ms([lengths[position] for position in group] for group in groups)
    for i, j in [(i, j) for i in range(count) for j in range(count) if i != j]:
        room = kind.max_tokens - sum(lengths[position] for position in groups[j])
        for position in groups[i]:
            if lengths[position] > room:
                continue
            moved, moved_ms = list(groups), list(times_ms)
            moved[i] = tuple(other for other in groups[i] if other != position)
            moved[j] = tuple(sorted((*groups[j], position)))
            for at in (i, j):
                moved_ms[at] = kind.cost.micro_batch_ms([lengths[other] for other in moved[at]])
            if not moved[i]:
                del moved[i], moved_ms[i]
            yield tuple(moved), moved_ms
