"""How the tests run: which of them share a worker, and what hypothesis draws.

The tests of one file stay together, so that what its fixtures compile is compiled once. All tests that need real
processes stay together as well, so that those processes are started once and never compete with a second set.
"""

from __future__ import annotations

import hypothesis
import pytest


def pytest_configure() -> None:
    """Draws the same examples in every run, without a time limit on one: a shared machine may be slow."""
    hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts each test into the group of its file, or into `gloo`; `--dist loadgroup` keeps a group in one worker."""
    for item in items:
        if item.get_closest_marker("xdist_group") is not None:
            continue
        group = "gloo" if item.get_closest_marker("gloo") is not None else item.location[0]
        item.add_marker(pytest.mark.xdist_group(group))
