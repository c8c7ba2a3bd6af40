"""What happens to sequences that are longer than a limit: an explicit policy that counts and reports.

| policy | a sequence above the limit |
|---|---|
| error | is refused, named with its length |
| cut | keeps its first `limit` tokens |
| split | becomes pieces of at most `limit` tokens, each knowing its document and its offset in it |
| drop | is left out |

Ids: whatever remains of document i keeps the id i; the second and later pieces of split documents get new ids after
the last document, in order. A document that is not there (dropped, or empty) keeps its id with length 0, so ids never
shift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np

from hgraph.errors import InvalidInput

__all__ = ["LengthPolicy", "Pieces", "PolicyReport", "apply_length_policy"]

LengthPolicy: TypeAlias = Literal["error", "cut", "split", "drop"]
POLICIES: tuple[LengthPolicy, ...] = ("error", "cut", "split", "drop")

MAX_IDS_SHOWN = 10


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """What remains, by id: piece i is tokens `offsets[i]` to `offsets[i] + lengths[i]` of document `documents[i]`.

    Three int64 arrays of one length; a length of 0 means that nothing remains under that id.
    """

    documents: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """What a policy did. Ids are those of documents, in `unlabelled_ids` those of pieces.

    `num_kept` documents are whole; `num_tokens` counts before, `num_tokens_lost` what was cut off or dropped.
    `unlabelled_ids` are sequences that remain though none of their tokens has a target: harmless, but work for nothing.
    `str()` of it is one line, such as `3 kept, 2 dropped: ids 1, 4 (7 of 20 tokens dropped)`.
    """

    policy: LengthPolicy
    limit: int | None
    num_documents: int
    num_kept: int
    num_tokens: int
    num_tokens_lost: int = 0
    cut_ids: tuple[int, ...] = ()
    split_ids: tuple[int, ...] = ()
    dropped_ids: tuple[int, ...] = ()
    empty_ids: tuple[int, ...] = ()
    unlabelled_ids: tuple[int, ...] = ()
    pieces: Pieces = field(kw_only=True, compare=False, repr=False)

    @property
    def num_pieces(self) -> int:
        """The number of sequences that remain."""
        return int(np.count_nonzero(self.pieces.lengths))

    def with_target_counts(self, counts: np.ndarray) -> PolicyReport:
        """Returns the report with `unlabelled_ids` filled in from the number of targets of each piece, by id."""
        unlabelled = np.flatnonzero((self.pieces.lengths > 0) & (counts == 0))
        return replace(self, unlabelled_ids=tuple(unlabelled.tolist()))

    def __str__(self) -> str:
        parts = [f"{self.num_kept} kept"]
        pieces = self.num_pieces - self.num_kept
        for ids, what in (
            (self.cut_ids, "cut"),
            (self.split_ids, f"split into {pieces} pieces"),
            (self.dropped_ids, "dropped"),
            (self.empty_ids, "empty and dropped"),
            (self.unlabelled_ids, "without a target"),
        ):
            if ids:
                parts.append(f"{len(ids)} {what}: {id_list(ids)}")
        lost = f" ({self.num_tokens_lost} of {self.num_tokens} tokens dropped)" if self.num_tokens_lost else ""
        return ", ".join(parts) + lost


def apply_length_policy(
    lengths: Sequence[int] | np.ndarray | Sequence[Sequence[int]], limit: int | None, policy: LengthPolicy = "error"
) -> PolicyReport:
    """Returns what remains of documents of these lengths (or of these sequences) under a limit, in tokens.

    `limit` None: no limit, only empty documents are dropped. Raises `InvalidInput` for an unknown policy, a limit
    below 1, and, under `error`, naming the ids and lengths above the limit.
    """
    if policy not in POLICIES:
        raise InvalidInput(f"length policy: expected one of {', '.join(POLICIES)}, got {policy!r}")
    if limit is not None and limit < 1:
        raise InvalidInput(f"length policy: expected a limit of 1 token or more, got {limit}")
    sizes = _sizes(lengths)
    over = np.flatnonzero(sizes > limit) if limit is not None else np.zeros(0, dtype=np.int64)
    if policy == "error" and over.size:
        raise _too_long(sizes, over, limit)
    pieces = _pieces(sizes, over, limit, policy)
    empty = np.flatnonzero(sizes == 0)
    ids = tuple(over.tolist())
    return PolicyReport(
        policy,
        limit,
        num_documents=len(sizes),
        num_kept=len(sizes) - over.size - empty.size,
        num_tokens=int(sizes.sum()),
        num_tokens_lost=int(sizes.sum() - pieces.lengths.sum()),
        cut_ids=ids if policy == "cut" else (),
        split_ids=ids if policy == "split" else (),
        dropped_ids=ids if policy == "drop" else (),
        empty_ids=tuple(empty.tolist()),
        pieces=pieces,
    )


def id_list(ids: Sequence[int]) -> str:
    """Returns `id 3` or `ids 1, 4`, with at most 10 of them."""
    shown = ", ".join(str(i) for i in ids[:MAX_IDS_SHOWN])
    more = f" and {len(ids) - MAX_IDS_SHOWN} more" if len(ids) > MAX_IDS_SHOWN else ""
    return f"id{'s' if len(ids) != 1 else ''} {shown}{more}"


def _sizes(lengths: Sequence[int] | np.ndarray | Sequence[Sequence[int]]) -> np.ndarray:
    values = [len(value) if hasattr(value, "__len__") else value for value in lengths]
    sizes = np.asarray(values, dtype=np.int64)
    if sizes.size and sizes.min() < 0:
        raise InvalidInput(f"lengths: expected 0 or more, got {sizes.min()} for id {int(sizes.argmin())}")
    return sizes


def _too_long(sizes: np.ndarray, over: np.ndarray, limit: int | None) -> InvalidInput:
    named = ", ".join(f"id {i} ({sizes[i]} tokens)" for i in over[:MAX_IDS_SHOWN].tolist())
    more = f" and {over.size - MAX_IDS_SHOWN} more" if over.size > MAX_IDS_SHOWN else ""
    return InvalidInput(
        f"{over.size} of {sizes.size} sequences exceed the limit of {limit} tokens: {named}{more}; "
        "shorten them, raise the limit, or choose the policy cut, split or drop"
    )


def _pieces(sizes: np.ndarray, over: np.ndarray, limit: int | None, policy: LengthPolicy) -> Pieces:
    documents = np.arange(sizes.size)
    offsets = np.zeros(sizes.size, dtype=np.int64)
    if limit is None or not over.size:
        return Pieces(documents, offsets, sizes)
    lengths = sizes.copy()
    lengths[over] = 0 if policy == "drop" else limit
    if policy != "split":
        return Pieces(documents, offsets, lengths)
    num_more = -(-sizes[over] // limit) - 1
    more_documents = np.repeat(over, num_more)
    # Number of the piece within its document, from 1: piece 0 is the one that keeps the document's id.
    first = np.repeat(np.cumsum(num_more) - num_more, num_more)
    more_offsets = (np.arange(more_documents.size) - first + 1) * limit
    more_lengths = np.minimum(limit, sizes[more_documents] - more_offsets)
    return Pieces(
        np.concatenate([documents, more_documents]),
        np.concatenate([offsets, more_offsets]),
        np.concatenate([lengths, more_lengths]),
    )
