"""Data sets: sequences of token ids by id, in memory or mapped from files, and views of them under a length policy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from hgraph.data.packed import IGNORED_LABEL, shifted_labels
from hgraph.data.policy import Pieces, PolicyReport
from hgraph.errors import InvalidInput

__all__ = [
    "Dataset",
    "MemmapDataset",
    "PieceDataset",
    "TokenDataset",
    "sequence_fields",
    "sequence_labels",
    "target_counts",
]


@runtime_checkable
class Dataset(Protocol):
    """What a data set must have: lengths known without reading, and tokens by id.

    Optional: `labels(i)`, the targets aligned to tokens ([length], what token i predicts, -100 for nothing; None: the
        next token), `target_counts`, int array of the number of targets by id, which saves counting them at the start,
        and `fields(i)`, a mapping from the name of each further field that a loss reads to its tensor ([length, ...]
        where it is per token).
    """

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens by id, int64."""
        ...

    def tokens(self, index: int) -> Tensor:
        """Returns the token ids of one sequence, [length] int64."""
        ...


class TokenDataset:
    """A data set in memory.

    Invariants: every sequence is a row of integers of 0 or more; labels, where given, are as long as their sequence.
    """

    def __init__(
        self,
        sequences: Sequence[Sequence[int] | np.ndarray | Tensor],
        labels: Sequence[Sequence[int] | np.ndarray | Tensor | None] | None = None,
        fields: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> None:
        if fields is not None and len(fields) != len(sequences):
            raise InvalidInput(
                f"fields: expected one mapping for each of {len(sequences)} sequences, got {len(fields)}"
            )
        self._fields = fields
        self._tokens = [_ids(sequence, f"sequence {index}") for index, sequence in enumerate(sequences)]
        self.lengths = np.array([len(row) for row in self._tokens], dtype=np.int64)
        for index, row in enumerate(self._tokens):
            if len(row) and row.min() < 0:
                at = int(np.flatnonzero(row < 0)[0])
                raise InvalidInput(f"sequence {index}: token id {row[at]} at position {at} is negative")
        self._labels = self._checked_labels(labels)
        self.target_counts = target_counts_from_rows(self.lengths, self._labels)

    def _checked_labels(
        self, labels: Sequence[Sequence[int] | np.ndarray | Tensor | None] | None
    ) -> list[np.ndarray | None] | None:
        if labels is None:
            return None
        if len(labels) != len(self._tokens):
            raise InvalidInput(
                f"labels: expected one entry for each of {len(self._tokens)} sequences, got {len(labels)}"
            )
        rows = [None if row is None else _ids(row, f"labels of sequence {index}") for index, row in enumerate(labels)]
        for index, row in enumerate(rows):
            if row is not None and len(row) != self.lengths[index]:
                raise InvalidInput(
                    f"labels of sequence {index}: expected {self.lengths[index]} targets, one per token, got {len(row)}"
                )
        return rows

    def __len__(self) -> int:
        return len(self._tokens)

    def tokens(self, index: int) -> Tensor:
        return torch.from_numpy(self._tokens[index])

    def labels(self, index: int) -> Tensor | None:
        row = None if self._labels is None else self._labels[index]
        return None if row is None else torch.from_numpy(row)

    def fields(self, index: int) -> Mapping[str, Tensor]:
        return {} if self._fields is None else self._fields[index]


class MemmapDataset:
    """A data set in a folder: `tokens.npy`, all tokens one after another; `offsets.npy`, [number + 1] int64 borders;
    and `labels.npy`, targets aligned to tokens, where the data set has its own. Nothing is read before it is asked
    for.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        for name in ("tokens.npy", "offsets.npy"):
            if not (self.folder / name).is_file():
                raise InvalidInput(f"{self.folder}: expected the files tokens.npy and offsets.npy, {name} is missing")
        self._tokens = np.load(self.folder / "tokens.npy", mmap_mode="r")
        self._offsets = np.load(self.folder / "offsets.npy")
        if not self._offsets.size or self._offsets[0] != 0 or self._offsets[-1] != self._tokens.size:
            raise InvalidInput(
                f"{self.folder}/offsets.npy: expected borders from 0 to {self._tokens.size}, the size of tokens.npy"
            )
        self.lengths = np.diff(self._offsets)
        labels = self.folder / "labels.npy"
        self._labels = np.load(labels, mmap_mode="r") if labels.is_file() else None
        if self._labels is not None and self._labels.size != self._tokens.size:
            raise InvalidInput(
                f"{labels}: expected {self._tokens.size} targets, as tokens.npy, got {self._labels.size}"
            )

    @staticmethod
    def write(folder: str | Path, sequences: Sequence[np.ndarray], labels: Sequence[np.ndarray] | None = None) -> None:
        """Writes the files of a data set into `folder`; ids take two bytes where they fit."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        flat = np.concatenate([np.zeros(0, dtype=np.int64), *sequences])
        narrow = np.uint16 if not flat.size or flat.max() < 2**16 else np.int32
        np.save(folder / "tokens.npy", flat.astype(narrow))
        np.save(folder / "offsets.npy", np.cumsum([0, *(len(row) for row in sequences)], dtype=np.int64))
        if labels is not None:
            np.save(folder / "labels.npy", np.concatenate([np.zeros(0, dtype=np.int64), *labels]).astype(np.int32))

    def __reduce__(self) -> tuple[type[MemmapDataset], tuple[str]]:
        # By folder, so that sending the data set to another process does not copy its tokens.
        return MemmapDataset, (str(self.folder),)

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, index: int) -> Tensor:
        return torch.from_numpy(self._slice(self._tokens, index))

    def labels(self, index: int) -> Tensor | None:
        return None if self._labels is None else torch.from_numpy(self._slice(self._labels, index))

    def _slice(self, flat: np.ndarray, index: int) -> np.ndarray:
        return flat[self._offsets[index] : self._offsets[index + 1]].astype(np.int64)


class PieceDataset:
    """A view of a data set after `apply_length_policy`, by the ids of its pieces.

    The target of a split piece's last token is the first token of the next piece, so splitting loses no target. The
    last token before a cut has no target, unless the data set gives labels: those are kept as they are.
    """

    def __init__(self, dataset: Dataset, report: PolicyReport) -> None:
        self.dataset = dataset
        self.report = report
        self._pieces: Pieces = report.pieces
        self.lengths = report.pieces.lengths
        self._is_split = np.isin(self._pieces.documents, report.split_ids)
        self.target_counts = self._counts()

    def _counts(self) -> np.ndarray:
        counts = target_counts(self.dataset)[self._pieces.documents]
        whole = self.lengths == np.asarray(self.dataset.lengths)[self._pieces.documents]
        for index in np.flatnonzero(~whole).tolist():
            labels = self._piece_labels(index)
            counts[index] = max(self.lengths[index] - 1, 0) if labels is None else _num_labelled(labels)
        return counts

    def __len__(self) -> int:
        return len(self.lengths)

    def origin(self, index: int) -> tuple[int, int]:
        """Returns (document id, offset in tokens of the piece within it); of a view of a view, in the innermost one."""
        document, offset = self._place(index)
        if not isinstance(self.dataset, PieceDataset):
            return document, offset
        inner_document, inner_offset = self.dataset.origin(document)
        return inner_document, inner_offset + offset

    def _place(self, index: int) -> tuple[int, int]:
        return int(self._pieces.documents[index]), int(self._pieces.offsets[index])

    def tokens(self, index: int) -> Tensor:
        document, offset = self._place(index)
        return self.dataset.tokens(document)[offset : offset + int(self.lengths[index])]

    def labels(self, index: int) -> Tensor | None:
        return self._piece_labels(index)

    def fields(self, index: int, per_token: Collection[str] = ()) -> dict[str, Tensor]:
        """Returns the fields of one piece: those of `per_token` cut as its tokens are, the others as they are."""
        document, offset = self._place(index)
        stop = offset + int(self.lengths[index])
        whole = sequence_fields(self.dataset, document, per_token)
        return {name: value[offset:stop] if name in per_token else value for name, value in whole.items()}

    def _piece_labels(self, index: int) -> Tensor | None:
        document, offset = self._place(index)
        labels = sequence_labels(self.dataset, document)
        if labels is None and not self._is_split[index]:
            return None
        if labels is None:
            labels = shifted_labels(self.dataset.tokens(document))
        return labels[offset : offset + int(self.lengths[index])]


def sequence_labels(dataset: Dataset, index: int) -> Tensor | None:
    """Returns the targets aligned to tokens that the data set gives for one sequence; None: the next token."""
    labels = getattr(dataset, "labels", None)
    return None if labels is None else labels(index)


def sequence_fields(dataset: Dataset, index: int, per_token: Collection[str] = ()) -> Mapping[str, Tensor]:
    """Returns the further fields that the data set gives for one sequence; those of `per_token` are as long as it."""
    if isinstance(dataset, PieceDataset):
        return dataset.fields(index, per_token)
    fields = getattr(dataset, "fields", None)
    return {} if fields is None else fields(index)


def target_counts(dataset: Dataset) -> np.ndarray:
    """Returns the number of targets by id, int64: its `target_counts`, or counted from its labels, or length - 1."""
    known = getattr(dataset, "target_counts", None)
    if known is not None:
        return np.array(known, dtype=np.int64)
    counts = np.maximum(np.asarray(dataset.lengths, dtype=np.int64) - 1, 0)
    if getattr(dataset, "labels", None) is None:
        return counts
    for index in range(len(counts)):
        labels = sequence_labels(dataset, index)
        if labels is None:
            continue
        counts[index] = _num_labelled(labels)
    return counts


def target_counts_from_rows(lengths: np.ndarray, labels: Sequence[np.ndarray | None] | None) -> np.ndarray:
    """Returns the number of targets by id: those of the labels where given, length - 1 elsewhere."""
    counts = np.maximum(lengths - 1, 0)
    for index, row in enumerate(labels or ()):
        if row is not None:
            counts[index] = np.count_nonzero(row != IGNORED_LABEL)
    return counts


def _num_labelled(labels: Tensor) -> int:
    return int((labels != IGNORED_LABEL).sum())


def _ids(values: Sequence[int] | np.ndarray | Tensor, where: str) -> np.ndarray:
    array = np.asarray(values)
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1:
        raise InvalidInput(f"{where}: expected one dim of ids, got shape {list(array.shape)}")
    if not np.issubdtype(array.dtype, np.integer):
        raise InvalidInput(f"{where}: expected integers, got {array.dtype}")
    return array.astype(np.int64)
