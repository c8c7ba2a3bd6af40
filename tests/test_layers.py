"""The layers between the four packages hold, and every file keeps to the house rules that a program can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hgraph.installation import PACKAGES

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 500
FOLDERS = (*PACKAGES, "tests", "examples", "benchmarks", "docs")
SOURCES = sorted(
    path.relative_to(ROOT)
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".md", ".yaml", ".toml"}
)
MODULES = [path for path in SOURCES if path.suffix == ".py"]

# A quoted or bare path that only one machine has: /home/x, /root/x, C:\x.
ABSOLUTE_PATH = re.compile(r"(?<![\w.~/:-])(/(home|root|work|Users|mnt|data|opt)/\w|[A-Z]:\\\w)")


def test_the_contracts_between_packages_hold() -> None:
    tool = Path(sys.executable).parent / "lint-imports"
    run = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("package", "statement", "contract"),
    [
        ("hgraph", "import passes", "runtime over passes and strategies"),
        ("passes", "from strategies import dispatch", "runtime over passes and strategies"),
        ("strategies", "import runtime", "runtime over passes and strategies"),
        ("runtime", "import cvxpy", "only strategies formulate"),
        ("strategies", "import torch", "planning starts fast"),
    ],
)
def test_a_breach_of_a_contract_is_seen(tmp_path: Path, package: str, statement: str, contract: str) -> None:
    """The contracts run on four empty packages, one of which breaks one of them."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(statement if name == package else "")
    (tmp_path / "strategies" / "dispatch.py").write_text("")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    program = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1, run.stdout + run.stderr
    broken = [line for line in run.stdout.splitlines() if line.rstrip().endswith("BROKEN")]
    assert len(broken) == 1 and contract in run.stdout, run.stdout


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_a_module_says_what_it_is(path: Path) -> None:
    text = (ROOT / path).read_text()
    assert ast.get_docstring(ast.parse(text)), f"{path}: expected a docstring that says what the module is for"


@pytest.mark.parametrize("path", [path for path in MODULES if path.parts[0] in PACKAGES], ids=str)
def test_a_module_fits_in_the_head(path: Path) -> None:
    num_lines = len((ROOT / path).read_text().splitlines())
    assert num_lines <= MAX_LINES, f"{path}: expected at most {MAX_LINES} lines, got {num_lines}; split it by topic"


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name != "test_layers.py"], ids=str)
def test_no_path_of_one_machine(path: Path) -> None:
    found = [line for line in (ROOT / path).read_text().splitlines() if ABSOLUTE_PATH.search(line)]
    assert not found, f"{path}: expected no absolute path, got {found}"


def test_every_folder_of_modules_is_packaged() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setuptools["packages"]["find"]["include"] == [name for p in PACKAGES for name in (p, f"{p}.*")]
    for folder in {path.parent for path in MODULES if path.parts[0] in PACKAGES}:
        assert (ROOT / folder / "__init__.py").is_file(), (
            f"{folder}: expected an __init__.py; without it, not installed"
        )


def imported_names(path: Path) -> set[str]:
    """Returns the first parts of the modules that a file imports anywhere in it."""
    nodes = list(ast.walk(ast.parse((ROOT / path).read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.partition(".")[0] for name in names}


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["hf"]]
    declared = {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}
    known = {*sys.stdlib_module_names, *PACKAGES, *declared}
    for path in [path for path in MODULES if path.parts[0] in PACKAGES]:
        assert imported_names(path) <= known, f"{path}: imports {imported_names(path) - known}, which is not declared"


def test_every_requirement_has_a_tested_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    names = {re.split(r"[^\w.-]", requirement)[0] for requirement in requirements}
    assert names <= pinned, f"constraints.txt: no version of {sorted(names - pinned)}"
