"""Which collective call each rank is in, told through the job's store.

Every rank makes the same calls of a program in the same order. Each notes number and name of a call as it enters it:
one message to the store, no answer. So a rank that waits for others in vain can say at once what they do instead.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from hgraph.errors import RankFailed

__all__ = ["Call", "Calls", "waits_in"]

_ENDED = "end"
_C10D = "torch.distributed.distributed_c10d"
_JOINED_BY_ALL = ("barrier", "broadcast_object_list", "all_gather_object")
_BETWEEN = ("torch.", "runtime.cluster")
"""Modules between the one that called a collective and the collective."""


@dataclass(frozen=True, slots=True)
class Call:
    """The last collective call that a rank has entered; `number` counts those of one program, from 1 (0: none yet)."""

    number: int
    name: str

    def __str__(self) -> str:
        return f"{self.number} {self.name}"

    @property
    def has_ended(self) -> bool:
        return self.name == _ENDED

    @staticmethod
    def parse(text: str) -> Call:
        number, _, name = text.partition(" ")
        return Call(int(number), name)

    def rules_out(self, other: Call) -> bool:
        """Returns whether a rank that is here cannot come to `other` any more."""
        if self.has_ended:
            return self.number < other.number
        return self.number > other.number or (self.number == other.number and self.name != other.name)


class Calls:
    """One rank's end of the book of calls of one program. Attribute `last`: the call that this rank entered last."""

    def __init__(self, store: Store, rank: int, timeout_s: float) -> None:
        self.rank, self.last = rank, Call(0, "")
        # The same name on all ranks: each counts its own programs.
        number = store.add(f"programs_of_{rank}", 1)
        # A connection of its own: the job's may be blocked for as long as some rank waits for a key.
        connection = store.clone()  # type: ignore[attr-defined]
        connection.set_timeout(timedelta(seconds=timeout_s))
        self.store = PrefixStore(f"calls of program {number}", connection)
        self._note(self.last)

    @staticmethod
    def on_default_store(timeout_s: float) -> Calls:
        """Returns the book of this rank's next program, on the store of the initialised default process group."""
        return Calls(dist.distributed_c10d._get_default_store(), dist.get_rank(), timeout_s)

    def enter(self, name: str) -> Call:
        """Notes that this rank enters the call `name`. Raises `RankFailed` where the store does not answer."""
        self.last = Call(self.last.number + 1, name)
        with self.asking():
            self._note(self.last)
        return self.last

    def end(self) -> None:
        """Notes that this rank makes no more calls."""
        try:
            self._note(Call(self.last.number, _ENDED))
        except RuntimeError:
            return  # the job has ended: nobody is left to ask

    def of(self, ranks: Iterable[int]) -> list[Call]:
        """Returns the last call of each of these ranks, all of which have made the program."""
        return [Call.parse(value.decode()) for value in self.store.multi_get([str(rank) for rank in ranks])]

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Turns what a store raises that does not answer into `RankFailed`."""
        try:
            yield
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            raise RankFailed(f"rank {self.rank}: {self.last.name}: the job's store does not answer: {text}") from error

    def _note(self, call: Call) -> None:
        self.store.set(str(self.rank), str(call))


def waits_in(thread: int) -> str:
    """Returns the collective of all ranks that a thread of this process is in, with file and line, or nothing.

    Only those that no rank leaves long before another: one that stays there cannot be awaited elsewhere.
    """
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None and not _is_joined_by_all(frame):
        frame = frame.f_back
    name = "" if frame is None else frame.f_code.co_name
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    return "" if frame is None else f"torch.distributed.{name} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _is_joined_by_all(frame: FrameType) -> bool:
    if frame.f_code.co_name not in _JOINED_BY_ALL or frame.f_globals.get("__name__") != _C10D:
        return False
    return frame.f_locals.get("group") in (None, dist.group.WORLD)
