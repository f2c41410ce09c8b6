"""Copies of Python values, so that a second run of user code changes nothing that the user holds."""

from __future__ import annotations

import enum
import re
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from persample._internal.tree import is_filled


class CannotCopy(Exception):
    """A value cannot be copied; the message says which."""


# What nobody can change. Modules are shared, too: `ModelState` restores what a run changes in them.
_SHARED = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type, enum.Enum, re.Pattern, property,
    weakref.ref, types.ModuleType, types.EllipsisType, types.NotImplementedType, nn.Module, torch.dtype,
    torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip


def copy_values(value: Any, change: Callable[[Any], Any], leaves: tuple[type, ...] = (Tensor,)) -> Any:
    """A copy of a value and of all values inside it, with `change(leaf)` in the place of each leaf.

    Containers of all kinds, objects with attributes or slots, arrays, random number generators, and what functions
    refer to are copied. A value that occurs twice is copied once.

    Raises:
        CannotCopy: the value holds a running generator, an open file, a lock, or another handle.

    >>> before = {"seen": {1}, "x": torch.zeros(2)}
    >>> after = copy_values(before, torch.clone)
    >>> after["seen"].add(2)
    >>> before, after
    ({'seen': {1}, 'x': tensor([0., 0.])}, {'seen': {1, 2}, 'x': tensor([0., 0.])})
    """
    copier = _Copier(change, leaves)
    try:
        return copier.copy(value)
    except RecursionError:
        raise CannotCopy(f"a {type(value).__name__} is nested too deeply") from None
    finally:
        copier.memo.clear()  # the caller's error may refer to the copier


class _Copier:
    def __init__(self, change: Callable[[Any], Any], leaves: tuple[type, ...]) -> None:
        self.change, self.leaves = change, leaves
        self.memo: dict[int, tuple[Any, Any]] = {}  # by id: the value, which keeps its id, and its copy

    def copy(self, value: Any) -> Any:
        if isinstance(value, self.leaves):
            known = self.memo.get(id(value))
            return self._keep(value, self.change(value)) if known is None else known[1]
        if isinstance(value, _SHARED) or type(value) is object:
            return value
        known = self.memo.get(id(value))
        return self._make(value) if known is None else known[1]

    def _keep(self, value: Any, made: Any) -> Any:
        self.memo[id(value)] = value, made
        return made

    def _make(self, value: Any) -> Any:
        kind = type(value)
        if kind is list:
            made = self._keep(value, [])
            made.extend(map(self.copy, value))
            return made
        if kind is dict:
            made = self._keep(value, {})
            made.update((self.copy(key), self.copy(part)) for key, part in value.items())
            return made
        if kind is tuple:
            parts = tuple(map(self.copy, value))
            return value if all(a is b for a, b in zip(parts, value, strict=True)) else self._keep(value, parts)
        if kind in (set, frozenset):
            return self._keep(value, kind(map(self.copy, value)))
        if kind is torch.Generator:
            generator = self._keep(value, torch.Generator(value.device))
            generator.set_state(value.get_state())
            return generator
        if kind is types.FunctionType:
            return self._copy_function(value)
        if kind in (types.MethodType, types.BuiltinMethodType):
            return self._copy_method(value)
        return self._copy_object(value)

    def _copy_function(self, value: types.FunctionType) -> Any:
        """A function with copies of the variables around it, its defaults and attributes; itself if all are shared."""
        given = [cell for cell in value.__closure__ or () if is_filled(cell)]
        if not (given or value.__defaults__ or value.__kwdefaults__ or vars(value)):
            return value
        cells = {id(cell): types.CellType() for cell in value.__closure__ or ()}
        made = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, None, tuple(cells.values()) or None
        )
        self._keep(value, made)  # it may refer to itself
        pairs = [(cell.cell_contents, self.copy(cell.cell_contents)) for cell in given]
        for cell, (_, content) in zip(given, pairs, strict=True):
            cells[id(cell)].cell_contents = content
        pairs += [(part, self.copy(part)) for part in value.__defaults__ or ()]
        pairs += [(part, self.copy(part)) for part in (value.__kwdefaults__ or {}).values()]
        pairs += [(part, self.copy(part)) for part in vars(value).values()]
        if all(a is b or a is value for a, b in pairs):
            return self._keep(value, value)
        made.__qualname__, made.__module__ = value.__qualname__, value.__module__
        made.__defaults__, made.__kwdefaults__ = self.copy(value.__defaults__), self.copy(value.__kwdefaults__)
        vars(made).update({name: self.copy(part) for name, part in vars(value).items()})
        return made

    def _copy_method(self, value: Any) -> Any:
        """A method of a copied object, such as `seen.append`."""
        owner = value.__self__
        own = self.copy(owner)
        if own is owner:
            return value
        return (
            types.MethodType(value.__func__, own) if type(value) is types.MethodType else getattr(own, value.__name__)
        )

    def _copy_object(self, value: Any) -> Any:
        """A copy by the protocol of `pickle`, which says how an object is made and what it holds."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # itertools
                reduced = value.__reduce_ex__(4)
            if isinstance(reduced, str):  # a global name
                return value
            function, args, state, items, pairs, setter = (*reduced, None, None, None, None)[:6]
            if state is None and items is None and pairs is None and _is_global(value):
                return value
            made = self._keep(value, function(*map(self.copy, args)))
            if made is value:
                return value
            self._set_state(made, self.copy(state), setter)
            for item in items or ():
                made.append(self.copy(item))
            for key, part in pairs or ():
                made[self.copy(key)] = self.copy(part)
        except (CannotCopy, RecursionError):
            raise
        except Exception as error:
            name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            raise CannotCopy(f"an object of type {name} cannot be copied") from error
        return made

    def _set_state(self, made: Any, state: Any, setter: Callable[[Any, Any], None] | None) -> None:
        if state is None:
            return
        if setter is not None:
            setter(made, state)
        elif hasattr(made, "__setstate__"):
            made.__setstate__(state)
        else:
            attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
            if attributes:
                vars(made).update(attributes)
            for name, part in (slots or {}).items():
                object.__setattr__(made, name, part)  # the class may be frozen


def _is_global(value: Any) -> bool:
    """Whether a value is that of a global variable of its type's module, as a sentinel is."""
    module = sys.modules.get(type(value).__module__)
    return module is not None and any(part is value for part in vars(module).values())
