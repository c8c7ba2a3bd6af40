"""Several strategies in one step: parameters and accumulated gradients go directly from layout to layout, exactly."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from hgraph.check_plan import check_sequenced_plan
from hgraph.data import GlobalBatch, Packed, token_loss
from hgraph.errors import InvalidInput, PlanError
from hgraph.plan import SequencedPlan, StepPlan
from hgraph.strategy import Pool, Scheme
from hgraph.topology import Link, uniform
from runtime.optimizer import AdamW
from runtime.program import Program
from runtime.rank_step import rank_step
from runtime.verifier import Verifier
from runtime.verify_batches import Trial, draw_trial, plan_of, random_assignment
from runtime.weights import gather
from tests.gloo_workers import GlooPool
from tests.models import language_loss, llama
from tests.small_pools import (
    Step,
    assert_close,
    draw_batch,
    exact_program,
    expected_step,
    overridden,
    pool,
    stages,
    strategy,
)

U = Scheme.uniform
POOL = pool(
    4,
    strategy("tp2,tp1x2", U(2), U(1), U(1)),
    strategy("tp2.pp2", U(2, 2)),
    strategy("tp3 ahead of tp1", stages((3, 1), (1, 1))),
    strategy("unequal subgroups", overridden(3, layers__1__mlp="0-1[S(2)] + 2[] @ S(1)")),
    strategy("one rank", U(1)),
)
NAMES = [one.name for one in POOL.strategies]
VOCABULARY = 31


def table_loss(model: nn.Module, packed: Packed) -> torch.Tensor:
    return token_loss(model(packed.tokens), packed)


def tied_llama() -> nn.Module:
    return llama(hidden=24, ffn=25, vocab_size=VOCABULARY, tie_embeddings=True)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tied_llama()


@pytest.fixture(scope="module")
def program(model: nn.Module) -> Program:
    return exact_program(model, language_loss, POOL)


def sequenced(program: Program, batch: GlobalBatch, names: Sequence[str], seed: int) -> SequencedPlan:
    """Deals the sequences out to the strategies at random (the first get one each), and to replicas likewise."""
    generator = random.Random(seed)
    order = list(range(len(batch)))
    generator.shuffle(order)
    positions: list[list[int]] = [[] for _ in names]
    for number, index in enumerate(order):
        positions[number if number < len(names) else generator.randrange(len(names))].append(index)
    return SequencedPlan(
        tuple(_part(program, batch, name, own, generator) for name, own in zip(names, positions, strict=True))
    )


def _part(
    program: Program, batch: GlobalBatch, name: str, positions: Sequence[int], generator: random.Random
) -> StepPlan:
    chosen = program.pool[name]
    assignment = random_assignment(chosen, len(positions), generator)
    lengths = [batch.lengths[index] for index in positions]
    return plan_of(assignment, chosen, program.profile, lengths, program.step_count).renumbered(positions)


def run_parts(program: Program, batch: GlobalBatch, plan: SequencedPlan) -> Step:
    """Runs a step that leaves weights as they are; returns loss and whole gradients."""
    facts = program.step_facts(batch, plan)
    generators = {
        rank: rank_step(state, facts, keep_gradients=True, update=False) for rank, state in program.ranks.items()
    }
    with torch.no_grad():
        outcomes = program.cluster.run(generators)
    outcome = next(iter(outcomes.values()))
    gradients = gather(program, {rank: own.gradients for rank, own in outcomes.items()})
    return Step(outcome.loss, outcome.grad_norm, gradients)


@pytest.mark.parametrize("names", list(itertools.product(NAMES, NAMES)), ids=" then ".join)
def test_two_strategies_in_a_step_give_the_gradients_of_one_device(
    program: Program, model: nn.Module, names: tuple[str, str]
) -> None:
    batch = draw_batch(len("".join(names)), [5, 9, 1, 14, 3, 22], VOCABULARY)
    plan = sequenced(program, batch, names, seed=sum(map(NAMES.index, names)))
    check_sequenced_plan(plan, program.pool, program.profile, batch.lengths)
    assert_close(run_parts(program, batch, plan), expected_step(model, language_loss, batch))


class WithHashes(nn.Module):
    """Names that any module may have."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 12)
        self.heads = nn.ModuleDict({"a#1": nn.Linear(12, VOCABULARY), "a": nn.Linear(12, VOCABULARY, bias=False)})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        return self.heads["a#1"](x) + self.heads["a"](x)


def test_a_hash_in_a_name_is_part_of_the_name() -> None:
    torch.manual_seed(0)
    model = WithHashes().double()
    own = exact_program(
        model, table_loss, pool(2, strategy("one", U(1)), strategy("two", U(2)), strategy("rows", U(1), U(1)))
    )
    batch = draw_batch(5, [8, 6, 3], VOCABULARY)
    plan = sequenced(own, batch, ["two", "rows", "one"], seed=1)
    assert_close(run_parts(own, batch, plan), expected_step(model, table_loss, batch))


def test_all_strategies_in_one_step_with_masked_sequences(program: Program, model: nn.Module) -> None:
    batch = draw_batch(3, [7, 2, 11, 4, 9, 1, 6], VOCABULARY, masked=(0, 4))
    plan = sequenced(program, batch, [*NAMES, NAMES[0]], seed=1)
    assert_close(run_parts(program, batch, plan), expected_step(model, language_loss, batch))


def test_what_has_accumulated_is_not_lost_where_a_strategy_gets_no_sequence_of_a_replica(
    program: Program, model: nn.Module
) -> None:
    batch = draw_batch(5, [8, 6], VOCABULARY)
    first, second = "tp2,tp1x2", "tp2.pp2"
    parts = [
        plan_of((((0,),), (), ()), POOL[first], program.profile, [8], 0).renumbered([1]),
        plan_of((((0,),),), POOL[second], program.profile, [6], 0).renumbered([0]),
    ]
    with pytest.raises(PlanError, match="replica 0"):
        check_sequenced_plan(SequencedPlan(tuple(parts)), POOL, program.profile, [8, 6])
    parts[0] = plan_of((((0,),), (), ()), POOL[first], program.profile, [6], 0).renumbered([1])
    parts[1] = plan_of((((0,),),), POOL[second], program.profile, [8], 0).renumbered([0])
    assert_close(run_parts(program, batch, SequencedPlan(tuple(parts))), expected_step(model, language_loss, batch))


class TestApi:
    def test_a_step_in_parts(self, model: nn.Module) -> None:
        own = exact_program(tied_llama(), language_loss, POOL)
        other = exact_program(tied_llama(), language_loss, POOL)
        batch = draw_batch(1, [6, 3, 12, 5], VOCABULARY)
        out = own.step(batch, parts=[("tp2.pp2", [2]), ("tp2,tp1x2", [0, 1, 3])])
        same = other.step(batch)
        assert out.strategy == "tp2.pp2, then tp2,tp1x2"
        assert abs(out.loss - same.loss) <= 1e-12 and abs(out.grad_norm - same.grad_norm) <= 1e-12
        assert out.plan.replicas[0].micro_batches == ((2,),)
        switch = own.ranks[0].switches["tp2.pp2", "tp2,tp1x2"]
        into = own.ranks[0].executables["tp2.pp2"].bridges.parameters.total_bytes
        home = own.ranks[0].executables["tp2,tp1x2"].bridges.gradients.total_bytes
        assert out.bridge_bytes == into + switch.total_bytes + home
        log = [message for rank in range(4) for message in own.cluster.log_of(rank) if message.kind == "send"]
        moved = sum(m.num_bytes for m in log if m.label.startswith(("bridge", "switch")))
        assert moved == out.bridge_bytes

    @pytest.mark.parametrize(
        ("parts", "message"),
        [
            ([("tp9", [0, 1])], "strategy 'tp9' is not in the pool; there are tp2,tp1x2, tp2.pp2"),
            ([("tp2.pp2", [0])], "each of the 2 sequences of the batch in one part; not so: 1"),
            ([("tp2.pp2", [0, 1]), ("one rank", [1])], "in one part; not so: 1"),
            ([("tp2.pp2", [0, 1, 2])], "not so: 2"),
            ({"tp2.pp2": [0, 1]}, "expected pairs of a strategy's name and positions in the batch"),
            ([("tp2.pp2", [0.0, 1])], "expected pairs of a strategy's name and positions in the batch"),
            ([("tp2.pp2", [0, 1]), ("one rank", [])], "the part of one rank has no sequence; leave it out"),
        ],
    )
    def test_parts_that_do_not_fit(self, program: Program, parts: list[tuple[str, list[int]]], message: str) -> None:
        before = program.step_count
        with pytest.raises(InvalidInput, match=message):
            program.step(draw_batch(1, [6, 3], VOCABULARY), parts=parts)
        assert program.step_count == before


def wide_pool() -> Pool:
    """Strategies on sixteen ranks: replicas of one to eight ranks, pipelines, idle ranks."""
    return pool(
        16,
        strategy("tp4x4", *[U(4)] * 4),
        strategy("tp8.pp2", U(8, 2)),
        strategy("tp4.pp2,tp2x4", U(4, 2), *[U(2)] * 4),
        strategy("tp8,tp2.pp2,tp1x4", U(8), U(2, 2), *[U(1)] * 4),
        strategy("tp1x16", *[U(1)] * 16),
        strategy("tp3 ahead of tp1, tp2x5", stages((3, 1), (1, 1)), *[U(2)] * 5),
    )


@pytest.mark.long
def test_a_random_walk_of_fifty_switches_on_sixteen_ranks() -> None:
    walk(wide_pool(), num_steps=50, seed=11)


def test_a_short_random_walk() -> None:
    walk(POOL, num_steps=6, seed=2)


def walk(chosen: Pool, num_steps: int, seed: int) -> None:
    """Trains under another strategy every step, a third of the steps in parts; compares all state with one device's."""
    small = llama(hidden=32, heads=8, kv_heads=8, ffn=25, vocab_size=VOCABULARY)
    topology = uniform("two nodes", 2, chosen.num_ranks // 2, Link(100, 1), Link(10, 5))
    optimizer = AdamW(lr=1e-2, warmup_steps=3, total_steps=num_steps, max_grad_norm=0.5)
    verifier = Verifier(small, language_loss, chosen, optimizer=optimizer, topology=topology, bucket_mb=0.004)
    generator = random.Random(seed)
    names = [one.name for one in chosen.strategies]
    name = names[0]
    for step in range(num_steps):
        name = generator.choice([other for other in names if other != name])
        trial: Trial = draw_trial("random dispatch", chosen[name], VOCABULARY, generator)
        if step % 3 == 2 and len(trial.batch) > 2:
            order = [name, *generator.sample([other for other in names if other != name], 2)]
            plan = sequenced(verifier.program, trial.batch, order, seed=step)
            comparison = verifier.run_plan(trial, plan)
            name = order[-1]
        else:
            comparison = verifier.run(trial, name)
        assert comparison.worst.error <= 1e-10, (step, comparison)
    compare_moments(verifier, num_steps)


def compare_moments(verifier: Verifier, num_steps: int) -> None:
    """Raises where a moment differs by more than 1e-10 of its greatest value, or the number of steps does."""
    program, reference = verifier.program, verifier.reference
    states = {rank: state.optimizer.state_dict() for rank, state in program.ranks.items()}
    assert {state["step"] for state in states.values()} == {num_steps}
    for kind in ("exp_avg", "exp_avg_sq"):
        whole = gather(program, {rank: state[kind] for rank, state in states.items()})
        for name, parameter in reference.named_parameters():
            expected = verifier.reference_state[parameter][kind]
            difference = (whole[name] - expected).abs().max().item()
            assert difference <= 1e-10 * expected.abs().max().item(), f"{kind} {name}: {difference}"


def step_in_parts() -> tuple[str, float, float, str, int]:
    """Parts that differ between ranks, which must be refused; then one step in parts, and one more.

    Returns the error's text (none where one process has all ranks), what both steps gave, and the bytes moved.
    """
    torch.set_num_threads(1)
    program = exact_program(tied_llama(), language_loss, POOL, bucket_mb=0.01)
    text = ""
    if len(program.ranks) == 1:
        first = 0 if 1 in program.ranks else 2
        others = [index for index in range(4) if index != first]
        with pytest.raises(InvalidInput) as caught:
            program.step(draw_batch(1, [6, 6, 6, 6], VOCABULARY), parts=[("tp2.pp2", [first]), ("one rank", others)])
        text = str(caught.value)
    batch = draw_batch(1, [6, 3, 12, 5], VOCABULARY)
    out = program.step(batch, parts=[("tp2.pp2", [2]), ("tp2,tp1x2", [0, 1]), ("one rank", [3])])
    again = program.step(draw_batch(2, [6, 3, 12, 5], VOCABULARY))
    return text, out.loss, again.grad_norm, out.strategy, out.bridge_bytes


@pytest.mark.gloo
def test_real_processes_give_what_the_virtual_cluster_gives_and_refuse_parts_that_differ(gloo: GlooPool) -> None:
    virtual = step_in_parts()
    answers = gloo.run(step_in_parts, timeout_s=280.0)
    assert len(set(answers)) == 1 and answers[0][1:] == virtual[1:]
    assert "expected the same parts on every rank" in answers[0][0] and "on rank 1" in answers[0][0]
