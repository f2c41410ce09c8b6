"""Options that several functions take as `**options`: declared once, and shown in the signature and the docs of each.

The options are the fields of a dataclass, which has their defaults and, under "Attributes:", their documentation. A
TypedDict has their names and types for `**options: Unpack[...]`, which type checkers read.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
Values = TypeVar("Values")

_PLACE = re.compile(r"^(?P<indent> *)\*\*\w+:.*$", re.MULTILINE)


def show_options(values: type, typed: Any) -> Callable[[Function], Function]:
    """Decorator: show options in the signature of a function, and in its docstring in place of the line `**name: ...`.

    Args:
        values: the dataclass with defaults and documentation.
        typed: the TypedDict with the names of the options that the function takes.
    """

    def show(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        options = [p for p in inspect.signature(values).parameters.values() if p.name in typed.__annotations__]
        function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        if place := _PLACE.search(function.__doc__ or ""):
            documented = find_documentation(values)
            lines = [place["indent"] + line for p in options for line in documented[p.name]]
            function.__doc__ = place.string.replace(place[0], "\n".join(lines))
        return function

    return show


def find_documentation(values: type) -> dict[str, list[str]]:
    """The lines under "Attributes:" in the docstring of a class, for each attribute."""
    found: dict[str, list[str]] = {}
    lines = inspect.cleandoc(values.__doc__ or "").splitlines()
    for line in lines[lines.index("Attributes:") + 1 :]:
        if not line.startswith("    "):
            break
        if start := re.match(r"    (\w+): ", line):
            name = start[1]
            found[name] = []
        found[name].append(line[4:])
    return found


def make_options(values: type[Values], function: str, given: Mapping[str, Any], typed: Any = None) -> Values:
    """The options that a function was given. An unknown option is a TypeError."""
    declared: Any = values if typed is None else typed
    known = _list_names(declared)
    if not given.keys() <= known:
        name = next(name for name in given if name not in known)
        close = get_close_matches(name, known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"The options are {', '.join(sorted(known))}."
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}. {hint}")
    return values(**given)


@cache
def _list_names(declared: Any) -> frozenset[str]:
    return frozenset(declared.__annotations__)
