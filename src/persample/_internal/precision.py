"""Products in the precision of their factors, also where the caller's autocast would round them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from persample import _torch

P = ParamSpec("P")
R = TypeVar("R")

_DEVICES = ("cpu", "cuda", "mps", "xpu")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """The function with autocast turned off.

    Norms, sums and other answers are computed from float32 at least. If backward() or an answer is called where
    autocast is on, it would round their products to bfloat16: norms would be too small by more than the bound allows.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _torch.is_any_autocast_enabled():
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for device in _DEVICES:
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return run
