"""Capture: what is traced, and that nothing of the traced batch is remembered or of the user's model changed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgraph.capture import Captured, LossFunction, capture
from hgraph.data.packed import Packed, pack
from hgraph.errors import CaptureError
from hgraph.graph import BOUNDARIES, TOKENS, annotated_text, info
from hgraph.strategy import Scheme
from passes.pipelines import compile_scheme, normalized
from passes.rules.table import RULES
from tests.models import (
    Word,
    gpt,
    hugging_face_gpt2,
    hugging_face_llama,
    hugging_face_loss,
    language_loss,
    llama,
    random_batches,
)
from tests.scheme_runs import assert_equal_to_reference, run_compiled, run_scheme

VOCABULARY, HIDDEN = 61, 24


def small_llama() -> nn.Module:
    return llama(layers=1, hidden=24, heads=4, kv_heads=2, ffn=20, vocab_size=VOCABULARY)


@functools.cache
def llama_capture() -> Captured:
    return capture(small_llama(), language_loss)


MODELS: dict[str, tuple[Callable[[], nn.Module], LossFunction, str, int]] = {
    "llama": (small_llama, language_loss, "layers", 1),
    "gpt": (gpt, language_loss, "blocks", 2),
    "hugging face llama": (hugging_face_llama, hugging_face_loss, "model.layers", 2),
    "hugging face gpt2": (hugging_face_gpt2, hugging_face_loss, "transformer.h", 2),
}


@pytest.mark.case(124)
@pytest.mark.parametrize("name", MODELS)
def test_models_as_strangers_write_them_are_traced(name: str) -> None:
    """They run as they do alone, and the user's model is as before."""
    make, loss, layers, num_layers = MODELS[name]
    model = make()
    before, values = state_of(model), copy.deepcopy(model.state_dict())
    captured = normalized(capture(model, loss), exact=True)
    assert state_of(model) == before
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
    assert (captured.layers, captured.num_layers) == (layers, num_layers)
    operators = {node.target for node in captured.graph.nodes if node.op == "call_function"}
    assert operators - set(RULES) == {getitem for getitem in operators if getattr(getitem, "__name__", "") == "getitem"}
    batches, sequences = random_batches([(5, 1, 9), (2, 2)], 50)
    outcome = run_scheme(captured, Scheme.uniform(1), model, batches)
    assert_equal_to_reference(outcome, model, loss, sequences)
    assert outcome.log == ()


def test_every_node_says_where_it_comes_from() -> None:
    captured = capture(gpt(layers=1), language_loss)
    nodes = {node.name: info(node) for node in captured.graph.nodes if node.op == "call_function"}
    facts = nodes["addmm"]
    assert (facts.module, facts.module_class, facts.phase) == ("blocks.0.query", "Linear", "forward")
    assert "/tests/models.py:" in facts.source
    assert all(facts.source for facts in nodes.values())
    backward = [facts for facts in nodes.values() if facts.phase == "backward" and facts.module == "blocks.0.query"]
    assert backward and {own.source for own in backward} == {facts.source}


def test_inputs_are_named_and_shapes_are_symbolic() -> None:
    captured = llama_capture()
    shapes = {info(node).name: info(node).shape for node in captured.graph.nodes if info(node).role == "input"}
    assert shapes == {"tokens": (TOKENS,), "positions": (TOKENS,), "labels": (TOKENS,), "cu_seqlens": (BOUNDARIES,)}
    assert captured.outputs[0] == "loss"
    assert set(captured.outputs[1:]) - {None} == {facts.name for facts in captured.parameters}


def test_capture_is_deterministic() -> None:
    assert annotated_text(capture(small_llama(), language_loss).graph) == annotated_text(llama_capture().graph)


def test_parameters_may_be_on_meta() -> None:
    captured = capture(small_llama().to("meta"), language_loss)
    assert annotated_text(captured.graph) == annotated_text(llama_capture().graph)


def test_tied_parameters_are_one_parameter_with_two_names() -> None:
    captured = capture(gpt(), language_loss)
    (tied,) = [facts for facts in captured.parameters if len(facts.names) > 1]
    assert tied.names == ("tokens.weight", "head.weight")
    assert tied.names[0] in captured.outputs and tied.names[1] in captured.outputs


def state_of(model: nn.Module) -> dict[str, Any]:
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return {
        "parameters": {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)},
        "buffers": {name: id(buffer) for name, buffer in model.named_buffers()},
        "gradients": [parameter.grad for parameter in model.parameters()],
        "hooks": hooks,
        "training": [module.training for module in model.modules()],
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "attention": getattr(getattr(model, "config", None), "_attn_implementation", None),
    }


def test_a_model_set_to_evaluate_stays_so() -> None:
    model = gpt(layers=1).eval()
    before = state_of(model)
    capture(model, language_loss)
    assert state_of(model) == before


def test_the_users_model_is_as_before_where_capture_fails() -> None:
    model = Word(lambda x, tokens, positions: x * tokens.sum().item() if tokens.sum() > 3 else x)
    before = state_of(model)
    with pytest.raises(CaptureError):
        capture(model, language_loss)
    assert state_of(model) == before
    assert torch.fx.traceback.current_meta.get("nn_module_stack") is None
    hugging_face = hugging_face_gpt2(attn_pdrop=0.1)
    before = state_of(hugging_face)
    with pytest.raises(CaptureError, match="attention dropout 0.1 is not supported"):
        capture(hugging_face, hugging_face_loss)
    assert state_of(hugging_face) == before


# What the graph remembers


@pytest.fixture(scope="module")
def compiled() -> tuple[nn.Module, Captured, Any]:
    model = small_llama()
    captured = normalized(llama_capture(), exact=True)
    return model, captured, compile_scheme(captured, Scheme.uniform(1))


@pytest.mark.case(120)
@pytest.mark.parametrize("lengths", [(4, 4), (2, 6), (8,), (1, 1, 6), (24,), (1,), (48, 61, 7)], ids=str)
def test_one_graph_serves_every_batch(compiled: Any, lengths: tuple[int, ...]) -> None:
    model, captured, programs = compiled
    batches, sequences = random_batches([lengths], VOCABULARY)
    outcome = run_compiled(programs, captured, model, batches)
    assert_equal_to_reference(outcome, model, language_loss, sequences)


@pytest.mark.case(121)
@pytest.mark.parametrize("num_labels", [8, 3, 1])
def test_the_number_of_labels_is_not_remembered(compiled: Any, num_labels: int) -> None:
    model, captured, programs = compiled
    tokens = torch.arange(10) * 5
    labels = torch.roll(tokens, -1).masked_fill(torch.arange(10) >= num_labels, -100)
    batch = pack([tokens], labels=[labels])
    outcome = run_compiled(programs, captured, model, [batch])
    assert_equal_to_reference(outcome, model, language_loss, [batch])


@pytest.mark.case(22)
def test_documents_and_padding_do_not_touch_each_other(compiled: Any) -> None:
    """Loss of a row is the sum of its documents', whatever stands beside them; pads count for nothing."""
    model, captured, programs = compiled
    rows = [
        torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)) for length in (5, 7)
    ]
    together = run_compiled(programs, captured, model, [pack(rows, multiple=16)], 1.0)
    alone = [run_compiled(programs, captured, model, [pack([row])], 1.0) for row in rows]
    assert together.loss == pytest.approx(sum(outcome.loss for outcome in alone), rel=1e-13)
    for name, gradient in together.gradients.items():
        expected = alone[0].gradients[name] + alone[1].gradients[name]
        torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-13)


# What a model may have


class Scaled(Word):
    """With a buffer, a frozen parameter, one that is never used, and an attribute that is a plain tensor."""

    def __init__(self) -> None:
        super().__init__(lambda x, tokens, positions: x)
        self.register_buffer("scale", torch.linspace(1, 2, HIDDEN, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.linspace(0, 1, HIDDEN, dtype=torch.float64), requires_grad=False)
        self.unused = nn.Linear(HIDDEN, 3).double()
        self.up = nn.Linear(HIDDEN, 10).double()
        self.down = nn.Linear(10, HIDDEN).double()
        self.register_buffer("inner_scale", torch.linspace(1, 2, 10, dtype=torch.float64), persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.frozen
        return self.head(x + self.down(F.silu(self.up(x)) * self.inner_scale))


def test_buffers_frozen_and_unused_parameters() -> None:
    model = Scaled()
    captured = normalized(capture(model, language_loss), exact=True)
    assert set(captured.buffers) == {"scale", "inner_scale"}
    assert {facts.name for facts in captured.parameters if not facts.requires_grad} == {"frozen"}
    batches, sequences = random_batches([(5, 1), (9,)], VOCABULARY)
    for tp in (1, 2, 3):
        outcome = run_scheme(captured, Scheme.uniform(tp), model, batches)
        assert_equal_to_reference(outcome, model, language_loss, sequences)
        assert not {"frozen", "unused.weight", "unused.bias"} & set(outcome.gradients)


def weighted_loss(model: nn.Module, packed: Packed) -> Tensor:
    logits = model(packed.tokens[None], packed.positions[None])[0]
    losses = F.cross_entropy(logits, packed.labels, reduction="none")
    return (losses * packed.fields["weight"]).sum()


def test_a_field_per_token() -> None:
    model = gpt(layers=1)
    example = {"weight": torch.ones(24, dtype=torch.float64)}
    captured = normalized(capture(model, weighted_loss, fields=example), exact=True)
    assert captured.extra_fields == ("weight",)
    rows = [torch.arange(7), torch.arange(4) + 20]
    weights = [torch.linspace(0, 1, len(row), dtype=torch.float64) for row in rows]
    batch = pack(rows, token_fields={"weight": weights})
    alone = [pack([row], token_fields={"weight": [weight]}) for row, weight in zip(rows, weights, strict=True)]
    for tp in (1, 2):
        outcome = run_scheme(captured, Scheme.uniform(tp), model, [batch], 3.5)
        assert_equal_to_reference(outcome, model, weighted_loss, alone, 3.5)


def test_fields_that_cannot_be() -> None:
    model = small_llama()
    with pytest.raises(CaptureError, match="'tokens' is a standard field of packed; choose another name"):
        capture(model, weighted_loss, fields={"tokens": torch.ones(24)})
    with pytest.raises(
        CaptureError, match=r"'weight' with 24 entries \(one per token\) or 3 \(one per sequence\), got shape \[10\]"
    ):
        capture(model, weighted_loss, fields={"weight": torch.ones(10)})


def test_a_field_per_sequence_is_symbolic_in_their_number() -> None:
    def loss(model: nn.Module, packed: Packed) -> Tensor:
        return language_loss(model, packed) + packed.fields["offset"].sum()

    captured = capture(
        Word(lambda x, tokens, positions: x), loss, fields={"offset": torch.ones(3, dtype=torch.float64)}
    )
    (shape,) = [info(node).shape for node in captured.graph.nodes if info(node).name == "offset"]
    assert shape == (BOUNDARIES - 1,)


@pytest.mark.parametrize("ignored", [-100, 0])
def test_a_label_of_the_vocabulary_may_be_ignored(ignored: int) -> None:
    def loss(model: nn.Module, packed: Packed) -> Tensor:
        logits = model(packed.tokens[None], packed.positions[None])[0]
        labels = packed.labels.masked_fill(packed.labels < 0, ignored)
        return F.cross_entropy(logits, labels, reduction="sum", ignore_index=ignored)

    model = gpt(layers=1, vocab_size=7)
    captured = normalized(capture(model, loss), exact=True)
    batches, sequences = random_batches([(9, 4)], 7)
    outcome = run_scheme(captured, Scheme.uniform(3), model, batches)
    assert_equal_to_reference(outcome, model, loss, sequences)
