"""Packed attention against scaled_dot_product_attention, document by document."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hgraph import packed_attention as module
from hgraph.packed_attention import packed_attention
from hgraph.placements import balanced_sizes

HEAD_SIZE = 8
SCALE = 0.3
TOLERANCE = 1e-13
"""Float64: softmax over a dozen numbers, summed in another order."""

SHAPES = {
    "one document": ([7], 0),
    "three documents": ([3, 1, 5], 0),
    "padding": ([3, 4], 3),
    "empty documents": ([0, 1, 0, 1], 0),
    "empty but the last": ([0, 0, 0, 1], 0),
    "empty at the end, and padding": ([2, 0, 0], 2),
    "padding alone": ([0, 0], 4),
    "no token": ([], 0),
}


def inputs(num_tokens: int, queries: int, keys: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(num_tokens, heads, HEAD_SIZE, dtype=dtype, generator=generator, requires_grad=True)
        for heads in (queries, keys, keys)
    ]


def bounds(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def one_by_one(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    """Plain attention of each document alone; zero where there is no document."""
    parts, start = [], 0
    for length in lengths:
        rows = [x[start : start + length].transpose(0, 1)[None] for x in (query, key, value)]
        start += length
        if length:
            attended = F.scaled_dot_product_attention(*rows, is_causal=True, scale=SCALE, enable_gqa=True)
            parts.append(attended[0].transpose(0, 1))
    return torch.cat([*parts, query.new_zeros(query.shape[0] - start, *query.shape[1:])])


@pytest.fixture(params=["kernel", "mathematics"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The CPU kernel, and the formulas that serve every other device."""
    if request.param == "mathematics":
        monkeypatch.setattr(module, "_has_flash_kernel", lambda query, value: False)
    return request.param


@pytest.mark.case(30)
@pytest.mark.parametrize("heads", [(4, 4), (6, 3), (4, 1)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_equals_attention_of_each_document(path: str, name: str, heads: tuple[int, int]) -> None:
    lengths, num_pads = SHAPES[name]
    values = inputs(sum(lengths) + num_pads, *heads)
    output = packed_attention(*values, bounds(lengths), SCALE)
    expected = one_by_one(*values, lengths)
    torch.testing.assert_close(output, expected, rtol=0, atol=TOLERANCE)
    if not sum(lengths):
        return
    grad = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for got, wanted in zip(
        torch.autograd.grad(output, values, grad), torch.autograd.grad(expected, values, grad), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=TOLERANCE)


def test_padding_gets_no_output_and_no_gradient(path: str) -> None:
    values = inputs(8, 4, 2)
    output = packed_attention(*values, bounds([2, 3]), SCALE)
    assert not output[5:].any()
    for gradient in torch.autograd.grad(output.sum(), values):
        assert not gradient[5:].any()
        assert gradient[2:5].any()


@pytest.mark.case(30)
@pytest.mark.parametrize("lengths", [[0, 1, 0, 1], [0, 0, 0, 1], [3, 0, 4]], ids=str)
def test_empty_documents_change_nothing(path: str, lengths: list[int]) -> None:
    values = inputs(sum(lengths), 4, 2)
    full = [length for length in lengths if length]
    outputs = [packed_attention(*values, bounds(given), SCALE) for given in (lengths, full)]
    assert torch.equal(*outputs)
    gradients = [torch.autograd.grad(output.square().sum(), values) for output in outputs]
    assert all(map(torch.equal, *gradients))


@pytest.mark.case(22)
@pytest.mark.parametrize("rows", [1, 2])
def test_a_document_does_not_see_another(path: str, rows: int) -> None:
    """Documents A and B in one row, or A, B and again A, B as two rows laid end to end."""
    lengths = [5, 6] * rows
    of_b = torch.cat([torch.arange(5, 11) + 11 * row for row in range(rows)])
    of_a = torch.tensor([token for token in range(11 * rows) if token not in of_b.tolist()])
    before = inputs(11 * rows, 4, 2)
    other = inputs(11 * rows, 4, 2, seed=9)
    after = [
        x.detach().index_copy(0, of_a, y.detach()[of_a]).requires_grad_() for x, y in zip(before, other, strict=True)
    ]
    outputs = [packed_attention(*values, bounds(lengths), SCALE) for values in (before, after)]
    assert torch.equal(outputs[0][of_b], outputs[1][of_b])
    assert not torch.equal(outputs[0][of_a], outputs[1][of_a])
    for output, values in zip(outputs, (before, after), strict=True):
        for gradient in torch.autograd.grad(output[of_b].sum(), values):
            assert not gradient[of_a].any()


def test_gradients_are_those_of_the_function(path: str) -> None:
    values = inputs(5, 4, 2)
    assert torch.autograd.gradcheck(lambda *x: packed_attention(*x, bounds([2, 2]), SCALE), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_dtypes_are_kept(path: str, dtype: torch.dtype) -> None:
    values = inputs(6, 4, 2, dtype=dtype)
    output = packed_attention(*values, bounds([2, 4]), SCALE)
    assert output.dtype == dtype
    wide = packed_attention(*(x.detach().double() for x in values), bounds([2, 4]), SCALE)
    error = (output.double() - wide).abs().max().item()
    assert error <= 8 * torch.finfo(dtype).eps  # a few roundings of values near 1
    assert all(gradient.dtype == dtype for gradient in torch.autograd.grad(output.sum(), values))


def test_values_of_another_head_size(path: str) -> None:
    query, key, value = inputs(7, 4, 2)
    narrow = value[:, :, :3]
    output = packed_attention(query, key, narrow, bounds([3, 4]), SCALE)
    whole = packed_attention(query, key, value, bounds([3, 4]), SCALE)
    torch.testing.assert_close(output, whole[:, :, :3], rtol=0, atol=TOLERANCE)
    (gradient,) = torch.autograd.grad(output.sum(), value)
    (expected,) = torch.autograd.grad(whole[:, :, :3].sum(), value)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("queries", "keys", "ranks"), [(6, 3, 4), (6, 3, 6), (4, 1, 4), (8, 2, 3), (7, 7, 4)], ids=str)
def test_ranks_that_hold_some_heads(path: str, queries: int, keys: int, ranks: int) -> None:
    """More ranks than key heads: every rank reads the whole keys, and their gradients are terms of one sum."""
    values = [x.detach() for x in inputs(9, queries, keys)]
    grad = torch.randn(9, queries, HEAD_SIZE, dtype=torch.float64)
    borders, group = bounds([4, 3]), queries // keys
    forward, backward = torch.ops.hydraulis.packed_attention, torch.ops.hydraulis.packed_attention_backward
    whole = forward(*values, borders, SCALE, 0, 0, group)
    gradients = backward(grad, *values, *whole, borders, SCALE, 0, 0, group)
    start = 0
    sums = [torch.zeros_like(x) for x in values]
    for size in balanced_sizes(queries, ranks):
        own = slice(start, start + size)
        local = forward(values[0][:, own], *values[1:], borders, SCALE, start, 0, group)
        assert torch.equal(local[0], whole[0][:, own])
        parts = backward(grad[:, own], values[0][:, own], *values[1:], *local, borders, SCALE, start, 0, group)
        sums[0][:, own] = parts[0]
        sums[1] += parts[1]
        sums[2] += parts[2]
        start += size
    for total, gradient in zip(sums, gradients, strict=True):
        torch.testing.assert_close(total, gradient, rtol=0, atol=TOLERANCE)


def test_a_rank_that_holds_some_key_heads(path: str) -> None:
    """Six query heads over three key heads on two ranks: 2 + 1 key heads with their four and two query heads."""
    query, key, value = (x.detach() for x in inputs(9, 6, 3))
    borders = bounds([4, 5])
    whole, _ = torch.ops.hydraulis.packed_attention(query, key, value, borders, SCALE, 0, 0, 2)
    last, _ = torch.ops.hydraulis.packed_attention(query[:, 4:], key[:, 2:], value[:, 2:], borders, SCALE, 4, 2, 2)
    assert torch.equal(whole[:, 4:], last)


def test_a_rank_without_heads(path: str) -> None:
    query, key, value = (x.detach() for x in inputs(4, 4, 4))
    none = query[:, :0]
    output, lse = torch.ops.hydraulis.packed_attention(none, key, value, bounds([4]), SCALE, 4, 0, 1)
    assert output.shape == (4, 0, HEAD_SIZE)
    parts = torch.ops.hydraulis.packed_attention_backward(
        none, none, key, value, output, lse, bounds([4]), SCALE, 4, 0, 1
    )
    assert not parts[1].any() and not parts[2].any()


def test_operator_registration() -> None:
    """Fakes, autograd and schema agree with the kernels (torch's own checks)."""
    values = inputs(6, 4, 2)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(module._forward, (*values, bounds([2, 3]), SCALE, 0, 0, 2), test_utils=checks)
