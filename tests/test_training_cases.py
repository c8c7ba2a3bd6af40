"""Faults of neighbouring systems in how losses and gradients are put together, each as a small input with its value.

Where the numbers can be worked out by hand the model is a table: a token's loss is the table's entry for it, so the
gradient of an entry is how much its tokens weigh. Elsewhere a small Llama is compared with the untouched module.
"""

from __future__ import annotations

import math
import random
import time

import pytest
import torch
from torch import Tensor, nn

from hgraph.data import IGNORED_LABEL, GlobalBatch, Packed, global_batches, make_batch, num_targets, pack
from hgraph.data.dataset import TokenDataset
from hgraph.profile import Profile, SchemeCost
from hgraph.strategy import Scheme
from runtime.program import Program
from runtime.verify_batches import Assignment, random_assignment
from strategies.options import PlannerOptions
from strategies.select import plan_step
from tests.models import language_loss, llama
from tests.small_pools import (
    assert_close,
    draw_batch,
    exact_program,
    expected_step,
    overridden,
    pool,
    restore,
    run_step,
    snapshot,
    strategy,
    train_step,
)
from tests.table import Table, table_loss

U = Scheme.uniform
NONE = IGNORED_LABEL
VOCABULARY = 19


@pytest.fixture(scope="module")
def table() -> Program:
    """Tokens 0 to 3 cost 1, 3, 90 and 2."""
    both = pool(4, strategy("two", U(), U()), strategy("four", U(), U(), U(), U()), strategy("tp2", U(2)))
    return exact_program(Table(1.0, 3.0, 90.0, 2.0), table_loss, both)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return llama(hidden=16, heads=4, kv_heads=2, ffn=11, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def program(model: nn.Module) -> Program:
    """Two layers; strategies of 1 to 5 replicas."""
    strategies = [strategy(f"tp1 x{count}", *[U()] * count) for count in range(1, 6)]
    strategies += [strategy("pp2", U(1, 2)), strategy("het", U(2), U(1, 2), U()), strategy("tp2", U(2))]
    strategies += [strategy("tokens over ranks", overridden(2, layers__0="0-1[S(1)]"))]
    return exact_program(model, language_loss, pool(5, *strategies))


def alone(*indices: int) -> tuple[tuple[int, ...], ...]:
    """One micro-batch for each sequence."""
    return tuple((index,) for index in indices)


@pytest.mark.case(1)
@pytest.mark.parametrize("assignment", [(((0,),), ((1,),)), (((1,),), ((0,),)), ((), ((1, 0),)), (alone(0, 1), ())])
def test_every_labelled_token_weighs_the_same_on_a_nearly_empty_rank(
    program: Program, model: nn.Module, assignment: Assignment
) -> None:
    batch = draw_batch(0, [2, 10], VOCABULARY)
    assert batch.num_targets == 10
    assert_close(run_step(program, batch, "tp1 x2", assignment), expected_step(model, language_loss, batch))


@pytest.mark.case(3)
@pytest.mark.parametrize(
    ("name", "assignment"), [("two", (((0,),), ((1,),))), ("two", (((1, 0),), ())), ("tp2", (alone(0, 1),))]
)
def test_the_loss_is_a_sum_over_a_count_not_a_mean_of_means(table: Program, name: str, assignment: Assignment) -> None:
    """(Sum 1, 1 token) and (sum 9, 3 tokens) are 10 / 4; means of means give 2.0."""
    step = run_step(table, make_batch([[0], [1, 1, 1]], [[0], [0, 0, 0]]), name, assignment)
    assert step.loss == 2.5
    assert step.gradients["values.weight"].flatten().tolist() == [0.25, 0.75, 0.0, 0.0]


@pytest.mark.case(4)
def test_one_two_four_and_eight_micro_batches_are_one_batch(program: Program, model: nn.Module) -> None:
    batch = draw_batch(1, [3, 50, 7, 7, 1, 20, 2, 33], VOCABULARY)
    expected = expected_step(model, language_loss, batch)
    for count in (1, 2, 4, 8):
        cuts = tuple(tuple(range(begin, begin + 8 // count)) for begin in range(0, 8, 8 // count))
        assert len(cuts) == count
        assert_close(run_step(program, batch, "tp1 x1", (cuts,)), expected)


@pytest.mark.case(5)
def test_a_lone_labelled_token_weighs_a_fifth(table: Program) -> None:
    batch = make_batch([[0, 0, 0, 0], [1, 1, 1, 1]], [[3, NONE, NONE, NONE], [3, 3, 3, 3]])
    step = run_step(table, batch, "two", (((0,),), ((1,),)))
    assert step.gradients["values.weight"].flatten().tolist() == [0.2, 0.8, 0.0, 0.0]


@pytest.mark.case(6)
def test_a_wholly_masked_sample_adds_nothing_to_the_denominator(table: Program) -> None:
    batch = make_batch([[0, 0, 1, 1], [2]], [[3, 3, 3, 3], [NONE]])
    step = run_step(table, batch, "two", (((0,),), ((1,),)))
    assert step.gradients["values.weight"].flatten().tolist() == [0.5, 0.5, 0.0, 0.0]


@pytest.mark.case(9)
@pytest.mark.parametrize("name", ["tp1 x2", "het"])
def test_a_batch_without_any_label_changes_nothing(program: Program, name: str) -> None:
    before = snapshot(program)
    batch = draw_batch(2, [4, 7, 3], VOCABULARY, masked=(0, 1, 2))
    assignment = random_assignment(program.pool[name], 3, random.Random(0))
    step = run_step(program, batch, name, assignment)
    assert (step.loss, step.grad_norm) == (0.0, 0.0)
    assert all(not gradient.any() for gradient in step.gradients.values())
    assert train_step(program, batch, name, assignment) == 0.0
    out = program.step(batch)
    assert (out.loss, out.grad_norm, out.labelled_tokens, out.tokens) == (0.0, 0.0, 0, 14)
    after = snapshot(program)
    for rank, state in before.items():
        assert after[rank]["step"] == state["step"]
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            assert all(torch.equal(after[rank][kind][key], value) for key, value in state[kind].items())


@pytest.mark.case(11)
def test_a_micro_batch_without_labels_counts_for_nothing(program: Program, model: nn.Module) -> None:
    four = draw_batch(3, [5, 6, 4, 8], VOCABULARY, masked=(2,))
    step = run_step(program, four, "tp1 x1", (alone(0, 1, 2, 3),))
    tokens = [four.sequence(index)[0] for index in (0, 1, 3)]
    three = run_step(program, make_batch(tokens), "tp1 x1", (alone(0, 1, 2),))
    assert_close(step, three)
    assert_close(step, expected_step(model, language_loss, four))


@pytest.mark.case(13)
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_pipeline_sums_over_any_number_of_accumulation_rounds(
    program: Program, model: nn.Module, rounds: int
) -> None:
    batch = draw_batch(4, [5, 3, 9, 2, 7, 4][: 2 * rounds], VOCABULARY)
    step = run_step(program, batch, "pp2", (alone(*range(2 * rounds)),))
    assert_close(step, expected_step(model, language_loss, batch))


@pytest.mark.case(15)
def test_the_loss_lies_between_the_mean_losses_of_the_replicas(program: Program) -> None:
    batch = draw_batch(5, [3, 17], VOCABULARY)
    rows = [batch.sequence(index)[0] for index in (0, 1)]
    means = [run_step(program, make_batch([row]), "tp1 x2", (alone(0), ())).loss for row in rows]
    both = run_step(program, batch, "tp1 x2", (alone(0), alone(1))).loss
    assert min(means) < both < max(means)
    assert both == pytest.approx((2 * means[0] + 16 * means[1]) / 18, rel=1e-12)


@pytest.mark.case(16)
def test_filler_sequences_change_nothing(program: Program) -> None:
    three = draw_batch(6, [5, 9, 4], VOCABULARY)
    rows = [three.sequence(index)[0].tolist() for index in range(3)]
    four = make_batch([*rows, [1, 2, 3]], [None, None, None, [NONE] * 3])
    plain = run_step(program, three, "tp1 x2", (alone(0, 1), alone(2)))
    assert_close(run_step(program, four, "tp1 x2", (alone(0, 1), alone(2, 3))), plain)


@pytest.mark.case(20)
def test_twenty_steps_are_the_same_packed_dispatched_and_alone(program: Program) -> None:
    """Rounding grows along a trajectory: 1e-9 after twenty AdamW steps."""
    start = snapshot(program)
    generator = random.Random(0)
    batches = [draw_batch(seed, [generator.randint(1, 12) for _ in range(4)], VOCABULARY) for seed in range(20)]
    curves = {}
    for way in ("alone", "packed", "dispatched"):
        restore(program, start)
        name = {"alone": "tp1 x1", "packed": "tp1 x1", "dispatched": "het"}[way]
        fixed = {"alone": (alone(0, 1, 2, 3),), "packed": ((tuple(range(4)),),)}
        curves[way] = [
            train_step(program, batch, name, fixed.get(way) or random_assignment(program.pool[name], 4, generator))
            for batch in batches
        ]
    restore(program, start)
    for way in ("packed", "dispatched"):
        assert curves[way] == pytest.approx(curves["alone"], rel=1e-9)
    assert curves["alone"][-1] != curves["alone"][0]


@pytest.mark.case(21, 53)
@pytest.mark.parametrize(("lengths", "replicas"), [([9], 4), ([9], 3), ([5, 2], 3)])
def test_fewer_sequences_than_replicas(program: Program, model: nn.Module, lengths: list[int], replicas: int) -> None:
    start, name = snapshot(program), f"tp1 x{replicas}"
    batch = draw_batch(7, lengths, VOCABULARY)
    expected = expected_step(model, language_loss, batch)
    plan = _planned(program, batch, name)
    assert sum(1 for replica in plan if replica) <= len(lengths) < replicas
    assert_close(run_step(program, batch, name, plan), expected)
    restore(program, start)


def _planned(program: Program, batch: GlobalBatch, name: str) -> Assignment:
    plan = plan_step(program.pool, program.profile, batch.lengths, options=PlannerOptions(only=name))
    return tuple(replica.micro_batches for replica in plan.replicas)


@pytest.mark.case(41)
def test_labels_are_shifted_before_tokens_are_cut_over_ranks(program: Program, model: nn.Module) -> None:
    row = pack([list(range(1, 9))])
    assert num_targets(row) == 7
    assert row.labels[3] == 5
    batch = make_batch([list(range(1, 9))])
    step = run_step(program, batch, "tokens over ranks", (alone(0),))
    assert_close(step, expected_step(model, language_loss, batch))


@pytest.mark.case(43)
def test_overfitting_packed_and_alone_gives_one_curve(program: Program) -> None:
    """Rounding grows along a trajectory: 1e-7 after fifty AdamW steps."""
    start = snapshot(program)
    batch = draw_batch(8, [7, 3, 10], VOCABULARY)
    curves = []
    for assignment in ((alone(0, 1, 2),), (((0, 1, 2),),)):
        restore(program, start)
        curves.append([train_step(program, batch, "tp1 x1", assignment) for _ in range(50)])
    restore(program, start)
    assert curves[1] == pytest.approx(curves[0], rel=1e-7)
    assert curves[0][-1] < curves[0][0] - 0.1


@pytest.mark.case(69)
def test_replicas_with_different_numbers_of_micro_batches_end_together(model: nn.Module) -> None:
    two = pool(2, strategy("two", U(), U()))
    profile = Profile({"tp1": SchemeCost(a=0.0, b=1.0, c=1.0, max_tokens=100)}, {})
    program = exact_program(model, language_loss, two, profile=profile)
    batch = draw_batch(9, [95] * 5 + [100], VOCABULARY)
    start_s = time.monotonic()
    run_step(program, batch, "two", (alone(0, 1, 2, 3, 4), alone(5)))
    assert program.step(batch).replicas_used == 2
    assert time.monotonic() - start_s < 30.0


@pytest.mark.case(71)
def test_a_replica_without_labels_communicates_as_the_others_expect(program: Program) -> None:
    start, messages = snapshot(program), []
    for masked in ((), (1,)):
        batch = draw_batch(10, [6, 6], VOCABULARY, masked=masked)
        train_step(program, batch, "het", (alone(0), alone(1), ()))
        messages.append([program.cluster.log_of(rank) for rank in program.ranks])
    restore(program, start)
    assert messages[0] == messages[1]


@pytest.mark.case(73)
def test_the_border_of_an_epoch_is_no_empty_batch(program: Program) -> None:
    dataset = TokenDataset([[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11, 12]])
    start = snapshot(program)
    steps = [program.step(batch) for batch in global_batches(dataset, sequences_per_step=2, epochs=2)]
    restore(program, start)
    assert len(steps) == 4
    assert sum(step.tokens for step in steps) == 2 * 12
    assert all(math.isfinite(step.loss) for step in steps)


@pytest.mark.case(74)
def test_twenty_four_sequences_over_five_ranks_weigh_once_each(program: Program, model: nn.Module) -> None:
    batch = draw_batch(11, [3 + index % 4 for index in range(24)], VOCABULARY)
    assignment = tuple((tuple(range(rank, 24, 5)),) for rank in range(5))
    assert_close(run_step(program, batch, "tp1 x5", assignment), expected_step(model, language_loss, batch))


@pytest.mark.case(75)
def test_a_change_of_strategy_compiles_nothing(model: nn.Module) -> None:
    """Short limits force the change; over real processes: `tests/test_message_logs.py`."""
    both = pool(2, strategy("two", U(), U()), strategy("one", U(2)))
    costs = {"tp1": SchemeCost(0.0, 1.0, 0.0, 16), "tp2": SchemeCost(0.0, 1.5, 0.0, 64)}
    program = exact_program(model, language_loss, both, profile=Profile(costs, {}))
    steps = [program.step(draw_batch(step, lengths, VOCABULARY)) for step, lengths in enumerate([[9, 9], [40], [8, 7]])]
    assert [step.strategy for step in steps] == ["two", "one", "two"]
    assert len({step.compiled_graphs for step in steps}) == 1
    assert steps[0].compiled_graphs == program.compiled_graphs


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(5, dtype=torch.float64))


@pytest.mark.case(89)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_mean_over_an_unevenly_cut_dim_is_a_sum_over_the_global_count(ranks: int) -> None:
    def loss(model: nn.Module, packed: Packed) -> Tensor:
        return model.weight.mean(0) * (packed.labels != IGNORED_LABEL).sum()

    cut = overridden(ranks, weight=f"0-{ranks - 1}[S(0)]")
    step = run_step(
        exact_program(Mean(), loss, pool(ranks, strategy("cut", cut))), draw_batch(0, [3], 5), "cut", (alone(0),)
    )
    assert step.loss == 2.0
    assert step.gradients["weight"].tolist() == [0.2] * 5


class Ones(nn.Module):
    """A parameter that is cut over ranks and one that all hold."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Parameter(torch.zeros(6, 4, dtype=torch.float64))
        self.whole = nn.Parameter(torch.zeros(5, dtype=torch.float64))


@pytest.mark.case(108)
def test_the_global_norm_counts_every_element_once() -> None:
    def loss(model: nn.Module, packed: Packed) -> Tensor:
        return (model.cut.sum() + model.whole.sum()) * (packed.labels != IGNORED_LABEL).sum()

    tp2 = overridden(2, cut="0-1[S(0)]")
    program = exact_program(Ones(), loss, pool(3, strategy("tp2", tp2), strategy("unequal", tp2, U())))
    batch = draw_batch(0, [3, 4, 2], 7)
    for name, assignment in (("tp2", (alone(0, 1, 2),)), ("unequal", (alone(0), ((1, 2),)))):
        step = run_step(program, batch, name, assignment)
        assert all(torch.allclose(own, torch.ones_like(own), rtol=1e-14) for own in step.gradients.values())
        assert step.grad_norm == pytest.approx(math.sqrt(6 * 4 + 5), rel=1e-14)


@pytest.mark.case(114)
def test_a_hot_switch_moves_moments_and_step_count(program: Program) -> None:
    start = snapshot(program)
    batches = [draw_batch(seed, [6, 3, 9], VOCABULARY) for seed in range(6)]
    unbroken = _train(program, batches, ["het"] * 6)
    restore(program, start)
    switched = _train(program, batches, ["het"] * 3 + ["pp2", "tp1 x3", "tp2"])
    restore(program, start)
    assert {state["step"] for state in switched.values()} == {6 + start[0]["step"]}
    for rank, state in unbroken.items():
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            for name, value in state[kind].items():
                assert torch.allclose(switched[rank][kind][name], value, rtol=1e-9, atol=1e-12), (kind, name)


def _train(program: Program, batches: list[GlobalBatch], names: list[str]) -> dict[int, dict[str, object]]:
    """Returns the optimizer states after one step of each of `names`."""
    for seed, (batch, name) in enumerate(zip(batches, names, strict=True)):
        assignment = random_assignment(program.pool[name], len(batch), random.Random(seed))
        train_step(program, batch, name, assignment)
    return snapshot(program)
