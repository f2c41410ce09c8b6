"""The stacks of function modes and dispatch modes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from torch.overrides import TorchFunctionMode

from persample._torch.lookup import find

P = ParamSpec("P")
R = TypeVar("R")

# Context manager in which torch functions do not reach modes or subclasses.
DisableTorchFunction: Any = find("torch._C.DisableTorchFunction", "Every recording")


class _Stacks(threading.local):
    """Whether a stack of modes is being read or changed in this thread, and what shall be removed afterwards."""

    is_busy = False

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []


_stacks = _Stacks()


def _undisturbed(function: Callable[P, R]) -> Callable[P, R]:
    """While `function` runs, no mode is removed.

    The garbage collector may free a watched model at any time, and its mode then has to leave the stack.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        is_outermost, _stacks.is_busy = not _stacks.is_busy, True
        try:
            return function(*args, **kwargs)
        finally:
            if is_outermost:
                _stacks.is_busy = False
                while _stacks.waiting:
                    _stacks.waiting.pop()()

    return run


def _removing(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """The function, which waits if a stack of modes is being read or changed."""
    remove = _undisturbed(function)

    @wraps(function)
    def run(mode: Any) -> None:
        if _stacks.is_busy:
            _stacks.waiting.append(partial(remove, mode))
        else:
            remove(mode)

    return run


_list_function_modes: Callable[[], list[TorchFunctionMode]] = find(
    "torch.overrides._get_current_function_mode_stack", "Every recording"
)
_count_function_modes: Callable[[], int] = find("torch._C._len_torch_function_stack", "watch()")
_push_function_mode: Callable[[TorchFunctionMode], None] = find("torch.overrides._push_mode", "watch()")
_pop_function_mode: Callable[[], TorchFunctionMode] = find("torch.overrides._pop_mode", "watch()")
_default_device: Any = find("torch._GLOBAL_DEVICE_CONTEXT", "watch()")


@_undisturbed
def get_function_modes() -> list[TorchFunctionMode]:
    """All active function modes, the outermost first."""
    return _list_function_modes()


@_undisturbed
def insert_outermost_mode(mode: TorchFunctionMode) -> None:
    """Enter `mode` outside all other function modes, whose own blocks then still end in order.

    torch requires the mode of the default device to stay the outermost one.
    """
    inner = _pop_function_modes()
    if inner and inner[-1] is getattr(_default_device, "device_context", None):
        _push_function_mode(inner.pop())
    _push_function_mode(mode)
    for other in reversed(inner):
        _push_function_mode(other)


@_removing
def remove_mode(mode: TorchFunctionMode) -> None:
    """Leave `mode`, wherever it is on the stack."""
    if not any(other is mode for other in get_function_modes()):
        return
    for other in reversed(_pop_function_modes()):
        if other is not mode:
            _push_function_mode(other)


def _pop_function_modes() -> list[TorchFunctionMode]:
    """Empty the stack, the innermost mode first."""
    modes = []
    while _count_function_modes():
        modes.append(_pop_function_mode())
    return modes


_list_dispatch_modes: Callable[[], list[Any]] = find(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack", "Every recording"
)


@_undisturbed
def get_dispatch_modes() -> list[Any]:
    """All active dispatch modes, the outermost first."""
    return _list_dispatch_modes()


def is_default_device(mode: TorchFunctionMode) -> bool:
    """Whether a function mode is the one of `torch.set_default_device`."""
    return mode is getattr(_default_device, "device_context", None)


_count_dispatch_modes: Callable[[], int] = find("torch._C._len_torch_dispatch_stack", "Every recording")
_push_dispatch_mode: Callable[[Any], None] = find("torch.utils._python_dispatch._push_mode", "Every recording")
_pop_dispatch_mode: Callable[[], Any] = find("torch.utils._python_dispatch._pop_mode", "Every recording")


@_undisturbed
def insert_outermost_dispatch_mode(mode: Any) -> None:
    """Enter a dispatch mode outside all others, whose own blocks then still end in order."""
    for other in (mode, *reversed(_pop_dispatch_modes())):
        _push_dispatch_mode(other)


@_removing
def remove_dispatch_mode(mode: Any) -> None:
    """Leave a dispatch mode, wherever it is on the stack; nothing happens if it is not there."""
    if not any(other is mode for other in get_dispatch_modes()):
        return
    for other in reversed(_pop_dispatch_modes()):
        if other is not mode:
            _push_dispatch_mode(other)


def _pop_dispatch_modes() -> list[Any]:
    """Empty the stack, the innermost mode first."""
    modes = []
    while _count_dispatch_modes():
        modes.append(_pop_dispatch_mode())
    return modes
