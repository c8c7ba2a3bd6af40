"""Programs as a script sees them: fields of a data set, weights read and written back, parameters nothing reaches."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgraph.data import Packed, global_batches, make_batch, pack
from hgraph.data.dataset import TokenDataset
from hgraph.errors import InvalidInput, PlanError
from hgraph.strategy import Scheme
from runtime.optimizer import AdamW
from runtime.program import Program
from runtime.reference import reference_step
from runtime.verifier import Verifier
from tests.models import gpt, language_loss, llama
from tests.small_pools import draw_batch, exact_program, pool, run_step, strategy

U = Scheme.uniform
POOL = pool(3, strategy("tp2, tp1", U(2), U()), strategy("pp2", U(1, 2)))


def weighted_loss(model: nn.Module, packed: Packed) -> Tensor:
    """A weight per token, and one bias per sequence."""
    logits = model(packed.tokens[None], packed.positions[None])[0]
    losses = F.cross_entropy(logits, packed.labels, reduction="none")
    return (losses * packed.fields["weight"]).sum() + model.norm.bias.sum() * packed.fields["bias"].sum()


EXAMPLE = {"weight": torch.ones(24, dtype=torch.float64), "bias": torch.ones(3, dtype=torch.float64)}


def drawn_fields(lengths: list[int]) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    return [{"weight": torch.rand(length), "bias": torch.tensor(float(length))} for length in lengths]


@pytest.fixture(scope="module")
def weighted() -> Program:
    return exact_program(gpt(), weighted_loss, POOL, fields=EXAMPLE)


@pytest.mark.parametrize(("name", "assignment"), [("tp2, tp1", (((0, 2),), ((1,),))), ("pp2", (((2,), (0, 1)),))])
def test_fields_come_from_the_data_set(weighted: Program, name: str, assignment) -> None:  # type: ignore[no-untyped-def]
    lengths = [5, 1, 9]
    rows, fields = [torch.arange(length) + length for length in lengths], drawn_fields(lengths)
    step = run_step(weighted, make_batch(rows, fields=fields), name, assignment)
    alone = [
        pack(
            [row],
            token_fields={"weight": [own["weight"].double()]},
            sequence_fields={"bias": [own["bias"].double()]},
        )
        for row, own in zip(rows, fields, strict=True)
    ]
    loss, gradients = reference_step(gpt(), weighted_loss, alone, sum(lengths) - 3)
    assert step.loss == pytest.approx(loss, rel=1e-12)
    for key, gradient in gradients.items():
        torch.testing.assert_close(step.gradients[key], gradient, rtol=1e-9, atol=1e-13)


def test_fields_per_token_are_cut_with_their_sequence(weighted: Program) -> None:
    lengths = [7, 4]
    fields = drawn_fields(lengths)
    dataset = TokenDataset([list(range(7)), list(range(4))], fields=fields)
    (batch,) = global_batches(dataset, sequences_per_step=9, epochs=1, shuffle=False, max_length=5, policy="split")
    pieces = [batch.fields(index, ["weight"]) for index in range(len(batch))]
    assert [len(piece["weight"]) for piece in pieces] == [5, 4, 2]
    assert torch.equal(torch.cat([piece["weight"] for piece in pieces[::2]]), fields[0]["weight"])
    assert [float(piece["bias"]) for piece in pieces] == [7.0, 4.0, 7.0]
    assert weighted.step(batch).tokens == 11


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (None, "field 'weight': expected, but its fields(i) gives nothing"),
        ([{"weight": torch.ones(2)}], "field 'bias': expected, but its fields(i) gives weight"),
        (
            [{"weight": torch.ones(3), "bias": torch.ones(())}],
            "field 'weight': expected shape [2] (per token), got [3]",
        ),
        (
            [{"weight": torch.ones(2), "bias": torch.ones(1)}],
            "field 'bias': expected shape [] (per sequence), got [1]",
        ),
        (
            [{"weight": torch.ones(2, dtype=torch.int64), "bias": torch.ones(())}],
            "field 'weight': expected torch.float64, as the example given to compile, got torch.int64",
        ),
    ],
)
def test_fields_that_are_wrong(weighted: Program, fields: list[dict[str, Tensor]] | None, text: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(f"data set, id 0: {text}")):
        weighted.step(make_batch([[1, 2]], fields=fields))
    with pytest.raises(InvalidInput, match=r"fields: expected one mapping for each of 1 sequences, got 2"):
        make_batch([[1, 2]], fields=[{}, {}])


# Weights


def test_weights_are_read_and_written_back() -> None:
    model = llama(layers=2, hidden=16, heads=4, kv_heads=2, ffn=11, vocab_size=19, tie_embeddings=True)
    before = copy.deepcopy(model.state_dict())
    program = exact_program(model, language_loss, POOL)
    assert program.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in program.state_dict().items())
    program.step(draw_batch(0, [5, 9], 19))
    trained = program.state_dict()
    assert not any(torch.equal(value, before[name]) for name, value in trained.items())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    program.update_model()
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    assert model.head.weight is model.embed.weight


def test_a_model_on_meta_gets_memory_and_weights() -> None:
    with torch.device("meta"):
        model = gpt()
    program = exact_program(model, language_loss, POOL, seed=3)
    program.step(draw_batch(0, [5, 9], 61))
    assert all(parameter.is_meta for parameter in model.parameters())
    program.update_model()
    weights = program.state_dict()
    assert {name for name, _ in model.named_parameters(remove_duplicate=False)} == weights.keys()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert torch.equal(parameter, weights[name]), name
    assert torch.isfinite(language_loss(model, pack([[1, 2, 3]])))


class Unreached(nn.Module):
    """A parameter that the loss never depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt()
        self.unused = nn.Linear(5, 3).double()

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.inner(tokens, positions)


def test_a_parameter_that_gets_no_gradient_does_not_decay() -> None:
    model = Unreached()
    start = copy.deepcopy(model.state_dict())
    verifier = Verifier(model, language_loss, POOL, optimizer=AdamW(lr=1e-2, weight_decay=0.5))
    for name in ("tp2, tp1", "pp2", "tp2, tp1"):
        verifier.step(draw_batch(1, [4, 6, 2], 61), name)
    weights = verifier.program.state_dict()
    for name in ("unused.weight", "unused.bias"):
        assert torch.equal(weights[name], start[name])
        assert torch.equal(dict(verifier.reference.named_parameters())[name], start[name])
    assert not torch.equal(weights["inner.norm.weight"], start["inner.norm.weight"])


def test_a_planner_that_breaks_is_an_answer_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    program = exact_program(gpt(), language_loss, POOL)
    monkeypatch.setattr(program.planning, "_here", lambda *_: 1 / 0)
    answer = program.planning._own_plan(make_batch([[1, 2]]), 4)
    assert isinstance(answer, PlanError)
    assert str(answer) == "plan of step 4: ZeroDivisionError: division by zero"
    with pytest.raises(PlanError, match="plan of step 1: ZeroDivisionError"):
        program.step([[1, 2]])
