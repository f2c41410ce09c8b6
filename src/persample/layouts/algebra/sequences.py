"""Functions of lists of sequences, and functions that replace the memory of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from persample import _torch
from persample._internal.facts import T
from persample.layouts.algebra.engine import declare, get_argument
from persample.layouts.call import Call
from persample.layouts.ids import make_layout
from persample.layouts.layout import Layout, Lost
from persample.layouts.motion import Motion


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
