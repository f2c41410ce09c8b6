"""Ops whose motion no trial shows."""

from __future__ import annotations

import torch

from persample import _torch
from persample.layouts.call import Op
from persample.layouts.find import motion
from persample.layouts.functions import T
from persample.layouts.layout import Layout, Lost, regular
from persample.layouts.motion import Motion


@motion(torch.renorm)
@motion(T.renorm)
@motion(T.renorm_)
def _renorm(op: Op) -> Motion:
    """Each index along a dim is scaled down if it is too long: small numbers stay as they are."""
    where = op.where[0]
    dim = op.args[2] if len(op.args) > 2 else op.kwargs["dim"]
    if isinstance(where, Layout) and len(op.samples()) > 1 and dim % op.tensors[0].dim() != where.dim:
        where = Lost(f"renorm takes the norm over the samples of {tuple(op.tensors[0].shape)}")
    return Motion((where,))


@motion(_torch.pad_sequence)
def _pad_sequence(op: Op) -> Motion:
    """Sequences of any lengths, each of one sample."""
    owners = [
        set(where.sample_of(tensor.shape[where.dim], op.batch))
        for tensor, where in zip(op.tensors, op.where, strict=True)
        if isinstance(where, Layout)
    ]
    if len(owners) < len(op.tensors) or any(len(owner) > 1 for owner in owners):
        return Motion((Lost("pad_sequence takes sequences that are not of one sample each"),))
    batch_first = op.args[1] if len(op.args) > 1 else op.kwargs.get("batch_first", False)
    return Motion((regular(0 if batch_first else 1, tuple(n for owner in owners for n in owner), op.batch),))


def _cast(op: Op) -> Motion:
    """The same entries in another type or on another device, which a meta tensor has not."""
    return Motion((op.where[0],))


for _name in ("to", "type", "cpu", "cuda", "float", "double", "half", "bfloat16", "int", "long", "short", "bool"):
    motion(getattr(T, _name))(_cast)


@motion(T.resize_)
@motion(T.resize_as_)
def _resize(op: Op) -> Motion:
    return Motion((Lost("resize_ lets entries lie where they do in memory"),))


@motion(T.data.__set__)
def _set(op: Op) -> Motion:
    """A tensor becomes another (`x.data = y`)."""
    return Motion((op.where[1] if len(op.where) > 1 else None,))
