"""Hashable descriptions of everything that Python code can read, to notice what has changed between two calls."""

from __future__ import annotations

import dis
import enum
import hashlib
import sys
import weakref
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from persample import _torch
from persample._internal.tree import is_filled, list_slots

# Types of values that an argument or a result of a step may have besides tensors.
PLAIN_TYPES = {bool, int, float, str, type(None)}

# Types of values that are compared by value.
_VALUES = (*PLAIN_TYPES, complex, bytes, enum.Enum, torch.dtype, torch.device, torch.layout, torch.memory_format)
_CONTAINERS = {dict, OrderedDict, set, list, tuple}
_MAX_LENGTH = 1000  # longer containers of other values than plain ones are compared by identity and length
_MAX_DEPTH = 8  # objects behind so many others are compared by identity

# Packages whose classes do not change; torch's own settings are part of another key.
_FIXED = sys.stdlib_module_names - {"__main__"} | {"torch", "numpy", "persample"}

# Objects of Python's own library whose attributes are read. Others (loggers, locks) change without an effect on values.
_READ = (SimpleNamespace, UserDict, UserList, partial, property, cached_property, staticmethod, classmethod)


class ByIdentity:
    """An object that is compared by identity. It is kept alive, so that no other object can get its id."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Descriptions:
    """Descriptions of values at one time. Two are equal if and only if a graph that reads the values may be used again.

    Args:
        positions: numbers that stand for tensors whose values may change, by the ids of the tensors.
    """

    def __init__(self, positions: Mapping[int, int]) -> None:
        self._positions = positions
        self._found: dict[int, Any] = {}  # of objects, by their ids
        self._depth = 0

    def describe(self, value: Any) -> Any:
        """A hashable description of a value."""
        kind = type(value)
        if kind in PLAIN_TYPES:
            return (kind, value)
        if kind in _CONTAINERS and not value:  # most attributes of a module are empty dicts of hooks
            return kind
        if isinstance(value, _VALUES):
            return (kind, value)
        if isinstance(value, Tensor):
            position = self._positions.get(id(value))
            return (ByIdentity(value), value._version) if position is None else position
        if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
            return self._describe_container(value)
        if isinstance(value, weakref.ref):
            return (weakref.ref, self.describe(value()))
        if isinstance(value, nn.Module):
            return ByIdentity(value)
        if id(value) not in self._found:
            if self._depth == _MAX_DEPTH:
                return ByIdentity(value)
            self._found[id(value)] = ByIdentity(value)  # the object may contain itself
            self._depth += 1
            self._found[id(value)] = (ByIdentity(value), tuple(self._describe_parts(value)))
            self._depth -= 1
        return self._found[id(value)]

    def describe_module(self, module: nn.Module) -> tuple[tuple[str, Any], ...]:
        """The attributes of a module, and those of its class."""
        own = [(name, self.describe(value)) for name, value in vars(module).items()]
        return (*own, ("class", self.describe(type(module))))

    def _describe_container(self, value: Any) -> Any:
        kind = type(value)
        kinds = set(map(type, value.values() if isinstance(value, dict) else value))
        if kinds <= PLAIN_TYPES and not isinstance(value, (dict, set, frozenset)):
            return (kind, tuple(value), tuple(map(type, value)) if len(kinds) > 1 else (*kinds,))
        if len(value) > _MAX_LENGTH:
            return (ByIdentity(value), len(value))
        if isinstance(value, dict):
            return (kind, tuple([(self._describe_key(k), self.describe(v)) for k, v in value.items()]))
        if isinstance(value, (set, frozenset)):
            return (kind, frozenset(map(self._describe_key, value)))
        return (kind, tuple(map(self.describe, value)))

    def _describe_key(self, key: Any) -> Any:
        return (type(key), key) if isinstance(key, _VALUES) else ByIdentity(key)

    # ---- the parts of an object ----

    def _describe_parts(self, value: Any) -> Iterator[Any]:
        """Everything that a function can read, or the attributes of an object and of its class."""
        if (inner := _torch.get_uncompiled(value)) is not None:  # a compiled function encloses its compiler
            yield self.describe(inner)
        elif isinstance(value, FunctionType):
            if not _is_installed(value.__module__ or ""):  # the globals of a library do not change
                yield from self._describe_function(value)
        elif (enclosed := _list_enclosed(value)) is not None:
            yield from map(self.describe, enclosed)
        elif isinstance(value, type):
            yield from self._describe_class(value)
        elif (content := _digest_buffer(value)) is not None:
            yield content
        elif isinstance(value, _READ) or type(value).__module__.partition(".")[0] not in sys.stdlib_module_names:
            before = self._depth
            if type(value).__module__.partition(".")[0] == "torch":  # a compiled function refers to its whole compiler
                self._depth = _MAX_DEPTH
            yield from [(name, self.describe(part)) for name, part in _get_attributes(value).items()]
            self._depth = before
            yield self.describe(type(value))

    def _describe_function(self, function: FunctionType) -> Iterator[Any]:
        yield function.__code__
        enclosed = [cell.cell_contents for cell in function.__closure__ or () if is_filled(cell)]
        for part in (function.__defaults__, function.__kwdefaults__, enclosed):
            yield self.describe(part)
        names, scope = _find_names(function.__code__), function.__globals__
        for name in names.of_globals:
            if name in scope:
                yield (name, self._describe_global(scope[name], names.of_attributes))

    def _describe_global(self, value: Any, names: Sequence[str]) -> Any:
        """A global of a function. Of a module, only what the function can name: `settings.scale`."""
        if not isinstance(value, ModuleType):
            return self.describe(value)
        if _is_installed(value.__name__):
            return ByIdentity(value)
        members = vars(value)
        return (ByIdentity(value), tuple([(name, self.describe(members[name])) for name in names if name in members]))

    def _describe_class(self, kind: type) -> Iterator[Any]:
        if kind.__module__.partition(".")[0] in _FIXED:
            return
        for name, part in vars(kind).items():
            if isinstance(part, FunctionType) or not name.startswith("__"):
                yield (name, self.describe(part))
        for base in kind.__bases__:
            yield self.describe(base)


@cache
def _is_installed(module: str) -> bool:
    """Whether a module belongs to Python or to an installed package."""
    package = module.partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package in _FIXED or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


class _Names(NamedTuple):
    """The names that a function, or a function inside it, reads."""

    of_globals: Sequence[str]
    of_attributes: Sequence[str]


_names: dict[CodeType, _Names] = {}


def _find_names(code: CodeType) -> _Names:
    if code not in _names:
        inner = [_find_names(part) for part in code.co_consts if isinstance(part, CodeType)]
        loaded = [str(i.argval) for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
        of_globals = dict.fromkeys([*loaded, *(name for names in inner for name in names.of_globals)])
        of_attributes = dict.fromkeys([*code.co_names, *(name for names in inner for name in names.of_attributes)])
        _names[code] = _Names(tuple(of_globals), tuple(of_attributes))
    return _names[code]


def _list_enclosed(value: Any) -> tuple[Any, ...] | None:
    """What an object of Python encloses that only calls something else; None for other objects."""
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, partial):
        return ((value.func, value.args, value.keywords),)
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, property):
        return ((value.fget, value.fset),)
    return (value.func,) if isinstance(value, cached_property) else None


def _get_attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, with those in slots."""
    in_slots = {name: getattr(value, name) for name in list_slots(type(value)) if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **in_slots}


def _digest_buffer(value: Any) -> Any:
    """A digest of the memory of an array of numbers (numpy, array, bytearray), None for other objects."""
    try:
        memory = memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None
    content = memory if memory.c_contiguous else memory.tobytes()
    return (memory.format, memory.shape, hashlib.blake2b(content, digest_size=16).digest())
