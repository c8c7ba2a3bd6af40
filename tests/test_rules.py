"""Ground truth of the sharding rules: wrong rules and missing rules are both reported."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import fx

from hgraph.annotation import Annotation, Subgroup, replicated, sharded
from hgraph.errors import RuleError
from hgraph.graph import NodeInfo, Shape, set_info
from hgraph.placements import Partial, Placement, Replicate, Shard
from passes.rules.lift import Solution
from passes.rules.table import RULES, rule_of
from tests.ground_truth import Case, result_shapes, rules_of, solved
from tests.rule_samples import SAMPLES, Sample, X, inputs_of

IDS = [f"{number}-{sample}" for number, sample in enumerate(SAMPLES)]
every_sample = pytest.mark.parametrize("sample", SAMPLES, ids=IDS)

LOOKS_ALONG_TOKENS = (
    torch.ops.hydraulis.packed_attention.default,
    torch.ops.hydraulis.packed_attention_backward.default,
)
"""Kernels that may not be run on some of the tokens: borders of documents would lie outside the piece."""

ACROSS = "dims are regrouped across each other: pieces of whole rows of both shapes need a common factor of the dims"
INSIDE_HEADS = (
    "the elements of a value's heads are independent, but no layer splits inside heads: queries and keys cannot"
)
REFUSED = {
    # (sample or operator, sharded dims of the inputs): why the rule asks for whole values although pieces would do.
    ("aten.reshape.default-4x9-apart", ((0, 0),)): ACROSS,
    ("aten.reshape.default-5x4x9-half_apart", ((0, 1),)): ACROSS,
    ("hydraulis.packed_attention.default", ((2, 2),)): INSIDE_HEADS,
    ("hydraulis.packed_attention_backward.default", ((0, 2), (3, 2), (4, 2))): INSIDE_HEADS,
}


def test_every_operator_of_the_table_has_a_sample() -> None:
    assert {sample.target for sample in SAMPLES} == set(RULES)


@every_sample
def test_one_axis(sample: Sample) -> None:
    for parts in (1, 2, 3, 4):
        check(sample, axis_annotations(sample, parts, limit=48), tuple(range(parts)), seed=parts)


@every_sample
def test_meshes_and_unions(sample: Sample) -> None:
    check(sample, structured_annotations(sample, count=12, seed=0), (0, 1, 2, 3), seed=0)


@pytest.mark.long
@every_sample
def test_many_layouts(sample: Sample) -> None:
    for parts in (2, 3, 4):
        check(sample, axis_annotations(sample, parts, limit=2000), tuple(range(parts)), seed=parts, every_size=True)
    for seed in range(10):
        check(sample, structured_annotations(sample, count=60, seed=seed), (0, 1, 2, 3), seed=seed, every_size=True)


@every_sample
def test_layouts_of_the_result_that_are_asked_for(sample: Sample) -> None:
    """A gradient takes the layout of its parameter where the inputs do not decide."""
    if len(result_shapes(sample)) > 1:
        return
    (shape,) = result_shapes(sample)
    assert shape is not None
    rules, ranks = rules_of(sample), (0, 1, 2)
    for placement in placements(shape, 3, partial=False):
        aim = Annotation((Subgroup(ranks, (3,), (placement,)),))
        inputs = [replicated(ranks)] * len(inputs_of(sample))
        assert_true(sample, solved(sample, rules, inputs, ranks, [aim]), seed=0)


@every_sample
def test_no_rule_is_missing(sample: Sample) -> None:
    """What recombines when every rank runs the plain operator on pieces must not be refused by the rule."""
    ranks = (0, 1)
    rules = rules_of(sample)
    case = Case.make(sample, sample.tokens[-1])
    for picks, given in alike_shardings(sample, ranks):
        if sample.target in LOOKS_ALONG_TOKENS and picks[0][1] == 0:
            continue
        if {(str(sample), picks), (str(sample.target), picks)} & set(REFUSED) or not recombines(case, given, ranks):
            continue
        solution = solved(sample, rules, given, ranks)
        assert solution.moved == 0, (
            f"missing rule: {sample} gives the right result on pieces under {texts(given)}, but requires "
            f"{texts(solution.required)}"
        )


def test_a_wrong_rule_is_noticed() -> None:
    (sample,) = [sample for sample in SAMPLES if str(sample) == "aten.mm.default-5x6_6x8"]
    case, ranks = Case.make(sample, 1), (0, 1)
    columns, rows = sharded(ranks, 1), sharded(ranks, 0)
    partial = Annotation((Subgroup(ranks, (2,), (Partial(),)),))
    assert case.error((columns, rows), (partial,)) is None
    assert "differs" in str(case.error((columns, rows), (replicated(ranks),)))
    assert "expected torch.float64[5, 4]" in str(case.error((columns, rows), (columns,)))
    assert "differs" in str(case.error((partial, partial), (partial,)))


def test_an_operator_without_a_rule_names_operator_module_and_line() -> None:
    graph = fx.Graph()
    x = set_info(graph.placeholder("x"), NodeInfo(shapes=((5, 6),), dtypes=(torch.float64,)))
    node = graph.call_function(torch.ops.aten.cumsum.default, (x, 1))
    facts = NodeInfo(shapes=((5, 6),), dtypes=(torch.float64,), module="layers.0.mixer", module_class="Mixer")
    facts.source = "model.py:17"
    set_info(node, facts)
    with pytest.raises(RuleError) as raised:
        rule_of(node)
    text = str(raised.value)
    assert "no sharding rule for aten.cumsum.default" in text
    assert "module layers.0.mixer (Mixer), model.py:17" in text
    assert "passes/rules/table.py" in text
    assert "-> %cumsum_default: float64[5, 6]" in text


def test_a_missing_rule_is_noticed() -> None:
    (sample,) = [sample for sample in SAMPLES if str(sample) == "aten.mm.default-5x6_6x8"]
    ranks = (0, 1)
    (rule,) = rules_of(sample)
    found = {
        picks: solved(sample, [replace(rule, fixed=frozenset("k"))], given, ranks).moved
        for picks, given in alike_shardings(sample, ranks)
        if recombines(Case.make(sample, 1), given, ranks)
    }
    rows, contraction, columns = ((0, 0),), ((0, 1), (1, 0)), ((1, 1),)
    assert set(found) == {rows, contraction, columns}
    assert [picks for picks, moved in found.items() if moved] == [contraction]


def test_refusals_are_of_samples_that_exist() -> None:
    assert {name for name, _ in REFUSED} <= {str(name) for sample in SAMPLES for name in (sample, sample.target)}


def test_partial_values_flow_only_where_the_operator_is_linear() -> None:
    ranks = (0, 1)
    partial = Annotation((Subgroup(ranks, (2,), (Partial(),)),))
    flows = {
        "aten.add.Tensor-5x6_5x6": True,
        "aten.sub.Tensor-Tx6_Tx1": False,
        "aten.neg.default-5x6": True,
        "aten.mul.Scalar-5x6": True,
        "aten.mul.Tensor-5x6_5x6": False,
        "aten.add.Scalar-5x6": False,
        "aten.exp.default-5x6": False,
        "aten.t.default-5x6": True,
        "aten._to_copy.default-5x6-widening": True,
        "aten._to_copy.default-5x6-narrowing": False,
        "aten.mm.default-5x6_6x8": False,
    }
    for name, flow in flows.items():
        sample = next(sample for sample in SAMPLES if str(sample) == name)
        solution = solved(sample, rules_of(sample), [partial] * len(inputs_of(sample)), ranks)
        assert solution.outputs[0] is not None
        assert solution.outputs[0].is_partial is flow, name
        assert bool(solution.reduced) is not flow, name


def check(
    sample: Sample,
    layouts: Iterator[Sequence[Annotation | None]],
    ranks: tuple[int, ...],
    *,
    seed: int,
    every_size: bool = False,
) -> None:
    """Solves the rule for every layout, and runs each distinct solution once."""
    rules, done = rules_of(sample), set()
    for given in layouts:
        solution = solved(sample, rules, given, ranks)
        for number, (old, new) in enumerate(zip(given, solution.required, strict=True)):
            assert not new.is_partial or (old is not None and old.is_partial), (
                f"{sample}: input {number} is {old}, required {new}"
            )
        key = solution.required, solution.outputs
        if key in done:
            continue
        done.add(key)
        assert_true(sample, solution, seed=seed, every_size=every_size)


def assert_true(sample: Sample, solution: Solution, *, seed: int, every_size: bool = False) -> None:
    sizes = sample.tokens if every_size else (sample.tokens[seed % len(sample.tokens)],)
    for tokens in sizes if sample.is_symbolic else (1,):
        problem = Case.make(sample, tokens, seed).error(solution.required, solution.outputs, seed)
        assert problem is None, (
            f"wrong rule: {sample} at {tokens} tokens: "
            f"{texts(solution.required)} -> {texts(solution.outputs)}: {problem}"
        )


def texts(annotations: Sequence[Annotation | None]) -> str:
    return ", ".join(map(str, annotations))


def placements(shape: Shape, parts: int, *, partial: bool = True) -> list[Placement]:
    """Every placement of a tensor along one axis: replicated, partial, and every dim split evenly and very unevenly."""
    result: list[Placement] = [Replicate(), Partial()] if partial else [Replicate()]
    for dim, size in enumerate(shape):
        if size == 1:
            continue
        result.append(Shard(dim))
        if isinstance(size, int) and parts > 1:
            result.append(Shard(dim, (*(0,) * (parts - 1), size)))
            result.append(Shard(dim, (size - 1, *(0,) * (parts - 2), 1)))
    return result


def axis_annotations(sample: Sample, parts: int, *, limit: int) -> Iterator[list[Annotation]]:
    """All combinations of placements of the inputs over one axis, or `limit` of them, drawn with a fixed seed."""
    ranks, generator = tuple(range(parts)), random.Random(parts)
    choices = [placements(given.shape, parts) for given in inputs_of(sample)]
    total = 1
    for options in choices:
        total *= len(options)
    combinations: Iterator[tuple[Placement, ...]] = itertools.product(*choices)
    if total > limit:
        combinations = (tuple(generator.choice(options) for options in choices) for _ in range(limit))
    for combination in combinations:
        yield [Annotation((Subgroup(ranks, (parts,), (placement,)),)) for placement in combination]


def structured_annotations(sample: Sample, *, count: int, seed: int) -> Iterator[list[Annotation | None]]:
    """Random layouts on a mesh of 2 by 2, on unions of subgroups of 2 and 1 ranks, and mixtures of these.

    None stands for a value that every rank can have whole.
    """
    generator = random.Random(seed)
    kinds: list[list[Callable[[Shape, random.Random], Annotation | None]]] = [[_mesh], [_union], [_mesh, _union, _none]]
    for number in range(count):
        yield [generator.choice(kinds[number % 3])(given.shape, generator) for given in inputs_of(sample)]


def _none(shape: Shape, generator: random.Random) -> None:
    return None


def _balanced(shape: Shape, generator: random.Random) -> Placement:
    return generator.choice(
        [placement for placement in placements(shape, 2) if getattr(placement, "sizes", None) is None]
    )


def _mesh(shape: Shape, generator: random.Random) -> Annotation:
    return Annotation((Subgroup((0, 1, 2, 3), (2, 2), (_balanced(shape, generator), _balanced(shape, generator))),))


def _union(shape: Shape, generator: random.Random) -> Annotation:
    hetero = generator.choice(placements(shape, 2))
    return Annotation((Subgroup((0, 1), (2,), (_balanced(shape, generator),)), Subgroup((2,))), hetero)


def alike_shardings(
    sample: Sample, ranks: tuple[int, ...]
) -> Iterator[tuple[tuple[tuple[int, int], ...], list[Annotation]]]:
    """One dim of some of the inputs, all of the same size: (input, dim) picks and the annotations they make."""
    shapes = [given.shape for given in inputs_of(sample)]
    for size in dict.fromkeys(size for shape in shapes for size in shape if size != 1):
        options = [[None, *(dim for dim, other in enumerate(shape) if other == size)] for shape in shapes]
        for choice in itertools.islice(itertools.product(*options), 256):
            picks = tuple((number, dim) for number, dim in enumerate(choice) if dim is not None)
            if picks:
                yield picks, [replicated(ranks) if dim is None else sharded(ranks, dim) for dim in choice]


def recombines(case: Case, given: Sequence[Annotation], ranks: tuple[int, ...]) -> bool:
    """Whether the plain operator, run on pieces, gives pieces, copies or terms of each of its results."""
    choices = [
        None
        if shape is None
        else [Annotation((Subgroup(ranks, (len(ranks),), (placement,)),)) for placement in layouts]
        for shape in result_shapes(case.sample)
        for layouts in [[*placements(shape or (), 1), Partial("max")]]
    ]
    assert choices[0] is not None
    for first in choices[0]:
        outputs = [first, *(None if options is None else options[0] for options in choices[1:])]
        try:
            local = case.run(given, outputs)
        except (RuntimeError, IndexError, AssertionError):
            continue
        if case.compare(0, first, local) is not None:
            continue
        if all(
            options is None or any(case.compare(number, option, local) is None for option in options)
            for number, options in enumerate(choices[1:], 1)
        ):
            return True
    return False


def test_random_values_are_used() -> None:
    sample = Sample(SAMPLES[0].target, (X(5, 6),))
    assert not Case.make(sample, 1).values[0].equal(Case.make(sample, 1, seed=1).values[0])
