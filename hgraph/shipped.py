"""Files that come with this package, found by name where a path may stand too."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import resources

from hgraph.errors import InvalidInput
from hgraph.yaml_report import nearest, read_text

__all__ = ["read_named", "shipped_names"]


def shipped_names(folder: str, ending: str) -> tuple[str, ...]:
    """Returns the names, without `ending`, of the files in a folder of this package."""
    entries = (resources.files("hgraph") / folder).iterdir()
    return tuple(sorted(entry.name.removesuffix(ending) for entry in entries if entry.name.endswith(ending)))


def read_named(
    path_or_name: str | os.PathLike[str], folder: str, ending: str, what: str, endings: Sequence[str] | None = None
) -> tuple[str, bool]:
    """Returns the text of the file at a path, or of one in `folder` by name, and whether it was a name.

    What is no file is taken for a path where it has a folder or an ending: one of `endings` where names may have a
    point in them. Raises `InvalidInput` where there is neither such a file nor such a name; `what` names the kind.
    """
    name = os.fspath(path_or_name)
    known = shipped_names(folder, ending)
    if name in known:
        return (resources.files("hgraph") / folder / f"{name}{ending}").read_text(encoding="utf-8"), True
    has_ending = bool(os.path.splitext(name)[1]) if endings is None else name.endswith(tuple(endings))
    if not os.path.exists(name) and not has_ending and os.path.basename(name) == name:
        raise InvalidInput(
            f"{what} {name!r}: expected a file or one of the names {', '.join(known)}, got neither"
            f"{nearest(name, known)}"
        )
    return read_text(name), False
