"""Motions of functions for which a trial would find nothing, or something wrong."""

from __future__ import annotations

import torch

from persample import _torch
from persample.layouts.call import Call
from persample.layouts.find import declare_motion
from persample.layouts.functions import T
from persample.layouts.layout import Layout, Lost, make_layout
from persample.layouts.motion import Motion


@declare_motion(torch.renorm, T.renorm, T.renorm_)
def _find_renorm_motion(call: Call) -> Motion:
    """Scales down slices along a dimension with too large a norm, which a trial with small values would not show."""
    where = call.where[0]
    dim = call.args[2] if len(call.args) > 2 else call.kwargs["dim"]
    if isinstance(where, Layout) and len(call.find_samples()) > 1 and dim % call.tensors[0].dim() != where.dim:
        where = Lost(f"renorm computes norms over the samples of a tensor of shape {tuple(call.tensors[0].shape)}")
    return Motion((where,))


@declare_motion(_torch.pad_sequence)
def _find_pad_sequence_motion(call: Call) -> Motion:
    """Sequences of different lengths, each of which belongs to one sample, become rows."""
    samples = [
        set(where.get_ids(tensor.shape[where.dim], call.batch))
        for tensor, where in zip(call.tensors, call.where, strict=True)
        if isinstance(where, Layout)
    ]
    if len(samples) < len(call.tensors) or any(len(of_sequence) > 1 for of_sequence in samples):
        return Motion((Lost("pad_sequence has a sequence that does not belong to exactly one sample"),))
    batch_first = call.args[1] if len(call.args) > 1 else call.kwargs.get("batch_first", False)
    ids = tuple(n for of_sequence in samples for n in of_sequence)
    return Motion((make_layout(0 if batch_first else 1, ids, call.batch),))


@declare_motion(
    T.to, T.type, T.cpu, T.cuda, T.float, T.double, T.half, T.bfloat16, T.int, T.long, T.short, T.bool
)  # fmt: skip
def _find_cast_motion(call: Call) -> Motion:
    """The same entries with another dtype or on another device. A meta tensor cannot be moved to a device."""
    return Motion((call.where[0],))


@declare_motion(T.resize_, T.resize_as_)
def _find_resize_motion(call: Call) -> Motion:
    return Motion((Lost("resize_ keeps the entries in memory, but not in their rows"),))


@declare_motion(T.data.__set__)
def _find_assignment_motion(call: Call) -> Motion:
    """`x.data = y`: the first tensor gets the layout of the second."""
    return Motion((call.where[1] if len(call.where) > 1 else None,))
