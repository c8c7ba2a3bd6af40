"""The page of results is what its data make of it, and what it says of them is true."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.results import PAGE, page_text, stored
from benchmarks.results_cases import Case, cases
from hgraph.strategy_file import load_pool

SHOWN = [case for case in cases() if case.name in stored()]


def test_the_page_is_made_from_the_stored_results() -> None:
    assert PAGE.read_text() == page_text(), "run `python benchmarks/results.py --page`"


def test_every_setting_was_run_on_the_same_batches_as_its_group() -> None:
    store = stored()
    assert [case.name for case in cases() if case.name not in store] == []
    for group in {case.group.name for case in SHOWN}:
        own = [store[case.name] for case in SHOWN if case.group.name == group]
        assert len({(one["batches"], one["calibration"], one["seed"]) for one in own}) == 1


@pytest.mark.parametrize("case", SHOWN[:: max(1, len(SHOWN) // 6)], ids=lambda case: case.name)
def test_results_are_of_the_pools_that_lie_beside_them(case: Case) -> None:
    assert stored()[case.name]["pool"] == [strategy.name for strategy in load_pool(case.pool).strategies]


def test_the_page_is_linked() -> None:
    assert "docs/results.md" in (Path(__file__).parent.parent / "README.md").read_text()
