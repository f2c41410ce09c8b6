"""The hot path of the tracker: calls whose effect follows from layouts and numbers of dimensions, at any size.

Most calls of a forward pass are of functions whose motion does not depend on sizes (`layouts.SIZE_FREE`). Such a call
has a short key without shapes. The first call with a key takes the general path, which leaves a `QuickCall` for it.
Functions that change shapes (`view`, `x[:, 0]`) have no key: their layout is computed from the shapes each time.

A key holds, besides the function and the arguments that are not tensors, for each tensor: its layout, PARAMETER for a
parameter of the model, or None for a constant; its number of dimensions; and whether samples require grad. Floats are
part of the key if there are parameters: they do not decide where samples lie, but gradients depend on them (`eps`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from persample._internal.facts import all_with
from persample.backward import Plan
from persample.layouts import Call, Layout
from persample.rules import count_rule_changes

Key = tuple[Any, ...]
# By the id of a tensor: a weak reference to the tensor; where its samples lie, and whether it required grad then.
Known = Mapping[int, tuple[Callable[[], Any], tuple[Any, bool]]]

# Stands for a parameter of the model in a key.
PARAMETER = "parameter"

# What the tensors of a call are: constants have neither bit.
HAS_SAMPLES, HAS_PARAMETERS = 1, 2

_PLAIN = {str, NoneType, torch.dtype, torch.device, torch.Size, EllipsisType, torch.memory_format}

_INTEGERS = {int}

_MAX_ENTRIES = 20_000
_MAX_TUPLES = 1_000

# Functions that need not be followed.
WITHOUT_TENSORS = all_with("reads_metadata")


@dataclass(slots=True)
class QuickCall:
    """The effect of all calls with one key: the layout of each result; for a use of parameters, its plan."""

    layout: Layout
    plan: Plan | None
    changes: int  # of the rules, when the plan was made


QUICK_CALLS: dict[Key, QuickCall] = {}


def make_key(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known: Known,
    parameters: Any,
    constants_allowed: bool,
    rows: int = 0,
) -> tuple[Key, int] | None:
    """The key of a call without sizes, and what its tensors are; None if the call must take the general path.

    `rows` is the batch size if constants that may have a row for each sample must take the general path.
    """
    key: list[Any] = [func, len(args)]
    contents = 0
    has_constants = False
    numbers: list[float] = []
    pending: Sequence[Any] = args
    if kwargs:
        pending = [*args]
        for name in kwargs:
            pending += (name, kwargs[name])
    every: list[Any] = []  # what was nested
    while pending:
        nested: list[Any] = []
        for arg in pending:
            kind = type(arg)
            if kind is Tensor or kind is nn.Parameter:
                entry = known.get(id(arg))
                if entry is not None and entry[0]() is arg:
                    layout, had_grad = entry[1]
                    token = layout.token if type(layout) is Layout else None
                    has_grad = arg.requires_grad
                    if token is None or (has_grad and not had_grad):
                        return None
                    contents |= HAS_SAMPLES
                    key += (token, arg.dim(), has_grad)
                elif id(arg) in parameters and arg.requires_grad:  # the model may freeze it for a while
                    contents |= HAS_PARAMETERS
                    key += (PARAMETER, arg.dim())
                elif arg.requires_grad or not constants_allowed or _is_view_of_known(arg, known):
                    return None
                else:
                    has_constants = True
                    key += (None, arg.dim())
            elif kind is int or kind in _PLAIN:
                key.append(arg)
            elif kind is float:  # no motion depends on such a value, but terms do
                key.append(float)
                numbers.append(arg)
            elif kind is bool:  # not equal to a number
                key += (bool, arg)
            elif kind is tuple and (_integer_tuples.get(id(arg)) is arg or _has_integers(arg)):
                key.append(arg)
            elif kind is tuple or kind is list:
                key += (kind, len(arg))
                nested += arg
            else:
                return None
        every += nested
        pending = nested
    if numbers and contents & HAS_PARAMETERS:
        key += numbers
    if rows and has_constants and _may_have_rows([*args, *kwargs.values(), *every], known, parameters, rows):
        return None
    return tuple(key), contents


# By id: tuples of integers that were met before, such as the padding that a module keeps. A tuple cannot change, and as
# long as it is here, its id belongs to no other object.
_integer_tuples: dict[int, tuple[Any, ...]] = {}


def is_integer_tuple(values: tuple[Any, ...]) -> bool:
    """Whether a tuple consists of integers."""
    return _integer_tuples.get(id(values)) is values or _has_integers(values)


def _has_integers(values: tuple[Any, ...]) -> bool:
    if {*map(type, values)} != _INTEGERS:
        return False
    if len(_integer_tuples) >= _MAX_TUPLES:
        _integer_tuples.clear()
    _integer_tuples[id(values)] = values
    return True


def _may_have_rows(pending: list[Any], known: Known, parameters: Any, batch: int) -> bool:
    """Whether a constant may have rows for each sample.

    Beside samples, it then has their size in one of its dimensions; alone, a multiple of the batch size.
    """
    tensors: list[Tensor] = [arg for arg in pending if type(arg) in (Tensor, nn.Parameter)]
    of_samples = [(t, entry[1][0]) for t in tensors if (entry := known.get(id(t))) is not None and entry[0]() is t]
    sizes = {tensor.shape[layout.dim] for tensor, layout in of_samples}
    found = {id(tensor) for tensor, _ in of_samples}
    constants = [tensor for tensor in tensors if id(tensor) not in found and id(tensor) not in parameters]
    return any([size in sizes if sizes else size % batch == 0 for tensor in constants for size in tensor.shape])


def _is_view_of_known(tensor: Tensor, known: Known) -> bool:
    base = tensor._base
    return base is not None and id(base) in known


def add_quick_call(key: Key, layout: Layout, plan: Plan | None) -> None:
    """Keep the effect of a call for later calls with the same key."""
    if len(QUICK_CALLS) >= _MAX_ENTRIES:
        QUICK_CALLS.clear()
    QUICK_CALLS[key] = QuickCall(layout, plan, count_rule_changes())


def has_fixed_weights(call: Call, plan: Plan, layout: Layout, result: Tensor) -> bool:
    """Whether no weight of a use can have rows for each sample, whatever its size is.

    `layout` is where the samples lie in the result.
    """
    dims = [call.tensors[i].dim() for i, _ in plan.weights_at]
    if any(plan.layouts[i] is not None for i, _ in plan.weights_at):
        return False
    if call.facts.shares_weights:
        return True
    if call.facts.operator in ("matmul", "mm"):
        return max(dims) <= 2
    if call.facts.operator == "addmm":
        return all(dim == (1 if i == 0 else 2) for (i, _), dim in zip(plan.weights_at, dims, strict=True))
    # Functions of entries: dimensions are counted from the last one.
    return call.facts.is_pointwise and all(dim < result.dim() - layout.dim for dim in dims)
