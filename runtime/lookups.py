"""What the ids of a batch look up in a captured model: tables, vocabularies, and the classes of losses.

PyTorch refuses an id outside a table; where a table is cut over ranks each holds a part of it, and an id that no rank
holds would go unnoticed. So every id is checked before a step runs, against what the captured graph says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from hgraph.capture import Captured
from hgraph.data.packed import IGNORED_LABEL, Packed
from hgraph.errors import InvalidInput
from hgraph.graph import info, where

__all__ = ["Lookup", "check_lengths", "check_lookups", "longest_sequence", "lookups_of", "vocabulary"]

aten = torch.ops.aten
_SAME_IDS = (
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.transpose.int,
    aten.t.default,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten._to_copy.default,
)
_SHIFTED = {aten.add.Tensor: 1, aten.sub.Tensor: -1}


@dataclass(frozen=True, slots=True)
class Lookup:
    """Ids of `field` look up a table of `size` entries, `offset` added to them; an id equal to `ignored` looks up
    nothing. `place` says where in the model, for messages.
    """

    field: str
    size: int
    place: str
    offset: int = 0
    ignored: int | None = None

    @property
    def first(self) -> int:
        """The least id."""
        return -self.offset

    @property
    def last(self) -> int:
        """The greatest id."""
        return self.size - 1 - self.offset


def lookups_of(captured: Captured) -> tuple[Lookup, ...]:
    """Returns what the fields of a batch look up: tokens first, and of each field the smallest table first.

    Ids are followed through views, casts and the addition of a number to the field they come from; all ids of the field
    count, also where a view leaves some out. Other ids are the model's own business. Labels that nothing looks up are
    held to be ids of the vocabulary of the tokens.
    """
    found = sorted(_found(captured.graph), key=lambda lookup: (lookup.field != "tokens", lookup.field, lookup.last))
    tokens = next((lookup for lookup in found if lookup.field == "tokens"), None)
    if tokens is not None and all(lookup.field != "labels" for lookup in found):
        found.append(Lookup("labels", tokens.size, tokens.place, tokens.offset, IGNORED_LABEL))
    return tuple(found)


def vocabulary(lookups: Sequence[Lookup]) -> int | None:
    """Returns the number of ids, from 0 on, that tokens and their labels may both take; None where nothing says."""
    sizes = [lookup.last + 1 for lookup in lookups if lookup.field in ("tokens", "labels")]
    return min(sizes, default=None)


def longest_sequence(lookups: Sequence[Lookup]) -> int | None:
    """Returns the greatest length of a sequence, where the model has a table of positions; None otherwise."""
    return min((lookup.last + 1 for lookup in lookups if lookup.field == "positions"), default=None)


def check_lengths(ids: Sequence[int], lengths: Sequence[int], lookups: Sequence[Lookup]) -> None:
    """Raises `InvalidInput` naming the first sequence that is longer than a table of positions."""
    limits = [lookup for lookup in lookups if lookup.field == "positions"]
    for lookup in limits:
        for sequence_id, length in zip(ids, lengths, strict=True):
            if length > lookup.last + 1:
                raise InvalidInput(
                    f"sequence with id {sequence_id}: {length} tokens, but positions look up a table of "
                    f"{lookup.size} entries ({lookup.place}); expected at most {lookup.last + 1} tokens. Cut long "
                    "sequences (policy 'cut') or build the model with a longer table"
                )


def check_lookups(packed: Packed, lookups: Sequence[Lookup]) -> None:
    """Raises `InvalidInput` naming field, id and position of the first id that is in no table."""
    for lookup in lookups:
        values = packed.fields.get(lookup.field, getattr(packed, lookup.field, None))
        if isinstance(values, Tensor):
            _check_ids(values, lookup)


def _check_ids(values: Tensor, lookup: Lookup) -> None:
    outside = (values < lookup.first) | (values > lookup.last)
    if lookup.ignored is not None:
        outside &= values != lookup.ignored
    wrong = torch.nonzero(outside)
    if not len(wrong):
        return
    at = tuple(wrong[0].tolist())
    name = lookup.field if lookup.field in ("tokens", "positions", "labels") else f"field {lookup.field!r}"
    of_words = lookup.field in ("tokens", "labels")
    what, place = ("the vocabulary", "") if of_words else ("the table", f" of {lookup.place}")
    raise InvalidInput(
        f"{name}: id {int(values[at])} at position {at[0]} is outside {what} of {lookup.size} entries "
        f"(ids {lookup.first} to {lookup.last}){place}"
    )


def _found(graph: fx.Graph) -> Iterator[Lookup]:
    for node in graph.nodes:
        if node.target == aten.embedding.default:
            yield from _lookup(node, node.args[1], info(node.args[0]).shape[0], None)
        elif node.target == aten.nll_loss_forward.default:
            yield from _lookup(node, node.args[1], info(node.args[0]).shape[-1], node.args[4])


def _lookup(node: fx.Node, ids: Any, size: Any, ignored: int | None) -> Iterator[Lookup]:
    offset = 0
    while isinstance(ids, fx.Node) and ids.op == "call_function":
        if ids.target in _SHIFTED and len(ids.args) == 2 and not ids.kwargs and isinstance(ids.args[1], int):
            offset += _SHIFTED[ids.target] * ids.args[1]
        elif ids.target not in _SAME_IDS:
            return
        ids = ids.args[0]
    if isinstance(size, int) and isinstance(ids, fx.Node) and info(ids).role == "input":
        kept = None if ignored is None else ignored - offset
        yield Lookup(info(ids).name, size, where(node), offset, kept)
