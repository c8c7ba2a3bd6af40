# ruff: noqa: E501 (the tables of a Markdown page have long lines)
"""The text of docs/results.md, from the results of `benchmarks/results.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypeAlias

__all__ = ["page"]

Result: TypeAlias = dict[str, Any]
PUBLISHED_RANGE = (1.32, 2.66)
NOTHING = 0.01
TITLES = {
    "7b-32gpu": "7B on 32 GPUs",
    "13b-32gpu": "13B on 32 GPUs",
    "32b-64gpu": "32B on 64 GPUs",
    "32b-1024gpu": "32B on 1,024 GPUs",
}

HEAD = """# Results of simulation

Made by `python benchmarks/results.py`; nothing here was measured on GPUs of these sizes. Costs are the published ones of
LLaMA 7B, 13B and 32B on A800-80GB (`docs/profiles.md`), the cluster is `8x8-a800` with as many nodes as it takes, lengths
are the four samples that come along. Batches are drawn with seed {seed}: {calibration} to choose by, then the timed ones
({batches}; the same for all systems). Longer sequences are cut to the context window. The planner gives its first checked
plan, without integer programs. Our pools were proposed at 32K for each length set, before these batches were drawn, and
serve 16K as well.

A step is simulated with its messages between stages and with its bridges, counted by bytes (what `plan_bridge` plans
takes 1.1 to 1.2 times as long at 64 GPUs), hidden behind computation as far as order allows. Intervals are 95 %, by
bootstrap over batches.

## What is compared

| system | what it does |
|---|---|
| padded rows | a row per sequence, in order of the data, padded to the longest of its micro-batch |
| padded packs | packs of the context window, filled up with padding |
| static | the reference: the one layout (tp, pp) of equal replicas that holds the context window and is best on the calibration batches; first-fit-decreasing packs, dealt in turn |
| + balanced dispatch | longest first to the replica with least work, then packs of the context window |
| + fine-grained packing | as many balanced micro-batches as take least time, up to the memory limit |
| + planner | our planner on the same equal replicas |
| + unequal replicas | one strategy of the pool, or of equal replicas, for all steps |
| + choice per step | our planner over the pool |
| per batch | the best layout of equal replicas for each batch, balanced and finely packed |
| in turn (HotSPa-like) | several layouts of equal replicas within a step, by length, with switches (Ge et al., SOSP 2024) |
| published algorithm | two stages and selection as arXiv 2412.07894 describes them, on the published pool; on 43 published batches it takes the same strategy as the published code in 37, and its flow times are 1.5 % lower on average |

Every rung has its own choice of a layout where it has one. Cells: mean step time, speed-up over static, and over the rung
before.
"""

SHORT = {
    "rows": "padded rows",
    "padded": "padded packs",
    "static": "static",
    "balanced": "+ balanced dispatch",
    "fine": "+ fine-grained packing",
    "planned": "+ planner",
    "unequal": "+ unequal replicas",
    "pool": "+ choice per step",
    "per-batch": "per batch",
    "in-turn": "in turn (HotSPa-like)",
    "published": "published algorithm",
}


def page(results: Sequence[Result]) -> str:
    """Returns the page in markdown; results are in the order of the page."""
    main = [result for result in results if not result["variant"]]
    if not main:
        return HEAD.format(seed="-", calibration="-", batches="none yet")
    counts = sorted({result["batches"] for result in main})
    text = HEAD.format(seed=main[0]["seed"], calibration=main[0]["calibration"], batches=" or ".join(map(str, counts)))
    lines = [text, *_totals(main)]
    for name, own in groupby(main, key=lambda result: result["group"]):
        lines += [f"## {TITLES[name]}", ""]
        for _, table in groupby(list(own), key=lambda result: (result["tokens"], result["longest"])):
            lines += _table(list(table))
    lines += _large([result for result in results if result["group"] == "32b-1024gpu"])
    return "\n".join(lines).rstrip() + "\n"


def _system(result: Result, key: str) -> Result | None:
    return next((one for one in result["systems"] if one["key"] == key), None)


def _where(result: Result) -> str:
    return f"{result['longest'] // 1024}K context, {result['tokens']:,} tokens a step"


def _totals(results: Sequence[Result]) -> list[str]:
    """The total gain of every setting."""
    low, high = PUBLISHED_RANGE
    lines = ["## Total gain over static", ""]
    lines += [
        "| model | setting | lengths | speed-up | 95 % | computation alone | over balanced, finely packed | published algorithm |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    gains = []
    for result in results:
        ours, static, fine = (_system(result, key) for key in ("pool", "static", "fine"))
        published = _system(result, "published")
        assert ours and static and fine and published
        value, *ends = ours["speed_up"]
        gains.append(value)
        lines.append(
            f"| {TITLES[result['group']]} | {_where(result)} | {result['lengths']} | {value:.2f} | {ends[0]:.2f} to "
            f"{ends[1]:.2f} | {static['compute_ms'] / ours['compute_ms']:.2f} | "
            f"{fine['mean_ms'][0] / ours['mean_ms'][0]:.2f} | {published['speed_up'][0]:.2f} |"
        )
    inside = sum(1 for gain in gains if low <= gain <= high)
    above = sum(1 for gain in gains if gain > high)
    lines += [
        "",
        f"Published is a range of {low} to {high}. Of {len(gains)} settings {inside} lie in it, {above} above and "
        f"{len(gains) - inside - above} below. Each one outside is explained below its table.",
        "",
    ]
    return lines


def _table(results: Sequence[Result]) -> list[str]:
    """One table: systems by length sets, and what its numbers need by way of explanation."""
    lines = [f"### {TITLES[results[0]['group']]}: {_where(results[0])}", ""]
    lines += [
        "| system | " + " | ".join(result["lengths"] for result in results) + " |",
        "|---|" + "---|" * len(results),
    ]
    for one in results[0]["systems"]:
        cells = [_cell(_system(result, one["key"])) for result in results]
        lines.append(f"| {SHORT[one['key']]} | " + " | ".join(cells) + " |")
    lines += ["", *(f"- {note}" for result in results for note in _notes(result)), ""]
    return lines


def _cell(one: Result | None) -> str:
    assert one is not None
    mean, low, high = one["mean_ms"]
    text = f"{mean:,.0f} ms ({low:,.0f} to {high:,.0f})"
    if one["key"] == "static":
        return f"{text}, **1**, {one['layout']}"
    value, low, high = one["speed_up"]
    text += f", **{value:.2f}** ({low:.2f} to {high:.2f})"
    return text if one["over_rung_before"] is None else f"{text}, x {one['over_rung_before'][0]:.3f}"


def _notes(result: Result) -> list[str]:
    """Sentences on rungs that gain nothing and on a total outside the published range."""
    notes = []
    for one in result["systems"]:
        before = one["over_rung_before"]
        if before is not None and before[0] < 1.0 + NOTHING:
            notes.append(f"{result['lengths']}, {SHORT[one['key']]} {one['note']}.")
    ours, static = _system(result, "pool"), _system(result, "static")
    assert ours and static
    value = ours["speed_up"][0]
    low, high = PUBLISHED_RANGE
    if low <= value <= high:
        return notes
    rungs = [one for one in result["systems"] if one["over_rung_before"] is not None and one["key"] != "static"]
    steps = ", ".join(f"{SHORT[one['key']]} x {one['over_rung_before'][0]:.2f}" for one in rungs)
    share = min(1.0, result["longest_share"]["pool"])
    why = (
        f"the longest sequence alone takes {share:.0%} of our step, which no dispatch shortens"
        if share >= 0.8
        else (
            f"static ({static['layout']}) is that far from balance: the longest sequence takes {share:.0%} of our step"
        )
    )
    side = "above" if value > high else "below"
    notes.append(f"{result['lengths']}: {value:.2f} in all is {side} the published range: {steps}; {why}.")
    return notes


def _lengths(result: Result) -> str:
    return str(result["lengths"])


def _large(results: Sequence[Result]) -> list[str]:
    """What bounds 1,024 GPUs, and what larger schemes for the longest sequences would gain."""
    own = [result for result in results if result["longest"] == 32_768]
    if not any(result["variant"] for result in own):
        return []
    lines = ["## 1,024 GPUs: what bounds them, and what larger schemes would gain", ""]
    lines += [
        "The published pool has (16,1) x 64 and one unequal strategy. *Longest* is the share of the step that the longest "
        "sequence takes alone. Larger schemes were measured by nobody; their costs are analytic (`docs/profiles.md`), and "
        "context parallelism can be planned here, not trained yet.",
        "",
        "| lengths | pool | strategies taken | mean step | longest | static over it |",
        "|---|---|---|---|---|---|",
    ]
    names = {"published": "published", "": "proposed, measured schemes", "larger-schemes": "proposed, larger schemes"}
    for lengths, group in groupby(
        sorted(own, key=lambda result: result["lengths"]), key=lambda result: result["lengths"]
    ):
        found = {result["variant"]: result for result in group}
        static = _system(found[""], "static") if "" in found else None
        for variant in ("published", "", "larger-schemes"):
            if variant not in found:
                continue
            ours = _system(found[variant], "pool")
            assert ours is not None
            taken = ", ".join(f"{name} in {count}" for name, count in Counter(ours["strategies"]).most_common())
            ratio = "-" if static is None else f"{static['mean_ms'][0] / ours['mean_ms'][0]:.2f}"
            share = min(1.0, found[variant]["longest_share"]["pool"])
            lines.append(
                f"| {lengths} | {names[variant]} | {taken} | {ours['mean_ms'][0]:,.0f} ms | {share:.0%} | {ratio} |"
            )
    return [*lines, ""]
