"""Run the Python functions of torch op by op."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

from persample.layouts import DECLARATIONS


@cache
def is_composite(func: Callable[..., Any]) -> bool:
    """Whether a function is written in Python in `torch.nn.functional`, and has no declared motion.

    Its ops are followed one by one, so that it need not be tried.
    """
    return isinstance(func, FunctionType) and func.__module__ == "torch.nn.functional" and func not in DECLARATIONS


@cache
def make_inline(func: FunctionType) -> Callable[..., Any]:
    """A copy of `func` whose body runs op by op under a function mode.

    A Python function of torch first asks `has_torch_function` whether a mode wants to handle the whole call. Under a
    mode the answer is always yes. In the copy the answer is no.
    """

    def answer_no(*_: Any) -> bool:
        return False

    questions = [name for name in func.__globals__ if name.startswith("has_torch_function")]
    scope = {**func.__globals__, **dict.fromkeys(questions, answer_no)}
    inlined = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    inlined.__kwdefaults__ = func.__kwdefaults__
    return inlined
