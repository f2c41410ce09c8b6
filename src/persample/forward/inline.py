"""Seeing into the functions of torch that are written in Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any


@cache
def opened(func: FunctionType) -> Callable[..., Any]:
    """`func`, with its body run op by op instead of being handed over whole.

    Such a function first asks `has_torch_function` whether somebody wants to handle it, and under a mode the answer is
    always yes. In this copy of it the answer is no.
    """

    def no(*_: Any) -> bool:
        return False

    asks = [name for name in func.__globals__ if name.startswith("has_torch_function")]
    scope = {**func.__globals__, **dict.fromkeys(asks, no)}
    copy = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy
