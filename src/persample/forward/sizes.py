"""Sizes that a model passes as tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from persample.layouts import Call, Lost, Reduced, make_call


def read_sizes(call: Call) -> Call:
    """The same call with numbers in place of sizes that all samples share, such as the largest count of any sample.

    A size decides how much padding there is, as `int(size)` would. It does not become part of a value.
    """
    if len(call.tensors) == 1:
        return call
    shared = _find_shared(call)
    if call.kwargs or not shared or not all(any(t is size for size in shared) for t in call.tensors[1:]):
        return call

    def read(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(read, value))
        return int(value) if isinstance(value, Tensor) else value

    args = (call.args[0], *map(read, call.args[1:]))
    if call.facts.operator == "narrow":  # the first or the last part; a part in the middle is a choice of entries
        _, dim, start, length = args
        if start and start + length != call.tensors[0].shape[dim]:
            return call
    return replace(call, args=args, tensors=call.tensors[:1], where=call.where[:1])


def read_slices(call: Call) -> Call:
    """The same call with numbers in place of such sizes in the bounds of slices: `ids[:, :lengths.max()]`.

    The first or the last entries may be selected; entries in the middle are a choice.
    """
    shared = _find_shared(call) if len(call.tensors) > 1 else []
    if not shared:
        return call

    def read(part: Any) -> Any:
        if not isinstance(part, slice) or part.step is not None:
            return part
        bounds = [bound for bound in (part.start, part.stop) if bound is not None]
        is_size = len(bounds) == 1 and any(bounds[0] is size for size in shared)
        return slice(*[None if bound is None else int(bound) for bound in (part.start, part.stop)]) if is_size else part

    source, item = call.args
    made = tuple(map(read, item)) if isinstance(item, tuple) else read(item)
    where = dict(zip(map(id, call.tensors), call.where, strict=True))
    return make_call(call.func, (source, made), {}, call.batch, lambda t: where[id(t)], call.counted)


def _find_shared(call: Call) -> list[Tensor]:
    """The sizes that all samples share among the tensors of a call."""
    return [
        t
        for t, where in zip(call.tensors, call.where, strict=True)
        if isinstance(where, (Lost, Reduced)) and t.dim() == 0 and t.dtype == torch.int64
    ]
