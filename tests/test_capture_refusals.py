"""Models and losses that capture refuses: by name, with the module and the user's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgraph.capture import capture
from hgraph.data.packed import Packed
from hgraph.errors import CaptureError, RuleError
from hgraph.strategy import Scheme
from passes.pipelines import normalized
from tests.models import Word, language_loss, llama, random_batches
from tests.scheme_runs import assert_equal_to_reference, run_scheme

VOCABULARY, HIDDEN = 61, 24


def small_llama() -> nn.Module:
    return llama(layers=1, hidden=24, heads=4, kv_heads=2, ffn=20, vocab_size=VOCABULARY)


def attention(**options: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def between(x: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, **options).transpose(1, 2).flatten(2)

    return between


def by_hand(x: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    return (x @ x.transpose(-1, -2)).softmax(-1) @ x


def by_hand_with_a_causal_mask(x: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    scores = x @ x.transpose(-1, -2)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ x


def by_hand_with_positions_for_a_mask(x: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    """Positions restart in every document, but nothing keeps documents apart."""
    later = positions[:, :, None] < positions[:, None, :]
    scores = (x @ x.transpose(-1, -2)).masked_fill(later, -1e9)
    return scores.exp() @ x


REFUSED_MODELS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str]] = {
    "item": (
        lambda x, tokens, positions: x * tokens.sum().item(),
        "computes with a size or with a value read from a tensor (aten._local_scalar_dense.default",
    ),
    "branch on a value": (
        lambda x, tokens, positions: x if tokens.sum() > 3 else -x,
        "cannot trace Word into one graph: in module between",
    ),
    "branch on the number of tokens": (
        lambda x, tokens, positions: x if tokens.shape[1] > 99 else -x,
        "would hold for some batches only: 1 condition(s) on the number of tokens or sequences",
    ),
    "two rows": (
        lambda x, tokens, positions: x.view(2, -1, HIDDEN).flatten(0, 1)[None],
        "would hold for some batches only",
    ),
    "the tokens numbered": (
        lambda x, tokens, positions: x + torch.arange(tokens.shape[1])[:, None],
        "numbers the tokens of the packed batch, so that positions would not restart in every document",
    ),
    "a running sum": (
        lambda x, tokens, positions: x.cumsum(1),
        "no sharding rule for aten.cumsum.default",
    ),
    "the token before": (
        lambda x, tokens, positions: x.roll(1, 1),
        "no sharding rule for aten.roll.default",
    ),
    "the first token": (lambda x, tokens, positions: x + x[:, :1], "cuts the token dim"),
    "pieces of twelve tokens": (
        lambda x, tokens, positions: torch.cat(x.split(12, 1), 1),
        "would hold for some batches only",
    ),
    "tokens joined": (lambda x, tokens, positions: torch.cat([x, x], 1)[:, : x.shape[1]], "cuts the token dim"),
    "a mean over tokens": (lambda x, tokens, positions: x - x.mean(1, keepdim=True), "takes a mean over tokens"),
    "a sum over tokens": (
        lambda x, tokens, positions: x - x.sum(1, keepdim=True),
        "documents would see each other: aten.sub.Tensor",
    ),
    "the greatest of the tokens": (
        lambda x, tokens, positions: x - x.amax(1, keepdim=True),
        "documents would see each other: aten.amax.default",
    ),
    "a product over tokens": (
        lambda x, tokens, positions: x @ (x.transpose(1, 2) @ x),
        "documents would see each other: aten.bmm.default",
    ),
    "attention by hand": (by_hand, "relates every token to every other"),
    "attention by hand, causal": (by_hand_with_a_causal_mask, "relates every token to every other"),
    "attention by hand, positions reset": (by_hand_with_positions_for_a_mask, "relates every token to every other"),
    "a mask": (
        attention(attn_mask=torch.zeros(24, 24)),
        "an explicit attn_mask is not supported; pass is_causal=True and no mask",
    ),
    "not causal": (attention(), "attention that is not causal is not supported; pass is_causal=True"),
    "dropout in attention": (attention(is_causal=True, dropout_p=0.1), "dropout_p=0.1 is not supported"),
    "dropout": (lambda x, tokens, positions: F.dropout(x, 0.1), "aten.native_dropout.default"),
}


@pytest.mark.case(24, 124)
@pytest.mark.parametrize("name", REFUSED_MODELS)
def test_models_that_are_refused(name: str) -> None:
    """By name, with the user's line, whatever pass finds out."""
    between, message = REFUSED_MODELS[name]
    with pytest.raises((CaptureError, RuleError)) as raised:
        normalized(capture(Word(between), language_loss))
    text = str(raised.value)
    assert message in text
    assert f"{__file__}:" in text


def cross_entropy(model: nn.Module, packed: Packed, **options: Any) -> Tensor:
    return F.cross_entropy(model(packed.tokens[None], packed.positions[None])[0], packed.labels, **options)


def shifted_inside(model: nn.Module, packed: Packed) -> Tensor:
    logits = model(packed.tokens[None], packed.positions[None])[0]
    return F.cross_entropy(logits[:-1], packed.tokens[1:], reduction="sum")


def with_decay(model: nn.Module, packed: Packed) -> Tensor:
    return language_loss(model, packed) + sum(parameter.square().sum() for parameter in model.parameters())


REFUSED_LOSSES: dict[str, tuple[Any, str]] = {
    "a mean over labels": (cross_entropy, "takes the mean over the labels of one micro-batch"),
    "a mean over tokens": (
        lambda model, packed: cross_entropy(model, packed, reduction="none").mean(),
        "computes with a size",
    ),
    "divided by the number of tokens": (
        lambda model, packed: language_loss(model, packed) / packed.tokens.shape[0],
        "computes with a size",
    ),
    "divided by the number of labels": (
        lambda model, packed: language_loss(model, packed) / (packed.labels >= 0).sum(),
        "the loss is not a sum over tokens: aten.div.Tensor",
    ),
    "a function of the sum": (
        lambda model, packed: language_loss(model, packed).exp(),
        "the loss is not a sum over tokens: aten.exp.default",
    ),
    "one more for every micro-batch": (
        lambda model, packed: language_loss(model, packed) + 1,
        "the loss is not a sum over tokens: aten.add.Tensor",
    ),
    "a penalty for every micro-batch": (with_decay, "the loss is not a sum over tokens: aten.add.Tensor"),
    "labels shifted inside": (shifted_inside, "labels are already shifted in packed.labels"),
    "weights per class": (
        lambda model, packed: cross_entropy(
            model, packed, weight=torch.ones(VOCABULARY, dtype=torch.float64), reduction="sum"
        ),
        "class weights are not supported",
    ),
}


@pytest.mark.case(1)
@pytest.mark.parametrize("name", REFUSED_LOSSES)
def test_losses_that_are_refused(name: str) -> None:
    loss, message = REFUSED_LOSSES[name]
    with pytest.raises(CaptureError) as raised:
        normalized(capture(Word(lambda x, tokens, positions: x), loss))
    assert message in str(raised.value)
    assert f"{__file__}:" in str(raised.value)


def test_losses_that_are_no_scalar() -> None:
    expected = "expected a scalar, the sum over labelled tokens; got "
    with pytest.raises(CaptureError, match=expected + r"a tensor of 1 dim\(s\)"):
        capture(small_llama(), lambda model, packed: cross_entropy(model, packed, reduction="none"))
    with pytest.raises(CaptureError, match=expected + "float"):
        capture(small_llama(), lambda model, packed: 3.0)  # type: ignore[arg-type, return-value]


def test_sums_of_sums_and_scalings_are_fine() -> None:
    def loss(model: nn.Module, packed: Packed) -> Tensor:
        logits = model(packed.tokens[None], packed.positions[None])[0]
        sharp = logits.square().sum()
        return 0.5 * F.cross_entropy(logits, packed.labels, reduction="sum") - sharp / 7 + 1e-3 * sharp

    model = Word(lambda x, tokens, positions: x)
    captured = normalized(capture(model, loss), exact=True)
    batches, sequences = random_batches([(5, 1), (9,)], VOCABULARY)
    outcome = run_scheme(captured, Scheme.uniform(2), model, batches)
    assert_equal_to_reference(outcome, model, loss, sequences)


def test_nothing_to_train() -> None:
    with pytest.raises(CaptureError, match="Identity has no parameters; there is nothing to train"):
        capture(nn.Identity(), lambda model, packed: packed.tokens.double().sum())
    with pytest.raises(CaptureError, match="the loss depends on no trained parameter of Llama"):
        capture(small_llama(), lambda model, packed: packed.tokens.double().sum())
    model = small_llama().requires_grad_(False)
    with pytest.raises(CaptureError, match="the loss depends on no trained parameter of Llama"):
        capture(model, language_loss)


def test_grouped_heads_need_the_option_that_torch_wants() -> None:
    def between(x: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        few = heads[:, :2]
        return F.scaled_dot_product_attention(heads, few, few, is_causal=True).transpose(1, 2).flatten(2)

    with pytest.raises(CaptureError, match="4 query heads over 2 key heads is not supported; pass enable_gqa=True"):
        capture(Word(between), language_loss)
