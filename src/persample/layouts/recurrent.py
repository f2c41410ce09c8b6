"""Where the samples lie in what recurrent layers take and give, and in packed sequences."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from persample import _torch
from persample._internal.recurrent import declare_batch_second, recurrent_layer
from persample.errors import op_name
from persample.layouts.cache import CACHE
from persample.layouts.call import Op
from persample.layouts.find import described, motion
from persample.layouts.layout import Layout, Lost, Where, regular
from persample.layouts.motion import Motion


def packed_layout(sizes: Tensor, order: Tensor | None, batch: int, loose: bool = False) -> Layout:
    """Where the samples lie in the rows of a PackedSequence: step by step, the longest sample first."""
    samples = list(range(int(sizes[0]))) if order is None else order.tolist()
    return regular(0, tuple(n for size in sizes.tolist() for n in samples[:size]), batch, loose)


@motion(declare_batch_second)
def _motion_of_state(op: Op) -> Motion:
    return Motion(tuple(map(_second, op.where)))


def _second(where: Where | None) -> Where | None:
    readings = [where, *where.others] if isinstance(where, Layout) else []
    return next((replace(r, others=()) for r in readings if r.dim == 1), where)


@motion(recurrent_layer)
def _motion_of_layer(op: Op) -> Motion:
    """It is remembered, as the plans of the uses are kept with it."""
    return CACHE.get_or_find(described(op), lambda: _found_for_layer(op))


def _found_for_layer(op: Op) -> Motion:
    func, input, state, _, sizes, *_ = op.args
    where, count = op.where[0], state[0].shape[1]
    owners = op.samples()
    rows: Layout | None = None
    if len(owners) == 1 and isinstance(where, Layout):  # everything is of one sample, in whatever dim it was found
        rows = regular(1, (*owners,) * count, op.batch)
    elif isinstance(where, Layout) and where.dim != (1 if sizes is None else 0):
        where = Lost(f"{op_name(func)} runs along dim {where.dim}, where the samples lie")
    elif isinstance(where, Layout):
        ids = where.sample_of(input.shape[where.dim], op.batch)
        rows = regular(1, ids[:count], op.batch, where.loose)
        if any(own is not None and own != rows for own in op.where[1 : 1 + len(state)]):
            where = Lost(f"{op_name(func)} has the samples of its input and of its state in different places")
    if rows is not None and sizes is not None and len({*rows.sample_of(count, op.batch)}) < count:
        where = Lost(f"{op_name(func)} has packed sequences of which several are of one sample: pad them instead")
    if rows is None or not isinstance(where, Layout):
        return Motion((where,) * (1 + len(state)))
    return Motion((where, *[rows] * len(state)), tuple((1 + i, rows) for i in range(len(state))))


@motion(_torch.pack_padded_sequence)
def _motion_of_packing(op: Op) -> Motion:
    input, lengths, batch_first = op.args
    where = op.where[0]
    dim = 0 if batch_first else 1
    if op.batch == 1 and isinstance(where, Layout):
        return Motion((Layout(0, int(lengths[0])), None))
    if not isinstance(where, Layout) or where.dim != dim:
        return Motion((Lost("sequences were packed along another dim than that of the samples"), None))
    sizes = torch.tensor([int((lengths > t).sum()) for t in range(int(lengths[0]))])
    order = torch.tensor(where.sample_of(input.shape[dim], op.batch))
    return Motion((packed_layout(sizes, order, op.batch, where.loose), None))


@motion(_torch.pad_packed_sequence)
def _motion_of_padding(op: Op) -> Motion:
    data, sizes, batch_first, *_ = op.args
    where = op.where[0]
    if not isinstance(where, Layout):
        return Motion((where, None))
    ids = where.sample_of(len(data), op.batch)
    return Motion((regular(0 if batch_first else 1, ids[: int(sizes[0])], op.batch, where.loose), None))
