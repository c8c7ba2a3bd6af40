"""Micro-batches of a global batch: sequences fetched, packed with the fields the loss reads, and checked.

A wrong id is reported with the sequence it stands in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hgraph.capture import Captured
from hgraph.data.batches import GlobalBatch
from hgraph.data.packed import Packed, pack
from hgraph.data.packed_checker import check_packed
from hgraph.errors import InvalidInput
from hgraph.graph import TOKENS, info
from runtime.lookups import Lookup, check_lookups, lookups_of

__all__ = ["Contents", "contents_of", "fields_of", "pack_micro_batch"]


@dataclass(frozen=True, slots=True)
class _FieldKind:
    """One field beside the standard ones, as the example given at capture says; `rest` is its shape but for the
    first dim of the packed field.
    """

    name: str
    per_token: bool
    rest: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Contents:
    """What the micro-batches of a model hold: further fields, and what ids look up."""

    fields: tuple[_FieldKind, ...] = ()
    lookups: tuple[Lookup, ...] = ()

    def empty_fields(self, lengths: Sequence[int]) -> dict[str, Tensor]:
        """Returns zeros for every further field of a row of sequences of these lengths."""
        counts = {True: sum(lengths), False: len(lengths)}
        return {kind.name: torch.zeros(counts[kind.per_token], *kind.rest, dtype=kind.dtype) for kind in self.fields}


def contents_of(captured: Captured) -> Contents:
    """Returns what the captured graph says of its micro-batches."""
    kinds = []
    for node in captured.graph.nodes:
        facts = info(node)
        if facts.role == "input" and facts.name in captured.extra_fields:
            first, *rest = facts.shape
            kinds.append(_FieldKind(facts.name, first == TOKENS, tuple(int(size) for size in rest), facts.dtype))
    return Contents(tuple(kinds), lookups_of(captured))


def pack_micro_batch(batch: GlobalBatch, indices: Sequence[int], contents: Contents) -> Packed:
    """Returns the sequences at `indices` of the batch, packed; raises `InvalidInput` for what cannot be run."""
    rows = [_fetch(batch, index, contents) for index in indices]
    try:
        return _packed(rows, contents)
    except InvalidInput:
        for index, row in zip(indices, rows, strict=True):
            _check_alone(batch.ids[index], row, contents)
        raise


def fields_of(batch: GlobalBatch, index: int, contents: Contents) -> dict[str, Tensor]:
    """Returns the fields of the sequence at `index` of the batch, checked against the examples given at capture."""
    if not contents.fields:
        return {}
    given = batch.fields(index, [kind.name for kind in contents.fields if kind.per_token])
    return {kind.name: _field(batch, index, kind, given) for kind in contents.fields}


@dataclass(frozen=True, slots=True)
class _Row:
    tokens: Tensor
    labels: Tensor | None
    fields: Mapping[str, Tensor]


def _fetch(batch: GlobalBatch, index: int, contents: Contents) -> _Row:
    tokens, labels = batch.sequence(index)
    return _Row(tokens, labels, fields_of(batch, index, contents))


def _field(batch: GlobalBatch, index: int, kind: _FieldKind, given: Mapping[str, Tensor]) -> Tensor:
    place = f"data set, id {batch.ids[index]}: field {kind.name!r}"
    if kind.name not in given:
        raise InvalidInput(f"{place}: expected, but its fields(i) gives {', '.join(given) or 'nothing'}")
    value = torch.as_tensor(given[kind.name])
    shape = (batch.lengths[index], *kind.rest) if kind.per_token else kind.rest
    if tuple(value.shape) != shape:
        what = "per token" if kind.per_token else "per sequence"
        raise InvalidInput(f"{place}: expected shape {list(shape)} ({what}), got {list(value.shape)}")
    if value.dtype.is_floating_point != kind.dtype.is_floating_point:
        raise InvalidInput(f"{place}: expected {kind.dtype}, as the example given to compile, got {value.dtype}")
    return value.to(kind.dtype)


def _packed(rows: Sequence[_Row], contents: Contents) -> Packed:
    by_kind: dict[bool, dict[str, list[Tensor]]] = {True: {}, False: {}}
    for kind in contents.fields:
        by_kind[kind.per_token][kind.name] = [row.fields[kind.name] for row in rows]
    packed = pack(
        [row.tokens for row in rows],
        labels=[row.labels for row in rows],
        token_fields=by_kind[True],
        sequence_fields=by_kind[False],  # type: ignore[arg-type]
    )
    packed = check_packed(packed)
    check_lookups(packed, contents.lookups)
    return packed


def _check_alone(sequence_id: int, row: _Row, contents: Contents) -> None:
    """Raises `InvalidInput` that names the sequence, and the position in it, where it is the one that is wrong."""
    try:
        _packed([row], contents)
    except InvalidInput as error:
        raise InvalidInput(f"sequence with id {sequence_id}: {error}") from error
