"""Calls that repeat: the same place in the sequence of a model's functions, with arguments of the same kind.

The sequence of functions of a forward pass is known from its audit, and most passes repeat it. Each place in it keeps
what its last call was: the effect of the call, and what its arguments have to be for the effect to be the same. To
compare the arguments of the next call is faster than to build its key (`quick.make_key`). If a comparison fails, the
call takes the way over its key, so nothing depends on it but time.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from persample.forward.quick import Known, QuickCall, is_integer_tuple
from persample.layouts import Layout
from persample.rules import count_rule_changes

# Types of arguments that are compared by identity. None of them can change.
_FIXED = {int, float, bool, str, NoneType, torch.dtype, torch.device, EllipsisType, torch.memory_format}

_MAX_MISSES = 3  # then the arguments are not compared any more

# How an argument is compared: by its layout, by its id, or by identity.
_SAMPLES, _PARAMETER, _SAME = 0, 1, 2

# The way of comparison; the layout, id or object; the token of the layout; the number of dimensions; requires_grad.
_Check = tuple[int, Any, Any, int, bool]


class Node(dict[Any, Any]):
    """A place in the sequences of functions of a model: the places that follow, by function.

    Attributes:
        repeat: the last call that led here; None if there is none.
        misses: how often a call differed from the last one.
    """

    __slots__ = ("misses", "repeat")

    def __init__(self) -> None:
        super().__init__()
        self.repeat: Repeat | None = None
        self.misses = 0


class Repeat:
    """The effect of a call, and what its arguments were."""

    __slots__ = ("_checks", "_count", "_names", "quick")

    def __init__(self, quick: QuickCall, checks: list[_Check], count: int, names: tuple[str, ...]) -> None:
        self.quick = quick
        self._checks = checks
        self._count = count
        self._names = names

    def matches(self, args: tuple[Any, ...], kwargs: dict[str, Any], known: Known, parameters: Container[int]) -> bool:
        """Whether a call of the same function has the same effect."""
        if len(args) != self._count or self.quick.changes != count_rule_changes():
            return False
        values: Iterable[Any] = args
        if kwargs or self._names:
            if tuple(kwargs) != self._names:
                return False
            values = (*args, *kwargs.values())
        for value, (way, expected, token, dims, has_grad) in zip(values, self._checks, strict=True):
            if way == _SAME:
                if value is not expected:
                    return False
            elif way == _PARAMETER:
                if id(value) != expected or expected not in parameters:
                    return False
                if not value.requires_grad or value.dim() != dims or expected in known:
                    return False
            else:
                entry = known.get(id(value))
                if entry is None or entry[0]() is not value:
                    return False
                layout, had_grad = entry[1]
                if layout is not expected and (type(layout) is not Layout or layout.token is not token):
                    return False
                if value.requires_grad is not has_grad or had_grad is not has_grad or value.dim() != dims:
                    return False
        return True


def note_repeat(
    node: Any,
    quick: QuickCall,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known: Known,
    parameters: Container[int],
) -> None:
    """Keep the effect of a call for the next one in the same place of the sequence."""
    if type(node) is not Node or node.misses >= _MAX_MISSES:
        return
    node.misses += 1
    checks: list[_Check] = []
    for value in (*args, *kwargs.values()):
        check = _make_check(value, known, parameters)
        if check is None:
            node.misses, node.repeat = _MAX_MISSES, None
            return
        checks.append(check)
    node.repeat = Repeat(quick, checks, len(args), tuple(kwargs))


def _make_check(value: Any, known: Known, parameters: Container[int]) -> _Check | None:
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        entry = known.get(id(value))
        if entry is not None and entry[0]() is value:
            layout, had_grad = entry[1]
            has_grad = value.requires_grad
            if type(layout) is not Layout or layout.token is None or had_grad is not has_grad:
                return None
            return _SAMPLES, layout, layout.token, value.dim(), has_grad
        if id(value) in parameters and value.requires_grad:
            return _PARAMETER, id(value), None, value.dim(), True
        return None
    if kind in _FIXED or (kind is tuple and is_integer_tuple(value)):
        return _SAME, value, None, 0, False
    return None
