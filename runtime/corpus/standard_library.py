"""Documents everybody has: the top-level functions and classes of Python's own standard library.

Left out, so that one version of Python gives one corpus wherever it comes from: packages that distributors ship apart
or not at all (tests, IDLE, tkinter, lib2to3, distutils), and `encodings`, most of which is generated tables.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from hgraph.errors import InvalidInput
from runtime.corpus.config import Documents

__all__ = ["stdlib_documents", "stdlib_files"]

SKIPPED_FOLDERS = frozenset(
    {
        *("__pycache__", "dist-packages", "site-packages"),
        *("idle_test", "test", "tests"),
        *("distutils", "encodings", "idlelib", "lib2to3", "tkinter", "turtledemo"),
    }
)


def stdlib_files(folder: str | Path | None = None) -> list[Path]:
    """Returns the source files of the standard library (or of `folder`), sorted by their path within it."""
    root = _root(folder)
    files = [path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts[:-1])]
    if not files:
        raise InvalidInput(f"{root}: expected the .py files of Python's standard library, found none")
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def stdlib_documents(folder: str | Path | None = None, *, progress: bool = False) -> Documents:
    """Returns the source text of every top-level function and class, decorators included, in order of file and line.

    `folder`: where to look; None: where `sysconfig` says the standard library is. Files that are not valid Python of
    this version are skipped and listed. `progress` shows a bar.
    """
    root = _root(folder)
    files = stdlib_files(root)
    names: list[str] = []
    texts: list[str] = []
    skipped: list[str] = []
    for path in tqdm(files, desc="reading the standard library", unit="file", leave=False, disable=not progress):
        relative = path.relative_to(root).as_posix()
        try:
            found = list(_definitions(path.read_text(encoding="utf-8")))
        except (SyntaxError, ValueError) as error:
            skipped.append(f"{relative}: {type(error).__name__}: {error}")
            continue
        names.extend(f"{relative}:{name}" for name, _ in found)
        texts.extend(text for _, text in found)
    if not texts:
        raise InvalidInput(f"{root}: expected functions or classes in {len(files)} files, found none")
    return Documents(tuple(names), tuple(texts), len(files), tuple(skipped))


def _root(folder: str | Path | None) -> Path:
    return Path(sysconfig.get_path("stdlib") if folder is None else folder)


def _definitions(source: str) -> Iterator[tuple[str, str]]:
    """Yields (name, source text) of the top-level functions and classes; `SyntaxError` where it is not Python."""
    with warnings.catch_warnings():
        # Old files hold escapes that newer versions warn about; they are no concern of who trains on them.
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    # Not `ast.get_source_segment`: it leaves the decorators out, and splits the whole file again for each segment.
    lines = source.split("\n")
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        yield node.name, "\n".join(lines[first - 1 : node.end_lineno]) + "\n"
