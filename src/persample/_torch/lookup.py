"""Look up a private name of torch; one that is missing raises when it is used."""

from __future__ import annotations

import importlib
import warnings
from typing import Any, NoReturn

import torch

from persample._version import TESTED_TORCH
from persample.errors import PerSampleError


def warn_if_untested(version: str) -> None:
    """Warn if the tests have not been run with a version of torch."""
    if not version.startswith(tuple(f"{tested}." for tested in TESTED_TORCH)):
        warnings.warn(
            f"persample was not tested with torch {version}, but with {', '.join(TESTED_TORCH)}. It may refuse what it "
            "records with these: every private name of torch is looked up when it is first used.",
            stacklevel=2,
        )


class Missing:
    """Stands for a private name that the installed torch does not have; any use of it raises."""

    def __init__(self, path: str, feature: str) -> None:
        self.__dict__.update(path=path, feature=feature)

    def _raise(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PerSampleError(
            f"{self.__dict__['feature']} needs {self.__dict__['path']}, a private name of torch that torch "
            f"{torch.__version__} does not have. Install another version: docs/reference/versions.md lists the names "
            f"that the tested versions have ({', '.join(TESTED_TORCH)})."
        )

    __call__ = __enter__ = __getattr__ = __mro_entries__ = _raise

    def __instancecheck__(self, instance: object) -> bool:
        return False


def find(path: str, feature: str) -> Any:
    """The object with this dotted name, or a `Missing` in its place."""
    names = path.split(".")
    found: Any = torch
    for i, name in enumerate(names[1:], start=2):
        try:
            found = getattr(found, name)
        except AttributeError:
            try:
                found = importlib.import_module(".".join(names[:i]))
            except ImportError:
                return Missing(path, feature)
    return found


def read(owner: Any, name: str, feature: str) -> Any:
    """A private attribute of one of torch's objects."""
    try:
        return getattr(owner, name)
    except AttributeError:
        return Missing(f"{type(owner).__name__}.{name}", feature)._raise()
