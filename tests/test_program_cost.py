"""The work of compiled programs: against the closed form of a decoder, and counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
import sympy
import torch
from torch import Tensor, nn

from hgraph.analytic_cost import FEATURES, features, with_analytic
from hgraph.capture import Captured, capture
from hgraph.data import Packed
from hgraph.graph import TOKENS
from hgraph.memory_model import MemoryModel, ModelSizes
from hgraph.profile_file import ProfileFile, SchemeProfile
from hgraph.strategy import Scheme
from hgraph.topology_file import load_topology
from passes.pipelines import compile_scheme, normalized
from runtime.program_cost import scheme_stage_memory, stage_work, work_of_programs
from tests.models import language_loss, llama

U = Scheme.uniform
SIZES = {"layers": 2, "hidden": 24, "heads": 4, "kv_heads": 2, "ffn": 40, "vocab_size": 60}
MODEL = ModelSizes(layers=2, hidden=24, ffn_hidden=40, heads=4, kv_heads=2, vocab=60)
CLUSTER = load_topology("4-cpu")


@pytest.fixture(scope="module")
def captured() -> Captured:
    return normalized(capture(llama(**SIZES), language_loss))


@pytest.mark.parametrize("scheme", [U(2), U(1, 2)], ids=str)
def test_matrices_and_attention_are_those_of_the_closed_form(captured: Captured, scheme: Scheme) -> None:
    work = work_of_programs(lambda own: compile_scheme(captured, own), captured, 4, CLUSTER)
    counted, closed = (np.sum(own, axis=0) for own in (work.features(scheme), features(scheme, MODEL, CLUSTER)))
    for what in ("attention", "matrices"):
        index = FEATURES.index(what)
        assert counted[index] == pytest.approx(closed[index]), what
    exchange = FEATURES.index("exchange")
    assert (counted[exchange] > 0) == (closed[exchange] > 0)


def test_one_matrix_product_by_hand() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 3)
            self.head = nn.Linear(3, 7, bias=False)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens))

    def loss(model: nn.Module, packed: Packed) -> Tensor:
        return torch.nn.functional.cross_entropy(model(packed.tokens), packed.labels, reduction="sum")

    found = normalized(capture(Model(), loss))
    (stage,) = compile_scheme(found, U()).stages
    work = stage_work(stage)
    assert work.matrix_flops == 3 * 2 * 3 * 7 * TOKENS, "forward, and two products backward"
    assert work.attention_flops == 0 and work.launches > 3
    assert sympy.diff(work.moved_bytes, TOKENS) > 4 * 7


def test_what_is_filled_has_the_memory_of_its_programs(captured: Captured) -> None:
    work = work_of_programs(lambda own: compile_scheme(captured, own), captured, 4, CLUSTER)
    measured = {
        name: SchemeProfile(1e-9 * scale, 1e-5 * scale, 0.1, max_tokens=500)
        for name, scale in (("tp1", 2.0), ("tp2", 1.0))
    }
    profile = ProfileFile(measured, memory=MemoryModel(budget_mib=10))
    filled = with_analytic(profile, ["tp1.pp2"], CLUSTER, work=work)
    own = filled.schemes["tp1.pp2"]
    assert own.memory == scheme_stage_memory(compile_scheme(captured, U(1, 2)), captured, 4)
    assert own.origin == "analytic" and own.fit is not None
    assert 0 < own.cost(1).micro_batch_ms([100]) < measured["tp1"].cost(1).micro_batch_ms([100])
