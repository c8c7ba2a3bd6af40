"""Global batches: every sequence once an epoch, in an order that depends on the seed alone."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hgraph.data import (
    BatchState,
    GlobalBatch,
    MemmapDataset,
    TokenDataset,
    global_batches,
    make_batch,
)
from hgraph.errors import InvalidInput


def dataset_of(*lengths: int) -> TokenDataset:
    return TokenDataset([[index + 1] * length for index, length in enumerate(lengths)])


def ids_of(batches: object) -> list[tuple[int, ...]]:
    return [batch.ids for batch in batches]  # type: ignore[attr-defined]


@pytest.mark.case(36)
def test_the_tail_is_kept() -> None:
    batches = list(global_batches(dataset_of(*[3] * 18), sequences_per_step=16, epochs=1))
    assert [len(batch) for batch in batches] == [16, 2]
    assert sorted(i for batch in batches for i in batch.ids) == list(range(18))
    dropped = global_batches(dataset_of(*[3] * 18), sequences_per_step=16, epochs=2, drop_last=True)
    assert [len(batch) for batch in dropped] == [16, 16]


@pytest.mark.case(73)
def test_an_epoch_border_makes_no_empty_batch() -> None:
    batches = list(global_batches(dataset_of(2, 2, 2, 2), sequences_per_step=2, epochs=2))
    assert [(batch.index, batch.epoch, len(batch)) for batch in batches] == [(0, 0, 2), (1, 0, 2), (2, 1, 2), (3, 1, 2)]
    by_tokens = list(global_batches(dataset_of(2, 2, 2, 2), tokens_per_step=4, epochs=2))
    assert ids_of(by_tokens) == ids_of(batches)


@pytest.mark.case(74)
def test_no_sequence_is_repeated_to_even_anything_out() -> None:
    batches = list(global_batches(dataset_of(*range(1, 25)), sequences_per_step=5, epochs=1))
    assert sorted(i for batch in batches for i in batch.ids) == list(range(24))
    assert sum(batch.num_targets for batch in batches) == sum(range(24))


def test_a_batch_is_closed_by_the_sequence_that_reaches_the_tokens() -> None:
    batches = list(global_batches(dataset_of(5, 3, 9, 1, 2), tokens_per_step=8, shuffle=False, epochs=1))
    assert ids_of(batches) == [(0, 1), (2,), (3, 4)]
    assert [batch.num_tokens for batch in batches] == [8, 9, 3]
    assert [batch.num_targets for batch in batches] == [6, 8, 1]


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    dataset = dataset_of(*range(1, 30))
    first = ids_of(global_batches(dataset, sequences_per_step=29, epochs=2, seed=3))
    assert first == ids_of(global_batches(dataset, sequences_per_step=29, epochs=2, seed=3))
    assert first[0] != first[1]
    assert first != ids_of(global_batches(dataset, sequences_per_step=29, epochs=2, seed=4))
    flat = [i for ids in ids_of(global_batches(dataset, tokens_per_step=50, epochs=1, seed=3)) for i in ids]
    assert flat == list(first[0])
    # numpy promises these streams, so a run can be repeated elsewhere.
    assert flat == np.random.default_rng([3, 0]).permutation(29).tolist()


def test_batches_can_be_iterated_again() -> None:
    batches = global_batches(dataset_of(*range(1, 9)), tokens_per_step=9, epochs=2)
    assert list(batches) == list(batches)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("stop", [1, 3, 4, 7])
def test_resuming_continues_the_same_order(stop: int, drop_last: bool) -> None:
    options = {"tokens_per_step": 9, "seed": 5, "max_steps": 9, "drop_last": drop_last}
    dataset = dataset_of(*range(1, 9))
    unbroken = list(global_batches(dataset, **options))
    assert len(unbroken) == 9
    assert unbroken[-1].epoch >= 1
    resumed = global_batches(dataset, start=unbroken[stop - 1].next_state, **options)
    assert list(resumed) == unbroken[stop:]


def test_without_an_end_batches_go_on() -> None:
    batches = iter(global_batches(dataset_of(2, 2), sequences_per_step=2))
    assert [next(batches).epoch for _ in range(5)] == [0, 1, 2, 3, 4]
    assert list(global_batches(dataset_of(2), sequences_per_step=1, max_steps=0)) == []


def test_empty_documents_are_in_no_batch() -> None:
    batches = global_batches(dataset_of(2, 0, 3), tokens_per_step=100, epochs=1)
    assert sorted(next(iter(batches)).ids) == [0, 2]
    assert batches.report.empty_ids == (1,)


def test_a_split_document_is_seen_in_pieces() -> None:
    dataset = TokenDataset([range(13), range(50, 54)])
    (batch,) = global_batches(dataset, tokens_per_step=100, epochs=1, shuffle=False, max_length=10, policy="split")
    assert batch.ids == (0, 1, 2)
    assert batch.lengths == (10, 4, 3)
    assert batch.origins == ((0, 0), (1, 0), (0, 10))
    assert batch.num_targets == 12 + 3
    tokens, labels = batch.sequence(2)
    assert tokens.tolist() == [10, 11, 12]
    assert labels is not None and labels.tolist() == [11, 12, -100]


class CountingDataset:
    """A data set of a user: the two members of the protocol, nothing inherited."""

    def __init__(self) -> None:
        self.lengths = np.array([2, 3, 4])
        self.read: list[int] = []

    def tokens(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.arange(int(self.lengths[index]))


def test_tokens_are_read_only_when_asked_for() -> None:
    dataset = CountingDataset()
    (batch,) = global_batches(dataset, sequences_per_step=3, epochs=1, shuffle=False)
    assert batch.num_targets == 6
    assert dataset.read == []
    tokens, labels = batch.sequence(1)
    assert (tokens.tolist(), labels, dataset.read) == ([0, 1, 2], None, [1])


def test_a_data_set_whose_lengths_are_wrong_is_named() -> None:
    dataset = CountingDataset()
    (batch,) = global_batches(dataset, sequences_per_step=3, epochs=1, shuffle=False)
    dataset.lengths = np.array([2, 5, 4])
    with pytest.raises(InvalidInput, match=r"data set, id 1: expected 3 tokens, as its lengths say, got shape \[5\]"):
        batch.sequence(1)


def test_labels_of_a_user_are_counted() -> None:
    class Labelled(CountingDataset):
        def labels(self, index: int) -> torch.Tensor | None:
            return None if index == 0 else torch.full((int(self.lengths[index]),), -100 if index == 1 else 5)

    (batch,) = global_batches(Labelled(), sequences_per_step=3, epochs=1)
    assert batch.num_targets == 1 + 0 + 4


def test_a_batch_made_by_hand() -> None:
    batch = make_batch([[1, 2, 3], [4]], labels=[[-100, 3, -100], None])
    assert (batch.ids, batch.lengths, batch.num_targets) == ((0, 1), (3, 1), 1)
    assert pickle.loads(pickle.dumps(batch)) == batch


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens_per_step": 0}, "global batches: expected tokens_per_step of 1 or more, got 0"),
        ({"sequences_per_step": -1}, "global batches: expected sequences_per_step of 1 or more, got -1"),
        ({}, "expected either tokens_per_step or sequences_per_step, got tokens_per_step=None"),
        ({"tokens_per_step": 1, "sequences_per_step": 1}, "expected either tokens_per_step or sequences_per_step"),
        ({"tokens_per_step": 1, "epochs": -1}, "global batches: expected epochs of 0 or more, got -1"),
        ({"tokens_per_step": 9, "drop_last": True}, "drop_last leaves no batch: the data set has 3 tokens"),
        ({"sequences_per_step": 9, "drop_last": True}, "drop_last leaves no batch: the data set has 1 sequences"),
        ({"tokens_per_step": 1, "start": BatchState(0, 1, 1)}, "start: position 1 is outside an epoch of 1 sequences"),
        ({"tokens_per_step": 1, "max_length": 2}, r"1 of 1 sequences exceed the limit of 2 tokens: id 0 \(3 tokens\)"),
    ],
)
def test_wrong_settings_are_named(options: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        global_batches(dataset_of(3), **options)


def test_a_data_set_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidInput, match="data set: expected at least one sequence, got none"):
        global_batches(TokenDataset([]), tokens_per_step=1)
    with pytest.raises(
        InvalidInput, match="expected at least one token, got none: 0 kept, 2 empty and dropped: ids 0, 1"
    ):
        global_batches(TokenDataset([[], []]), tokens_per_step=1)


def test_each_invariant_of_a_batch_and_a_state() -> None:
    batch = make_batch([[1, 2]], index=4)
    with pytest.raises(InvalidInput, match="global batch 4: expected at least one sequence, got none"):
        replace(batch, ids=(), lengths=())
    with pytest.raises(InvalidInput, match=r"global batch 4: expected one length per id \(1\), got 2"):
        replace(batch, lengths=(2, 3))
    with pytest.raises(InvalidInput, match="global batch 4: id 0 appears 2 times"):
        replace(batch, ids=(0, 0), lengths=(2, 2))
    with pytest.raises(InvalidInput, match="batch state: expected epoch, position and index of 0 or more"):
        BatchState(epoch=-1)


@pytest.mark.parametrize(
    ("sequences", "labels", "message"),
    [
        ([[1], [2, -5]], None, "sequence 1: token id -5 at position 1 is negative"),
        ([[1.5]], None, "sequence 0: expected integers, got float64"),
        ([[[1]]], None, r"sequence 0: expected one dim of ids, got shape \[1, 1\]"),
        ([[1, 2]], [[1]], "labels of sequence 0: expected 2 targets, one per token, got 1"),
        ([[1, 2]], [], "labels: expected one entry for each of 1 sequences, got 0"),
    ],
)
def test_each_invariant_of_a_data_set(sequences: list, labels: list | None, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        TokenDataset(sequences, labels)


@pytest.mark.parametrize("largest", [7, 70_000])
def test_a_mapped_data_set_gives_what_was_written(tmp_path: Path, largest: int) -> None:
    rows = [np.array([1, 2, largest]), np.array([], dtype=np.int64), np.array([4])]
    labels = [np.array([2, -100, 3]), np.array([], dtype=np.int64), np.array([-100])]
    MemmapDataset.write(tmp_path, rows, labels)
    dataset = pickle.loads(pickle.dumps(MemmapDataset(tmp_path)))
    assert dataset.lengths.tolist() == [3, 0, 1]
    assert [dataset.tokens(i).tolist() for i in range(3)] == [row.tolist() for row in rows]
    assert [dataset.labels(i).tolist() for i in range(3)] == [row.tolist() for row in labels]
    assert dataset.tokens(0).dtype == torch.int64


def test_a_mapped_data_set_with_files_missing_or_at_odds_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"tokens\.npy is missing"):
        MemmapDataset(tmp_path)
    MemmapDataset.write(tmp_path, [np.array([1, 2])])
    np.save(tmp_path / "offsets.npy", np.array([0, 3]))
    with pytest.raises(InvalidInput, match=r"offsets\.npy: expected borders from 0 to 2, the size of tokens\.npy"):
        MemmapDataset(tmp_path)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=20).filter(any), st.integers(1, 40), st.integers(0, 5))
def test_every_sequence_once_an_epoch(lengths: list[int], tokens_per_step: int, seed: int) -> None:
    batches: list[GlobalBatch] = list(
        global_batches(dataset_of(*lengths), tokens_per_step=tokens_per_step, seed=seed, epochs=2)
    )
    present = [index for index, length in enumerate(lengths) if length]
    for epoch in (0, 1):
        own = [batch for batch in batches if batch.epoch == epoch]
        assert sorted(i for batch in own for i in batch.ids) == present
        assert all(batch.num_tokens >= tokens_per_step for batch in own[:-1])
        assert all(batch.num_tokens - batch.lengths[-1] < tokens_per_step for batch in own)
    assert [batch.index for batch in batches] == list(range(len(batches)))
