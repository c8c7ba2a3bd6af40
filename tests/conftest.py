"""Fixtures that several test files share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.captures import share_captures
from tests.gloo_workers import GlooPool


def pytest_configure() -> None:
    share_captures()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the files of tests/golden")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Returns what compares a text with tests/golden/<name of the test>.txt, or rewrites it with --update-golden."""
    name = re.sub(r"[^\w.-]+", "_", request.node.name).strip("_")
    path = Path(__file__).parent / "golden" / f"{name}.txt"
    again = f"pytest {request.node.path.name} -k {request.node.originalname} --update-golden"

    def compare(text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.write_text(text)
            return
        assert path.exists(), f"{path} is missing; write it with: {again}"
        assert text == path.read_text(), f"differs from {path}; if it should, rewrite it with: {again}"

    return compare


@pytest.fixture(scope="session")
def gloo() -> Iterator[GlooPool]:
    """Returns the pool of four real processes; they start with the first test that runs something on them."""
    pool = GlooPool(4)
    yield pool
    pool.close()
