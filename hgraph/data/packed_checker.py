"""The checker of packed rows; it does not know how they were made."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from hgraph.data.packed import IGNORED_LABEL, Packed
from hgraph.errors import InvalidInput

__all__ = ["check_packed"]


def check_packed(packed: Packed, vocab_size: int | None = None) -> Packed:
    """Returns `packed` with its integer dtypes as they should be, after proving the invariants of
    `hgraph/data/packed.py`.

    Integers of other widths are converted (an int64 `cu_seqlens` becomes int32). Everything else that is wrong raises
    `InvalidInput` that begins with the field's name. `vocab_size`: also that tokens and labels are ids of the
    vocabulary.
    """
    packed = replace(
        packed,
        tokens=_integers("tokens", packed.tokens, torch.int64),
        positions=_integers("positions", packed.positions, torch.int64),
        labels=_integers("labels", packed.labels, torch.int64),
        cu_seqlens=_integers("cu_seqlens", packed.cu_seqlens, torch.int32),
    )
    num_tokens = packed.tokens.shape[0]
    for name in ("positions", "labels"):
        length = getattr(packed, name).shape[0]
        if length != num_tokens:
            raise InvalidInput(f"{name}: expected length {num_tokens}, as tokens, got {length}")
    _check_borders(packed.cu_seqlens, num_tokens)
    _check_positions(packed)
    _check_pads(packed)
    _check_ids(packed, vocab_size)
    _check_fields(packed)
    return packed


def _integers(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise InvalidInput(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.ndim != 1:
        raise InvalidInput(f"{name}: expected one dim, got shape {list(tensor.shape)}")
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise InvalidInput(f"{name}: expected integers ({dtype}), got {tensor.dtype}")
    if dtype == torch.int32 and tensor.numel() and int(tensor.max()) > torch.iinfo(dtype).max:
        raise InvalidInput(f"{name}: expected values that fit {dtype}, got {int(tensor.max())}")
    return tensor.to(dtype)


def _check_borders(cu_seqlens: Tensor, num_tokens: int) -> None:
    borders = cu_seqlens.tolist()
    shown = borders if len(borders) <= 8 else [*borders[:8], "..."]
    if not borders or borders[0] != 0:
        raise InvalidInput(
            f"cu_seqlens: expected a leading 0, got {shown}; it has one entry more than there are documents"
        )
    for index, (begin, end) in enumerate(pairwise(borders)):
        if end < begin:
            raise InvalidInput(f"cu_seqlens: expected increasing borders, got {end} after {begin} at entry {index + 1}")
        if end == begin:
            raise InvalidInput(
                f"cu_seqlens: document {index} is empty (entry {index + 1} is {end} again); leave it out"
            )
    if borders[-1] > num_tokens:
        raise InvalidInput(f"cu_seqlens: expected to end at {num_tokens} tokens or before, got {borders[-1]}")


def _check_positions(packed: Packed) -> None:
    borders = packed.cu_seqlens.to(torch.int64)
    num_real = int(borders[-1])
    starts = torch.repeat_interleave(borders[:-1], torch.diff(borders))
    expected = torch.arange(num_real, device=starts.device) - starts
    wrong = torch.nonzero(packed.positions[:num_real] != expected).flatten()
    if wrong.numel():
        at = int(wrong[0])
        raise InvalidInput(
            f"positions: expected {int(expected[at])} at token {at}, got {int(packed.positions[at])}; "
            "they count from 0 in every document of cu_seqlens"
        )


def _check_pads(packed: Packed) -> None:
    num_real = int(packed.cu_seqlens[-1])
    labelled = torch.nonzero(packed.labels[num_real:] != IGNORED_LABEL).flatten()
    if labelled.numel():
        at = num_real + int(labelled[0])
        raise InvalidInput(f"labels: expected {IGNORED_LABEL} for the pad at token {at}, got {int(packed.labels[at])}")


def _check_ids(packed: Packed, vocab_size: int | None) -> None:
    for name, values in (("tokens", packed.tokens), ("labels", packed.labels)):
        ignored = values == IGNORED_LABEL if name == "labels" else torch.zeros_like(values, dtype=torch.bool)
        outside = (values < 0) & ~ignored
        if vocab_size is not None:
            outside |= values >= vocab_size
        wrong = torch.nonzero(outside).flatten()
        if wrong.numel():
            at = int(wrong[0])
            size = "" if vocab_size is None else f" of {vocab_size} entries (ids 0 to {vocab_size - 1})"
            raise InvalidInput(f"{name}: id {int(values[at])} at position {at} is outside the vocabulary{size}")


def _check_fields(packed: Packed) -> None:
    num_tokens, num_sequences = packed.tokens.shape[0], packed.num_sequences
    for name, value in packed.fields.items():
        if value.ndim == 0 or value.shape[0] not in (num_tokens, num_sequences):
            raise InvalidInput(
                f"field {name!r}: expected a first dim of {num_tokens} (per token) or {num_sequences} (per sequence), "
                f"got shape {list(value.shape)}"
            )
