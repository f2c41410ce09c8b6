"""Names of a package that are imported when they are first asked for, because their modules need more than others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def find_lazily(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A function `__getattr__` for a package; `modules` has the names of each module, separated by spaces."""
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module_of[name]}"), name)

    return find
