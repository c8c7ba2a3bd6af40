"""A growing list of moves that balances who sends and writes each pair's boxes as few moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

from hgraph.reshard_needs import merge_boxes
from hgraph.reshard_plan import Combine, Move, Origin
from hgraph.shard_map import Box, box_numel

__all__ = ["MoveList"]

_Key: TypeAlias = tuple[int, int, int, Combine, Origin]
"""(receiver, position among the terms it combines, sender, combine, origin)."""


class MoveList:
    """Moves of one phase at a time; loads, in elements, count over all phases."""

    def __init__(self) -> None:
        self._boxes: dict[_Key, list[Box]] = {}
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def add(
        self,
        holders: Sequence[int],
        receiver: int,
        boxes: Sequence[Box],
        *,
        position: int = 0,
        combine: Combine = "copy",
        origin: Origin = "source",
    ) -> None:
        """Lets `receiver` have `boxes` from one of `holders`: itself, else the one with the least to send so far."""
        for box in boxes:
            sender = receiver if receiver in holders else min(holders, key=lambda rank: (self._sent[rank], rank))
            self._boxes.setdefault((receiver, position, sender, combine, origin), []).append(box)
            if sender != receiver:
                self._sent[sender] += box_numel(box)
                self._received[receiver] += box_numel(box)

    def least_loaded_receiver(self, ranks: Sequence[int]) -> int:
        """Returns the rank that receives and sends the least so far; the lowest of several."""
        return min(ranks, key=lambda rank: (self._received[rank] + self._sent[rank], rank))

    def take(self) -> tuple[Move, ...]:
        """Returns the moves gathered since the last call, by receiver and then in the order to be applied."""
        moves = [
            Move(sender, receiver, box, combine, origin)
            for (receiver, _, sender, combine, origin), boxes in sorted(self._boxes.items())
            for box in merge_boxes(boxes)
        ]
        self._boxes = {}
        return tuple(moves)
