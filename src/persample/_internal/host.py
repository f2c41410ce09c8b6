"""Numbers that Python reads from tensors, and decisions that are left to the device.

On a CPU the numbers are in the memory of the host: reading some of them needs no op and waits for nothing, so decisions
are taken at once. Any other device would first have to finish what it was given, and Python could not prepare the next
ops meanwhile. So an ordinary step reads nothing from such a device. A decision is then *late*: the device replaces what
is in doubt by a bound that holds in any case, and the start of the next recording looks at the conditions. A device on
which that was needed once decides at once from then on.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextvars import ContextVar

import torch
from torch import Tensor

from persample._internal import tracing
from persample.errors import PerSampleError

is_forced: ContextVar[bool] = ContextVar("persample late decisions", default=False)
_deciding_at_once: set[torch.device] = set()


class _Conditions(threading.local):
    """The conditions of this thread that were not looked at yet: each with its message, and whether to raise it."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, str, bool]] = []


_conditions = _Conditions()


def decides_late(device: torch.device) -> bool:
    """Whether decisions about tensors on a device are left to it; in a compiled step, all are.

    >>> decides_late(torch.device("cpu")), decides_late(torch.device("meta"))
    (False, True)
    """
    if tracing.get_trace() is not None or is_forced.get():
        return True
    return device.type != "cpu" and device not in _deciding_at_once


def read_numbers(tensor: Tensor) -> list[float]:
    """The entries of a tensor. Tensors on the device `meta` have none: all count as 0.

    >>> read_numbers(torch.tensor([1.0, 2.0]))
    [1.0, 2.0]
    """
    if tensor.is_meta:
        return [0.0] * tensor.numel()
    numbers: list[float] = tensor.flatten().tolist()
    return numbers


def copy_to_host(tensor: Tensor) -> Tensor:
    """The tensor in the memory of the host. Tensors on the device `meta` have no values: all count as 0."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.cpu()


def require(condition: Tensor, message: str) -> None:
    """Raise if a condition, a tensor with one entry, does not hold: in a compiled step in each run, else late."""
    trace = tracing.get_trace()
    if trace is not None:
        trace.require(condition, message)
    elif not condition.is_meta:
        _conditions.waiting.append((condition, message, True))


def expect(compute: Callable[[], Tensor], message: str) -> None:
    """Warn late if a condition does not hold, and decide at once on its device from then on; not in a compiled step."""
    if tracing.get_trace() is None:
        condition = compute()
        if not condition.is_meta:
            _conditions.waiting.append((condition, message, False))


def check_conditions() -> None:
    """Look at the conditions of the last step: raise or warn if one does not hold."""
    waiting, _conditions.waiting = _conditions.waiting, []
    for condition, message, is_error in waiting:
        if not bool(condition):
            if is_error:
                raise PerSampleError(f"In the last step of this thread: {message}")
            _deciding_at_once.add(condition.device)
            warnings.warn(message, stacklevel=2)
