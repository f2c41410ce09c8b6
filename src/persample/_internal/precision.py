"""The dtypes of tensors, and float32 products in full precision, also where settings would round their factors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from threading import Lock
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from persample import _torch

# The dtypes of indices and masks.
INDEX_DTYPES = {torch.bool, torch.uint8, torch.int64, torch.int32}


def widen(tensor: Tensor) -> Tensor:
    """The tensor in a dtype that sums can be accumulated in: float32 in place of float16 and bfloat16."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def to_double(tensor: Tensor) -> Tensor:
    """The tensor in float64 or complex128; integers and booleans stay as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def promote(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All tensors in the widest of their dtypes: under autocast, activations and gradients differ."""
    dtype = tensors[0].dtype
    if all([tensor.dtype == dtype for tensor in tensors]):
        return tensors
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)


P = ParamSpec("P")
R = TypeVar("R")

_DEVICES = ("cpu", "cuda", "mps", "xpu")

_lock = Lock()
_inside = 0  # running calls, of all threads, for which the settings were changed
_saved: list[tuple[str, str, str]] = []  # what they were before: backend, operation, precision


def find_autocast(device: str) -> torch.dtype | None:
    """The dtype of autocast on a type of device; None if it is off, or not available there.

    >>> find_autocast("cpu"), find_autocast("meta")
    (None, None)
    """
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_on else None


def in_full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """The function with autocast turned off, and with float32 products that do not round their factors.

    Norms, sums and other answers are computed from float32 at least. If backward() or an answer is called where
    autocast is on, it would round their products to bfloat16. The library would round their factors if
    `torch.set_float32_matmul_precision` or `torch.backends` allow TF32 or bfloat16, and cuDNN's convolutions do so by
    default. Norms would then be too small by more than the bound of private training allows.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return call_in_full_precision(function, *args, **kwargs)

    return run


def call_in_full_precision(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function as `in_full_precision` would make it."""
    if _torch.is_any_autocast_enabled():
        with ExitStack() as stack:
            for device in _DEVICES:
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return call_in_full_precision(function, *args, **kwargs)
    if not _inside and not _torch.find_reduced_precision():
        return function(*args, **kwargs)
    _force_full_precision()
    try:
        return function(*args, **kwargs)
    finally:
        _restore_precision()


def _force_full_precision() -> None:
    """Change the settings of the process. Calls of several threads may overlap: the last one restores them."""
    global _inside
    with _lock:
        _inside += 1
        if _inside == 1:
            _saved[:] = _torch.find_reduced_precision()
            for backend, operation, _ in _saved:
                _torch.set_precision(backend, operation, "ieee")


def _restore_precision() -> None:
    global _inside
    with _lock:
        _inside -= 1
        if not _inside:
            for backend, operation, precision in _saved:
                _torch.set_precision(backend, operation, precision)
