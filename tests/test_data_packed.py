"""Packed rows: labels, positions, borders and pads, and the checker that proves them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hgraph.data import (
    Packed,
    check_packed,
    cu_seqlens_from_segments,
    num_targets,
    pack,
    positions_from_segments,
    token_loss,
)
from hgraph.errors import InvalidInput


def rows(*lengths: int) -> list[list[int]]:
    """Returns sequences of these lengths, of distinct ids from 1."""
    ends = np.cumsum([1, *lengths])
    return [list(range(begin, end)) for begin, end in pairwise(ends)]


@pytest.mark.case(26)
def test_positions_restart_in_every_document() -> None:
    assert pack(rows(3, 2, 4)).positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]


@pytest.mark.case(27)
def test_segment_ids_are_documents_and_zero_is_padding() -> None:
    segments = torch.tensor([1, 1, 2, 2, 2, 0])
    assert positions_from_segments(segments).tolist() == [0, 1, 0, 1, 2, 0]
    borders = cu_seqlens_from_segments(segments)
    assert borders.tolist() == [0, 2, 5]
    assert borders.dtype == torch.int32


def test_segment_ids_of_pads_alone_hold_no_document() -> None:
    assert cu_seqlens_from_segments(torch.zeros(3, dtype=torch.int64)).tolist() == [0]
    assert positions_from_segments(torch.zeros(3, dtype=torch.int64)).tolist() == [0, 1, 2]


def test_padding_before_a_document_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"segment_ids: padding \(0\) at position 1 stands before a document"):
        cu_seqlens_from_segments(torch.tensor([1, 0, 2]))


@pytest.mark.case(28)
def test_pads_add_no_documents() -> None:
    packed = pack(rows(*[5] * 2), multiple=4096)
    assert packed.tokens.shape == (4096,)
    assert packed.cu_seqlens.tolist() == [0, 5, 10]
    assert pack(rows(5), multiple=4096).cu_seqlens.tolist() == [0, 5]


@pytest.mark.case(30)
@pytest.mark.parametrize("lengths", [(0, 1, 0, 1), (0, 0, 0, 1)])
def test_empty_sequences_are_skipped(lengths: tuple[int, ...]) -> None:
    packed, without = pack(rows(*lengths)), pack([row for row in rows(*lengths) if row])
    assert packed.cu_seqlens.tolist() == without.cu_seqlens.tolist()
    assert packed.tokens.tolist() == without.tokens.tolist()


@pytest.mark.case(31)
def test_int64_borders_are_converted() -> None:
    packed = pack(rows(3, 2))
    checked = check_packed(replace(packed, cu_seqlens=packed.cu_seqlens.to(torch.int64)))
    assert checked.cu_seqlens.dtype == torch.int32
    assert checked.cu_seqlens.tolist() == [0, 3, 5]


@pytest.mark.case(31)
@pytest.mark.parametrize(
    ("borders", "message"),
    [
        ([3, 5], r"cu_seqlens: expected a leading 0, got \[3, 5\]"),
        ([], r"cu_seqlens: expected a leading 0, got \[\]"),
        ([0, 3, 2], r"cu_seqlens: expected increasing borders, got 2 after 3 at entry 2"),
        ([0, 3, 3, 5], r"cu_seqlens: document 1 is empty \(entry 2 is 3 again\)"),
        ([0, 3, 6], r"cu_seqlens: expected to end at 5 tokens or before, got 6"),
    ],
)
def test_wrong_borders_are_named(borders: list[int], message: str) -> None:
    packed = replace(pack(rows(3, 2)), cu_seqlens=torch.tensor(borders, dtype=torch.int32))
    with pytest.raises(InvalidInput, match=message):
        check_packed(packed)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokens", torch.zeros(1, 5, dtype=torch.int64), r"tokens: expected one dim, got shape \[1, 5\]"),
        ("tokens", torch.zeros(5), r"tokens: expected integers \(torch.int64\), got torch.float32"),
        ("tokens", [1, 2, 3, 4, 5], r"tokens: expected a tensor, got list"),
        ("labels", torch.zeros(4, dtype=torch.int64), r"labels: expected length 5, as tokens, got 4"),
        ("cu_seqlens", torch.tensor([0.0, 5.0]), r"cu_seqlens: expected integers \(torch.int32\), got torch.float32"),
        ("cu_seqlens", torch.tensor([0, 2**32]), r"cu_seqlens: expected values that fit torch.int32, got 4294967296"),
        ("fields", {"weight": torch.zeros(3)}, r"field 'weight': expected a first dim of 5 .* or 2 .* got shape \[3\]"),
    ],
)
def test_wrong_fields_are_named(field: str, value: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        check_packed(replace(pack(rows(3, 2)), **{field: value}))


def test_positions_that_run_on_over_a_border_are_refused() -> None:
    packed = replace(pack(rows(3, 2)), positions=torch.arange(5))
    with pytest.raises(InvalidInput, match="positions: expected 0 at token 3, got 3"):
        check_packed(packed)


def test_a_pad_with_a_label_is_refused() -> None:
    packed = pack(rows(3), multiple=4)
    with pytest.raises(InvalidInput, match="labels: expected -100 for the pad at token 3, got 1"):
        check_packed(replace(packed, labels=torch.tensor([2, 3, -100, 1])))


def test_a_token_outside_the_vocabulary_is_named_with_its_position() -> None:
    with pytest.raises(
        InvalidInput, match=r"tokens: id 9 at position 3 is outside the vocabulary of 9 entries \(ids 0 to 8\)"
    ):
        check_packed(pack([[1, 8, 0], [9]]), vocab_size=9)
    with pytest.raises(InvalidInput, match="tokens: id -1 at position 1 is outside the vocabulary"):
        check_packed(pack([[1, -1]]))
    with pytest.raises(InvalidInput, match="labels: id 12 at position 0 is outside the vocabulary of 9 entries"):
        check_packed(pack([[1, 2]], labels=[[12, -100]]), vocab_size=9)


@pytest.mark.case(37)
def test_every_field_is_padded_to_the_multiple() -> None:
    lengths = (4000, 243)
    weights = [torch.ones(length) for length in lengths]
    packed = pack(rows(*lengths), multiple=8, token_fields={"weight": weights})
    for row in (packed.tokens, packed.positions, packed.labels, packed.fields["weight"]):
        assert row.shape == (4248,)
    assert packed.labels[4243:].tolist() == [-100] * 5
    assert packed.positions[4243:].tolist() == [0, 1, 2, 3, 4]
    assert packed.fields["weight"].sum() == 4243
    check_packed(packed)


@pytest.mark.case(41)
def test_labels_are_shifted_before_anything_is_sharded() -> None:
    packed = pack([range(1, 9)])
    assert num_targets(packed) == 7
    assert packed.labels[packed.tokens.tolist().index(4)] == 5
    first, second = packed.labels.chunk(2)
    assert first.tolist() == [2, 3, 4, 5]
    assert second.tolist() == [6, 7, 8, -100]


@pytest.mark.case(42)
def test_no_target_across_a_border() -> None:
    packed = pack(rows(3, 2))
    assert packed.labels.tolist() == [2, 3, -100, 5, -100]
    assert num_targets(packed) == 3
    singles = pack(rows(1, 1, 1))
    assert num_targets(singles) == 0
    assert singles.cu_seqlens.tolist() == [0, 1, 2, 3]


def test_given_labels_are_targets_and_are_not_shifted_again() -> None:
    packed = pack([[1, 2, 3], [4, 5]], labels=[[-100, 7, 8], None])
    assert packed.labels.tolist() == [-100, 7, 8, 5, -100]


def test_labels_of_another_length_are_refused() -> None:
    with pytest.raises(InvalidInput, match="labels of sequence 1: expected 2 targets, one per token, got 1"):
        pack([[1], [2, 3]], labels=[None, [3]])
    with pytest.raises(InvalidInput, match="labels: expected one entry for each of 2 sequences, got 1"):
        pack([[1], [2, 3]], labels=[None])


def test_fields_follow_their_sequences() -> None:
    packed = pack(
        [[1, 2], [], [3]],
        token_fields={"mask": [torch.tensor([5, 6]), torch.tensor([]), torch.tensor([7])]},
        sequence_fields={"weight": [0.5, 9.0, 2.0]},
    )
    assert packed.fields["mask"].tolist() == [5, 6, 7]
    assert packed.fields["weight"].tolist() == [0.5, 2.0]
    with pytest.raises(InvalidInput, match="field 'mask' of sequence 0: expected 2 entries, one per token"):
        pack([[1, 2]], token_fields={"mask": [torch.ones(3)]})
    with pytest.raises(InvalidInput, match="field 'weight': expected one entry for each of 1 sequences, got 2"):
        pack([[1, 2]], sequence_fields={"weight": [1.0, 2.0]})


def test_nothing_packs_to_nothing() -> None:
    packed = check_packed(pack([], multiple=8))
    assert packed.tokens.shape == (0,)
    assert packed.cu_seqlens.tolist() == [0]
    assert num_targets(packed) == 0


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        ([[1, 2]], r"sequence 0: expected one dim of ids, got shape \[1, 2\]"),
        ([1.5], "sequence 0: expected integers, got torch.float32"),
    ],
)
def test_what_is_no_row_of_ids_is_refused(sequence: list, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        pack([sequence])
    with pytest.raises(InvalidInput, match="pack: expected multiple of 1 or more, got 0"):
        pack([[1]], multiple=0)


def test_the_loss_is_a_sum_over_labelled_tokens() -> None:
    packed = pack(rows(3, 2), multiple=8)
    logits = torch.zeros(8, 16, dtype=torch.float64)
    expected = 3 * torch.log(torch.tensor(16.0, dtype=torch.float64))
    torch.testing.assert_close(token_loss(logits, packed), expected, rtol=1e-14, atol=0)
    unlabelled = replace(packed, labels=torch.full_like(packed.labels, -100))
    assert token_loss(logits, unlabelled) == 0


def test_the_loss_of_a_hugging_face_model_is_its_own_mean_times_the_targets() -> None:
    transformers = pytest.importorskip("transformers")
    from hgraph.data import causal_lm_loss

    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        vocab_size=32,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.tensor([3, 1, 4, 1, 5, 9])
    own = model(input_ids=tokens[None], labels=tokens[None]).loss
    # Both sum five float32 terms of about 3.5, in another order.
    torch.testing.assert_close(causal_lm_loss()(model, pack([tokens])), own * 5, rtol=1e-6, atol=0)


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 7))
def test_what_is_packed_passes_the_checker(lengths: list[int], multiple: int) -> None:
    packed: Packed = check_packed(pack(rows(*lengths), multiple=multiple), vocab_size=sum(lengths) + 1)
    assert packed.tokens.shape[0] % multiple == 0
    assert num_targets(packed) == sum(max(length - 1, 0) for length in lengths)
    segments = [index + 1 for index, length in enumerate(lengths) for _ in range(length)]
    padded = torch.tensor(segments + [0] * (packed.tokens.shape[0] - len(segments)), dtype=torch.int64)
    assert torch.equal(positions_from_segments(padded), packed.positions)
    assert torch.equal(cu_seqlens_from_segments(padded), packed.cu_seqlens)
