"""Compiled schemes on the virtual cluster, in float64, against the untouched module run sequence by sequence."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from hgraph.capture import Captured, LossFunction
from hgraph.graph import evaluate_shape
from hgraph.placements import balanced_sizes
from hgraph.shard_map import shard_map
from hgraph.strategy import Override, Replica, Scheme, Stage
from passes.pipelines import CompiledScheme
from runtime.executor import RankExecutor
from tests.captures import shared_capture, shared_compile_scheme, shared_normalized
from tests.models import gpt, hugging_face_llama, hugging_face_loss, language_loss, llama, random_batches
from tests.scheme_runs import Outcome, assert_equal_to_reference, denominator_of, run_compiled

MIXED = ((5, 1, 9), (30,), (2, 2))
"""Lengths per micro-batch: several sequences, one of one token, unequal micro-batches."""


@functools.cache
def uneven_llama() -> nn.Module:
    """6 query and 3 key heads, 257 tokens, 50 wide in between: nothing divides by 2."""
    return llama(layers=3)


@functools.cache
def tied_llama() -> nn.Module:
    return llama(layers=2, hidden=24, heads=4, kv_heads=2, ffn=20, vocab_size=61, tie_embeddings=True)


@functools.cache
def small_llama(vocab_size: int = 61, layers: int = 1) -> nn.Module:
    return llama(layers=layers, hidden=16, heads=4, kv_heads=2, ffn=20, vocab_size=vocab_size)


@functools.cache
def plain_gpt() -> nn.Module:
    return gpt(layers=2)


def captured(model: nn.Module, loss: LossFunction = language_loss) -> Captured:
    return shared_normalized(shared_capture(model, loss), exact=True)


def check(
    model: nn.Module,
    scheme: Scheme,
    lengths: Sequence[Sequence[int]] = MIXED,
    loss: LossFunction = language_loss,
    vocab_size: int = 61,
    compiled: CompiledScheme | None = None,
) -> Outcome:
    """Runs one step and compares it with the reference."""
    compiled = compiled or shared_compile_scheme(captured(model, loss), scheme)
    batches, sequences = random_batches(lengths, vocab_size)
    outcome = run_compiled(compiled, captured(model, loss), model, batches)
    assert_equal_to_reference(outcome, model, loss, sequences)
    return outcome


def names(scheme: Scheme) -> str:
    return str(scheme)


# Schemes


@pytest.mark.parametrize(
    "scheme",
    [
        *(Scheme.uniform(tp) for tp in (1, 2, 3, 4, 6)),
        Scheme.uniform(1, 2),
        Scheme.uniform(1, 3),
        Scheme.uniform(1, 2, layers=(1, 2)),
        Scheme.uniform(2, 2, layers=(2, 1), schedule="gpipe"),
        Scheme((Stage(3, 2), Stage(1, 1))),
        Scheme((Stage(1, 1), Stage(4, 1), Stage(2, 1))),
    ],
    ids=names,
)
def test_llama_where_nothing_divides(scheme: Scheme) -> None:
    check(uneven_llama(), scheme, vocab_size=257)


@pytest.mark.parametrize("layers", [(0, 2), (2, 0)], ids=str)
def test_a_stage_with_embedding_or_head_alone(layers: tuple[int, int]) -> None:
    """A gradient is made on the stage of its parameter, also where that stage has no layer."""
    scheme = Scheme.uniform(2, 2, layers=layers)
    compiled = shared_compile_scheme(captured(tied_llama()), scheme)
    assert {("embed.weight", 0), ("head.weight", 1)} <= set(compiled.gradients)
    assert set(compiled.gradients) == set(compiled.parameters)
    check(tied_llama(), scheme, compiled=compiled)


@pytest.mark.case(81)
def test_middle_stages_know_the_documents() -> None:
    check(uneven_llama(), Scheme.uniform(2, 3), ((5, 1, 9, 3), (2, 2)), vocab_size=257)


@pytest.mark.parametrize(
    "scheme", [Scheme.uniform(1), Scheme.uniform(2), Scheme.uniform(3), Scheme.uniform(2, 2)], ids=names
)
def test_gpt_with_biases_and_layer_norm(scheme: Scheme) -> None:
    check(plain_gpt(), scheme)


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme.uniform(1),
        Scheme.uniform(2),
        Scheme.uniform(1, 2),
        Scheme.uniform(2, 2),
        Scheme((Stage(3, 1), Stage(1, 1))),
    ],
    ids=names,
)
def test_tied_embeddings(scheme: Scheme) -> None:
    """One gradient per use; across stages each use has its own."""
    compiled = shared_compile_scheme(captured(tied_llama()), scheme)
    last = scheme.pp - 1
    assert {("embed.weight", 0), ("head.weight", last)} <= set(compiled.gradients)
    check(tied_llama(), scheme, compiled=compiled)


@pytest.mark.parametrize("scheme", [Scheme.uniform(3), Scheme.uniform(2, 2)], ids=names)
def test_hugging_face_llama(scheme: Scheme) -> None:
    check(_hugging_face(), scheme, loss=hugging_face_loss, vocab_size=50)


@functools.cache
def _hugging_face() -> nn.Module:
    return hugging_face_llama()


@pytest.mark.parametrize(
    "annotation",
    [
        "0-1[S(2)] + 2[] @ S(1)",
        "0-1[S(1)] + 2[] @ S(2)",
        "0-2[S(1)]",
        "0-2[S(2:40,8,0)]",
        "0-1[R] + 2[] @ R",
        "1[]",
        "0,2[S(2)]",
    ],
)
def test_an_activation_moved_by_an_override(annotation: str) -> None:
    """Between unequal subgroups, over tokens, to some of the ranks; and back to where it is needed."""
    scheme = Scheme.uniform(3, overrides=(Override("layers.1.mlp", annotation),))
    outcome = check(uneven_llama(), scheme, vocab_size=257)
    assert outcome.log


def test_a_parameter_moved_by_an_override() -> None:
    overrides = (
        Override("layers.*.mlp.up_proj.weight", "0[S(0)] + 1-2[S(0)] @ S(0:20,30)"),
        Override("layers.0.mlp.down_proj.weight", "0-2[R]"),
        Override("embed.weight", "0-2[S(1)]"),
        Override("norm.weight", "0-2[S(0)]"),
    )
    check(uneven_llama(), Scheme.uniform(3, overrides=overrides), vocab_size=257)


def test_overrides_on_stages_of_a_pipeline() -> None:
    overrides = (Override("layers.1.mlp", "2,3[S(1)]"), Override("layers.0.attention", "0[] + 1[] @ S(2)"))
    check(small_llama(layers=2), Scheme.uniform(2, 2, overrides=overrides))


# Micro-batches


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("pp", [2, 3])
def test_any_number_of_micro_batches(pp: int, schedule: str) -> None:
    """More and fewer than stages; live micro-batches are as few as the schedule promises."""
    model = small_llama(layers=3)
    compiled = shared_compile_scheme(captured(model), Scheme.uniform(1, pp, schedule=schedule))
    lengths = ((37,), (5, 6), (64,), (1,), (1, 1, 2))
    for count in (1, 2, 3, 5):
        outcome = check(model, compiled.scheme, lengths[:count], compiled=compiled)
        expected = [min(count, pp - stage) if schedule == "1f1b" else count for stage in range(pp)]
        assert list(outcome.peaks.values()) == expected


def test_an_idle_replica() -> None:
    model = small_llama(layers=2)
    outcome = run_compiled(shared_compile_scheme(captured(model), Scheme.uniform(2, 2)), captured(model), model, [])
    assert (outcome.loss, outcome.gradients, outcome.log) == (0.0, {}, ())


@pytest.mark.case(4)
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_accumulation_over_unequal_micro_batches(count: int) -> None:
    lengths = (3, 50, 7, 7, 1, 20, 2, 33)
    size = len(lengths) // count
    check(small_llama(), Scheme.uniform(1), [lengths[start : start + size] for start in range(0, 8, size)])


@pytest.mark.case(13)
def test_accumulation_over_rounds_is_a_sum() -> None:
    model = small_llama(layers=2)
    compiled = shared_compile_scheme(captured(model), Scheme.uniform(1, 2))
    batches, sequences = random_batches(((5,), (3, 4), (7,), (2,), (6,), (8,)), 61)
    count = denominator_of(batches)
    rounds = [run_compiled(compiled, captured(model), model, batches[i : i + 2], count) for i in (0, 2, 4)]
    total = Outcome(
        sum(outcome.loss for outcome in rounds),
        {name: sum(outcome.gradients[name] for outcome in rounds) for name in rounds[0].gradients},  # type: ignore[misc]
        (),
        {},
    )
    assert_equal_to_reference(total, model, language_loss, sequences)


@pytest.mark.case(77, 80)
@pytest.mark.parametrize("steps", [(128, 129), (4, 8, 16)], ids=str)
def test_steps_of_other_lengths(steps: tuple[int, ...]) -> None:
    """The same programs; no shape of an earlier step is remembered."""
    model = small_llama(layers=2)
    compiled = shared_compile_scheme(captured(model), Scheme.uniform(1, 2))
    for length in steps:
        check(model, compiled.scheme, ((length,),), compiled=compiled)


@pytest.mark.case(78)
def test_eight_sequences_in_three_micro_batches() -> None:
    check(small_llama(layers=3), Scheme.uniform(1, 3), ((4, 4, 4), (4, 4, 4), (4, 4)))


@pytest.mark.case(5, 9)
def test_micro_batches_without_labels() -> None:
    """One token predicts nothing. A micro-batch of such alone is harmless, a whole step gives zeros."""
    model = small_llama(layers=2)
    compiled = shared_compile_scheme(captured(model), Scheme.uniform(2, 2))
    check(model, compiled.scheme, ((1, 1), (5,), (1,)), compiled=compiled)
    outcome = check(model, compiled.scheme, ((1, 1), (1,)), compiled=compiled)
    assert outcome.loss == 0.0
    assert not any(gradient.any() for gradient in outcome.gradients.values())


@pytest.mark.parametrize("multiple", [8, 16])
def test_padding_changes_nothing(multiple: int) -> None:
    model = small_llama()
    for scheme in (Scheme.uniform(1), Scheme.uniform(2)):
        batches, sequences = random_batches(((5, 6), (1,)), 61, multiple=multiple)
        outcome = run_compiled(shared_compile_scheme(captured(model), scheme), captured(model), model, batches)
        assert_equal_to_reference(outcome, model, language_loss, sequences)


# Vocabulary and heads


@pytest.mark.case(90)
@pytest.mark.parametrize("tp", [2, 3])
def test_a_vocabulary_that_does_not_divide(tp: int) -> None:
    check(small_llama(vocab_size=11), Scheme.uniform(tp), vocab_size=11)


def test_fewer_tokens_in_the_vocabulary_than_ranks() -> None:
    check(small_llama(vocab_size=3), Scheme.uniform(4), vocab_size=3)


@pytest.mark.case(92)
def test_zero_logits_lose_the_logarithm_of_the_vocabulary() -> None:
    model = llama(layers=1, hidden=16, heads=4, kv_heads=2, ffn=20, vocab_size=8)
    nn.init.zeros_(model.head.weight)
    for tp in (1, 2):
        outcome = check(model, Scheme.uniform(tp), vocab_size=8)
        assert outcome.loss == pytest.approx(math.log(8), rel=1e-12)
        assert outcome.loss == pytest.approx(2.0794, abs=1e-4)


def query_heads(compiled: CompiledScheme, model: nn.Module, head_size: int) -> list[int]:
    name = next(name for name, _ in compiled.parameters if name.endswith(("q_proj.weight", "query.weight")))
    shape = dict(model.named_parameters())[name].shape
    pieces = shard_map(compiled.parameters[name, 0], shape).pieces
    return [(piece.box[0][1] - piece.box[0][0]) // head_size for piece in pieces]


@pytest.mark.case(94)
def test_heads_are_split_alike_whatever_was_compiled_before() -> None:
    first, second = (gpt(layers=1, hidden=heads * 2, heads=heads) for heads in (12, 7))
    expected = {id(first): [3, 3, 3, 3], id(second): [2, 2, 2, 1]}
    losses = []
    for model in (first, second, first):
        compiled = shared_compile_scheme(captured(model), Scheme.uniform(4))
        assert query_heads(compiled, model, 2) == expected[id(model)]
        losses.append(check(model, compiled.scheme, compiled=compiled).loss)
    assert losses[0] == losses[2] != losses[1]


@pytest.mark.case(94)
def test_strategies_in_turn() -> None:
    """A, B, A of one model in one process: the third run repeats the first to the last bit."""
    model = gpt(layers=1, hidden=24, heads=12)
    schemes = [shared_compile_scheme(captured(model), Scheme.uniform(tp)) for tp in (4, 3)]
    first, _, again = (check(model, schemes[index].scheme, compiled=schemes[index]) for index in (0, 1, 0))
    assert query_heads(schemes[0], model, 2) == [3, 3, 3, 3]
    assert first.loss == again.loss
    assert all(torch.equal(gradient, again.gradients[name]) for name, gradient in first.gradients.items())
    assert first.log == again.log


@pytest.mark.case(94)
def test_twenty_heads_over_eight_ranks() -> None:
    model = gpt(layers=1, hidden=40, heads=20)
    compiled = shared_compile_scheme(captured(model), Scheme.uniform(8))
    assert query_heads(compiled, model, 2) == [3, 3, 3, 3, 2, 2, 2, 2] == list(balanced_sizes(20, 8))
    check(model, compiled.scheme, ((5, 1), (9,)), compiled=compiled)


@pytest.mark.parametrize("padding", [0, 7, 60])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_an_embedding_with_padding(tp: int, padding: int) -> None:
    """The padding's row gets no gradient, on whichever rank it lies."""
    model = gpt(layers=1)
    model.head.weight = nn.Parameter(torch.randn(61, 24, dtype=torch.float64))
    model.tokens.padding_idx = padding
    batches, sequences = random_batches(((9, 4), (6,)), 61)
    for batch in (*batches, *sequences):
        batch.tokens[batch.tokens % 3 == 0] = padding
    compiled = shared_compile_scheme(captured(model), Scheme.uniform(tp))
    outcome = run_compiled(compiled, captured(model), model, batches)
    assert_equal_to_reference(outcome, model, language_loss, sequences)
    assert not outcome.gradients["tokens.weight"][padding].any()
    assert outcome.gradients["tokens.weight"].any()


def test_a_route_keeps_the_latest_sizes_alone() -> None:
    """Over tokens, a Reshard is prepared for each number of them."""
    scheme = Scheme.uniform(2, overrides=(Override("blocks.0.norm_1", "0-1[S(1)]"),))
    model = gpt(layers=1, max_positions=200)
    compiled = shared_compile_scheme(captured(model), scheme)
    executor = RankExecutor(compiled, Replica(scheme, (0, 1)), 0, {}, torch.float64)
    route = next(route for route in executor.forward_routes if route.prepared is None)
    prepared = {}
    for tokens in range(1, 101):
        shape = evaluate_shape(route.shape, tokens, 2)
        prepared[tokens] = route._at(shape)
        assert route._at(evaluate_shape(route.shape, 1, 2)) is prepared[1]
    assert len(route.by_shape) == 64
    assert route._at(evaluate_shape(route.shape, 100, 2)) is prepared[100]
    assert route._at(evaluate_shape(route.shape, 2, 2)) is not prepared[2]
    assert len(route.by_shape) == 64


# One rank, shared programs, places


@pytest.mark.case(96)
@pytest.mark.parametrize("make", [uneven_llama, tied_llama, plain_gpt], ids=lambda make: make.__name__)
def test_one_rank_never_communicates(make: functools._lru_cache_wrapper[nn.Module]) -> None:
    compiled = shared_compile_scheme(captured(make()), Scheme.uniform(1))
    for program in (compiled.stages[0].ranks[0].forward, compiled.stages[0].ranks[0].backward):
        assert not program.reshards
        assert "yield from communicate" not in program.source
    assert not compiled.transfers


def test_ranks_share_no_program_where_only_a_frozen_parameter_differs() -> None:
    """61 tokens over three ranks: 21, 20 and 20 rows of a weight that has no gradient."""
    model = gpt(layers=1, heads=3, max_positions=129)
    model.head.weight = nn.Parameter(torch.randn(61, 24, dtype=torch.float64))
    model.tokens.weight.requires_grad_(False)
    compiled = shared_compile_scheme(captured(model), Scheme.uniform(3, overrides=(Override("head.weight", "0-2[R]"),)))
    assert compiled.num_programs == 4
    check(model, compiled.scheme, ((120,),), compiled=compiled)


def test_ranks_of_equal_local_shapes_share_programs() -> None:
    model = small_llama(vocab_size=64)
    assert shared_compile_scheme(captured(model), Scheme.uniform(2)).num_programs == 2
    uneven = shared_compile_scheme(captured(small_llama()), Scheme.uniform(2))
    assert uneven.num_programs == 4
    ranks = shared_compile_scheme(captured(model), Scheme.uniform(2)).stages[0].ranks
    assert ranks[0].forward is ranks[1].forward and ranks[0].coordinates != ranks[1].coordinates


def test_a_replica_runs_wherever_it_is_placed() -> None:
    model = small_llama(layers=2)
    compiled = shared_compile_scheme(captured(model), Scheme.uniform(2, 2))
    batches, _ = random_batches(MIXED, 61)
    here, there = (run_compiled(compiled, captured(model), model, batches, first_rank=first) for first in (0, 3))
    assert here.loss == there.loss
    assert all(torch.equal(gradient, there.gradients[name]) for name, gradient in here.gradients.items())
    assert [(m.kind, tuple(rank + 3 for rank in m.ranks)) for m in here.log] == [(m.kind, m.ranks) for m in there.log]


def test_the_callers_parameters_are_left_as_they_are() -> None:
    model = small_llama()
    before: dict[str, Tensor] = {name: value.clone() for name, value in model.state_dict().items()}
    check(model, Scheme.uniform(2))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
