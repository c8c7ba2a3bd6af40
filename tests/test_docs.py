"""The examples of the documentation run."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["concepts.md", "resharding.md"])
def test_examples_of_a_page(page: str) -> None:
    failures, tried = doctest.testfile(str(DOCS / page), module_relative=False)
    assert tried > 0 and failures == 0
