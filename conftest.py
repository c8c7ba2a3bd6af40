"""How the tests run: which of them share a worker, and what hypothesis draws.

The tests of one file stay together, so that what its fixtures compile is compiled once. All tests that need real
processes stay together as well, so that those processes are started once and never compete with a second set.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest


def pytest_configure() -> None:
    """Draws the same examples in every run, without a time limit on one: a shared machine may be slow.

    Garbage is looked for less often: what tests share, such as traced models, makes each look long.
    """
    gc.set_threshold(50_000)
    hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts each test into the group of its file, or into `gloo`; `--dist loadgroup` keeps a group in one worker.

    Those of `gloo` come first: they are the largest group, and what is left of the others fills the other workers.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("gloo" if _is_gloo(item) else item.location[0]))
    items.sort(key=lambda item: not _is_gloo(item))


def _is_gloo(item: pytest.Item) -> bool:
    return item.get_closest_marker("gloo") is not None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: Sequence[str]) -> None:
    """Ends the run where groups are not kept: some versions of pytest and pytest-xdist do not fit, and say nothing."""
    loose = [name for name in ids if "@" not in name]
    if node.config.getvalue("dist") == "loadgroup" and loose:
        pytest.exit(
            f"--dist loadgroup does not see the groups of {len(loose)} tests, such as {loose[0]}: pytest-xdist marks "
            f"them in a way that pytest {pytest.__version__} does not know. Install the versions of constraints.txt",
            returncode=4,
        )
