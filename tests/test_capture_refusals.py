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
from hgraph.errors import CaptureError, InvalidInput, RuleError
from hgraph.strategy import Scheme
from passes.pipelines import compile_scheme, normalized
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
        "takes a mean over tokens",
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


class Memory(nn.Module):
    """Keys that are not tokens: every document would see the same ones, in the place of its own first tokens."""

    def __init__(self, keys: str) -> None:
        super().__init__()
        self.keys = keys
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.memory = nn.Parameter(torch.randn(1, 4, 16, HIDDEN // 4))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        query = x.unflatten(-1, (4, -1)).transpose(1, 2)
        key = {"memory": self.memory, "halves": x.reshape(1, -1, 4, HIDDEN // 8).transpose(1, 2)}[self.keys]
        query = query if self.keys == "memory" else key
        attended = F.scaled_dot_product_attention(query, key, key, is_causal=True)
        return self.head(attended.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("keys", ["memory", "halves"])
def test_attention_over_anything_but_tokens_is_refused(keys: str) -> None:
    with pytest.raises(CaptureError, match="that are not one per token"):
        normalized(capture(Memory(keys), language_loss))


@pytest.mark.case(24)
@pytest.mark.parametrize(
    "scramble",
    [
        lambda x: x.reshape(-1, 6).view(1, 4, -1, 6).transpose(1, 2).reshape(x.shape),
        lambda x: x.reshape(-1).view(HIDDEN, -1).t()[None],
    ],
)
def test_reshapes_that_mix_tokens_are_refused(scramble: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match="regroups tokens"):
        normalized(capture(Word(lambda x, tokens, positions: scramble(x)), language_loss))


def assert_trained_as_alone(model: nn.Module) -> None:
    batches, alone = random_batches([[5, 3], [9]], VOCABULARY)
    captured = normalized(capture(model, language_loss), exact=True)
    outcome = run_scheme(captured, Scheme.uniform(2), model, batches)
    assert_equal_to_reference(outcome, model, language_loss, alone)


@pytest.mark.parametrize(
    "keep",
    [
        lambda x: x.reshape(-1, 6).mul(2).reshape(x.shape),
        lambda x: x.reshape(-1, HIDDEN)[None],
        lambda x: x.unflatten(-1, (4, -1)).permute(2, 0, 1, 3).permute(1, 2, 0, 3).flatten(2),
    ],
)
def test_reshapes_that_keep_tokens_apart_are_traced(keep: Callable[[Tensor], Tensor]) -> None:
    model = Word(lambda x, tokens, positions: keep(x)).double()
    assert_trained_as_alone(model)


@pytest.mark.case(120)
@pytest.mark.parametrize(
    "extra",
    [
        lambda packed: packed.cu_seqlens.double().sum(),
        lambda packed: torch.ones_like(packed.cu_seqlens).double().sum(),
    ],
)
def test_a_loss_that_depends_on_the_packing_is_refused(extra: Callable[[Packed], Tensor]) -> None:
    with pytest.raises(CaptureError, match="computes with the borders of documents"):
        model = Word(lambda x, tokens, positions: x)
        normalized(capture(model, lambda model, packed: language_loss(model, packed) + extra(packed)))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, VOCABULARY)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.embed(tokens)


def test_a_buffer_that_the_forward_pass_changes_is_refused() -> None:
    with pytest.raises(CaptureError, match="the forward pass changes calls in place"):
        capture(Counting(), language_loss)


def test_a_buffer_on_meta_is_refused() -> None:
    with pytest.raises(CaptureError, match="buffer calls is on the meta device"):
        capture(Counting().to("meta"), language_loss)


@pytest.mark.case(124)
def test_a_hugging_face_model_that_is_not_causal_is_refused() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from hgraph.data.losses import causal_lm_loss

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=1, **sizes))
    model.model.layers[0].self_attn.is_causal = False
    with pytest.raises(CaptureError, match=r"module model.layers.0.self_attn .*not causal is not supported"):
        capture(model, causal_lm_loss())
    assert model.config._attn_implementation != "hydraulis_packed"


class Constant(nn.Module):
    """Numbers made in the forward pass, and parameter names that differ in punctuation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a_b, self.a = nn.Embedding(VOCABULARY, HIDDEN), nn.ModuleDict({"b": nn.Linear(HIDDEN, VOCABULARY)})

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return sum([self.a["b"](self.a_b(tokens)) * torch.tensor(0.5, dtype=torch.float64)])


def test_constants_and_look_alike_names_are_traced() -> None:
    model = Constant().double()
    assert_trained_as_alone(model)


class Repeated(nn.Module):
    """One layer registered, and run, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        layer = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList([layer, layer, layer])

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


def test_a_module_that_is_registered_twice_is_traced_and_left_alone() -> None:
    model = Repeated().double()
    before = dict(model.named_parameters())
    assert_trained_as_alone(model)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


class Reversed(nn.Module):
    """Layers that run from the last to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(2)])

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in reversed(self.layers):
            x = x + layer(x).tanh()
        return self.head(x)


def test_layers_out_of_order_are_refused_in_a_pipeline() -> None:
    captured = normalized(capture(Reversed(), language_loss))
    with pytest.raises(InvalidInput, match="layers that are used out of order or more than once"):
        compile_scheme(captured, Scheme.uniform(1, 2))
