"""Cache key: everything a compiled step reads except tensor values."""

from __future__ import annotations

import enum
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from persample import _torch

# Types of values that an argument or a result of a step may have besides tensors.
PLAIN_TYPES = {bool, int, float, str, type(None)}

# Types of values that are compared by value.
_VALUES = (*PLAIN_TYPES, complex, bytes, type, enum.Enum, torch.dtype, torch.device, torch.layout, torch.memory_format)
_CONTAINERS = {dict, OrderedDict, set, list, tuple}
_MAX_LENGTH = 1000  # longer containers are compared by identity


class ByIdentity:
    """An object that is compared by identity. It is kept alive, so that no other object can get its id."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class StepState:
    """The modules and functions of a step, as they are now.

    Args:
        modules: the model, and the loss if it is a module.
        functions: the other functions of the step. They can read variables that they enclose, and global numbers.
        stand_ins: while a step is traced, other tensors stand for the parameters and buffers; `{id: position}` of the
            tensors that they stand for. `tensors` is empty then.

    Attributes:
        modules: all modules with their paths.
        tensors: the parameters and buffers of the modules, each once.
        key: descriptions of the tensors, of the modules and of the functions.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        functions: Sequence[Callable[..., Any]],
        stand_ins: Mapping[int, int] | None = None,
    ) -> None:
        self.modules = {m: name for root in modules for name, m in root.named_modules()}
        self.tensors: list[Tensor] = []
        self._positions: dict[int, int] = dict(stand_ins or {})  # of the tensors, by their ids
        self._members = [members for m in self.modules for members in (_torch.get_parameters(m), _torch.get_buffers(m))]
        for members in self._members if stand_ins is None else ():
            for tensor in members.values():
                if tensor is not None and id(tensor) not in self._positions:
                    self._positions[id(tensor)] = len(self.tensors)
                    self.tensors.append(tensor)
        self._descriptions: dict[int, Any] = {}  # of objects, by their ids
        self.key = (
            tuple([describe_tensor(t) for t in self.tensors]),
            tuple([self._describe_module(m) for m in self.modules]),
            tuple([self._describe(function) for function in functions]),
        )

    def is_changed(self, later: StepState) -> bool:
        """Whether the modules or functions have changed, apart from their tensors."""
        return self.key[1:] != later.key[1:]

    def find_change(self, later: StepState) -> str:
        """The first attribute that has changed, in words."""
        for i, (module, name) in enumerate(self.modules.items()):
            before, after = (dict(state.key[1][i]) for state in (self, later))
            for attribute in before.keys() | after.keys():
                if before.get(attribute) != after.get(attribute):
                    return f"'{attribute}' of {f'module {name!r}' if name else type(module).__name__}"
        return "a variable that its functions enclose"

    @contextmanager
    def replace_tensors(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Inside the block, the modules have these parameters and buffers. Afterwards all attributes are restored."""
        attributes = [(vars(module), dict(vars(module))) for module in self.modules]
        members = [(now, dict(now)) for now in self._members]
        for now, before in members:
            now.update({name: t if t is None else tensors[self._positions[id(t)]] for name, t in before.items()})
        try:
            yield
        finally:
            for now, before in [*attributes, *members]:
                now.clear()
                now.update(before)

    # ---- descriptions, which are equal if and only if a graph may be used again ----

    def _describe_module(self, module: nn.Module) -> Any:
        return tuple([(name, self._describe(value)) for name, value in vars(module).items()])

    def _describe(self, value: Any, with_attributes: bool = True) -> Any:
        """A hashable description of a value. Without `with_attributes`, objects are compared by identity alone."""
        kind = type(value)
        if kind in PLAIN_TYPES:
            return (kind, value)
        if kind in _CONTAINERS and not value:  # most attributes of a module are empty dicts of hooks
            return kind
        if isinstance(value, _VALUES):
            return (kind, value)
        if isinstance(value, Tensor):
            return self._describe_tensor(value)
        if isinstance(value, dict) and len(value) <= _MAX_LENGTH:
            items = value.items()
            return (dict, tuple([(self._describe(k, False), self._describe(v, with_attributes)) for k, v in items]))
        if isinstance(value, (list, tuple)) and len(value) <= _MAX_LENGTH:
            return (kind, tuple([self._describe(part, with_attributes) for part in value]))
        if isinstance(value, (set, frozenset)) and len(value) <= _MAX_LENGTH:
            return (set, frozenset([self._describe(part, with_attributes) for part in value]))
        if isinstance(value, weakref.ref):
            return (weakref.ref, self._describe(value(), with_attributes))
        if isinstance(value, nn.Module) or not with_attributes:
            return ByIdentity(value)
        if id(value) not in self._descriptions:
            self._descriptions[id(value)] = ByIdentity(value)  # the object may contain itself
            self._descriptions[id(value)] = (ByIdentity(value), tuple(self._describe_parts(value)))
        return self._descriptions[id(value)]

    def _describe_tensor(self, tensor: Tensor) -> Any:
        position = self._positions.get(id(tensor))
        return (ByIdentity(tensor), tensor._version) if position is None else position

    def _describe_parts(self, value: Any) -> Iterator[Any]:
        """Everything that a function can read, or the attributes of an object."""
        if (inner := _torch.get_uncompiled(value)) is not None:  # a compiled function encloses its compiler
            yield self._describe(inner)
        elif isinstance(value, FunctionType):
            enclosed = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            for part in (value.__defaults__, value.__kwdefaults__, enclosed):
                yield self._describe(part)
            names = [name for name in value.__code__.co_names if name in value.__globals__]
            numbers = {n: value.__globals__[n] for n in names if isinstance(value.__globals__[n], _VALUES)}
            yield self._describe(numbers)
        elif isinstance(value, MethodType):
            yield self._describe(value.__func__)
            yield self._describe(value.__self__)
        elif isinstance(value, partial):
            yield self._describe((value.func, value.args, value.keywords))
        else:
            attributes = getattr(value, "__dict__", {})
            yield from [(name, self._describe(part, with_attributes=False)) for name, part in attributes.items()]


def _is_filled(cell: CellType) -> bool:
    """Whether an enclosed variable has a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def describe_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """Everything about a tensor except its values; `requires_grad` comes last."""
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
