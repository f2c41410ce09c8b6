"""The modules and parameters of a model, kept from one recording to the next.

A recording needs the names of all parameters. To compare a model with the table of the last recording is faster than to
search through its modules.
"""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from persample import _torch


class _Members:
    """What some dicts of modules hold: the parameters, or the children. Keeps none of them alive."""

    __slots__ = ("_counts", "_keys", "_values")

    def __init__(self, dicts: list[dict[str, Any]]) -> None:
        self._counts = [*map(len, dicts)]
        self._keys = [*chain.from_iterable(dicts)]
        self._values = [_get_nothing if value is None else ref(value) for each in dicts for value in each.values()]

    def find(self, dicts: list[dict[str, Any]]) -> list[Any] | None:
        """The values of all dicts; None if they are not the same objects by the same names in the same order."""
        if [*map(len, dicts)] != self._counts or [*chain.from_iterable(dicts)] != self._keys:
            return None
        values = [*chain.from_iterable([each.values() for each in dicts])]
        return values if all(map(is_, values, [get() for get in self._values])) else None


def _get_nothing() -> None:
    return None


class _Table:
    """The modules of a model, each once, and their parameters."""

    def __init__(self, model: nn.Module) -> None:
        found = _torch.walk_modules(model)
        modules = [module for _, module in found]
        parameters = _torch.list_own_parameters(modules)
        self._modules = [*map(ref, modules)]
        self._children = _Members(_torch.list_children(modules))
        self._parameters = _Members(parameters)
        self._positions: list[tuple[str, int]] = []  # the name of each parameter, and its position in all dicts
        names = [prefix + name for (prefix, _), own in zip(found, parameters, strict=True) for name in own]
        values = [value for own in parameters for value in own.values()]
        seen: set[int] = set()
        for i, (name, value) in enumerate(zip(names, values, strict=True)):
            if value is not None and id(value) not in seen:
                seen.add(id(value))
                self._positions.append((name, i))

    def read_modules(self) -> list[nn.Module] | None:
        """The modules; None if the model has changed."""
        modules: list[Any] = [get() for get in self._modules]
        return None if None in modules or self._children.find(_torch.list_children(modules)) is None else modules

    def read_parameters(self) -> dict[str, Tensor] | None:
        """The parameters by name, each once; None if the model has changed."""
        modules = self.read_modules()
        if modules is None:
            return None
        values = self._parameters.find(_torch.list_own_parameters(modules))
        return None if values is None else {name: values[i] for name, i in self._positions}


_tables: WeakKeyDictionary[nn.Module, _Table] = WeakKeyDictionary()


def get_named_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a model by name, as `named_parameters` lists them."""
    if type(model).named_parameters is not nn.Module.named_parameters:
        return dict(model.named_parameters())
    table = _tables.get(model)
    found = None if table is None else table.read_parameters()
    if found is None:
        table = _tables[model] = _Table(model)
        found = table.read_parameters()
    assert found is not None
    return found


def list_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model, each once, as `modules` lists them."""
    if type(model).named_modules is not nn.Module.named_modules:
        return list(model.modules())
    table = _tables.get(model)
    found = None if table is None else table.read_modules()
    return [module for _, module in _torch.walk_modules(model)] if found is None else found
