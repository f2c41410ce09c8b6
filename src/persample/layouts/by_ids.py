"""How an op that only moves entries moves the samples: applied to the numbers of the samples, it tells exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from persample._internal.functions import find_results
from persample._internal.tree import find_tensors
from persample.errors import op_name
from persample.layouts.by_trial import goes_with_rows
from persample.layouts.call import Op
from persample.layouts.functions import PICKS, RESHAPES, T
from persample.layouts.layout import Layout, Lost, Where, from_ids, laid_out_ids, sample_ids
from persample.layouts.motion import Motion, everywhere


def by_ids(op: Op, results: Sequence[Tensor]) -> Motion:
    """Exactly where a move put each entry."""
    carriers = range(len(list(find_tensors(op.args[0] if op.args else next(iter(op.kwargs.values()))))))
    if any(op.where[len(carriers) :]):
        return everywhere(Lost(f"{op_name(op.func)} moves entries to where samples say"), results)
    moved = _moved(op, {i: op.where[i] for i in carriers})
    layouts = [where for i in carriers if isinstance(where := op.where[i], Layout)]
    loose = any(where.loose for where in layouts)
    found: list[Where | None] = [from_ids(m, op.batch, loose) for m in moved]
    first = op.where[0]
    for i, m in enumerate(moved):  # of an empty tensor no entry says where the samples are
        kept = isinstance(first, Layout) and m.dim() == op.tensors[0].dim() and first.ids is None
        if m.numel() == 0 and kept and m.shape[first.dim] == op.tensors[0].shape[first.dim]:  # type: ignore[union-attr]
            found[i] = first
    if loose:
        found = [_still_loose(op, where, len(moved)) for where in found]
    if any(where.places for where in layouts):
        found = [replace(where, places=True) if isinstance(where, Layout) else where for where in found]
    if isinstance(first, Layout) and first.others and len(carriers) == 1:
        found[0] = _with_others(op, first, found[0])
    return Motion(tuple(found))


def _with_others(op: Op, first: Layout, found: Where | None) -> Where | None:
    """`found`, with where the samples would be, had they been in another dim of the first argument."""
    moved = [_moved(op, {0: other})[0] for other in first.others]
    others = tuple(layout for m in moved if isinstance(layout := from_ids(m, op.batch), Layout))
    return replace(found, others=others) if isinstance(found, Layout) else found


# To divide rows by numbers of them that were counted is to group them; to halve them is to choose by place.
_GROUPS = {T.split, T.split_with_sizes, torch.split, torch.split_with_sizes}


def _still_loose(op: Op, found: Where | None, results: int) -> Where | None:
    """What a move makes of loose rows, of which it has to keep all: a choice by place would be one by all samples."""
    where = op.where[0]
    puts_together = isinstance(op.args[0], (list, tuple))
    lists = [a for a in (*op.args[1:], *op.kwargs.values()) if isinstance(a, (list, tuple))]
    counted = op.func in _GROUPS and bool(lists) and op.counted.contains(lists[0])
    if puts_together and any(w is None for w in op.where) and not goes_with_rows(op, [found]):
        return Lost(f"{op_name(op.func)} puts constants beside rows whose order depends on all samples")
    if puts_together or counted or not isinstance(where, Layout) or not isinstance(found, Layout):
        return found
    before, after = where.ids or (), found.ids or ()
    # Each row still has one owner, and a sample's entries are in the order they would be in without the others.
    if after == before or op.func in RESHAPES:
        return found
    if results == 1 and bool(before) == bool(after) and len(after) % max(1, len(before)) == 0 and op.func not in PICKS:
        return found
    return Lost(f"{op_name(op.func)} chooses by their place among rows whose order depends on all samples")


_BY_STRIDE = {torch.as_strided, T.as_strided}


def _moved(op: Op, carriers: Mapping[int, Where | None]) -> tuple[Tensor, ...]:
    """The results of the op on the numbers of the samples."""
    numbers = laid_out_ids if op.func in _BY_STRIDE else sample_ids
    ids = {i: numbers(op.tensors[i], where, op.batch) for i, where in carriers.items()}
    if op.func not in _BY_STRIDE:
        ids = {i: n.clone() for i, n in ids.items()}
    args, kwargs = op.fill([ids.get(i, t) for i, t in enumerate(op.tensors)])
    kwargs.pop("out", None)
    return find_results(op.func(*args, **kwargs), args)
