"""The entropy of single tokens, which a model that looks at its context must beat."""

from __future__ import annotations

import numpy as np

from hgraph.data.dataset import Dataset, sequence_labels
from hgraph.data.packed import IGNORED_LABEL
from hgraph.errors import InvalidInput

__all__ = ["unigram_entropy"]

CHUNK_TOKENS = 1_000_000


def unigram_entropy(dataset: Dataset) -> float:
    """Returns the entropy in nats per token of the targets of a data set: the loss of a guess without context."""
    counts = np.zeros(0, dtype=np.int64)
    pending: list[np.ndarray] = []
    num_pending = 0
    for index in np.flatnonzero(dataset.lengths).tolist():
        labels = sequence_labels(dataset, index)
        targets = dataset.tokens(index)[1:] if labels is None else labels[labels != IGNORED_LABEL]
        pending.append(targets.numpy())
        num_pending += pending[-1].size
        if num_pending >= CHUNK_TOKENS:
            counts = _added(counts, pending)
            pending, num_pending = [], 0
    counts = _added(counts, pending)
    present = counts[counts > 0]
    if not present.size:
        raise InvalidInput("unigram entropy: expected at least one target in the data set, got none")
    shares = present / present.sum()
    return float(-(shares * np.log(shares)).sum())


def _added(counts: np.ndarray, rows: list[np.ndarray]) -> np.ndarray:
    if not rows:
        return counts
    more = np.bincount(np.concatenate(rows), minlength=counts.size)
    more[: counts.size] += counts
    return more
