"""Any pool, any walk over it, any assignment: losses, gradients and weights equal the untouched module's, to 1e-10.

On the virtual cluster, in float64. 1e-10 leaves room for sums in another order (about 1e-14), for nothing else. The
same over real processes: `tests/test_message_logs.py`.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor, nn

from hgraph.annotation import Annotation, Subgroup
from hgraph.placements import Replicate, Shard
from hgraph.strategy import Override, Pool, Scheme, Stage
from runtime.executor import MicroBatchResult
from runtime.rank_step import collect_gradients, exchange_parameters
from runtime.requests import RankGenerator
from runtime.verifier import Verifier
from runtime.verify import verify
from runtime.verify_batches import KINDS, draw_trial, plan_of
from runtime.weights import gather
from tests.models import hugging_face_llama, hugging_face_loss, language_loss, llama
from tests.small_pools import draw_batch, exact_program, overridden, pool, stages, strategy

U = Scheme.uniform
FIRST_LIGHT = "examples/first_light/strategies.yaml"

# Every odd layout in one pool: one capture serves all.
ODD = pool(
    4,
    strategy("tp2, tp1 x2", U(2), U(1), U(1)),
    strategy("3 layers over 2 stages", U(1, 2), U(2)),
    strategy("6 query and 3 key/value heads over tp3", U(3), U(1)),
    strategy("more ranks than key/value heads", U(4)),
    strategy("tp3 ahead of tp1", stages((3, 2), (1, 1))),
    strategy("an activation between unequal subgroups", overridden(3, layers__1__mlp="0-1[S(2)] + 2[] @ S(1)")),
    strategy(
        "parameters in unequal subgroups", overridden(3, layers__0__mlp__up_proj__weight="0-1[S(1)] + 2[] @ S(0)")
    ),
    strategy("residual stream cut by tokens", overridden(2, layers__0="0-1[S(1)]"), U(1)),
    # One subgroup holds terms of the loss, the other all of it: it counts once.
    strategy("a loss in unequal subgroups", overridden(3, layers__2="0-1[S(1)] + 2[] @ S(2)")),
    strategy("three idle ranks", U(1)),
)


@pytest.fixture(scope="module")
def odd() -> Verifier:
    """Three layers, 6 query and 3 key/value heads, feed-forward 25, vocabulary 257: nothing divides."""
    return Verifier(llama(layers=3, hidden=24, ffn=25), language_loss, ODD)


@pytest.mark.parametrize("name", [one.name for one in ODD.strategies])
def test_every_kind_of_batch_under_every_odd_layout(odd: Verifier, name: str) -> None:
    generator = random.Random(name)
    for kind in KINDS:
        trial = draw_trial(kind, odd.program.pool[name], 257, generator)
        odd.step(trial.batch, name, trial.assignment, kind)


def test_a_walk_over_all_odd_layouts(odd: Verifier) -> None:
    generator = random.Random(0)
    names = [one.name for one in ODD.strategies]
    for _ in range(len(names)):
        name = generator.choice(names)
        trial = draw_trial("random dispatch", odd.program.pool[name], 257, generator)
        odd.step(trial.batch, name, trial.assignment)


def test_the_pool_of_first_light() -> None:
    model = llama(layers=4, hidden=32, heads=8, kv_heads=4, ffn=27, vocab_size=67)
    report = verify(model, language_loss, FIRST_LIGHT, steps=2, walk=8)
    assert [result.name for result in report.results] == [
        "tp4",
        "tp2.pp2",
        "tp2x2",
        "tp2+tp1x2",
        "pp2+tp1x2",
        "tp1x4",
        "random walk",
    ]
    assert all(result.worst.error <= 1e-10 for result in report.results)


def test_eight_ranks_in_three_unequal_replicas() -> None:
    model = llama(layers=2, hidden=32, heads=8, kv_heads=2, ffn=27, vocab_size=61)
    both = pool(8, strategy("het", U(4), U(2), U(1, 2)), strategy("turned", U(1, 2), U(2), U(4)))
    report = verify(model, language_loss, both, steps=3, walk=4)
    assert report.num_ranks == 8
    assert all(result.worst.error <= 1e-10 for result in report.results)


TIED = pool(
    4,
    strategy("two pipelines", U(1, 2), U(1, 2)),
    strategy("tp2.pp2", U(2, 2)),
    strategy("tp3 ahead of tp1", stages((3, 1), (1, 1))),
    strategy("mixed", U(2), U(1), U(1)),
)


@pytest.fixture(scope="module")
def tied() -> Verifier:
    """Embedding and head are one parameter."""
    return Verifier(llama(hidden=24, ffn=25, vocab_size=17, tie_embeddings=True), language_loss, TIED)


def test_tied_embeddings_across_stages(tied: Verifier) -> None:
    generator = random.Random(0)
    assert len(tied.program.captured.parameters) == len(dict(tied.reference.named_parameters()))
    for name in ("two pipelines", "tp2.pp2", "tp3 ahead of tp1", "mixed", "two pipelines"):
        trial = draw_trial("random dispatch", tied.program.pool[name], 17, generator)
        tied.step(trial.batch, name, trial.assignment)


@pytest.mark.case(101)
def test_what_all_copies_of_a_tied_weight_leave_is_summed_and_the_copies_stay_equal(tied: Verifier) -> None:
    program, name = tied.program, "two pipelines"
    # First stages hold the embedding, last stages the head; each weighs 1/2, as two replicas with equal tokens do.
    left = {0: ("embed.weight", 1.0), 2: ("embed.weight", 2.0), 1: ("head.weight", 3.0), 3: ("head.weight", 4.0)}

    def bridge(rank: int) -> RankGenerator[dict[str, Tensor]]:
        state, (weight, value) = program.ranks[rank], left[rank]
        gradient = torch.full((17, 24), value / 2, dtype=torch.float64)
        result = MicroBatchResult(torch.zeros(()), {weight: gradient})
        return collect_gradients(state, state.executables[name], result)

    with torch.no_grad():
        gradients = gather(program, program.cluster.run({rank: bridge(rank) for rank in program.ranks}))
        held = program.cluster.run(
            {rank: exchange_parameters(state, state.executables[name]) for rank, state in program.ranks.items()}
        )
    assert torch.equal(gradients["embed.weight"], torch.full((17, 24), 5.0, dtype=torch.float64))
    copies = [held[rank][weight] for rank, (weight, _) in left.items()]
    assert all(torch.equal(copies[0], copy) for copy in copies[1:])


def test_a_hugging_face_llama_from_configuration() -> None:
    both = pool(4, strategy("tp2.pp2", U(2, 2)), strategy("het", U(2), U(1), U(1)))
    report = verify(hugging_face_llama(), hugging_face_loss, both, steps=3, walk=2)
    assert all(result.worst.error <= 1e-10 for result in report.results)


@pytest.mark.case(120, 121)
@pytest.mark.parametrize("lengths", [(2, 6), (8,), (1, 1, 6), (4, 5)])
def test_the_graph_remembers_no_document_border_and_no_number_of_labels(
    odd: Verifier, lengths: tuple[int, ...]
) -> None:
    """(4, 5) has seven targets; the second sequence masked leaves three."""
    order = tuple(range(len(lengths)))
    odd.step(draw_batch(1, lengths), "three idle ranks", ((order,),))
    odd.step(draw_batch(1, lengths, masked=order[1:]), "three idle ranks", ((order,),))


def test_a_layer_costs_two_reductions_forward_and_two_backward() -> None:
    layers = 3
    model = llama(layers=layers, hidden=24, ffn=25, vocab_size=16)
    program = exact_program(model, language_loss, pool(2, strategy("tp2", U(2))))
    plan = plan_of((((0, 1),),), program.pool["tp2"], program.profile, (9, 5), 0)
    program.run_plan(draw_batch(0, [9, 5], 16), plan)
    hidden_bytes = 14 * 24 * 8
    reductions = [
        one for one in program.cluster.log_of(0) if one.kind == "all_reduce" and one.num_bytes == hidden_bytes
    ]
    phases = [one.label.split()[0] for one in reductions]
    # One more each way: the split embedding ahead of the layers, the head's input gradient behind them.
    assert phases.count("forward") == 2 * layers + 1
    assert phases.count("backward") == 2 * layers + 1
    # The loss over the split vocabulary needs numbers per token, never a hidden row; nothing else moves in a layer.
    others = [one for one in program.cluster.log_of(0) if one.label.split()[0] in ("forward", "backward")]
    assert sum(one.num_bytes > 14 * 8 for one in others) == len(reductions)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_random_models_and_pools(seed: int) -> None:
    generator = random.Random(seed)
    kv_heads = generator.choice([1, 2, 3])
    sizes = {
        "layers": generator.randint(2, 4),
        "kv_heads": kv_heads,
        "heads": kv_heads * generator.choice([1, 2, 3]),
        "ffn": generator.randint(5, 30),
        "vocab_size": generator.randint(5, 90),
        "tie_embeddings": generator.random() < 0.5,
    }
    model = llama(seed, **sizes, hidden=sizes["heads"] * 4)
    drawn = _random_pool(generator, sizes["layers"], sizes["heads"])
    report = verify(model, language_loss, drawn, steps=3, walk=6, seed=seed)
    assert all(result.worst.error <= 1e-10 for result in report.results)


def _random_pool(generator: random.Random, layers: int, heads: int, num_ranks: int = 8) -> Pool:
    strategies = []
    for number in range(4):
        schemes: list[Scheme] = []
        left = num_ranks
        while left and generator.random() < 0.9:
            scheme = _random_scheme(generator, layers, min(left, 5), heads)
            schemes.append(scheme)
            left -= scheme.num_ranks
        strategies.append(strategy(f"drawn {number}", *(schemes or [U()])))
    return pool(num_ranks, *strategies)


def _random_scheme(generator: random.Random, layers: int, ranks: int, heads: int) -> Scheme:
    degrees: list[int] = []
    while sum(degrees) < ranks and len(degrees) < layers and (not degrees or generator.random() < 0.5):
        degrees.append(generator.randint(1, min(ranks - sum(degrees), heads)))
    borders = sorted(generator.sample(range(1, layers), len(degrees) - 1))
    counts = [end - begin for begin, end in zip([0, *borders], [*borders, layers], strict=True)]
    return Scheme(
        tuple(Stage(tp, count) for tp, count in zip(degrees, counts, strict=True)),
        schedule=generator.choice(["1f1b", "gpipe"]),
    )


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
def test_random_overrides(seed: int) -> None:
    generator = random.Random(seed)
    tp = generator.randint(2, 4)
    model = llama(seed, hidden=24, ffn=25, vocab_size=61)
    overrides = [_random_override(generator, model, tp) for _ in range(generator.randint(1, 3))]
    scheme = Scheme((Stage(tp),), overrides=tuple(overrides))
    report = verify(model, language_loss, pool(tp, strategy("overridden", scheme)), steps=3, walk=0, seed=seed)
    assert all(result.worst.error <= 1e-10 for result in report.results), overrides


def _random_override(generator: random.Random, model: nn.Module, tp: int) -> Override:
    """A parameter or the output of a module, anyhow on the ranks of the replica."""
    if generator.random() < 0.4:
        name, parameter = generator.choice(list(model.named_parameters()))
        return Override(name, str(_random_annotation(generator, tp, list(range(parameter.ndim)))))
    modules = [name for name, module in model.named_modules() if name and not isinstance(module, nn.ModuleList)]
    # Outputs are [1, T, D].
    return Override(generator.choice(modules), str(_random_annotation(generator, tp, [1, 2])))


def _random_annotation(generator: random.Random, tp: int, dims: list[int]) -> Annotation:
    ranks = generator.sample(range(tp), tp)
    borders = [0, *sorted(generator.sample(range(1, tp), generator.randint(0, min(2, tp - 1)))), tp]
    choices = [Replicate(), *(Shard(dim) for dim in dims)]
    groups = [tuple(ranks[begin:end]) for begin, end in itertools.pairwise(borders)]
    subgroups = tuple(Subgroup(group, (len(group),), (generator.choice(choices),)) for group in groups)
    return Annotation(subgroups, generator.choice(choices))
