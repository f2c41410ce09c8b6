"""Several models as one module; the modules and parameters of a model, kept from one recording to the next.

A recording needs the names of all parameters. To compare a model with the table of the last recording is faster than to
search through its modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import chain
from operator import is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from persample import _torch
from persample.errors import PerSampleError

# ---- several models as one ----


class SeveralModels(nn.Module):
    """Holds models under names, which are the prefixes of their parameters' names. It is never called itself."""


def combine_models(model: Any) -> nn.Module:
    """The module itself, or a list or mapping of modules as one module.

    >>> [name for name, _ in combine_models({"actor": nn.Linear(2, 1), "critic": nn.Tanh()}).named_parameters()]
    ['actor.weight', 'actor.bias']
    """
    if isinstance(model, nn.Module):
        return model
    named: Mapping[str, Any] = {}
    if isinstance(model, Mapping):
        named = model
    elif isinstance(model, Sequence) and not isinstance(model, str):
        named = {str(i): each for i, each in enumerate(model)}
    for name, each in named.items():
        if not isinstance(each, nn.Module):
            raise PerSampleError(f"Only an nn.Module can be recorded, got {type(each).__name__} as '{name}'.")
        if isinstance(each, nn.parallel.DistributedDataParallel):
            raise PerSampleError(f"'{name}' is under DistributedDataParallel: record one model at a time.")
    if not named:
        raise PerSampleError(
            f"Only an nn.Module can be recorded, or a list or dict of them, got {type(model).__name__}."
        )
    several = SeveralModels()
    for name, each in named.items():
        try:
            several.add_module(name, each)
        except (KeyError, TypeError) as error:
            raise PerSampleError(f"A model cannot be named {name!r}: {error.args[0]}.") from None
    return several


# ---- the members of a model ----


class Members(NamedTuple):
    """The modules of a model, each once, and its parameters by name, as `modules` and `named_parameters` list them."""

    modules: list[nn.Module]
    parameters: dict[str, Tensor]
    table: _Table | None = None  # that they were read from

    def find_owners(self, recorded: Set[int]) -> list[nn.Module]:
        """The modules that have parameters with these ids, in themselves or in modules inside of them."""
        known = None if self.table is None else self.table.owners
        if known is None or known[0] != recorded:
            known = recorded, _find_owners(self.modules, recorded)
            if self.table is not None:
                self.table.owners = known
        return [self.modules[position] for position in known[1]]


def _find_owners(modules: list[nn.Module], recorded: Set[int]) -> list[int]:
    # A scripted module has no such dicts.
    plain = [i for i, module in enumerate(modules) if not isinstance(module, torch.jit.ScriptModule)]
    members = _torch.list_members([modules[i] for i in plain])
    having: set[int] = set()  # the ids of the modules that have recorded parameters
    found: list[int] = []
    for i, parameters, children in reversed([*zip(plain, members, members[len(plain) :], strict=False)]):
        own = [*map(id, parameters.values())]  # a module comes before its children
        if not (recorded.isdisjoint(own) and having.isdisjoint(map(id, children.values()))):
            having.add(id(modules[i]))
            found.append(i)
    return found


class _Table:
    """The modules of a model, each once, and their parameters. Keeps none of them alive.

    Attributes:
        owners: the ids of some parameters, and the positions of the modules that have them (`Members.find_owners`).
    """

    def __init__(self, model: nn.Module) -> None:
        found = _torch.walk_modules(model)
        modules = [module for _, module in found]
        self._modules = [*map(ref, modules)]
        self.owners: tuple[Set[int], list[int]] | None = None
        members = _torch.list_members(modules)
        self._counts = [*map(len, members)]
        self._keys = [*chain.from_iterable(members)]
        values = [value for each in members for value in each.values()]
        self._freed: list[Any] = []  # references to members that do not exist any more
        self._values = [_get_nothing if value is None else ref(value, self._freed.append) for value in values]
        names = [prefix + name for (prefix, _), own in zip(found, members, strict=False) for name in own]
        seen: set[int] = set()
        self._parameters: list[tuple[str, int]] = []  # the name of each parameter, and its position in `_values`
        for i, name in enumerate(names):
            if values[i] is not None and id(values[i]) not in seen:
                seen.add(id(values[i]))
                self._parameters.append((name, i))

    def read(self) -> Members | None:
        """The members of the model; None if it has changed."""
        modules: list[Any] = [get() for get in self._modules]
        if self._freed or None in modules:
            return None
        members = _torch.list_members(modules)
        if [*map(len, members)] != self._counts or [*chain.from_iterable(members)] != self._keys:
            return None
        values = [*chain.from_iterable([each.values() for each in members])]
        if not all(map(is_, values, [get() for get in self._values])):
            return None
        return Members(modules, {name: values[i] for name, i in self._parameters}, self)


def _get_nothing() -> None:
    return None


_tables: WeakKeyDictionary[nn.Module, _Table] = WeakKeyDictionary()


def read_model(model: nn.Module) -> Members:
    """The modules and parameters of a model."""
    kind = type(model)
    if kind.named_parameters is not nn.Module.named_parameters or kind.named_modules is not nn.Module.named_modules:
        return Members(list(model.modules()), dict(model.named_parameters()))
    table = _tables.get(model)
    found = None if table is None else table.read()
    if found is None:
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):  # without the usual dicts
            return Members(list(model.modules()), dict(model.named_parameters()))
        table = _tables[model] = _Table(model)
        found = table.read()
    assert found is not None
    return found


MAX_GROUPS = 16


def group_by_module(names: Sequence[str], most: int = MAX_GROUPS) -> dict[str, list[str]]:
    """The parameter names of each module, at the greatest depth that gives at most `most` groups.

    >>> group_by_module(["conv.weight", "conv.bias", "head.0.weight", "head.2.weight"])
    {'conv': ['conv.weight', 'conv.bias'], 'head.0': ['head.0.weight'], 'head.2': ['head.2.weight']}
    """
    modules = [name.split(".")[:-1] or [name] for name in names]
    depths = range(max(map(len, modules), default=1), 0, -1)
    depth = next((d for d in depths if len({tuple(m[:d]) for m in modules}) <= most), 1)
    found: dict[str, list[str]] = {}
    for module, name in zip(modules, names, strict=True):
        found.setdefault(".".join(module[:depth]), []).append(name)
    return found
