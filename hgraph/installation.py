"""The start-up check that our four packages come from one place.

Their import names are generic, so a file `strategies.py` beside a user's script, or another distribution, can hide one
of them. Python then reports a missing attribute far from the cause; this check names the file that hides ours.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import packages_distributions
from pathlib import Path

from hgraph.errors import HydraulisError

__all__ = ["PACKAGES", "InstallationError", "check_installation"]

PACKAGES = ("hgraph", "passes", "strategies", "runtime")
DISTRIBUTION = "hydraulis"


class InstallationError(HydraulisError, ImportError):
    """One of our packages is missing, or hidden by something else of the same name."""


def check_installation() -> None:
    """Raises `InstallationError` unless all four packages lie in the folder that this one lies in.

    Nothing is imported by it: it only asks where an import would look.
    """
    home = Path(__file__).resolve().parent.parent
    faults = [text for package in PACKAGES if (text := _fault(package, home)) is not None]
    if faults:
        raise InstallationError(
            f"{DISTRIBUTION}: expected the packages {', '.join(PACKAGES)} in one place, {home}, but:\n  "
            + "\n  ".join(faults)
        )


def _fault(package: str, home: Path) -> str | None:
    found = _location(package)
    if found is None:
        return f"`{package}` is not there; install {DISTRIBUTION} again, as a whole"
    if found == home / package:
        return None
    owners = sorted(set(packages_distributions().get(package, ())) - {DISTRIBUTION})
    if owners and "site-packages" in found.parts:
        return f"`{package}` is {found} of the distribution {owners[0]}; use an environment without {owners[0]}"
    return f"`{package}` is {found}; rename that file or folder, or start Python from another folder"


def _location(package: str) -> Path | None:
    """Returns the folder of a package, or the file of a plain module, that `import package` means."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # imported already, by something that left no spec
        return None
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    place = folders[0] if folders else spec.origin
    return None if place is None else Path(place).resolve()
