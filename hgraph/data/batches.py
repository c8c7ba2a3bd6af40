"""Global batches: which sequences a step trains on, the same on every rank, whatever the strategy.

The order depends on the seed and the epoch alone. A batch takes sequences in that order until it holds at least
`tokens_per_step` tokens (the sequence that reaches it included) or `sequences_per_step` sequences. Every sequence
appears exactly once an epoch; none is repeated to even anything out; a batch does not reach into the next epoch,
whose border is the last, smaller batch, never an empty one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from hgraph.data.dataset import Dataset, PieceDataset, TokenDataset, sequence_fields, sequence_labels, target_counts
from hgraph.data.policy import LengthPolicy, PolicyReport, apply_length_policy
from hgraph.errors import InvalidInput

__all__ = ["BatchState", "GlobalBatch", "GlobalBatches", "global_batches", "make_batch"]


@dataclass(frozen=True, slots=True)
class BatchState:
    """Where the next batch begins: `position` sequences into the order of `epoch`; `index` batches came before."""

    epoch: int = 0
    position: int = 0
    index: int = 0

    def __post_init__(self) -> None:
        if min(self.epoch, self.position, self.index) < 0:
            raise InvalidInput(f"batch state: expected epoch, position and index of 0 or more, got {self}")


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The sequences of one step: ids and lengths. Tokens are fetched one sequence at a time, by who runs it.

    `index` counts batches from 0. `num_targets` is the number of labelled tokens of the whole batch, the denominator of
    its loss. `next_state` is where the batches go on after this one: keep it with a checkpoint.

    Invariants: at least one sequence; ids are distinct; one length for each id.
    """

    index: int
    epoch: int
    ids: tuple[int, ...]
    lengths: tuple[int, ...]
    num_targets: int
    dataset: Dataset = field(repr=False, compare=False)
    next_state: BatchState = BatchState()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(self.ids))
        object.__setattr__(self, "lengths", tuple(self.lengths))
        if not self.ids:
            raise InvalidInput(f"global batch {self.index}: expected at least one sequence, got none")
        if len(self.lengths) != len(self.ids):
            raise InvalidInput(
                f"global batch {self.index}: expected one length per id ({len(self.ids)}), got {len(self.lengths)}"
            )
        if len(set(self.ids)) != len(self.ids):
            twice = next(i for i in self.ids if self.ids.count(i) > 1)
            raise InvalidInput(f"global batch {self.index}: id {twice} appears {self.ids.count(twice)} times")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def origins(self) -> tuple[tuple[int, int], ...]:
        """(document id, offset in it) of each sequence; offsets other than 0 come from the policy `split` alone."""
        if isinstance(self.dataset, PieceDataset):
            return tuple(self.dataset.origin(i) for i in self.ids)
        return tuple((i, 0) for i in self.ids)

    def sequence(self, position: int) -> tuple[Tensor, Tensor | None]:
        """Returns (tokens, labels) of the sequence at `position` of the batch: [length] int64 each, labels None where
        the target is the next token. Reads this sequence alone.
        """
        index = self.ids[position]
        tokens, labels = self.dataset.tokens(index), sequence_labels(self.dataset, index)
        for name, row in (("tokens", tokens), ("labels", labels)):
            if row is not None and tuple(row.shape) != (self.lengths[position],):
                raise InvalidInput(
                    f"data set, id {index}: expected {self.lengths[position]} {name}, as its lengths say, "
                    f"got shape {list(row.shape)}"
                )
        return tokens, labels

    def fields(self, position: int, per_token: Collection[str] = ()) -> Mapping[str, Tensor]:
        """Returns the further fields of the sequence at `position` of the batch; `per_token` names those that are as
        long as the sequence.
        """
        return sequence_fields(self.dataset, self.ids[position], per_token)


class GlobalBatches:
    """The batches of `global_batches`: iterating begins at `start` each time; `report` says what was dropped or cut."""

    def __init__(
        self,
        dataset: Dataset,
        report: PolicyReport,
        *,
        tokens_per_step: int | None,
        sequences_per_step: int | None,
        seed: int,
        epochs: int | None,
        max_steps: int | None,
        drop_last: bool,
        shuffle: bool,
        start: BatchState,
    ) -> None:
        self.dataset = dataset
        self.report = report
        self.tokens_per_step = tokens_per_step
        self.sequences_per_step = sequences_per_step
        self.seed = seed
        self.epochs = epochs
        self.max_steps = max_steps
        self.drop_last = drop_last
        self.shuffle = shuffle
        self.start = start
        self._lengths = np.asarray(dataset.lengths, dtype=np.int64)
        self._target_counts = target_counts(dataset)
        self._present = np.flatnonzero(self._lengths)

    def order(self, epoch: int) -> np.ndarray:
        """Returns the ids of one epoch in the order they are trained on: a function of seed and epoch."""
        if not self.shuffle:
            return self._present
        return np.random.default_rng([self.seed, epoch]).permutation(self._present)

    def __iter__(self) -> Iterator[GlobalBatch]:
        state = self.start
        while self.epochs is None or state.epoch < self.epochs:
            for batch in self._epoch(state):
                if self.max_steps is not None and batch.index >= self.max_steps:
                    return
                yield batch
                state = batch.next_state
            # With `drop_last` the epoch may end behind its last batch.
            state = state if state.position == 0 else BatchState(state.epoch + 1, 0, state.index)

    def _epoch(self, state: BatchState) -> Iterator[GlobalBatch]:
        """Yields the batches of one epoch from `state` on."""
        order = self.order(state.epoch)
        ends = self._batch_ends(order, state.position)
        begin, index = state.position, state.index
        for end in ends:
            ids = order[begin:end]
            is_last = end == len(order)
            following = (
                BatchState(state.epoch + 1, 0, index + 1) if is_last else BatchState(state.epoch, end, index + 1)
            )
            yield GlobalBatch(
                index,
                state.epoch,
                tuple(ids.tolist()),
                tuple(self._lengths[ids].tolist()),
                int(self._target_counts[ids].sum()),
                self.dataset,
                following,
            )
            begin, index = end, index + 1

    def _batch_ends(self, order: np.ndarray, position: int) -> list[int]:
        """Returns where each batch of the epoch ends, in sequences of `order`."""
        if self.sequences_per_step is not None:
            ends = list(range(position + self.sequences_per_step, len(order) + 1, self.sequences_per_step))
        else:
            ends = self._ends_by_tokens(order, position)
        reached = ends[-1] if ends else position
        if reached < len(order) and not self.drop_last:
            ends.append(len(order))
        return ends

    def _ends_by_tokens(self, order: np.ndarray, position: int) -> list[int]:
        assert self.tokens_per_step is not None
        total = np.cumsum(self._lengths[order])
        ends: list[int] = []
        begin = position
        while begin < len(order):
            before = int(total[begin - 1]) if begin else 0
            end = int(np.searchsorted(total, before + self.tokens_per_step)) + 1
            if end > len(order):
                break
            ends.append(end)
            begin = end
        return ends


def global_batches(
    dataset: Dataset,
    *,
    tokens_per_step: int | None = None,
    sequences_per_step: int | None = None,
    seed: int = 0,
    epochs: int | None = None,
    max_steps: int | None = None,
    drop_last: bool = False,
    shuffle: bool = True,
    max_length: int | None = None,
    policy: LengthPolicy = "error",
    start: BatchState | None = None,
) -> GlobalBatches:
    """Returns the global batches of a data set, which can be iterated any number of times.

    Args:
        tokens_per_step: a batch is closed once it holds at least so many tokens; or
        sequences_per_step: once it holds so many sequences. Exactly one of the two.
        seed: with the epoch, the only thing the order depends on.
        epochs, max_steps: where to stop (`max_steps` counts from batch 0, also after a resume); None and None: never.
        drop_last: leave out the last batch of an epoch where it holds less than asked for.
        shuffle: False: in order of ids.
        max_length, policy: what happens to longer sequences, see `hgraph/data/policy.py`.
        start: the `next_state` of the last batch trained on, to resume after it.

    Raises `InvalidInput` for an empty data set, sizes below 1, and settings under which no batch would ever come.
    """
    _check_sizes(tokens_per_step, sequences_per_step, epochs, max_steps)
    if not len(dataset.lengths):
        raise InvalidInput("data set: expected at least one sequence, got none")
    report = apply_length_policy(np.asarray(dataset.lengths), max_length, policy)
    if report.cut_ids or report.split_ids or report.dropped_ids:
        dataset = PieceDataset(dataset, report)
    report = report.with_target_counts(target_counts(dataset))
    if not report.num_pieces:
        raise InvalidInput(f"data set: expected at least one token, got none: {report}")
    if drop_last:
        _check_first_batch(report, tokens_per_step, sequences_per_step)
    start = start or BatchState()
    if start.position >= report.num_pieces:
        raise InvalidInput(
            f"start: position {start.position} is outside an epoch of {report.num_pieces} sequences; another data set?"
        )
    return GlobalBatches(
        dataset,
        report,
        tokens_per_step=tokens_per_step,
        sequences_per_step=sequences_per_step,
        seed=seed,
        epochs=epochs,
        max_steps=max_steps,
        drop_last=drop_last,
        shuffle=shuffle,
        start=start,
    )


def make_batch(
    sequences: Sequence[Sequence[int] | np.ndarray | Tensor],
    labels: Sequence[Sequence[int] | np.ndarray | Tensor | None] | None = None,
    *,
    fields: Sequence[Mapping[str, Tensor]] | None = None,
    index: int = 0,
) -> GlobalBatch:
    """Returns one global batch of these sequences, with ids 0, 1, ...; labels are targets aligned to tokens.

    `fields` has the further fields of each sequence that a loss reads.
    """
    dataset = TokenDataset(sequences, labels, fields)
    ids = tuple(range(len(dataset)))
    targets = int(dataset.target_counts.sum())
    return GlobalBatch(index, 0, ids, tuple(dataset.lengths.tolist()), targets, dataset, BatchState(0, 0, index + 1))


def _check_sizes(
    tokens_per_step: int | None, sequences_per_step: int | None, epochs: int | None, max_steps: int | None
) -> None:
    if (tokens_per_step is None) == (sequences_per_step is None):
        raise InvalidInput(
            "global batches: expected either tokens_per_step or sequences_per_step, "
            f"got tokens_per_step={tokens_per_step}, sequences_per_step={sequences_per_step}"
        )
    for name, value, least in (
        ("tokens_per_step", tokens_per_step, 1),
        ("sequences_per_step", sequences_per_step, 1),
        ("epochs", epochs, 0),
        ("max_steps", max_steps, 0),
    ):
        if value is not None and value < least:
            raise InvalidInput(f"global batches: expected {name} of {least} or more, got {value}")


def _check_first_batch(report: PolicyReport, tokens_per_step: int | None, sequences_per_step: int | None) -> None:
    num_tokens = int(report.pieces.lengths.sum())
    if tokens_per_step is not None and num_tokens < tokens_per_step:
        raise InvalidInput(
            f"global batches: drop_last leaves no batch: the data set has {num_tokens} tokens, "
            f"tokens_per_step is {tokens_per_step}"
        )
    if sequences_per_step is not None and report.num_pieces < sequences_per_step:
        raise InvalidInput(
            f"global batches: drop_last leaves no batch: the data set has {report.num_pieces} sequences, "
            f"sequences_per_step is {sequences_per_step}"
        )
