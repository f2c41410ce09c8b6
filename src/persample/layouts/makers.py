"""The motion of functions that make a new tensor: of a given size, or of the shape or dtype of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from persample.errors import get_op_name
from persample.layouts.algebra import is_pointwise
from persample.layouts.call import Call
from persample.layouts.functions import INDEX_DTYPES, LIKES, MAKERS, MOVES, WRITES, T
from persample.layouts.layout import Crossed, Layout, Lost, Reduced, Where
from persample.layouts.motion import Motion, make_uniform_motion

# Make a tensor of a size that is given by numbers. A number in a tensor is used as `int(tensor)` would be.
_SIZED: set[Any] = {
    torch.arange, torch.zeros, torch.ones, torch.empty, torch.eye, T.new_zeros, T.new_ones, T.new_empty,
}  # fmt: skip

# Those of MAKERS and LIKES that copy values of an argument.
_COPYING: set[Any] = {T.new, T.new_full, T.new_tensor, torch.full_like}


def find_motion_of_maker(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """The motion of a call that makes a new tensor; None for other calls."""
    if call.func in _SIZED:
        shared = [where for where in call.where[call.func in MAKERS :] if isinstance(where, (Lost, Reduced))]
        sizes = call.tensors[call.func in MAKERS :]
        is_size = all(t.dim() == 0 and t.dtype in INDEX_DTYPES and t.dtype != torch.bool for t in sizes)
        if shared and is_size:
            cause = f"{get_op_name(call.func)} makes a tensor whose size depends on the batch ({shared[0].cause})"
            return make_uniform_motion(Lost(cause, sized=True), results)
    if call.func not in MAKERS and call.func not in LIKES:
        return None
    if any(call.where[1:]):
        return _copy_values(call, results) if call.func in _COPYING else None
    if isinstance(call.where[0], Crossed) or call.func in MAKERS:
        return make_uniform_motion(None, results)
    like = call.where[0]
    if not isinstance(like, Layout):
        return None
    has_samples = call.batch == 1 or like.ids is None or len(set(like.ids)) > 1
    return make_uniform_motion(like if has_samples else None, results)


def find_motion_of_sized(call: Call, results: Sequence[Tensor]) -> Motion | Call | None:
    """For a call with a tensor whose size depends on the batch: its motion, or the call with constants instead.

    None if the samples are mixed in another argument.
    """
    others = [where for where in call.where if not (isinstance(where, Lost) and where.sized)]
    if any(isinstance(where, (Lost, Reduced)) for where in others):
        return None
    is_entrywise = is_pointwise(call.func) or call.func in MOVES
    is_base = call.func in WRITES and call.where[0] not in others and len(others) == len(call.where) - 1
    if any(isinstance(where, Layout) for where in others):
        if not is_base and not is_pointwise(call.func):
            return None
        return replace(call, where=tuple(where if where in others else None for where in call.where))
    lost = next(where for where in call.where if isinstance(where, Lost))
    where: Where = lost if is_entrywise else replace(lost, sized=False)
    return make_uniform_motion(where, results)


def _copy_values(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """The motion of a call that fills a tensor with values of one sample, or copies a tensor."""
    source = call.where[-1]
    if not isinstance(source, Layout):
        return None  # samples are mixed in it
    if call.func in (T.new, T.new_tensor):
        return make_uniform_motion(source, results)
    if len(call.find_samples()) == 1:
        return None
    return make_uniform_motion(Lost(f"{get_op_name(call.func)} fills a tensor with a number of one sample"), results)
