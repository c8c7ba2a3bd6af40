"""The page of results is what its data make of it, and what it says of them is true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.results import PAGE, page_text, stored
from benchmarks.results_cases import Case, cases
from benchmarks.results_page import page
from hgraph.strategy_file import load_pool

SHOWN = [case for case in cases() if case.name in stored()]


def test_the_page_is_made_from_the_stored_results() -> None:
    assert PAGE.read_text() == page_text(), "run `python benchmarks/results.py --page`"


def test_every_setting_was_run_on_the_same_batches_as_its_group() -> None:
    store = stored()
    for group in {case.group.name for case in SHOWN}:
        own = [store[case.name] for case in SHOWN if case.group.name == group]
        assert len({(one["batches"], one["calibration"], one["seed"]) for one in own}) == 1


@pytest.mark.parametrize("case", SHOWN[:: max(1, len(SHOWN) // 6)], ids=lambda case: case.name)
def test_results_are_of_the_pools_that_lie_beside_them(case: Case) -> None:
    assert stored()[case.name]["pool"] == [strategy.name for strategy in load_pool(case.pool).strategies]


def system(key: str, mean_ms: float, static_ms: float, before_ms: float | None, note: str = "") -> dict[str, Any]:
    def ratio(other_ms: float) -> list[float]:
        return [other_ms / mean_ms] * 3

    return {
        "key": key,
        "layout": f"layout of {key}",
        "mean_ms": [mean_ms] * 3,
        "compute_ms": mean_ms,
        "speed_up": ratio(static_ms),
        "over_rung_before": None if before_ms is None else ratio(before_ms),
        "note": note,
        "strategies": [key],
    }


def test_a_rung_that_gains_nothing_and_a_total_outside_are_explained() -> None:
    """Static 1,000 ms at half of 32 ranks' time, ours 800 ms at all of it: as much rank time in 1.25 times the time."""
    times_ms = {
        "padded": 1000,
        "static": 1000,
        "balanced": 900,
        "fine": 900,
        "planned": 900,
        "unequal": 850,
        "pool": 800,
    }
    rungs = list(times_ms)
    systems = [
        system(key, times_ms[key], 1000, times_ms[rungs[at - 1]] if at else None, "gains nothing: because")
        for at, key in enumerate(rungs)
    ]
    facts = {
        "static": {"rank_ms": 32 * 500.0, "longest_share": 0.2},
        "pool": {"rank_ms": 32 * 800.0, "longest_share": 0.9},
    }
    result = {
        "group": "7b-32gpu", "lengths": "web-docs", "longest": 16_384, "tokens": 100_000, "variant": "", "batches": 2,
        "calibration": 1, "seed": 0, "pool": ["one"], "proposal": None, "facts": facts,
        "systems": [*systems, system("published", 900, 1000, None)],
    }  # fmt: skip
    text = page([result], 3)
    assert "3 settings were not run yet" in text
    assert "- web-docs, static gains nothing: because." in text
    assert "- web-docs, + fine-grained packing gains nothing: because." in text
    assert "- web-docs, + balanced dispatch" not in text
    assert "1.25 in all is below the published range. Ranks are busy 50% of a static step (layout of static)" in text
    assert "and 100% of ours, and the batches take 0.62 times the rank time there" in text
    assert "the longest sequence alone takes 90% of our step, which no dispatch shortens." in text
    assert "Of 1 settings 0 lie in it, 0 above and 1 below." in text


def test_the_page_is_linked() -> None:
    assert "docs/results.md" in (Path(__file__).parent.parent / "README.md").read_text()
