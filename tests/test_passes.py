"""The passes one by one: a golden dump each, what they refuse, and what their verifiers catch."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from hgraph.annotation import Annotation, replicated
from hgraph.capture import Captured, capture
from hgraph.errors import InvalidAnnotation, InvalidInput, RuleError, VerificationError
from hgraph.graph import annotated_text, info
from hgraph.reshard_plan import Collective
from hgraph.strategy import Override, Scheme, Stage
from passes.annotate import annotate, parameter_roles
from passes.deduce import deduce
from passes.insert_comm import insert_comm, is_reshard
from passes.pipelines import PASSES, CompiledScheme, compile_scheme, normalized
from passes.rewriting import copy_graph
from passes.split_stages import split_stages
from passes.split_vocabulary import split_vocabulary
from passes.verify import verify_deduced, verify_inserted, verify_normalized, verify_split
from tests.models import Tiny, gpt, language_loss, llama, random_batches
from tests.scheme_runs import assert_equal_to_reference, run_compiled


@functools.cache
def tiny(layers: int = 1) -> Captured:
    return normalized(capture(Tiny(layers), language_loss))


@functools.cache
def small_llama(layers: int) -> Captured:
    model = llama(layers=layers, hidden=32, heads=8, kv_heads=4, ffn=24, vocab_size=48)
    return normalized(capture(model, language_loss))


@functools.cache
def small_gpt(layers: int) -> Captured:
    return normalized(capture(gpt(layers=layers), language_loss))


# Golden dumps


@functools.cache
def dumps() -> dict[str, str]:
    """The text after every pass: one layer on two ranks; two layers on two and one where stages are split."""
    texts: dict[str, list[str]] = {name: [] for name in PASSES}
    captured = capture(Tiny(), language_loss)
    texts["capture"] = [annotated_text(captured.graph)]
    ready = normalized(captured, dump=lambda name, text: texts[name].append(text))
    compile_scheme(ready, Scheme.uniform(2), dump=lambda name, text: texts[name].append(text))
    stages: list[str] = []
    scheme = Scheme((Stage(2, 1), Stage(1, 1)))
    compile_scheme(tiny(2), scheme, dump=lambda name, text: stages.append(text) if name == "split_stages" else None)
    return {name: "\n".join(parts) for name, parts in texts.items()} | {"split_stages": "\n".join(stages)}


@pytest.mark.parametrize("name", ["capture", *PASSES])
def test_golden(name: str, golden: Callable[[str], None]) -> None:
    """The text before a pass is that of the pass before it."""
    golden(dumps()[name])


def test_every_pass_is_dumped_and_none_besides() -> None:
    assert set(dumps()) == {"capture", *PASSES}
    assert all(dumps().values())


# Reductions


def reductions(captured: Captured, tp: int) -> tuple[int, int]:
    """The number of all-reduces in the forward and in the backward program."""
    program = compile_scheme(captured, Scheme.uniform(tp)).stages[0].ranks[0]
    counts = []
    for own in (program.forward, program.backward):
        used = [node for node in own.graph.nodes if getattr(node.target, "__name__", "") == "communicate"]
        plans = [own.reshards[int(node.args[1])].plan for node in used]
        operations = [operation for plan in plans if plan is not None for phase in plan.phases for operation in phase]
        assert all(isinstance(own, Collective) or own.sender == own.receiver for own in operations)
        kinds = [own.kind for own in operations if isinstance(own, Collective)]
        assert set(kinds) == {"all_reduce"}
        counts.append(len(kinds))
    return counts[0], counts[1]


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("make", [small_llama, small_gpt], ids=["llama", "gpt"])
def test_two_reductions_per_layer_forward_and_two_backward(make: Callable[[int], Captured], tp: int) -> None:
    """As Megatron-LM counts them (arXiv 1909.08053, section 3); embedding and loss add a fixed number."""
    one, two = reductions(make(1), tp), reductions(make(2), tp)
    assert (two[0] - one[0], two[1] - one[1]) == (2, 2)
    # Forward: embedding, and maximum, sum of exponentials, and loss of the split vocabulary. Backward: their gradients.
    assert one == (2 + 4, 2 + 2)


def test_the_residual_stream_is_never_partial() -> None:
    compiled = compile_scheme(small_llama(2), Scheme.uniform(2))
    for node in compiled.graph.nodes:
        facts = info(node)
        adds = node.target == torch.ops.aten.add.Tensor and facts.module == "layers.0" and facts.phase == "forward"
        assert not adds or (facts.annotation is not None and facts.annotation.is_replicated)


def test_one_value_crosses_a_cut_each_way() -> None:
    compiled = compile_scheme(small_llama(2), Scheme.uniform(1, 2))
    assert [(t.sender, t.receiver, t.phase) for t in compiled.transfers] == [(0, 1, "forward"), (1, 0, "backward")]


def test_compiling_twice_gives_the_same_text() -> None:
    texts = {annotated_text(compile_scheme(small_llama(1), Scheme.uniform(2)).graph) for _ in range(2)}
    assert len(texts) == 1


def test_a_captured_graph_is_not_changed_by_compiling() -> None:
    before = annotated_text(tiny(2).graph)
    compile_scheme(tiny(2), Scheme.uniform(2, 2))
    assert annotated_text(tiny(2).graph) == before


# Operators without a rule


class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.embed(tokens).sort(-1).values


def test_an_operator_without_a_rule_names_module_and_line() -> None:
    model = nn.Sequential()
    model.add_module("sorted", Sorted())

    def loss(model: nn.Sequential, packed: object) -> Tensor:
        return model.sorted(packed.tokens[None], None).sum()  # type: ignore[attr-defined]

    with pytest.raises(RuleError) as raised:
        normalized(capture(model, loss))  # type: ignore[arg-type]
    text = str(raised.value)
    line = Sorted.forward.__code__.co_firstlineno + 1
    assert text.startswith("no sharding rule for aten.sort.default [sort] in module sorted (Sorted), ")
    assert f"{__file__}:{line}. Express it by operators that have one" in text
    assert "\n-> %sort: float32[1, T, 8], int64[1, T, 8] {} = aten.sort.default(%embedding) # forward" in text


# Templates


ROLES = (
    ("embed.weight", "vocab"),
    ("*norm*", "replicate"),
    ("layers.*.project.weight", "row"),
    ("layers.*", "column"),
    ("head.*", "vocab"),
)


def test_the_megatron_template_reads_roles_off_the_graph() -> None:
    roles = {info(node).name: role for node, role in parameter_roles(small_llama(1).graph).items()}
    assert roles == {
        "embed.weight": "vocab",
        "head.weight": "column",
        **{f"layers.0.attention.{name}_proj.weight": "column" for name in "qkv"},
        "layers.0.attention.o_proj.weight": "row",
        "layers.0.mlp.gate_proj.weight": "column",
        "layers.0.mlp.up_proj.weight": "column",
        "layers.0.mlp.down_proj.weight": "row",
    }


def test_a_template_of_names_gives_the_same_as_reading_the_graph() -> None:
    by_name = compile_scheme(tiny(), Scheme.uniform(2), ROLES)
    assert by_name.parameters == compile_scheme(tiny(), Scheme.uniform(2)).parameters


def test_everything_replicated_needs_no_communication() -> None:
    model = Tiny().double()
    captured = normalized(capture(model, language_loss), exact=True)
    compiled = compile_scheme(captured, Scheme.uniform(2), [("*", "replicate")])
    assert all(annotation.is_replicated for annotation in compiled.parameters.values())
    batches, sequences = random_batches(((5, 3), (4,)), 10)
    outcome = run_compiled(compiled, captured, model, batches)
    assert outcome.log == ()
    assert_equal_to_reference(outcome, model, language_loss, sequences)


@pytest.mark.case(98)
def test_a_parameter_that_the_template_leaves_out() -> None:
    with pytest.raises(InvalidInput) as raised:
        compile_scheme(tiny(), Scheme.uniform(2), ROLES[:-1])
    assert str(raised.value) == (
        "template: no pattern matches parameter 'head.weight'; give it a role, or end the template with '*': replicate"
    )


def test_templates_that_cannot_be() -> None:
    with pytest.raises(InvalidInput, match="template 'head': expected column, row, vocab or replicate, got 'rows'"):
        compile_scheme(tiny(), Scheme.uniform(2), [("head", "rows")])
    with pytest.raises(InvalidInput, match="expected 'megatron' or pairs of a pattern and a role, got 'metagron'"):
        compile_scheme(tiny(), Scheme.uniform(2), "metagron")
    with pytest.raises(InvalidInput, match="parameter norm.weight of 1 dims cannot be split by 'row'; use 'replicate'"):
        compile_scheme(small_llama(1), Scheme.uniform(2), [("norm.weight", "row"), ("*", "replicate")])


# Stages and overrides


def compiled_with(*overrides: tuple[str, str], tp: int = 3, pp: int = 1) -> CompiledScheme:
    scheme = Scheme.uniform(tp, pp, overrides=tuple(Override(*override) for override in overrides))
    return compile_scheme(tiny(2), scheme)


def test_an_override_wins_over_the_template() -> None:
    text = "0-1[S(1)] + 2[] @ S(0)"
    compiled = compiled_with(("layers.*.query.weight", text), ("layers.0", "0-1[S(2)] + 2[] @ S(1)"))
    assert {str(compiled.parameters[f"layers.{layer}.query.weight", 0]) for layer in (0, 1)} == {text}
    moved = [node for node in compiled.graph.nodes if is_reshard(node) and info(node).module == "layers.0"]
    assert "0-1[S(2)] + 2[] @ S(1)" in {str(info(node).annotation) for node in moved}


BAD_OVERRIDES = {
    "no such name": (("layers.*.quarry.weight", "0[]"), "'layers.*.quarry.weight': matches no parameter and no module"),
    "foreign ranks": (
        ("head.weight", "0-3[S(0)]"),
        "uses ranks [0, 1, 2, 3], but head.weight lives on ranks [0, 1, 2]",
    ),
    "partial": (("head.weight", "0-2[P]"), "0-2[P] is partial; expected splits and copies"),
    "no such dim": (("head.weight", "0-2[S(2)]"), "S(2) on a tensor of 2 dims; expected a dim below 2"),
    "sizes that do not sum": (
        ("head.weight", "0-2[S(0:3,3,3)]"),
        "expected 3 sizes that sum to 10, got 3 sizes that sum to 9",
    ),
    "no annotation": (("head.weight", "column"), "expected ranks[placements], as in 0-3[S(0)], got 'column'"),
    "a rank twice": (("layers.0", "0-1[R] + 1-2[R] @ R"), "rank 1 is in two subgroups"),
}


@pytest.mark.parametrize("name", BAD_OVERRIDES)
def test_overrides_that_cannot_be(name: str) -> None:
    override, message = BAD_OVERRIDES[name]
    with pytest.raises((InvalidInput, InvalidAnnotation)) as raised:
        compiled_with(override)
    assert message in str(raised.value)


def test_an_override_may_not_leave_its_stage() -> None:
    with pytest.raises(InvalidAnnotation) as raised:
        compiled_with(("layers.1.query.weight", "0-1[R]"), tp=2, pp=2)
    assert str(raised.value) == (
        "override 'layers.1.query.weight': 0-1[R] uses ranks [0, 1], but layers.1.query.weight lives on ranks [2, 3] "
        "of its replica"
    )


def test_layer_splits_that_cannot_be() -> None:
    with pytest.raises(InvalidInput, match="scheme tp1.pp3: pp=3 is above the model's 2 layers"):
        compile_scheme(tiny(2), Scheme.uniform(1, 3))
    with pytest.raises(InvalidInput, match=r"layers \[2, 1\] sum to 3; the model has 2 layers"):
        compile_scheme(tiny(2), Scheme.uniform(1, 2, layers=(2, 1)))
    flat = normalized(capture(Sequenceless(), language_loss))
    with pytest.raises(
        InvalidInput, match=r"pp=2, but the model has no list of layers \(nn.ModuleList or nn.Sequential\)"
    ):
        compile_scheme(flat, Scheme.uniform(1, 2))


class Sequenceless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


@pytest.mark.parametrize("layers", [(2, 0), (0, 2), (1, 1)], ids=str)
def test_a_stage_may_have_no_layer(layers: tuple[int, int]) -> None:
    model = Tiny(2).double()
    captured = normalized(capture(model, language_loss), exact=True)
    compiled = compile_scheme(captured, Scheme.uniform(1, 2, layers=layers))
    stages = {name: stage for name, stage in compiled.parameters if name.endswith("query.weight")}
    assert stages == {
        "layers.0.query.weight": 0 if layers[0] else 1,
        "layers.1.query.weight": 0 if layers[0] > 1 else 1,
    }
    batches, sequences = random_batches(((5, 3), (4,)), 10)
    assert_equal_to_reference(run_compiled(compiled, captured, model, batches), model, language_loss, sequences)


# Verifiers


def deduced(scheme: Scheme, layers: int = 2) -> tuple[fx.Graph, object]:
    graph, _ = copy_graph(tiny(layers).graph)
    split_vocabulary(graph)
    leaves = annotate(graph, tiny(layers), scheme)
    deduce(graph, tiny(layers), scheme, leaves)
    verify_deduced(graph, scheme)
    return graph, leaves


def operator(graph: fx.Graph, target: object) -> fx.Node:
    return next(node for node in graph.nodes if node.target == target and info(node).stage is not None)


def test_verify_normalized_notices_an_operator_without_a_rule() -> None:
    graph, _ = copy_graph(tiny().graph)
    operator_node = next(node for node in graph.nodes if node.target == torch.ops.aten.add.Tensor)
    operator_node.target = torch.ops.aten.remainder.Tensor
    with pytest.raises(RuleError, match="no sharding rule for aten.remainder.Tensor"):
        verify_normalized(graph)


def test_verify_deduced_notices_a_value_without_annotation_and_one_on_foreign_ranks() -> None:
    scheme = Scheme.uniform(1, 2)
    graph, _ = deduced(scheme)
    node = operator(graph, torch.ops.aten.mm.default)
    info(node).annotations = (None,)
    with pytest.raises(VerificationError, match="deduce left aten.mm.default .* without an annotation"):
        verify_deduced(graph, scheme)
    info(node).annotations = (replicated((1,)),)
    with pytest.raises(VerificationError, match=r"of stage 0 on 1\[\]; the stage has ranks \[0\]"):
        verify_deduced(graph, scheme)


def test_verify_inserted_notices_what_does_not_fit() -> None:
    scheme = Scheme.uniform(2)
    graph, leaves = deduced(scheme)
    insert_comm(graph, scheme, leaves)  # type: ignore[arg-type]
    verify_inserted(graph, scheme, leaves)  # type: ignore[arg-type]
    node = next(node for node in graph.nodes if is_reshard(node) and info(node).phase == "forward")
    (user, *_) = node.users
    user.replace_input_with(node, node.args[0])
    with pytest.raises(VerificationError, match=r"requires 0-1\[R\] of .*, which is 0-1\[P\]"):
        verify_inserted(graph, scheme, leaves)  # type: ignore[arg-type]


def test_verify_inserted_notices_a_value_of_another_stage() -> None:
    scheme = Scheme.uniform(1, 2)
    graph, leaves = deduced(scheme)
    insert_comm(graph, scheme, leaves)  # type: ignore[arg-type]
    node = next(node for node in graph.nodes if is_reshard(node))
    (user, *_) = node.users
    user.replace_input_with(node, node.args[0])
    with pytest.raises(VerificationError, match="of stage 1 reads .* of stage 0"):
        verify_inserted(graph, scheme, leaves)  # type: ignore[arg-type]


def test_verify_split_notices_a_lost_value_and_a_lost_message() -> None:
    scheme = Scheme.uniform(1, 2)
    graph, leaves = deduced(scheme)
    insert_comm(graph, scheme, leaves)  # type: ignore[arg-type]
    stages, transfers = split_stages(graph, tiny(2), scheme)
    verify_split(stages, transfers)
    with pytest.raises(VerificationError, match="transfers .*: sent .*, received"):
        verify_split(stages, transfers[:-1])
    output = next(node for node in stages[0].forward.nodes if node.op == "output")
    values = dict(output.args[0])
    del values[next(name for name in values if name.startswith("saved:"))]
    output.args = (values,)
    with pytest.raises(VerificationError, match="stage 0: forward keeps .*, backward reads"):
        verify_split(stages, transfers)


def test_annotations_of_a_compiled_scheme_are_on_ranks_of_their_stage() -> None:
    compiled = compile_scheme(tiny(2), Scheme((Stage(2, 1), Stage(1, 1))))
    for (_, stage), annotation in {**compiled.parameters, **compiled.gradients}.items():
        assert isinstance(annotation, Annotation)
        assert set(annotation.ranks) <= set(compiled.scheme.stage_ranks(stage))
