"""Turns routes of bundles into the moves of the boxes that the bundles consist of.

What a rank copies from its own source buffer is in no route: it is added here, in the first level.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy

from hgraph.bundles import Bundle
from hgraph.reshard_needs import Need, merge_boxes
from hgraph.reshard_plan import Combine, Destination, Move, Origin
from hgraph.route_plan import NUM_LEVELS, SCRATCH, SOURCE, TARGET, Routes
from hgraph.shard_map import Box

__all__ = ["route_moves"]

_ORIGINS: dict[int, Origin] = {SOURCE: "source", TARGET: "target", SCRATCH: "scratch"}


class _Transfer(NamedTuple):
    """All fields of moves but the box. `bundle` is -1 where boxes of several bundles may be merged."""

    level: int
    sender: int
    receiver: int
    combine: Combine
    origin: Origin = "source"
    destination: Destination = "target"
    bundle: int = -1

    def of(self, bundle: int) -> _Transfer:
        """Returns the same for one bundle alone, unless it copies, and not to or from scratch.

        A copy that joins an earlier bundle's takes effect earlier: still before its own bundle's sums.
        """
        is_plain_copy = self.combine == "copy" and "scratch" not in (self.origin, self.destination)
        return self if is_plain_copy else self._replace(bundle=bundle)


def route_moves(
    needs: Sequence[Need],
    numbers: Sequence[int],
    bundles: Sequence[Bundle],
    routes: Routes,
    reduce: str | None,
    rank: int | None = None,
) -> tuple[tuple[Move, ...], ...]:
    """Returns the moves of each level, all of them or those that `rank` takes part in.

    `needs[i]` is part of bundle `numbers[i]`, each need of another one; `reduce` is how terms are combined. Moves that
    combine into one element take effect in the order in which they are listed. Copies of a pair of ranks that touch
    are merged; whatever goes into scratch or out of it, or is added, has the boxes of its need.
    """
    chosen = numpy.isin(routes.bundle, numbers)
    if rank is not None:
        chosen &= (routes.sender == rank) | (routes.receiver == rank)
    at = numpy.flatnonzero(chosen)
    of_bundle = dict(zip(numbers, needs, strict=True))
    boxes: dict[_Transfer, list[Box]] = {}
    for bundle, transfer in (*_own(numbers, bundles, routes, at), *_sent(routes, at, reduce)):
        if rank is None or rank in (transfer.sender, transfer.receiver):
            boxes.setdefault(transfer.of(bundle), []).extend(of_bundle[bundle].boxes)
    levels: list[list[Move]] = [[] for _ in range(NUM_LEVELS)]
    for (level, sender, receiver, combine, origin, destination, _), parts in boxes.items():
        merged = merge_boxes(parts)
        levels[level].extend(Move(sender, receiver, box, combine, origin, destination) for box in merged)
    return tuple(map(tuple, levels))


def _own(
    numbers: Sequence[int], bundles: Sequence[Bundle], routes: Routes, at: numpy.ndarray
) -> Iterator[tuple[int, _Transfer]]:
    """Yields what ranks copy from their own source buffer: values they need, and the first of the terms they sum."""
    for number in numbers:
        bundle, root = bundles[number], int(routes.roots[number])
        if bundle.is_copy:
            own = [] if bundle.in_target else sorted(set(bundle.receivers).intersection(bundle.terms[0]))
        else:
            own = [root] if any(root in term for term in bundle.terms) else []
        for rank in own:
            yield number, _Transfer(0, rank, rank, "copy")
    into_scratch = at[routes.into_scratch[at]]
    pairs = zip(routes.bundle[into_scratch].tolist(), routes.receiver[into_scratch].tolist(), strict=True)
    for number, rank in dict.fromkeys(pairs):
        yield number, _Transfer(0, rank, rank, "copy", "source", "scratch")


def _sent(routes: Routes, at: numpy.ndarray, reduce: str | None) -> Iterator[tuple[int, _Transfer]]:
    combine: Combine = "max" if reduce == "max" else "sum"
    columns = (
        routes.bundle,
        routes.level,
        routes.sender,
        routes.receiver,
        routes.origin,
        routes.combines,
        routes.into_scratch,
    )
    for bundle, level, sender, receiver, origin, combines, scratch in zip(
        *(column[at].tolist() for column in columns), strict=True
    ):
        how: Combine = combine if combines else "copy"
        where: Destination = "scratch" if scratch else "target"
        yield bundle, _Transfer(level, sender, receiver, how, _ORIGINS[origin], where)
