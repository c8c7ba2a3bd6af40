"""What ids look up, read off the captured graph, and batches whose ids are in no table."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgraph.data import Packed, make_batch
from hgraph.errors import InvalidInput
from hgraph.strategy import Scheme
from runtime.lookups import longest_sequence, lookups_of, vocabulary
from runtime.program import Program
from tests.captures import shared_capture, shared_normalized
from tests.models import gpt, language_loss, llama
from tests.small_pools import exact_program, pool, run_step, snapshot, strategy

U = Scheme.uniform
TWO = pool(2, strategy("tp2", U(2)), strategy("two", U(), U()))
EXAMPLE = {"kind": torch.zeros(24, dtype=torch.int64), "source": torch.zeros(3, 2, dtype=torch.int32)}


class Tables(nn.Module):
    """Tables of several sizes over several fields: 9 ids with 7 classes, 5 kinds per token, 4 sources per sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(9, 4)
        self.positions = nn.Embedding(8, 4)
        self.kinds = nn.Embedding(5, 4)
        self.sources = nn.Embedding(4, 4)
        self.head = nn.Linear(4, 7)
        self.double()

    def forward(self, packed: Packed) -> Tensor:
        x = self.tokens(packed.tokens[None]) + self.positions(packed.positions[None] + 2)
        return self.head(x + self.kinds(packed.fields["kind"].to(torch.int32).long())[None])[0]


def tables_loss(model: nn.Module, packed: Packed) -> Tensor:
    loss = F.cross_entropy(model(packed), packed.labels, reduction="sum")
    return loss + model.sources(packed.fields["source"]).sum()


@pytest.fixture(scope="module")
def program() -> Program:
    return exact_program(Tables(), tables_loss, TWO, fields=EXAMPLE)


def batch(tokens: list[int], labels: list[int] | None = None, kind: int = 0, source: int = 0):  # type: ignore[no-untyped-def]
    fields = [
        {"kind": torch.zeros(len(row), dtype=torch.int64), "source": torch.zeros(2, dtype=torch.int32)}
        for row in ([0, 1], tokens)
    ]
    fields[1]["kind"][-1] = kind
    fields[1]["source"][1] = source
    return make_batch([[0, 1], tokens], [None, labels], fields=fields)


def test_every_table_is_found_with_the_field_of_its_ids(program: Program) -> None:
    found = {(lookup.field, lookup.size, lookup.offset, lookup.ignored) for lookup in program.contents.lookups}
    assert found == {
        ("tokens", 9, 0, None),
        ("positions", 8, 2, None),
        ("kind", 5, 0, None),
        ("source", 4, 0, None),
        ("labels", 7, 0, -100),
    }
    assert program.vocab_size == 7
    assert program.longest_sequence == 6


def test_labels_that_nothing_looks_up_are_of_the_vocabulary() -> None:
    def loss(model: nn.Module, packed: Packed) -> Tensor:
        return (model(packed.tokens[None], packed.positions[None])[0, :, 0] * (packed.labels != -100)).sum()

    lookups = lookups_of(shared_normalized(shared_capture(gpt(layers=1), loss)))
    assert [lookup.size for lookup in lookups if lookup.field == "labels"] == [61]
    assert (vocabulary(lookups), longest_sequence(lookups)) == (61, 128)
    assert (
        longest_sequence(lookups_of(shared_normalized(shared_capture(llama(layers=1, vocab_size=31), language_loss))))
        is None
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tokens": [1, 9]}, "tokens: id 9 at position 1 is outside the vocabulary of 9 entries (ids 0 to 8)"),
        (
            {"tokens": [1, 2], "labels": [7, -100]},
            "labels: id 7 at position 0 is outside the vocabulary of 7 entries (ids 0 to 6)",
        ),
        (
            {"tokens": [1, 2, 3], "kind": 5},
            "field 'kind': id 5 at position 2 is outside the table of 5 entries (ids 0 to 4) of aten.embedding",
        ),
        (
            {"tokens": [1, 2], "source": -1},
            "field 'source': id -1 at position 0 is outside the table of 4 entries (ids 0 to 3) of aten.embedding",
        ),
        (
            {"tokens": [1] * 7},
            "positions: id 6 at position 6 is outside the table of 8 entries (ids -2 to 5) of aten.embedding",
        ),
    ],
)
@pytest.mark.parametrize(("name", "assignment"), [("tp2", (((0, 1),),)), ("two", (((0,),), ((1,),)))])
def test_an_id_in_no_table_is_refused(program: Program, arguments, text: str, name: str, assignment) -> None:  # type: ignore[no-untyped-def]
    before = snapshot(program)
    with pytest.raises(InvalidInput, match=re.escape(f"step 0: sequence with id 1: {text}")):
        run_step(program, batch(**arguments), name, assignment)
    after = snapshot(program)
    assert all(after[rank]["step"] == state["step"] == 0 for rank, state in before.items())


def test_the_greatest_ids_are_in_their_tables(program: Program) -> None:
    greatest = batch([8] * 6, [6] * 5 + [-100], kind=4, source=3)
    losses = [
        run_step(program, greatest, "tp2", (((0, 1),),)).loss,
        run_step(program, greatest, "two", ((), ((0, 1),))).loss,
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_a_label_that_the_loss_does_not_ignore_is_refused() -> None:
    def loss(model: nn.Module, packed: Packed) -> Tensor:
        logits = model(packed.tokens[None], packed.positions[None])[0]
        return F.cross_entropy(logits, packed.labels, reduction="sum", ignore_index=0)

    program = exact_program(gpt(layers=1), loss, TWO)
    with pytest.raises(InvalidInput, match=re.escape("labels: id -100 at position 1 is outside the vocabulary of 61")):
        run_step(program, make_batch([[3, 4]]), "tp2", (((0,),),))


def test_a_sequence_longer_than_the_table_of_positions_is_refused_before_it_is_planned(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(program.planning), "plan", lambda *_: pytest.fail("planned"))
    text = (
        "sequence with id 1: 7 tokens, but positions look up a table of 8 entries (aten.embedding.default [embedding_1]"
    )
    with pytest.raises(InvalidInput, match=re.escape(text)) as failed:
        program.step(batch([1] * 7))
    assert failed.match(re.escape("expected at most 6 tokens. Cut long sequences (policy 'cut')"))
    assert program.strategies_for(7) == [] != program.strategies_for(6)
