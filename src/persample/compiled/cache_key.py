"""What a graph takes for fixed: all of a step but the numbers in its tensors. Where that changes, so must the graph."""

from __future__ import annotations

import enum
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from persample import _torch

NUMBERS = {bool, int, float, str, type(None)}
_PLAIN = (*NUMBERS, complex, bytes, type, enum.Enum, torch.dtype, torch.device, torch.layout, torch.memory_format)
_CONTAINERS = {dict, OrderedDict, set, list, tuple}
_LONGEST = 1000  # beyond which the parts of a list are not looked at


class Same:
    """An object, equal to itself alone; it is kept, so that no other can have its id."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class State:
    """The parameters and buffers of some modules, and all else that their forward passes can read of them.

    `functions` are the functions of a step: they can read what they enclose, and numbers among their globals.
    With `known_as`, these are the only tensors of the modules that are known, by the positions of those they stand for.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        functions: Sequence[Callable[..., Any]],
        known_as: Mapping[int, int] | None = None,
    ) -> None:
        self.modules = {m: name for root in modules for name, m in root.named_modules()}
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = dict(known_as or {})
        self._members = [members for m in self.modules for members in (_torch.get_parameters(m), _torch.get_buffers(m))]
        for members in self._members if known_as is None else ():
            for tensor in members.values():
                if tensor is not None and id(tensor) not in self._numbers:
                    self._numbers[id(tensor)] = len(self.tensors)
                    self.tensors.append(tensor)
        self._described: dict[int, Any] = {}
        self.functions = functions
        self.key = (
            tuple([described_tensor(t) for t in self.tensors]),
            tuple([self._of_module(m) for m in self.modules]),
            tuple([self._of(function) for function in functions]),
        )

    def changed(self, later: State) -> str:
        """What is not as it was, in words."""
        for i, (module, name) in enumerate(self.modules.items()):
            before, after = (dict(state.key[1][i]) for state in (self, later))
            for attribute in before.keys() | after.keys():
                if before.get(attribute) != after.get(attribute):
                    return f"'{attribute}' of {f'module {name!r}' if name else type(module).__name__}"
        return "what its functions enclose"

    @contextmanager
    def replaced_by(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Inside, these are the parameters and buffers. Afterwards the modules are as they were."""
        before = [(vars(module), dict(vars(module))) for module in self.modules]
        members = [(where, dict(where)) for where in self._members]
        for where, own in members:
            where.update({name: t if t is None else tensors[self._numbers[id(t)]] for name, t in own.items()})
        try:
            yield
        finally:
            for now, then in [*before, *members]:
                now.clear()
                now.update(then)

    # ---- descriptions ----

    def _of_module(self, module: nn.Module) -> Any:
        return tuple([(name, self._of(value)) for name, value in vars(module).items()])

    def _of(self, value: Any, inside: bool = True) -> Any:
        """All that matters of a value; of an object's attributes, those of objects are told apart by who they are."""
        kind = type(value)
        if kind in NUMBERS:
            return (kind, value)
        if kind in _CONTAINERS and not value:  # as most of a module's attributes are, which hold its hooks
            return kind
        if isinstance(value, _PLAIN):
            return (kind, value)
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if isinstance(value, dict) and len(value) <= _LONGEST:
            return (dict, tuple([(self._of(k, False), self._of(v, inside)) for k, v in value.items()]))
        if isinstance(value, (list, tuple)) and len(value) <= _LONGEST:
            return (type(value), tuple([self._of(part, inside) for part in value]))
        if isinstance(value, (set, frozenset)) and len(value) <= _LONGEST:
            return (set, frozenset([self._of(part, inside) for part in value]))
        if isinstance(value, weakref.ref):
            return (weakref.ref, self._of(value(), inside))
        if isinstance(value, nn.Module) or not inside:
            return Same(value)
        if id(value) not in self._described:
            self._described[id(value)] = Same(value)  # where it holds itself
            self._described[id(value)] = (Same(value), tuple(self._parts(value)))
        return self._described[id(value)]

    def _of_tensor(self, tensor: Tensor) -> Any:
        number = self._numbers.get(id(tensor))
        if number is not None:
            return number
        return (Same(tensor), tensor._version)

    def _parts(self, value: Any) -> Iterator[Any]:
        if (inner := _torch.get_uncompiled(value)) is not None:  # a compiled function encloses its compiler
            yield self._of(inner)
        elif isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            for part in (value.__defaults__, value.__kwdefaults__, cells):
                yield self._of(part, inside=True)
            read = {name: value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__}
            yield self._of({name: number for name, number in read.items() if isinstance(number, _PLAIN)})
        elif isinstance(value, MethodType):
            yield self._of(value.__func__)
            yield self._of(value.__self__)
        elif isinstance(value, partial):
            yield self._of((value.func, value.args, value.keywords))
        else:
            yield from [(name, self._of(part, inside=False)) for name, part in getattr(value, "__dict__", {}).items()]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def described_tensor(tensor: Tensor) -> Any:
    """All of a tensor but its numbers."""
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
