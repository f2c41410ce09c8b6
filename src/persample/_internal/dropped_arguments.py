"""Arguments that torch drops when it hands a call over to a function mode.

A Python function of torch hands its call over with `handle_torch_function(function, ..., arguments)`. A few functions
leave an argument out, so that every mode computes something else than the caller asked for. The frame of the function
still has the argument. `tests/_internal/test_dropped_arguments.py` searches torch for such functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# The argument that each function leaves out, and its default.
DROPPED: dict[Any, tuple[str, Any]] = {
    F.l1_loss: ("weight", None),
    torch.chain_matmul: ("out", None),
    Tensor.dim_order: ("ambiguity_check", False),
}


def find_dropped(func: Callable[..., Any]) -> dict[str, Any]:
    """The argument that was left out of a call of `func`, by name; empty if it was not given.

    Must be called by the mode that the function has handed its call to: it reads the frames below.
    """
    if func not in DROPPED:
        return {}
    name, default = DROPPED[func]
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not func.__code__:
        frame = frame.f_back
    value = default if frame is None else frame.f_locals.get(name, default)
    return {} if value is default else {name: value}
