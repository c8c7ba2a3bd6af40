"""Names of a package that are looked up on first use (SPEC 1), so that a part of it is imported without the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

__all__ = ["lazy_front"]


def lazy_front(package: str, module_of: Mapping[str, str]) -> Callable[[str], object]:
    """Returns the `__getattr__` of a package whose public names are defined in the modules of it that are given."""

    def look_up(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(module_of)}")
        return getattr(import_module(f"{package}.{module_of[name]}"), name)

    return look_up
