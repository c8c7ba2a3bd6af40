"""Over-long sequences: nothing vanishes without a count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hgraph.data import TokenDataset, apply_length_policy, global_batches
from hgraph.data.dataset import PieceDataset
from hgraph.errors import InvalidInput


@pytest.mark.case(33)
def test_tokens_beyond_the_limit_are_an_error_a_report_or_kept() -> None:
    lengths = [4, 2, 3, 1]
    with pytest.raises(InvalidInput, match=r"1 of 4 sequences exceed the limit of 3 tokens: id 0 \(4 tokens\)"):
        apply_length_policy(lengths, 3, "error")
    assert str(apply_length_policy(lengths, 3, "cut")) == "3 kept, 1 cut: id 0 (1 of 10 tokens dropped)"
    assert str(apply_length_policy(lengths, 3, "drop")) == "3 kept, 1 dropped: id 0 (4 of 10 tokens dropped)"
    split = apply_length_policy(lengths, 3, "split")
    assert str(split) == "3 kept, 1 split into 2 pieces: id 0"
    assert split.pieces.lengths.sum() == 10


@pytest.mark.case(34)
def test_a_split_piece_keeps_document_and_offset() -> None:
    documents = [range(100, 113), range(200, 211)]
    dataset = TokenDataset(documents)
    report = apply_length_policy(dataset.lengths, 10, "split")
    pieces = PieceDataset(dataset, report)
    assert [pieces.origin(i) for i in range(len(pieces))] == [(0, 0), (1, 0), (0, 10), (1, 10)]
    assert pieces.lengths.tolist() == [10, 10, 3, 1]
    assert pieces.tokens(2).tolist() == [110, 111, 112]
    # The border target survives: the last token of a piece predicts the first of the next.
    assert pieces.labels(0).tolist() == list(range(101, 111))
    assert pieces.labels(2).tolist() == [111, 112, -100]
    assert pieces.target_counts.sum() == 12 + 10

    cut = PieceDataset(dataset, apply_length_policy(dataset.lengths, 10, "cut"))
    assert cut.tokens(0).tolist() == list(range(100, 110))
    assert cut.labels(0) is None
    assert cut.target_counts.tolist() == [9, 9]


@pytest.mark.case(50)
def test_dropped_sequences_are_counted_and_listed() -> None:
    report = apply_length_policy([2, 9, 3, 1, 9], 4, "drop")
    assert str(report) == "3 kept, 2 dropped: ids 1, 4 (18 of 24 tokens dropped)"
    assert (report.num_kept, report.dropped_ids, report.num_pieces) == (3, (1, 4), 3)


def test_empty_documents_are_dropped_and_counted_and_ids_do_not_shift() -> None:
    report = apply_length_policy([0, 3, 0], None)
    assert str(report) == "1 kept, 2 empty and dropped: ids 0, 2"
    assert report.pieces.documents.tolist() == [0, 1, 2]


@pytest.mark.case(45)
def test_sequences_without_a_target_are_counted_and_harmless() -> None:
    dataset = TokenDataset([[1, 2, 3], [4, 5], [6, 7]], labels=[None, [-100, -100], [7, -100]])
    batches = global_batches(dataset, sequences_per_step=3, epochs=1)
    assert str(batches.report) == "3 kept, 1 without a target: id 1"
    (batch,) = batches
    assert batch.num_targets == 3
    assert sorted(batch.ids) == [0, 1, 2]


def test_long_lists_of_ids_are_shortened() -> None:
    assert str(apply_length_policy([5] * 12, 4, "drop")).startswith(
        "0 kept, 12 dropped: ids 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2"
    )


def test_given_labels_are_cut_with_their_tokens() -> None:
    dataset = TokenDataset([[1, 2, 3, 4]], labels=[[-100, 3, 4, 9]])
    pieces = PieceDataset(dataset, apply_length_policy(dataset.lengths, 3, "split"))
    assert pieces.labels(0).tolist() == [-100, 3, 4]
    assert pieces.labels(1).tolist() == [9]
    assert pieces.target_counts.tolist() == [2, 1]


def test_a_view_of_a_view_names_the_document() -> None:
    dataset = TokenDataset([range(10)])
    once = PieceDataset(dataset, apply_length_policy(dataset.lengths, 6, "split"))
    twice = PieceDataset(once, apply_length_policy(once.lengths, 3, "split"))
    assert [twice.origin(i) for i in range(len(twice))] == [(0, 0), (0, 6), (0, 3), (0, 9)]
    assert [twice.tokens(i).tolist() for i in range(4)] == [[0, 1, 2], [6, 7, 8], [3, 4, 5], [9]]
    assert twice.target_counts.sum() == 9


@pytest.mark.parametrize(
    ("lengths", "limit", "policy", "message"),
    [
        ([1], 0, "cut", "length policy: expected a limit of 1 token or more, got 0"),
        ([1], 4, "shrink", "length policy: expected one of error, cut, split, drop, got 'shrink'"),
        ([1, -2], 4, "cut", "lengths: expected 0 or more, got -2 for id 1"),
    ],
)
def test_wrong_settings_are_named(lengths: list[int], limit: int, policy: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        apply_length_policy(lengths, limit, policy)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 12))
def test_split_keeps_every_token_once(lengths: list[int], limit: int) -> None:
    dataset = TokenDataset([list(range(1, length + 1)) for length in lengths])
    pieces = PieceDataset(dataset, apply_length_policy(lengths, limit, "split"))
    seen = sorted((pieces.origin(i)[0], token) for i in range(len(pieces)) for token in pieces.tokens(i).tolist())
    assert seen == [(i, token) for i, length in enumerate(lengths) for token in range(1, length + 1)]
    assert all(length <= limit for length in pieces.lengths)
    assert pieces.target_counts.sum() == sum(max(length - 1, 0) for length in lengths)
