"""The part of docs/results.md on 1,024 GPUs: what bounds a step there, and what larger schemes gain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypeAlias

from benchmarks.results_cases import VARIANTS

__all__ = ["large_section"]

Result: TypeAlias = dict[str, Any]
NAMES = {
    "published": "published",
    "": "proposed, measured schemes",
    **{name: "proposed, and " + ", ".join(schemes) for name, schemes in VARIANTS.items()},
}
TEXT = """\
## 1,024 GPUs: what bounds them, and what larger schemes gain

The published pool has tp16x64 and one unequal strategy. *Longest* is the share of the step that the longest sequence
takes alone on the replica that has it. Nobody measured the larger schemes, so their costs are analytic
(`docs/profiles.md`); context parallelism can be planned here, not trained yet, tp32 can be.
"""


def large_section(results: Sequence[Result]) -> list[str]:
    """Returns the lines of the section; none where no other pool than the proposed one was run."""
    own = sorted((result for result in results if result["longest"] == 32_768), key=lambda one: str(one["lengths"]))
    if not any(result["variant"] for result in own):
        return []
    lines = [
        "| lengths | pool | strategies taken | mean step | longest | over published |",
        "|---|---|---|---|---|---|",
    ]
    for _, group in groupby(own, key=lambda one: str(one["lengths"])):
        found = {result["variant"]: result for result in group}
        lines += [_row(found[variant], found.get("published")) for variant in NAMES if variant in found]
    return [TEXT, *lines, ""]


def _row(result: Result, published: Result | None) -> str:
    ours = _pool(result)
    taken = ", ".join(f"{name} in {count}" for name, count in Counter(ours["strategies"]).most_common())
    ratio = "-" if published is None else f"{_pool(published)['mean_ms'][0] / ours['mean_ms'][0]:.2f}"
    share = min(1.0, result["facts"]["pool"]["longest_share"])
    mean = "{:,.0f} ms ({:,.0f} to {:,.0f})".format(*ours["mean_ms"])
    cells = (result["lengths"], NAMES[result["variant"]], taken, mean, f"{share:.0%}", ratio)
    return "| " + " | ".join(cells) + " |"


def _pool(result: Result) -> Result:
    found: Result = next(one for one in result["systems"] if one["key"] == "pool")
    return found
