"""Writes the page of what can be resharded, and how, anew: `python tests/reshard_table.py`.

Every row is planned, proved by `check_reshard` and counted when the page is written; `tests/test_collectives.py` says
by hand what is expected of each.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from hgraph.annotation import Annotation  # noqa: E402
from hgraph.check_reshard import check_reshard  # noqa: E402
from hgraph.reshard import lower_bound_elements, plan_reshard, reshard_bytes  # noqa: E402
from hgraph.reshard_plan import Collective, Operation, ReshardPlan  # noqa: E402
from runtime.optimizer import AdamW, ShardedAdamW  # noqa: E402

__all__ = ["PAGE", "ROWS", "kind_of", "page", "plan_of"]

PAGE = ROOT / "docs" / "resharding-table.md"
COMMAND = "python tests/reshard_table.py"

NAMES = {
    "all_gather": "all-gather",
    "all_reduce": "all-reduce",
    "all_to_all": "all-to-all",
    "local": "local slice",
    "reduce_scatter": "reduce-scatter",
    "send": "send",
}

Row = tuple[str, str, str, tuple[int, ...]]
"""What is shown, source, target, shape."""

ROWS: dict[str, list[Row]] = {
    "Equal shard maps": [
        ("nested axes and one axis", "0-3[2x2: S(0), S(0)]", "0-3[S(0)]", (8,)),
        ("explicit sizes and a balanced split", "0-2[S(0:3,2,2)]", "0-2[S(0)]", (7,)),
        ("a union and one subgroup", "0[] + 1[] @ S(0)", "0-1[S(0)]", (5,)),
        ("terms named otherwise", "0-1[P]", "0[] + 1[] @ P", (4,)),
    ],
    "A replica is on the rank": [
        ("a slice of it", "0-3[R]", "0-3[S(0)]", (7,)),
        ("a slice along both dims", "0-3[R]", "0-3[2x2: S(1), S(0)]", (5, 7)),
        ("a further cut", "0-3[2x2: R, S(0)]", "0-3[2x2: S(1), S(0)]", (5, 7)),
        ("into one term of a partial", "0-1[R]", "0-1[P]", (4,)),
    ],
    "Partial to replicate": [
        ("one axis", "0-3[P]", "0-3[R]", (5, 3)),
        ("maximum", "0-3[P(max)]", "0-3[R]", (5, 3)),
        ("ranks in any order", "3,1,0,2[P]", "2,3,0,1[R]", (5, 3)),
        ("a group per row of a mesh", "0-3[2x2: S(0), P]", "0-3[2x2: S(0), R]", (5, 4)),
        ("a group per column", "0-3[2x2: P, S(1)]", "0-3[2x2: R, S(1)]", (4, 5)),
        ("the middle one of three axes", "0-7[2x2x2: S(0), P, S(1)]", "0-7[2x2x2: S(0), R, S(1)]", (5, 5)),
        ("fewer terms", "0-3[P]", "0-3[2x2: P, R]", (4,)),
        ("two ranks hold each of two terms", "0-3[2x2: R, P]", "0-3[R]", (4,)),
        ("two ranks hold each of three terms", "0-5[2x3: R, P]", "0-5[R]", (6,)),
        ("the same, but there is nothing to divide", "0-5[2x3: R, P]", "0-5[R]", (1,)),
        ("two subgroups hold the sum each", "0-1[P] + 2-3[P] @ R", "0-3[R]", (4,)),
        ("each half on both ranks of its row, to all", "0-3[2x2: S(0), P]", "0-3[R]", (4, 4)),
        ("more ranks", "0-1[P]", "0-2[R]", (4,)),
        ("some of the ranks", "0-3[P]", "0-1[R]", (4,)),
    ],
    "Partial to shard": [
        ("dim 0", "0-3[P]", "0-3[S(0)]", (8, 3)),
        ("dim 1, uneven", "0-3[P]", "0-3[S(1)]", (5, 7)),
        ("maximum, dim 2", "0-3[P(max)]", "0-3[S(2)]", (2, 3, 6)),
        ("explicit sizes", "0-2[P]", "0-2[S(0:1,4,2)]", (7,)),
        ("fewer elements than ranks", "0-3[P]", "0-3[S(0)]", (3,)),
        ("ranks in any order", "3,1,0,2[P]", "0,1,2,3[S(0)]", (6,)),
        ("along two dims", "0-3[P]", "0-3[2x2: S(1), S(0)]", (5, 5)),
        ("within the rows of a mesh", "0-3[2x2: S(0), P]", "0-3[2x2: S(0), S(1)]", (5, 4)),
        ("within rows, the same dim again", "0-3[2x2: S(0), P]", "0-3[2x2: S(0), S(0)]", (8,)),
        ("some of the ranks", "0-3[P]", "0-1[S(0)]", (5,)),
        ("more ranks: the further ones by messages", "0-1[P]", "0-2[S(0)]", (6,)),
        ("each part on two ranks", "0-3[P]", "0-3[2x2: S(0), R]", (8,)),
        ("two ranks hold each of two terms", "0-3[2x2: R, P]", "0-3[2x2: R, S(0)]", (4,)),
        ("two ranks hold each of three terms", "0-5[2x3: R, P]", "0-5[2x3: R, S(0)]", (6, 4)),
        ("the same, to disjoint parts", "0-5[2x3: R, P]", "0-5[S(0)]", (6, 4)),
    ],
    "Shard to replicate": [
        ("dim 0", "0-3[S(0)]", "0-3[R]", (8,)),
        ("dim 1, uneven", "0-3[S(1)]", "0-3[R]", (5, 7)),
        ("dim 2, explicit sizes", "0-2[S(2:1,4,2)]", "0-2[R]", (2, 3, 7)),
        ("ranks in any order", "2,0,3,1[S(1)]", "3,2,1,0[R]", (5, 7)),
        ("nested axes, the inner one", "0-3[2x2: S(0), S(0)]", "0-3[2x2: S(0), R]", (6,)),
        ("both dims, the inner axis", "0-3[2x2: S(0), S(1)]", "0-3[2x2: S(0), R]", (5, 5)),
        ("both dims, the outer axis", "0-3[2x2: S(0), S(1)]", "0-3[2x2: R, S(1)]", (5, 5)),
        ("nested axes, both", "0-3[2x2: S(0), S(0)]", "0-3[R]", (6,)),
        ("both dims, both axes", "0-3[2x2: S(0), S(1)]", "0-3[R]", (5, 5)),
        ("two ranks hold each part", "0-5[2x3: R, S(0)]", "0-5[R]", (7,)),
        ("one rank holds all already", "0-1[S(0)] + 2[] @ R", "0-2[R]", (4,)),
        ("fewer elements than ranks", "0-2[S(0)]", "0-2[R]", (2,)),
        ("more ranks", "0-1[S(0)]", "0-2[R]", (4,)),
    ],
    "Shard of one dim to shard of another": [
        ("dim 0 to 1", "0-3[S(0)]", "0-3[S(1)]", (8, 8)),
        ("dim 2 to 0, uneven", "0-2[S(2)]", "0-2[S(0)]", (5, 2, 7)),
        ("explicit sizes", "0-1[S(0:1,4)]", "0-1[S(1:3,1)]", (5, 4)),
        ("ranks in any order", "2,0,3,1[S(0)]", "3,1,2,0[S(1)]", (5, 7)),
        ("fewer rows than ranks", "0-3[S(0)]", "0-3[S(1)]", (3, 8)),
        ("fewer columns than ranks", "0-3[S(0)]", "0-3[S(1)]", (8, 3)),
        ("within the rows of a mesh", "0-3[2x2: S(0), S(1)]", "0-3[2x2: S(0), S(0)]", (6, 5)),
        ("both dims to one of them", "0-3[2x2: S(0), S(1)]", "0-3[S(0)]", (8, 5)),
        ("two ranks hold each part, before and after", "0-3[2x2: R, S(0)]", "0-3[2x2: R, S(1)]", (4, 4)),
        ("two ranks hold each part before", "0-3[2x2: R, S(0)]", "0-3[S(1)]", (4, 8)),
        ("two ranks hold each part after", "0-3[S(0)]", "0-3[2x2: R, S(1)]", (8, 4)),
        ("more ranks", "0-1[S(0)]", "0-3[S(1)]", (4, 8)),
        ("some of the ranks", "0-3[S(0)]", "0-1[S(1)]", (8, 4)),
        ("rows on some, all on the others", "0-3[S(1)]", "0-1[S(0)] + 2-3[R] @ R", (4, 8)),
    ],
    "Same boxes, other ranks": [
        ("a shard", "0-1[S(0)]", "2-3[S(0)]", (5,)),
        ("ranks swapped", "0-1[S(0)]", "1,0[S(0)]", (4,)),
        ("two replicas to two others", "0-1[R]", "2-3[R]", (4,)),
        ("axes swapped", "0-3[2x2: S(0), S(1)]", "0-3[2x2: S(1), S(0)]", (4, 4)),
    ],
    "SplitAR: terms in subgroups with other splits": [
        ("2 against 1", "0-1[S(0)] + 2[] @ P", "0-1[S(0)] + 2[] @ R", (4, 4)),
        ("3 against 2", "0-2[S(0)] + 3-4[S(0)] @ P", "0-2[S(0)] + 3-4[S(0)] @ R", (6, 2)),
        ("16 against 8", "0-15[S(0)] + 16-23[S(0)] @ P", "0-15[S(0)] + 16-23[S(0)] @ R", (32,)),
        ("2 against twice 1", "0-1[S(0)] + 2[] + 3[] @ P", "0-1[S(0)] + 2[] + 3[] @ R", (4, 6)),
        ("maximum, uneven", "0-1[S(1)] + 2-4[S(1)] @ P(max)", "0-1[S(1)] + 2-4[S(1)] @ R", (3, 7)),
        ("ranks in any order", "4,1[S(0)] + 0,3,2[S(0)] @ P", "4,1[S(0)] + 0,3,2[S(0)] @ R", (6,)),
        ("splits of two dims", "0-1[S(0)] + 2-3[S(1)] @ P", "0-1[S(0)] + 2-3[S(1)] @ R", (4, 4)),
        ("terms inside a subgroup too", "0-3[2x2: S(0), P] + 4[] @ P", "0-3[2x2: S(0), R] + 4[] @ R", (4,)),
        ("a term on two ranks", "0-1[R] + 2[] @ P", "0-1[R] + 2[] @ R", (4,)),
    ],
    "SplitRS": [
        ("2 against 1", "0-1[S(0)] + 2[] @ P", "0-1[S(0)] + 2[] @ S(1)", (4, 4)),
        ("3 against 2", "0-2[S(0)] + 3-4[S(0)] @ P", "0-2[S(0)] + 3-4[S(0)] @ S(1)", (6, 4)),
        ("16 against 8", "0-15[S(0)] + 16-23[S(0)] @ P", "0-15[S(0)] + 16-23[S(0)] @ S(1)", (32, 2)),
        ("2 against twice 1", "0-1[S(0)] + 2[] + 3[] @ P", "0-1[S(0)] + 2[] + 3[] @ S(1)", (4, 6)),
        ("maximum, uneven", "0-1[S(1)] + 2-4[S(1)] @ P(max)", "0-1[S(1)] + 2-4[S(1)] @ S(0)", (3, 7)),
        ("ranks in any order", "4,1[S(0)] + 0,3,2[S(0)] @ P", "4,1[S(0)] + 0,3,2[S(0)] @ S(1)", (6, 4)),
        ("along the dim that is split", "0-1[S(0)] + 2[] @ P", "0-1[S(0)] + 2[] @ S(0)", (8,)),
    ],
    "SplitAG": [
        ("2 against 1", "0-1[S(0)] + 2[] @ S(1)", "0-1[S(0)] + 2[] @ R", (4, 4)),
        ("3 against 2", "0-2[S(0)] + 3-4[S(0)] @ S(1)", "0-2[S(0)] + 3-4[S(0)] @ R", (6, 4)),
        ("16 against 8", "0-15[S(0)] + 16-23[S(0)] @ S(1)", "0-15[S(0)] + 16-23[S(0)] @ R", (32, 2)),
        ("2 against twice 1", "0-1[S(0)] + 2[] + 3[] @ S(1)", "0-1[S(0)] + 2[] + 3[] @ R", (4, 6)),
        ("uneven", "0-1[S(1)] + 2-4[S(1)] @ S(0)", "0-1[S(1)] + 2-4[S(1)] @ R", (3, 7)),
        ("ranks in any order", "4,1[S(0)] + 0,3,2[S(0)] @ S(1)", "4,1[S(0)] + 0,3,2[S(0)] @ R", (6, 4)),
        ("a copy per subgroup, 3 against 2", "0-2[S(0)] + 3-4[S(0)] @ R", "0-4[R]", (6,)),
    ],
    "Everything else": [
        ("nested and flat splits that disagree", "0-3[2x2: S(0), S(0)]", "0-3[S(0)]", (6,)),
        ("neighbours alone exchange", "0-2[S(0:3,2,2)]", "0-2[S(0:2,2,3)]", (7,)),
        ("parts gathered elsewhere", "0-3[S(0)]", "0-3[2x2: R, S(0)]", (8,)),
        ("overlapping parts", "0,2[S(0:4,2)] + 3,1[S(0:2,4)] @ R", "0-1[R]", (6,)),
        ("a reduce-scatter with a gap", "0-1[P]", "0,2,1[S(0:2,1,2)]", (5,)),
        ("terms and receivers on other ranks", "0-1[P]", "2-3[R]", (4,)),
        ("terms to one rank", "0-2[P]", "0[]", (4,)),
        ("a sum into terms of a maximum", "0-1[P]", "0-1[P(max)]", (4,)),
        ("one rank to all", "0[]", "0-2[R]", (4,)),
    ],
}


def plan_of(source: str, target: str, shape: Sequence[int], *, collectives: bool = True) -> ReshardPlan:
    """Returns the plan of a row."""
    return plan_reshard(Annotation.parse(source), Annotation.parse(target), shape, collectives=collectives)


def kind_of(operation: Operation) -> str:
    """Returns the kind of an operation: a move is `send`, or `local` where it stays on the rank."""
    if isinstance(operation, Collective):
        return operation.kind
    return "local" if operation.sender == operation.receiver else "send"


def page() -> str:
    """Returns the text of the page."""
    parts = [
        f"<!-- Generated: `{COMMAND}` writes it anew. -->\n\n# What can be resharded, and how\n\n"
        "Everything: any two annotations of one shape have a plan. This page shows which operations it has, row by\n"
        "row of the forms that layouts take. `+` parts operations that run together, *then* phases. *Moved* counts\n"
        "the elements that cross from rank to rank, *least* is the lower bound on it (`lower_bound_elements`; a\n"
        "target of terms may need more). How plans are made: [resharding](resharding.md).\n"
    ]
    for section, rows in ROWS.items():
        parts.append(f"\n## {section}\n")
        parts.append("| | from | to | shape | operations | moved | least |\n|---|---|---|---|---|---|---|")
        parts.extend(map(_line, rows))
    parts.append(f"\n## Optimizers\n\n{_optimizers()}")
    return "\n".join(parts) + "\n"


def _line(row: Row) -> str:
    name, source, target, shape = row
    plan = plan_of(source, target, shape)
    check_reshard(plan)
    moved = sum(reshard_bytes(plan, 1).values())
    least = lower_bound_elements(plan.source, plan.target, shape)
    lengths = " x ".join(map(str, shape))
    return f"| {name} | `{source}` | `{target}` | {lengths} | {_operations(plan)} | {moved} | {least} |"


def _operations(plan: ReshardPlan) -> str:
    if plan.is_nothing:
        return "none"
    return ", *then* ".join(" + ".join(_texts(phase)) for phase in plan.phases)


def _texts(phase: Sequence[Operation]) -> list[str]:
    counts: Counter[tuple[str, str]] = Counter()
    for operation in phase:
        size = f" of {len(operation.ranks)}" if isinstance(operation, Collective) else ""
        counts[kind_of(operation), size] += 1
    return [
        f"{NAMES[kind]}{size}" if count == 1 else f"{count} {NAMES[kind]}s{size}"
        for (kind, size), count in sorted(counts.items())
    ]


def _optimizers() -> str:
    """Returns a table of the state of every optimizer there is, by how it travels."""
    shape = (3, 2)
    state = ShardedAdamW(AdamW(), {"weight": torch.zeros(shape)}).state_dict()
    lines = [
        "Each has its state in the optimizer layout, any annotation of the pool's file, and keeps it there when the",
        "strategy changes. A checkpoint saves boxes; a run with another layout reads those that it needs.\n",
        "| optimizer | state | resharded |\n|---|---|---|",
    ]
    for key, value in state.items():
        is_tensor = isinstance(value, dict) and tuple(value["weight"].shape) == shape
        how = "as the parameter: every row above" if is_tensor else "one number, the same on every rank"
        lines.append(f"| `{AdamW.__name__}` | `{key}` | {how} |")
    return "\n".join(lines)


def main() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
