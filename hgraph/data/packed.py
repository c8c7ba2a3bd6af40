"""Packed sequences: several documents in one row of tokens, each attending to itself alone.

Notation: T tokens of the row (pads included), N sequences.

Invariants of a `Packed` (made by `pack`, proved by `hgraph/data/packed_checker.py`)
----------
- `tokens`, `positions`, `labels` and every per-token field have the same length T.
- `cu_seqlens` is [N + 1] int32, begins with 0, strictly increases and ends at the last real token, not at T: pads
  belong to no document, so that no number of pads adds an entry.
- `positions` count from 0 in every document; those of the pads count from 0 once more.
- `labels[i]` is what token i is to predict. Where labels are not given it is the next token of the same document; the
  last token of a document predicts nothing (-100), nor does a pad.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hgraph.errors import InvalidInput

__all__ = [
    "IGNORED_LABEL",
    "Packed",
    "cu_seqlens_from_segments",
    "num_targets",
    "pack",
    "positions_from_segments",
    "shifted_labels",
]

IGNORED_LABEL = -100
"""The label of a token that predicts nothing, as in `torch.nn.functional.cross_entropy`."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """One packed row: what a loss receives beside the model.

    `tokens`, `positions`, `labels`: [T] int64. `cu_seqlens`: [N + 1] int32, borders of the documents. `fields`:
    whatever else the data set yields, per token ([T, ...]) or per sequence ([N, ...]).

    It does not check itself: a model is traced with symbolic sizes inside a `Packed`, and a check would be a guard.
    """

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    cu_seqlens: Tensor
    fields: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.shape[0] - 1


def pack(
    sequences: Sequence[Tensor | np.ndarray | Sequence[int]],
    *,
    multiple: int = 1,
    labels: Sequence[Tensor | np.ndarray | Sequence[int] | None] | None = None,
    pad_token: int = 0,
    token_fields: Mapping[str, Sequence[Tensor]] | None = None,
    sequence_fields: Mapping[str, Sequence[Tensor | float]] | None = None,
) -> Packed:
    """Returns the sequences one after another, padded to a multiple of `multiple` tokens.

    Args:
        sequences: token ids of each sequence, 1-D, in CPU memory. Sequences of no token are skipped, with their
            labels and fields.
        multiple: T is the next multiple of it (0 stays 0).
        labels: targets aligned to tokens: `labels[s][i]` is what token i of sequence s predicts, -100 for nothing. They
            are *not* shifted again. None, or None for one sequence: the next token of the sequence.
        pad_token: id of the pads.
        token_fields: name -> one tensor per sequence, first dim as long as the sequence; concatenated, pads are zeros.
        sequence_fields: name -> one scalar or tensor per sequence; stacked to [N, ...].

    Raises `InvalidInput` naming the sequence and the field where lengths differ.
    """
    if multiple < 1:
        raise InvalidInput(f"pack: expected multiple of 1 or more, got {multiple}")
    rows = [_row(sequence, f"sequence {index}") for index, sequence in enumerate(sequences)]
    present = [index for index, row in enumerate(rows) if row.shape[0]]
    targets = _aligned_labels(rows, labels)
    lengths = [rows[index].shape[0] for index in present]
    num_pads = -sum(lengths) % multiple
    pads = torch.arange(num_pads)
    cu_seqlens = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    fields = {
        **_token_fields(token_fields or {}, rows, present, num_pads),
        **_sequence_fields(sequence_fields or {}, len(rows), present),
    }
    return Packed(
        tokens=torch.cat([*(rows[index] for index in present), torch.full_like(pads, pad_token)]),
        positions=torch.cat([*(torch.arange(length) for length in lengths), pads]),
        labels=torch.cat([*(targets[index] for index in present), torch.full_like(pads, IGNORED_LABEL)]),
        cu_seqlens=cu_seqlens,
        fields=fields,
    )


def shifted_labels(tokens: Tensor) -> Tensor:
    """Returns [length] int64 targets aligned to tokens: the next token, and -100 for the last one."""
    targets = torch.full_like(tokens, IGNORED_LABEL)
    targets[:-1] = tokens[1:]
    return targets


def num_targets(packed: Packed) -> int:
    """Returns the number of labelled tokens."""
    return int((packed.labels != IGNORED_LABEL).sum())


def positions_from_segments(segment_ids: Tensor) -> Tensor:
    """Returns [T] int64 positions for segment ids such as 1 1 2 2 2 0 -> 0 1 0 1 2 0.

    A document is a run of equal ids above 0; 0 is padding and stands at the end. Raises `InvalidInput` otherwise.
    """
    starts = _run_starts(_segments(segment_ids))
    lengths = torch.diff(torch.cat([starts, torch.tensor([segment_ids.shape[0]])]))
    return torch.arange(segment_ids.shape[0]) - torch.repeat_interleave(starts, lengths)


def cu_seqlens_from_segments(segment_ids: Tensor) -> Tensor:
    """Returns [N + 1] int32 borders for segment ids such as 1 1 2 2 2 0 -> 0 2 5; padding is outside any document."""
    segments = _segments(segment_ids)
    num_real = int((segments > 0).sum())
    starts = _run_starts(segments[:num_real])
    return torch.cat([starts, torch.tensor([num_real])]).to(torch.int32)


def _segments(segment_ids: Tensor) -> Tensor:
    segments = _row(segment_ids, "segment_ids")
    if bool((segments < 0).any()):
        raise InvalidInput(f"segment_ids: expected ids of 0 or more, got {int(segments.min())}")
    num_real = int((segments > 0).sum())
    if bool((segments[:num_real] == 0).any()):
        position = int((segments == 0).nonzero()[0])
        raise InvalidInput(
            f"segment_ids: padding (0) at position {position} stands before a document; put it at the end"
        )
    return segments


def _run_starts(segments: Tensor) -> Tensor:
    if not segments.shape[0]:
        return torch.zeros(0, dtype=torch.int64)
    changes = torch.nonzero(torch.diff(segments)).flatten() + 1
    return torch.cat([torch.zeros(1, dtype=torch.int64), changes])


def _row(values: Tensor | np.ndarray | Sequence[int], where: str) -> Tensor:
    """Returns the values as a 1-D int64 tensor; `where` begins the message of what is refused."""
    tensor = torch.as_tensor(values)
    if tensor.numel() == 0:
        return torch.zeros(0, dtype=torch.int64)
    if tensor.ndim != 1:
        raise InvalidInput(f"{where}: expected one dim of ids, got shape {list(tensor.shape)}")
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise InvalidInput(f"{where}: expected integers, got {tensor.dtype}")
    return tensor.to(torch.int64)


def _aligned_labels(
    rows: Sequence[Tensor], labels: Sequence[Tensor | np.ndarray | Sequence[int] | None] | None
) -> list[Tensor]:
    if labels is None:
        return [shifted_labels(row) for row in rows]
    if len(labels) != len(rows):
        raise InvalidInput(f"labels: expected one entry for each of {len(rows)} sequences, got {len(labels)}")
    aligned = []
    for index, (row, given) in enumerate(zip(rows, labels, strict=True)):
        targets = shifted_labels(row) if given is None else _row(given, f"labels of sequence {index}")
        if targets.shape != row.shape:
            raise InvalidInput(
                f"labels of sequence {index}: expected {row.shape[0]} targets, one per token, got {targets.shape[0]}"
            )
        aligned.append(targets)
    return aligned


def _token_fields(
    fields: Mapping[str, Sequence[Tensor]], rows: Sequence[Tensor], present: Sequence[int], num_pads: int
) -> dict[str, Tensor]:
    packed = {}
    for name, values in fields.items():
        _check_count(name, len(values), len(rows))
        parts = [torch.as_tensor(values[index]) for index in present]
        for index, part in zip(present, parts, strict=True):
            if part.shape[:1] != rows[index].shape:
                raise InvalidInput(
                    f"field {name!r} of sequence {index}: expected {rows[index].shape[0]} entries, one per token, "
                    f"got shape {list(part.shape)}"
                )
        if parts:
            packed[name] = torch.cat([*parts, parts[0].new_zeros((num_pads, *parts[0].shape[1:]))])
    return packed


def _sequence_fields(
    fields: Mapping[str, Sequence[Tensor | float]], num_sequences: int, present: Sequence[int]
) -> dict[str, Tensor]:
    packed = {}
    for name, values in fields.items():
        _check_count(name, len(values), num_sequences)
        packed[name] = torch.stack([torch.as_tensor(values[index]) for index in present]) if present else torch.zeros(0)
    return packed


def _check_count(name: str, count: int, num_sequences: int) -> None:
    if count != num_sequences:
        raise InvalidInput(f"field {name!r}: expected one entry for each of {num_sequences} sequences, got {count}")
