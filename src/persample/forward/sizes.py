"""Sizes that a model passes as tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from persample.layouts import Call, Lost, Reduced

_NARROW = {Tensor.narrow, torch.narrow}

# Functions whose arguments after the first one are sizes.
SIZED: set[Any] = {
    Tensor.view, Tensor.reshape, Tensor.expand, Tensor.repeat, Tensor.tile, torch.reshape, torch.tile,
    torch.broadcast_to, Tensor.broadcast_to, *_NARROW,
}  # fmt: skip


def read_sizes(call: Call) -> Call:
    """The same call with numbers in place of sizes that all samples share, such as the largest count of any sample.

    A size decides how much padding there is, as `int(size)` would. It does not become part of a value.
    """
    if len(call.tensors) == 1:
        return call
    shared = [
        t
        for t, where in zip(call.tensors, call.where, strict=True)
        if isinstance(where, (Lost, Reduced)) and t.dim() == 0 and t.dtype == torch.int64
    ]
    if call.kwargs or not shared or not all(any(t is size for size in shared) for t in call.tensors[1:]):
        return call

    def read(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(read, value))
        return int(value) if isinstance(value, Tensor) else value

    args = (call.args[0], *map(read, call.args[1:]))
    if call.func in _NARROW:  # the first or the last part; a part in the middle is a choice of entries
        _, dim, start, length = args
        if start and start + length != call.tensors[0].shape[dim]:
            return call
    return replace(call, args=args, tensors=call.tensors[:1], where=call.where[:1])
