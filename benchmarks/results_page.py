"""The text of docs/results.md, from the results of `benchmarks/results.py`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.results_large import large_section

__all__ = ["page"]

Result: TypeAlias = dict[str, Any]
PUBLISHED_RANGE = (1.32, 2.66)
NOTHING = 0.01
BOUND = 0.8
"""The longest sequence is named as a reason where it takes this share of a step or more."""
TITLES = {
    "7b-32gpu": "7B on 32 GPUs",
    "13b-32gpu": "13B on 32 GPUs",
    "32b-64gpu": "32B on 64 GPUs",
    "32b-1024gpu": "32B on 1,024 GPUs",
}
RANKS = {"7b-32gpu": 32, "13b-32gpu": 32, "32b-64gpu": 64, "32b-1024gpu": 1_024}

HEAD = Path(__file__).with_name("results_head.md")

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
RUNGS = ("static", "balanced", "fine", "planned", "unequal", "pool")


def page(results: Sequence[Result], num_missing: int = 0) -> str:
    """Returns the page in markdown; results are in the order of the page, `num_missing` settings were not run yet."""
    main = [result for result in results if not result["variant"]]
    if not main:
        return HEAD.read_text().format(seed="-", calibration="-", batches="none yet")
    counts = sorted({result["batches"] for result in main})
    text = HEAD.read_text().format(
        seed=main[0]["seed"], calibration=main[0]["calibration"], batches=" or ".join(map(str, counts))
    )
    if num_missing:
        text += f"\n{num_missing} settings were not run yet; `python benchmarks/results.py` runs what is missing.\n"
    lines = [text, *_totals(main), *_rungs(main), *_proposals(results)]
    lines += large_section([result for result in results if result["group"] == "32b-1024gpu"])
    for name, own in groupby(main, key=lambda result: result["group"]):
        lines += [f"## {TITLES[name]}", ""]
        for _, table in groupby(list(own), key=lambda result: (result["tokens"], result["longest"])):
            lines += _table(list(table))
    return "\n".join(lines).rstrip() + "\n"


def _system(result: Result, key: str) -> Result:
    found: Result = next(one for one in result["systems"] if one["key"] == key)
    return found


def _where(result: Result) -> str:
    return f"{result['longest'] // 1024}K context, {result['tokens']:,} tokens a step"


def _table_rows(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a table in markdown and an empty line."""
    lines = [headers, ["---"] * len(headers), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines] + [""]


def _totals(results: Sequence[Result]) -> list[str]:
    """The total gain of every setting."""
    low, high = PUBLISHED_RANGE
    rows, gains = [], []
    for result in results:
        ours, static, fine = (_system(result, key) for key in ("pool", "static", "fine"))
        value, *ends = ours["speed_up"]
        gains.append(value)
        rows.append(
            [
                TITLES[result["group"]],
                _where(result),
                result["lengths"],
                f"{value:.2f}",
                f"{ends[0]:.2f} to {ends[1]:.2f}",
                f"{static['compute_ms'] / ours['compute_ms']:.2f}",
                f"{fine['mean_ms'][0] / ours['mean_ms'][0]:.2f}",
                f"{_system(result, 'published')['speed_up'][0]:.2f}",
            ]
        )
    headers = ("model", "setting", "lengths", "speed-up", "95 %", "computation alone", "over balanced, finely packed")
    inside = sum(1 for gain in gains if low <= gain <= high)
    above = sum(1 for gain in gains if gain > high)
    return [
        "## Total gain over static",
        "",
        *_table_rows((*headers, "published algorithm"), rows),
        f"Published is a range of {low} to {high}. Of {len(gains)} settings {inside} lie in it, {above} above and "
        f"{len(gains) - inside - above} below. Each one outside is explained below its table.",
        "",
    ]


def _rungs(results: Sequence[Result]) -> list[str]:
    """What each rung gains over all settings."""
    rows = []
    for key in RUNGS:
        gains = [_system(result, key)["over_rung_before"] for result in results]
        values = [gain[0] for gain in gains]
        rows.append(
            [
                SHORT[key],
                f"x {statistics.median(values):.3f}",
                f"x {min(values):.3f} to {max(values):.3f}",
                str(sum(1 for value in values if value < 1.0 + NOTHING)),
                str(sum(1 for gain in gains if gain[2] < 1.0)),
            ]
        )
    headers = ("rung", "median over the one before", "range", "gains below 1 %", "loses, by its whole interval")
    return [
        f"## Rung by rung, {len(results)} settings",
        "",
        *_table_rows(headers, rows),
        "Each rung that gains nothing is explained below its table.",
        "",
    ]


def _proposals(results: Sequence[Result]) -> list[str]:
    """What proposing the pools took."""
    rows = []
    made: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if result.get("proposal"):
            made.setdefault((result["group"], result["variant"]), []).append(result)
    for (name, variant), own in made.items():
        found = [(result["proposal"], len(result["pool"])) for result in own]
        times = [proposal["cpu_s"] for proposal, _ in found]
        sizes = [size for _, size in found]
        rows.append(
            [
                TITLES[name] + (f", {variant.replace('-', ' ')}" if variant else ""),
                str(len(found)),
                f"{min(sizes)} to {max(sizes)}",
                str(found[0][0]["num_batches"]),
                f"{statistics.median(times):.1f}",
                f"{max(times):.1f}",
            ]
        )
    headers = ("pools", "how many", "strategies", "batches", "median CPU s", "most")
    return ["## Proposing the pools", "", *_table_rows(headers, rows)] if rows else []


def _table(results: Sequence[Result]) -> list[str]:
    """One table: systems by length sets, and what its numbers need by way of explanation."""
    rows = [
        [SHORT[one["key"]], *(_cell(_system(result, one["key"])) for result in results)]
        for one in results[0]["systems"]
    ]
    notes = [f"- {note}" for result in results for note in _notes(result)]
    title = f"### {TITLES[results[0]['group']]}: {_where(results[0])}"
    headers = ("system", *(result["lengths"] for result in results))
    return [title, "", *_table_rows(headers, rows), *notes, ""]


def _cell(one: Result) -> str:
    text = "{:,.0f} ms ({:,.0f} to {:,.0f})".format(*one["mean_ms"])
    if one["key"] == "static":
        return f"{text}, **1**, {one['layout']}"
    text += ", **{:.2f}** ({:.2f} to {:.2f})".format(*one["speed_up"])
    over = one["over_rung_before"]
    return text if over is None else text + ", x {:.3f} ({:.3f} to {:.3f})".format(*over)


def _notes(result: Result) -> list[str]:
    """Sentences on rungs that gain nothing and on a total outside the published range."""
    notes = [
        f"{result['lengths']}, {SHORT[one['key']]} {one['note']}."
        for one in result["systems"]
        if one["over_rung_before"] is not None and one["over_rung_before"][0] < 1.0 + NOTHING
    ]
    value = _system(result, "pool")["speed_up"][0]
    low, high = PUBLISHED_RANGE
    if not low <= value <= high:
        side = "above" if value > high else "below"
        notes.append(f"{result['lengths']}: {value:.2f} in all is {side} the published range. {_parts(result)}.")
    return notes


def _parts(result: Result) -> str:
    """What the total consists of: how busy the ranks are, and what rank time the same batches take."""
    static, ours = result["facts"]["static"], result["facts"]["pool"]
    busy = [
        result["facts"][key]["rank_ms"] / (RANKS[result["group"]] * _system(result, key)["compute_ms"])
        for key in ("static", "pool")
    ]
    text = (
        f"Ranks are busy {busy[0]:.0%} of a static step ({_system(result, 'static')['layout']}) and {busy[1]:.0%} of "
        f"ours, and the batches take {static['rank_ms'] / ours['rank_ms']:.2f} times the rank time there"
    )
    share = min(1.0, ours["longest_share"])
    reason = f"; the longest sequence alone takes {share:.0%} of our step"
    return text + (f"{reason}, which no dispatch shortens" if share >= BOUND else reason)
