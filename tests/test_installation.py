"""The front door: quick, lazy, and clear about what hides one of our packages."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest

import hgraph
import hgraph.installation
from hgraph.installation import InstallationError, check_installation

ROOT = Path(__file__).resolve().parent.parent


def python(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs `program` as a script in `folder`, which Python then searches first."""
    (folder / "script.py").write_text(program)
    command = [sys.executable, "script.py"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_the_packages_of_this_installation_lie_together() -> None:
    check_installation()


def test_import_takes_up_neither_torch_nor_the_packages_above(tmp_path: Path) -> None:
    program = """
import sys
import hgraph
assert "AdamW" in dir(hgraph)
hgraph.Annotation, hgraph.Pool, hgraph.Shard
heavy = {"torch", "cvxpy", "runtime", "passes", "strategies", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    run = python(program, tmp_path)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", sorted(hgraph._MODULE_OF))
def test_a_public_name_is_what_its_module_defines(name: str) -> None:
    module = import_module(hgraph._MODULE_OF[name])
    value = getattr(hgraph, name)
    assert value is getattr(module, name)
    assert not isinstance(value, types.ModuleType), f"a module hgraph/{name}.py hides the public name {name}"


@pytest.mark.parametrize("package", ["hgraph.data", "runtime.corpus"])
def test_no_module_hides_a_public_name_of_its_package(package: str) -> None:
    front = import_module(package)
    modules = {module.name for module in pkgutil.iter_modules(front.__path__)}
    assert not modules & set(front.__all__)
    for name in front.__all__:
        assert getattr(front, name) is not None
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'pakc'; it has "):
        front.pakc  # noqa: B018


def test_what_a_run_is_asked_with_is_read_without_torch(tmp_path: Path) -> None:
    run = python("import sys, runtime.config, runtime.checkpoint.resume, runtime.launch\nprint(*sys.modules)", tmp_path)
    assert not {"torch", "cvxpy"} & set(run.stdout.split()), run.stderr


def test_the_solver_is_imported_where_a_program_is_built_and_not_before(tmp_path: Path) -> None:
    program = """
import sys
import strategies.explain, strategies.least_load, strategies.one_more, strategies.propose, strategies.service
from strategies.planner import Planner
from tests.planner_reference import batch, laptop
from strategies.options import PlannerOptions

lengths = batch(5, 3_000, 1_000)
plan = Planner(*laptop(), PlannerOptions(program=False)).plan(lengths)
assert plan.gap > 0 and not {"cvxpy", "highspy"} & set(sys.modules)
sys.modules["cvxpy"] = None  # as where it is not installed
from strategies.anytime import AnytimePlanner
planner = AnytimePlanner(*laptop(), PlannerOptions(gap=0.0))
planner.warm_up()
*_, last = planner.answers(lengths, 3)
print(last.plan.solver)
assert last.plan.replicas == plan.replicas
"""
    run = python(program, tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("heuristic (solver: ModuleNotFoundError: ") and "cvxpy" in run.stdout


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="module 'hgraph' has no attribute 'compil'; it has AdamW, Annotation, "):
        hgraph.compil  # noqa: B018


def test_a_file_of_the_user_that_hides_a_package_is_named(tmp_path: Path) -> None:
    hiding = tmp_path / "strategies.py"
    hiding.write_text("")
    run = python("import hgraph\nhgraph.Pool\n", tmp_path)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-2:] == [
        "hgraph.installation.InstallationError: hydraulis: expected the packages hgraph, passes, strategies, runtime "
        f"in one place, {ROOT}, but:",
        f"  `strategies` is {hiding}; rename that file or folder, or start Python from another folder",
    ]


def test_a_folder_of_the_user_that_hides_a_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "passes").mkdir()
    (tmp_path / "passes" / "__init__.py").write_text("")
    run = python("import hgraph\nhgraph.Pool\n", tmp_path)
    assert f"  `passes` is {tmp_path / 'passes'}; rename that file or folder" in run.stderr


def test_another_distribution_of_the_same_name_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed = tmp_path / "site-packages"
    (installed / "strategies").mkdir(parents=True)
    (installed / "strategies" / "__init__.py").write_text("")
    information = installed / "trading_kit-2.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: trading-kit\nVersion: 2.0\n")
    (information / "top_level.txt").write_text("strategies\n")
    monkeypatch.syspath_prepend(str(installed))
    for name in [name for name in sys.modules if name.partition(".")[0] == "strategies"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(InstallationError) as error:
        check_installation()
    assert (
        f"`strategies` is {installed / 'strategies'} of the distribution trading-kit; "
        "use an environment without trading-kit"
    ) in str(error.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hgraph.installation, "PACKAGES", ("hgraph", "passes_that_nobody_has"))
    with pytest.raises(InstallationError, match="`passes_that_nobody_has` is not there; install hydraulis again"):
        check_installation()
