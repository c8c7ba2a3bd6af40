"""The examples of the documentation run."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

from strategies import bound_program, integer_program

DOCS = Path(__file__).parent.parent / "docs"
PLANNER_MODULES = (
    "hgraph.check_plan",
    "hgraph.plan",
    "hgraph.profile",
    "hgraph.simulate",
    "strategies.bound",
    "strategies.bound_program",
    "strategies.dispatch",
    "strategies.fleet",
    "strategies.integer_program",
    "strategies.local_search",
    "strategies.options",
    "strategies.packing",
    "strategies.planner",
    "strategies.schedule_cuts",
    "strategies.search",
    "strategies.shapes",
)
# Letters of formulas that are written as code.
SYMBOLS = {"T"}


@pytest.mark.parametrize("page", ["concepts.md", "resharding.md"])
def test_examples_of_a_page(page: str) -> None:
    failures, tried = doctest.testfile(str(DOCS / page), module_relative=False)
    assert tried > 0 and failures == 0


def _names(module: ModuleType) -> set[str]:
    """Returns the names a module defines, and those of its classes' attributes and fields."""
    names = set(vars(module))
    for value in vars(module).values():
        if isinstance(value, type):
            names |= set(vars(value)) | set(getattr(value, "__annotations__", {}))
            names |= {f"{value.__name__}.{name}" for name in {*vars(value), *getattr(value, "__annotations__", {})}}
    return names


def test_names_in_the_planner_page_are_those_of_the_code() -> None:
    text = (DOCS / "planner.md").read_text(encoding="utf-8")
    prose = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    found = set(re.findall(r"`([A-Za-z_][\w./]*)`", prose))
    paths = {name for name in found if "/" in name}
    assert paths and all((DOCS.parent / path).exists() for path in paths)
    modules = [importlib.import_module(name) for name in PLANNER_MODULES]
    known = set().union(*map(_names, modules)) | {f"{m.__name__}.{name}" for m in modules for name in vars(m)}
    named = {name for name in found - paths if "_" in name or "." in name or name[0].isupper()}
    assert named - known - SYMBOLS == set()
    assert len(named & known) >= 30


def test_numbers_in_the_planner_page_are_those_of_the_code() -> None:
    text = (DOCS / "planner.md").read_text(encoding="utf-8")
    assert f"Beyond {integer_program.MAX_COUNTS} counts" in text
    assert f"{bound_program.NUM_GROUPS} groups of classes" in text
