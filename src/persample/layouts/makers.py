"""The motion of functions that make a new tensor: of a given size, or of the shape or dtype of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from persample._internal.precision import INDEX_DTYPES
from persample.errors import get_op_name
from persample.layouts.call import Call
from persample.layouts.layout import Crossed, Layout, Lost, Reduced, Where
from persample.layouts.motion import Motion, make_uniform_motion

# Operators that make a tensor, and copy values of an argument.
_COPYING = {"new", "new_full", "new_tensor", "full_like"}


def find_motion_of_maker(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """The motion of a call that makes a new tensor; None for other calls."""
    makes_new = call.facts.makes_new
    if call.facts.makes_sized:  # a number in a tensor is used as `int(tensor)` would be
        shared = [where for where in call.where[makes_new:] if isinstance(where, (Lost, Reduced))]
        sizes = call.tensors[makes_new:]
        is_size = all(t.dim() == 0 and t.dtype in INDEX_DTYPES and t.dtype != torch.bool for t in sizes)
        if shared and is_size:
            cause = f"{get_op_name(call.func)} makes a tensor whose size depends on the batch ({shared[0].cause})"
            return make_uniform_motion(Lost(cause, sized=True), results)
    if not makes_new and not call.facts.makes_like:
        return None
    if any(call.where[1:]):
        return _copy_values(call, results) if call.facts.operator in _COPYING else None
    if isinstance(call.where[0], Crossed) or makes_new:
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
    is_entrywise = call.facts.is_pointwise or call.facts.moves_entries
    is_base = call.facts.writes_entries and call.where[0] not in others and len(others) == len(call.where) - 1
    if any(isinstance(where, Layout) for where in others):
        if not is_base and not call.facts.is_pointwise:
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
    if call.facts.operator in ("new", "new_tensor"):
        return make_uniform_motion(source, results)
    if len(call.find_samples()) == 1:
        return None
    return make_uniform_motion(Lost(f"{get_op_name(call.func)} fills a tensor with a number of one sample"), results)
