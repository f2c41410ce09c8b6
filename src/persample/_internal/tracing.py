"""The trace of `persample.compile`, seen from the code that is traced.

While a step is traced, its tensors have shapes but no values. Code that needs values of its own (sample numbers,
indices) computes them outside the trace (`suspend`) and brings them in as constants (`lift`). A condition that only the
values of a run can decide is left to the run (`Trace.require`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from persample import _torch


class Trace(Protocol):
    """A running trace; `persample.compiled.trace` implements it."""

    drawn: int  # the number of ops so far that drew random numbers

    def require(self, condition: Tensor, message: str) -> None:
        """Have each run of the step check a condition, and raise with this message if it does not hold."""

    def stand_in(self, call: Any) -> Any:
        """The same call with tensors that have values: their own where these are known, else invented ones."""

    def is_invented(self, tensor: Tensor) -> bool:
        """Whether the values of a tensor are invented."""


_current: ContextVar[Trace | None] = ContextVar("persample trace", default=None)

# The trace that is running, None if nothing is traced.
get_trace = _current.get


@contextmanager
def activate(trace: Trace | None) -> Iterator[None]:
    """Make `trace` the current one inside the block. Device threads of autograd do not inherit it by themselves."""
    token = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(token)


def suspend() -> AbstractContextManager[Any]:
    """Inside the block, ops are not part of the trace and have values."""
    return nullcontext() if get_trace() is None else _torch.disable_dispatch_modes()


def lift(tensor: Tensor) -> Tensor:
    """A tensor that was computed outside the trace, for use inside."""
    return tensor if get_trace() is None else torch.ops.aten.lift_fresh.default(tensor)
