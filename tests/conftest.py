"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gloo_workers import GlooPool


@pytest.fixture(scope="session")
def gloo() -> Iterator[GlooPool]:
    """Returns the pool of four real processes; they start with the first test that runs something on them."""
    pool = GlooPool(4)
    yield pool
    pool.close()
