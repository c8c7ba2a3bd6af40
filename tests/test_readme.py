"""The README is true: its script is the example, is short enough and runs; its tree names every file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PACKAGES = ("hgraph", "passes", "strategies", "runtime", "examples", "benchmarks")


def test_the_script_is_the_example_and_at_most_40_lines() -> None:
    script = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert script is not None
    text = (ROOT / "examples" / "quickstart.py").read_text()
    assert script[1] == text
    assert len(text.splitlines()) <= 40


def test_the_script_runs_in_an_empty_folder(tmp_path: Path) -> None:
    script = tmp_path / "quickstart.py"
    script.write_text((ROOT / "examples" / "quickstart.py").read_text())
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(lines) == 10
    assert len({line.split()[2] for line in lines}) > 1, "more than one strategy is used"


def test_every_file_is_tracked() -> None:
    """A pattern of .gitignore that is too wide leaves files out of every clone."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:  # not a checkout
        return
    ignored = subprocess.run(
        ["git", "ls-files", "--others", "--ignored", "--exclude-standard", *PACKAGES, "tests", "docs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert not [line for line in ignored.stdout.splitlines() if line.endswith((".py", ".md", ".yaml", ".txt"))]


def test_the_tree_names_every_file() -> None:
    listed = set(re.findall(r"^\| `([\w/]+\.py)` \|", README, re.MULTILINE))
    there = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert listed == there, "run `python tests/readme_tree.py` to write the tree anew"
