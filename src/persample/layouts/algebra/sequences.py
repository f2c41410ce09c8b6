"""Recurrent layers, packed sequences, lists of sequences, and functions that replace the memory of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from persample import _torch
from persample._internal.facts import T
from persample._internal.recurrent import declare_batch_second, recurrent_layer
from persample.errors import get_op_name
from persample.layouts.algebra.engine import declare, get_argument
from persample.layouts.call import Call
from persample.layouts.ids import make_layout
from persample.layouts.layout import Layout, Lost, Where
from persample.layouts.motion import MEMO, Motion


def make_packed_layout(sizes: Tensor, order: Tensor | None, batch: int, loose: bool = False) -> Layout:
    """The layout of the rows of a PackedSequence, which are sorted by step, the longest sample first.

    `sizes` and `order` are the `batch_sizes` and `sorted_indices` of the PackedSequence.
    """
    samples = list(range(int(sizes[0]))) if order is None else order.tolist()
    return make_layout(0, tuple(n for size in sizes.tolist() for n in samples[:size]), batch, loose)


@declare(declare_batch_second, handles_any_layout=True)
def _find_state_motion(call: Call, results: Sequence[Tensor]) -> Motion:
    return Motion(tuple(map(_choose_dim_1, call.where)))


def _choose_dim_1(where: Where | None) -> Where | None:
    """The layout along dimension 1, if that is the layout or one of its alternatives."""
    layouts = [where, *where.alternatives] if isinstance(where, Layout) else []
    return next((replace(layout, alternatives=()) for layout in layouts if layout.dim == 1), where)


@declare(recurrent_layer, handles_any_layout=True)
def _find_layer_motion(call: Call, results: Sequence[Tensor]) -> Motion:
    # It is kept because the plans of the uses are kept with it.
    return MEMO.get_or_find(call.key, lambda: _compute_layer_motion(call))


def _compute_layer_motion(call: Call) -> Motion:
    func, input, state, _, sizes, *_ = call.args
    where, count = call.where[0], state[0].shape[1]
    samples = call.find_samples()
    of_state: Layout | None = None
    if len(samples) == 1 and isinstance(where, Layout):  # everything belongs to one sample, in any dimension
        of_state = make_layout(1, (*samples,) * count, call.batch)
    elif isinstance(where, Layout) and where.dim != (1 if sizes is None else 0):
        where = Lost(f"{get_op_name(func)} runs over dimension {where.dim}, which is the batch dimension")
    elif isinstance(where, Layout):
        ids = where.get_ids(input.shape[where.dim], call.batch)
        of_state = make_layout(1, ids[:count], call.batch, where.loose)
        if any(given is not None and given != of_state for given in call.where[1 : 1 + len(state)]):
            where = Lost(f"{get_op_name(func)} has an input and a state with the samples in different places")
    if of_state is not None and sizes is not None and len({*of_state.get_ids(count, call.batch)}) < count:
        where = Lost(f"{get_op_name(func)} has several packed sequences of one sample (pad them instead)")
    if of_state is None or not isinstance(where, Layout):
        return Motion((where,) * (1 + len(state)))
    return Motion((where, *[of_state] * len(state)), tuple((1 + i, of_state) for i in range(len(state))))


@declare(_torch.pack_padded_sequence, handles_any_layout=True)
def _find_packing_motion(call: Call, results: Sequence[Tensor]) -> Motion:
    input, lengths, batch_first = call.args
    where = call.where[0]
    dim = 0 if batch_first else 1
    if call.batch == 1 and isinstance(where, Layout):
        return Motion((Layout(0, int(lengths[0])), None))
    if not isinstance(where, Layout) or where.dim != dim:
        return Motion((Lost("sequences were packed along a dimension that is not the batch dimension"), None))
    sizes = torch.tensor([int((lengths > t).sum()) for t in range(int(lengths[0]))])
    order = torch.tensor(where.get_ids(input.shape[dim], call.batch))
    layout = make_packed_layout(sizes, order, call.batch, where.loose)
    call.counted.add_packed(layout.get_ids(int(sizes.sum()), call.batch), sizes.tolist())
    return Motion((layout, None))


@declare(_torch.pad_packed_sequence, handles_any_layout=True)
def _find_padding_motion(call: Call, results: Sequence[Tensor]) -> Motion:
    data, sizes, batch_first, *_ = call.args
    where = call.where[0]
    if not isinstance(where, Layout):
        return Motion((where, None))
    ids = where.get_ids(len(data), call.batch)
    return Motion((make_layout(0 if batch_first else 1, ids[: int(sizes[0])], call.batch, where.loose), None))


@declare(_torch.pad_sequence)
def _pad_sequence(call: Call, results: Sequence[Tensor]) -> Motion:
    """Sequences of different lengths, each of which belongs to one sample, become rows."""
    samples = [
        set(where.get_ids(tensor.shape[where.dim], call.batch))
        for tensor, where in call.pairs
        if isinstance(where, Layout)
    ]
    if len(samples) < len(call.tensors) or any(len(of_sequence) > 1 for of_sequence in samples):
        return Motion((Lost("pad_sequence has a sequence that does not belong to exactly one sample"),))
    ids = tuple(n for of_sequence in samples for n in of_sequence)
    is_first = get_argument(call, 1, "batch_first", default=False)
    return Motion((make_layout(0 if is_first else 1, ids, call.batch),))


@declare(T.resize_, T.resize_as_)
def _resize(call: Call, results: Sequence[Tensor]) -> Motion:
    return Motion((Lost("resize_ keeps the entries in memory, but not in their rows"),))


@declare(T.data.__set__, handles_any_layout=True, replaces_memory=True)
def _assign_data(call: Call, results: Sequence[Tensor]) -> Motion:
    """`x.data = y`: the first tensor gets the layout of the second."""
    return Motion((call.where[1] if len(call.where) > 1 else None,))


@declare(T.__deepcopy__, handles_any_layout=True)
def _deepcopy(call: Call, results: Sequence[Tensor]) -> Motion:
    """The same entries. A trial would leave its own tensors in the memo of the copy."""
    return Motion((call.where[0],))
