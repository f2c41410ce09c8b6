"""Rows of packed sequences that a model slices by hand, as recurrent layers written in Python do.

The rows of a PackedSequence are sorted by step, and within a step the longest sample comes first. So the first k rows
of a step, where k is the size of another step, are the samples that have that step: a choice by each sample's length.
The order of the samples may depend on all of them (they are sorted by length). The rows are loose then, and other
choices by position are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from persample._internal.facts import T
from persample.layouts.call import Call
from persample.layouts.counts import PackedOrder
from persample.layouts.ids import make_layout
from persample.layouts.layout import Layout
from persample.layouts.motion import Motion


def find_packed_motion(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """The motion of a call that slices, joins or writes rows in a packed order; None for other calls."""
    orders = call.counted.packed_orders
    layouts: tuple[Layout, ...] | None
    if call.facts.operator == "cat":
        layouts = _join_rows(call, orders)
    elif call.facts.operator in ("split", "split_with_sizes"):
        layouts = _split_rows(call, orders)
    elif call.func is T.__getitem__:
        layouts = _select_rows(call, orders)
    elif call.func is T.__setitem__:
        layouts = _write_rows(call, orders)
    else:
        return None
    if layouts is None or len(layouts) != len(results):
        return None
    return Motion(layouts, depends_on_values=True)


def _join_rows(call: Call, orders: Sequence[PackedOrder]) -> tuple[Layout] | None:
    """`cat([states, first_states[k:n]])`: the samples whose sequences begin at this step get rows of a first state."""
    if len(call.tensors) != 2 or call.kwargs.get("dim", (*call.args, 0)[1]) != 0:
        return None
    (rows, first), (where, of_first) = call.tensors, call.where
    if not isinstance(where, Layout) or where.dim or of_first is not None or not first.dim() or not first.stride(0):
        return None
    known, total = where.get_ids(len(rows), call.batch), len(rows) + len(first)
    begins_at = first.storage_offset() // first.stride(0)
    found = {
        order.samples[:total]
        for order in orders
        if order.has_steps(len(rows), total) and order.starts_with(known)
        # The constants are rows k to n of a tensor with a row for each sample.
        and first._base is not None and begins_at % len(order.samples) == len(rows)
    }  # fmt: skip
    if len(found) != 1 or (where.loose and not bool((first == first[:1]).all())):
        return None
    return (make_layout(0, found.pop(), call.batch, where.loose),)


def _split_rows(call: Call, orders: Sequence[PackedOrder]) -> tuple[Layout, ...] | None:
    """`data.split(batch_sizes)` of loose rows: one part for each step."""
    where = call.where[0]
    sizes = [a for a in (*call.args[1:2], *call.kwargs.values()) if isinstance(a, (list, tuple))]
    if not isinstance(where, Layout) or not where.loose or where.dim or any(call.where[1:]) or len(sizes) != 1:
        return None
    counts = tuple(int(size) for size in sizes[0])
    ids = where.get_ids(len(call.tensors[0]), call.batch)
    if not any(order.sizes == counts and order.make_ids() == ids for order in orders):
        return None
    starts = [sum(counts[:t]) for t in range(len(counts))]
    return tuple(_make_loose(ids[a : a + n]) for a, n in zip(starts, counts, strict=True))


def _select_rows(call: Call, orders: Sequence[PackedOrder]) -> tuple[Layout] | None:
    """`rows[a:b]`, where a and b are sizes of steps, or one row `rows[i]`, of loose rows of one step."""
    where = call.where[0]
    if not isinstance(where, Layout) or not where.loose or where.dim or where.by_rank or any(call.where[1:]):
        return None
    item, known = _get_first_item(call.args[1]), where.get_ids(len(call.tensors[0]), call.batch)
    fitting = [order for order in orders if order.starts_with(known)]
    if isinstance(item, slice) and item.step in (None, 1):
        start, stop, _ = item.indices(len(known))
        if any(order.has_steps(start, stop) for order in fitting) and start < stop:
            return (_make_loose(known[start:stop]),)
    if isinstance(item, int) and fitting:
        rank = range(len(known))[item]
        size = call.tensors[0].shape[1] if call.tensors[0].dim() > 1 else 1
        return (Layout(0, ids=(known[rank],) * size, loose=True, by_rank=True),)
    return None


def _write_rows(call: Call, orders: Sequence[PackedOrder]) -> tuple[Layout] | None:
    """`base[a:b] = rows`, where a and b are sizes of steps, or `base[i] = row`, where the row was row i of a step.

    A base in which single rows were written can be used once it has all rows of an order.
    """
    base, item, value = call.args
    where, of_value = call.where[0], call.where[-1]
    if len(call.tensors) != 2 or not isinstance(of_value, Layout) or not of_value.loose or of_value.dim:
        return None
    if where is not None and not (isinstance(where, Layout) and where.loose and not where.dim):
        return None
    at = _get_first_item(item)
    ids = list(where.get_ids(len(base), call.batch) if isinstance(where, Layout) else (-1,) * len(base))
    written = of_value.get_ids(value.shape[0] if value.dim() else 1, call.batch)
    if of_value.by_rank and isinstance(at, int) and (where is None or where.by_rank):
        ids[at] = written[0]
        for order in orders:
            if len(order.samples) == len(base) and all(n in (-1, m) for n, m in zip(ids, order.samples, strict=True)):
                return (Layout(0, ids=tuple(ids), loose=True, by_rank=-1 in ids),)
    elif not of_value.by_rank and isinstance(at, slice) and at.step in (None, 1):
        start, stop, _ = at.indices(len(base))
        if where is None and not torch.equal(base[stop:], base[stop:][:1].expand_as(base[stop:])):
            return None
        for order in orders:
            is_order = order.samples == tuple(ids) or (where is None and len(order.samples) == len(base) and not start)
            if is_order and order.has_steps(start, stop) and order.samples[start:stop] == written:
                return (_make_loose(order.samples),)
    return None


def _make_loose(ids: tuple[int, ...]) -> Layout:
    return Layout(0, ids=ids, loose=True)


def _get_first_item(item: Any) -> Any:
    """What selects rows in an item, if its other parts keep their dimensions as they are; else None."""
    parts = item if isinstance(item, tuple) else (item,)
    is_rest_whole = all(part is Ellipsis or (isinstance(part, slice) and part == slice(None)) for part in parts[1:])
    return parts[0] if parts and is_rest_whole and not isinstance(parts[0], bool) else None
