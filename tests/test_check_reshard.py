"""The checker of reshard plans: what it refuses, a test per property, and corrupted plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hgraph.annotation import Annotation
from hgraph.check_reshard import check_reshard
from hgraph.errors import PlanError
from hgraph.reshard import plan_reshard
from hgraph.reshard_plan import Collective, Move, Operation, ReshardPlan
from hgraph.shard_map import Box
from hgraph.topology import Topology
from tests.annotations import Pair, annotation_pairs
from tests.bridge_samples import nodes
from tests.reshard_reference import is_right

WHOLE: Box = ((0, 4),)
LEFT: Box = ((0, 2),)
RIGHT: Box = ((2, 4),)
EMPTY: Box = ((2, 2),)

REFUSED = {
    "a box outside the shape": ("0[]", "1[]", [[Move(0, 1, ((0, 5),))]], "well formed: expected boxes inside"),
    "an empty box": ("0[]", "1[]", [[Move(0, 1, WHOLE), Move(0, 1, EMPTY)]], "well formed: expected no empty box"),
    "the wrong reduction": ("0-1[P]", "2[]", [[Move(0, 2, WHOLE, "max")]], "well formed: expected copy or sum"),
    "a reduction of plain values": ("0[]", "1[]", [[Move(0, 1, WHOLE, "sum")]], "well formed: expected copy or None"),
    "reading what is not held": ("0-1[S(0)]", "2[]", [[Move(0, 2, WHOLE)]], "exact: rank 0 reads"),
    "reading on a rank without a piece": ("0[]", "1-2[R]", [[Move(2, 1, WHOLE)]], "exact: rank 2 reads"),
    "reading what is not there yet": (
        "0[]",
        "1-2[R]",
        [[Move(1, 2, WHOLE, origin="target")], [Move(0, 1, WHOLE)]],
        "exact: rank 1 reads .* which holds nothing yet",
    ),
    "writing outside the target box": ("0[]", "1-2[S(0)]", [[Move(0, 1, WHOLE)]], "exact: rank 1 has no"),
    "writing on a rank without a piece": ("0[]", "1[]", [[Move(0, 2, WHOLE)]], "exact: rank 2 has no"),
    "reading what the same phase writes": (
        "0-1[P]",
        "0-2[R]",
        [
            [Move(0, 0, WHOLE, "sum")],
            [Move(1, 0, WHOLE, "sum"), Move(0, 1, WHOLE, origin="target"), Move(0, 2, WHOLE, origin="target")],
        ],
        "exact: rank 0 reads .* in the same phase that writes it",
    ),
    "a sum into the neutral element of a maximum": (
        "0-1[P]",
        "0-1[P(max)]",
        [[Move(0, 0, WHOLE, "sum"), Move(1, 0, WHOLE, "sum")]],
        "exact: rank 0 combines into another reduction's neutral element",
    ),
    "a copy twice": ("0-1[R]", "2[]", [[Move(0, 2, WHOLE), Move(1, 2, WHOLE)]], "non-redundant: rank 2 gets .* twice"),
    "sending what is held": (
        "0-1[R]",
        "0-1[S(0)]",
        [[Move(0, 0, LEFT), Move(0, 1, RIGHT)]],
        "non-redundant: rank 1 holds",
    ),
    "reading scratch that is empty": (
        "0[]",
        "1[]",
        [[Move(0, 1, WHOLE, origin="scratch")]],
        "exact: rank 0 reads .* of its scratch buffer, which holds nothing yet",
    ),
    "reading scratch that the same phase writes": (
        "0-1[P]",
        "2[]",
        [
            [Move(0, 0, WHOLE, destination="scratch")],
            [Move(1, 0, WHOLE, "sum", destination="scratch"), Move(0, 2, WHOLE, origin="scratch")],
        ],
        "exact: rank 0 reads .* in the same phase that writes it",
    ),
    "a sum into empty scratch": (
        "0-1[P]",
        "2[]",
        [[Move(0, 0, WHOLE, "sum", destination="scratch")]],
        "exact: rank 0 combines .* into empty scratch",
    ),
    "a copy into scratch twice": (
        "0-1[P]",
        "2[]",
        [[Move(0, 0, WHOLE, destination="scratch"), Move(1, 0, WHOLE, destination="scratch")]],
        "non-redundant: rank 0 gets .* twice in scratch",
    ),
    "a sum in scratch that nobody reads": (
        "0-1[P]",
        "2[]",
        [[Move(0, 0, WHOLE, destination="scratch"), Move(0, 2, WHOLE, "sum"), Move(1, 2, WHOLE, "sum")]],
        "non-redundant: nobody reads .* of the scratch buffer of rank 0",
    ),
    "a term added to scratch after it was read": (
        "0-1[P]",
        "2[]",
        [
            [Move(0, 0, WHOLE, destination="scratch")],
            [Move(0, 2, WHOLE, origin="scratch"), Move(1, 2, WHOLE, "sum")],
            [Move(1, 0, WHOLE, "sum", destination="scratch")],
        ],
        "non-redundant: nobody reads .* of the scratch buffer of rank 0",
    ),
    "part of a sum in scratch that nobody reads": (
        "0-1[P]",
        "2[]",
        [
            [Move(0, 0, WHOLE, destination="scratch"), Move(0, 2, RIGHT), Move(1, 2, RIGHT, "sum")],
            [Move(0, 2, LEFT, origin="scratch"), Move(1, 2, LEFT, "sum")],
        ],
        r"non-redundant: nobody reads \(\(2, 4\),\) of the scratch buffer of rank 0",
    ),
    "sending into scratch what is held": (
        "0-3[2x2: P, R]",
        "4[]",
        [[Move(0, 1, WHOLE, destination="scratch")]],
        "non-redundant: rank 1 holds",
    ),
    "sending into scratch what came into the target": (
        "0[]",
        "1-2[R]",
        [[Move(0, 1, WHOLE)], [Move(0, 1, WHOLE, destination="scratch")], [Move(1, 2, WHOLE, origin="scratch")]],
        "non-redundant: rank 1 holds",
    ),
    "sending what the receiver has in scratch": (
        "0[]",
        "1-2[R]",
        [[Move(0, 1, WHOLE, destination="scratch")], [Move(0, 1, WHOLE), Move(1, 2, WHOLE, origin="scratch")]],
        "non-redundant: rank 1 holds",
    ),
    "a term in scratch that counts twice": (
        "0-1[P]",
        "2[]",
        [
            [Move(0, 0, WHOLE, destination="scratch"), Move(1, 0, WHOLE, "sum", destination="scratch")],
            [Move(0, 2, WHOLE, origin="scratch"), Move(1, 2, WHOLE, "sum")],
        ],
        "complete: .* got",
    ),
    "an element that nobody gets": ("0[]", "1[]", [[Move(0, 1, LEFT)]], "complete: .* got"),
    "a term that is missing": ("0-1[P]", "2[]", [[Move(0, 2, WHOLE, "sum")]], "complete: .* got"),
    "a term that counts twice": (
        "0-3[2x2: R, P]",
        "4[]",
        [[Move(0, 4, WHOLE, "sum"), Move(2, 4, WHOLE, "sum"), Move(1, 4, WHOLE, "sum")]],
        "complete: .* got",
    ),
    "terms of two families": (
        "0-1[P] + 2-3[P] @ R",
        "4[]",
        [[Move(0, 4, WHOLE, "sum"), Move(3, 4, WHOLE, "sum")]],
        "complete: .* got",
    ),
    "a value in two terms": ("0[]", "1-2[P]", [[Move(0, 1, WHOLE), Move(0, 2, WHOLE)]], "complete: .* got"),
    "copies of a term that differ": (
        "0[]",
        "1-4[2x2: P, R]",
        [[Move(0, 1, WHOLE)]],
        r"complete: ranks \[1, 2\] should hold the same term",
    ),
    "terms of a sum as terms of a maximum": (
        "0-1[P]",
        "0-1[P(max)]",
        [[Move(0, 0, WHOLE), Move(1, 1, WHOLE)]],
        "complete: terms of a sum .* are spread",
    ),
    "no phases for other boxes": ("0-1[R]", "0-1[S(0)]", [], "complete: expected phases"),
    "no phases for other terms": ("0-1[R]", "0-1[P]", [], "complete: .* got"),
    "a collective of one rank": (
        "0-1[P]",
        "0-1[R]",
        [[Collective("all_reduce", (0,), (WHOLE,), (WHOLE,), "sum")]],
        "well formed: expected two or more distinct ranks",
    ),
    "an all-reduce over different boxes": (
        "0-1[P]",
        "0-1[R]",
        [[Collective("all_reduce", (0, 1), (WHOLE, WHOLE), (WHOLE, LEFT), "sum")]],
        "well formed: boxes do not fit the kind",
    ),
    "an all-reduce that does not reduce": (
        "0-1[P]",
        "0-1[R]",
        [[Collective("all_reduce", (0, 1), (WHOLE, WHOLE), (WHOLE, WHOLE))]],
        "well formed: expected the reduction sum",
    ),
    "a reduce-scatter that loses elements": (
        "0-1[P]",
        "0-1[S(0)]",
        [[Collective("reduce_scatter", (0, 1), (WHOLE, WHOLE), (LEFT, ((2, 3),)), "sum")]],
        "well formed: boxes do not fit the kind",
    ),
    "an all-gather of overlapping boxes": (
        "0-1[S(0)]",
        "0-1[R]",
        [[Collective("all_gather", (0, 1), (WHOLE, RIGHT), (WHOLE, WHOLE))]],
        "well formed: boxes do not fit the kind",
    ),
    "an all-gather that reduces": (
        "0-1[S(0)]",
        "0-1[R]",
        [[Collective("all_gather", (0, 1), (LEFT, RIGHT), (WHOLE, WHOLE), "sum")]],
        "well formed: expected combine='copy' of all_gather",
    ),
    "an all-to-all of overlapping boxes": (
        "0-1[R]",
        "0-1[S(0)]",
        [[Collective("all_to_all", (0, 1), (WHOLE, RIGHT), (LEFT, RIGHT))]],
        "well formed: boxes do not fit the kind",
    ),
    "a rank that gets nothing of a gather": (
        "0-1[S(0)]",
        "0-1[R]",
        [[Collective("all_gather", (0, 1), (LEFT, RIGHT), (WHOLE, ((0, 0),)))]],
        "well formed: expected no empty box",
    ),
    "nothing that is written in another way": (
        "0-1[P]",
        "0[]",
        [[Collective("reduce_scatter", (0, 1), (WHOLE, WHOLE), (WHOLE, EMPTY), "sum")]],
        "well formed: expected no empty box",
    ),
    "an all-to-all that drops what it takes": (
        "0-1[S(0)]",
        "0-1[S(0)]",
        [[Collective("all_to_all", (0, 1), (LEFT, RIGHT), (LEFT, ((2, 3),)))]],
        "well formed: boxes do not fit the kind",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_checker_refuses(name: str) -> None:
    source, target, phases, message = REFUSED[name]
    parsed = (Annotation.parse(source), Annotation.parse(target))
    with pytest.raises(PlanError, match=f"^reshard plan is not {message}"):
        check_reshard(ReshardPlan(*parsed, (4,), tuple(map(tuple, phases))))


def test_the_checker_refuses_a_free_dim_that_is_cut() -> None:
    parsed = (Annotation.parse("0[]"), Annotation.parse("1[]"))
    with pytest.raises(PlanError, match="free dim 0 is cut by"):
        check_reshard(ReshardPlan(*parsed, (4,), ((Move(0, 1, LEFT), Move(0, 1, RIGHT)),), (0,)))


def test_a_gather_along_two_dims_has_every_part() -> None:
    parsed = (Annotation.parse("0-3[2x2: S(0), S(1)]"), Annotation.parse("0-3[R]"))
    quarters: tuple[Box, ...] = tuple((rows, columns) for rows in (*LEFT, *RIGHT) for columns in (*LEFT, *RIGHT))
    gather = Collective("all_gather", (0, 1, 2, 3), quarters, ((*WHOLE, *WHOLE),) * 4)
    check_reshard(ReshardPlan(*parsed, (4, 4), ((gather,),)))
    three = Collective("all_gather", (0, 1, 2), quarters[:3], ((*WHOLE, *WHOLE),) * 3)
    with pytest.raises(PlanError, match="^reshard plan is not well formed: boxes do not fit the kind"):
        check_reshard(ReshardPlan(*parsed, (4, 4), ((three,),)))


RIGHT_WITH_SCRATCH = {
    "a sum on its way": (
        "0-1[P]",
        "2[]",
        [
            [Move(0, 0, WHOLE, destination="scratch"), Move(1, 0, WHOLE, "sum", destination="scratch")],
            [Move(0, 2, WHOLE, origin="scratch")],
        ],
    ),
    "a sum read in parts, by two ranks": (
        "0-1[P]",
        "2-3[S(0)]",
        [
            [Move(0, 0, WHOLE, destination="scratch"), Move(1, 0, WHOLE, "sum", destination="scratch")],
            [Move(0, 2, LEFT, origin="scratch"), Move(0, 3, RIGHT, origin="scratch")],
        ],
    ),
    "a value that a stranger passes on": (
        "0[]",
        "2[]",
        [[Move(0, 1, WHOLE, destination="scratch")], [Move(1, 2, WHOLE, origin="scratch")]],
    ),
    "a sum that its own rank takes over": (
        "0-1[P(max)]",
        "0[]",
        [
            [Move(0, 0, WHOLE, destination="scratch"), Move(1, 0, WHOLE, "max", destination="scratch")],
            [Move(0, 0, WHOLE, origin="scratch")],
        ],
    ),
}


@pytest.mark.parametrize("name", RIGHT_WITH_SCRATCH)
def test_the_checker_accepts_sums_on_their_way(name: str) -> None:
    source, target, phases = RIGHT_WITH_SCRATCH[name]
    plan = ReshardPlan(Annotation.parse(source), Annotation.parse(target), (4,), tuple(map(tuple, phases)))
    check_reshard(plan)
    assert is_right(plan)


# Corrupted plans


@st.composite
def mutants(draw: st.DrawFn, plan: ReshardPlan) -> tuple[str, ReshardPlan]:
    """Draws a corruption of a plan: an operation dropped or doubled, a box, a rank or a buffer changed."""
    phase = draw(st.integers(0, len(plan.phases) - 1))
    operations = list(plan.phases[phase])
    assume(operations)
    index = draw(st.integers(0, len(operations) - 1))
    change = draw(st.sampled_from(["drop", "double", "box", "rank", "buffer"]))
    if change == "drop":
        del operations[index]
    elif change == "double":
        operations.insert(draw(st.integers(0, len(operations))), operations[index])
    elif change == "box":
        operations[index] = draw(_other_box(operations[index], plan.shape))
    elif change == "buffer":
        origin = draw(st.sampled_from(["source", "target", "scratch"]))
        destination = {"destination": draw(st.sampled_from(["target", "scratch"]))}
        options = destination if isinstance(operations[index], Move) else {}
        operations[index] = replace(operations[index], origin=origin, **options)
    else:
        ranks = sorted({*plan.source.ranks, *plan.target.ranks, 8})
        operations[index] = draw(_other_rank(operations[index], ranks))
    assume(tuple(operations) != plan.phases[phase])
    return change, replace(plan, phases=(*plan.phases[:phase], tuple(operations), *plan.phases[phase + 1 :]))


@st.composite
def _other_box(draw: st.DrawFn, operation: Operation, shape: tuple[int, ...]) -> Operation:
    def change(box: Box) -> Box:
        assume(box)
        dim = draw(st.integers(0, len(box) - 1))
        ends = sorted(draw(st.tuples(st.integers(0, shape[dim]), st.integers(0, shape[dim]))))
        return (*box[:dim], (ends[0], ends[1]), *box[dim + 1 :])

    if isinstance(operation, Move):
        return replace(operation, box=change(operation.box))
    field = draw(st.sampled_from(["contributed", "received"]))
    boxes = list(getattr(operation, field))
    index = draw(st.integers(0, len(boxes) - 1))
    boxes[index] = change(boxes[index])
    return replace(operation, **{field: tuple(boxes)})


@st.composite
def _other_rank(draw: st.DrawFn, operation: Operation, ranks: list[int]) -> Operation:
    rank = draw(st.sampled_from(ranks))
    if isinstance(operation, Move):
        return replace(operation, **{draw(st.sampled_from(["sender", "receiver"])): rank})
    index = draw(st.integers(0, len(operation.ranks) - 1))
    return replace(operation, ranks=(*operation.ranks[:index], rank, *operation.ranks[index + 1 :]))


NODES = [None, nodes((0, 3, 5), (1, 2), (4, 6, 7))]


@settings(max_examples=400, suppress_health_check=[HealthCheck.filter_too_much])
@given(annotation_pairs(), st.booleans(), st.sampled_from(NODES), st.data())
def test_a_corrupted_plan_is_refused(
    pair: Pair, collectives: bool, topology: Topology | None, data: st.DataObject
) -> None:
    plan = plan_reshard(pair.source, pair.target, pair.shape, collectives=collectives, topology=topology)
    assume(plan.phases)
    change, mutant = data.draw(mutants(plan))
    if change in ("rank", "buffer") and _is_right_after_all(mutant):
        return
    with pytest.raises(PlanError):
        check_reshard(mutant)


def _is_right_after_all(mutant: ReshardPlan) -> bool:
    """Whether a plan moves the same values from another holder or another buffer, or uselessly."""
    try:
        return is_right(mutant)
    except (KeyError, ValueError):  # a rank without a buffer, or a box outside it
        return False
