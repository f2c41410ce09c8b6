"""The motion of functions that select or write entries by an index or a mask.

Every such call is `base[item]` or `base[item] = value` (or `+=`), with an item of slices, masks and index tensors. The
sample ids of the base and of the value are moved in the same way. If samples provide the index or the mask, a sample
may select only its own entries: an entry and the index that selects it must belong to the same sample.

Rows that were selected by a mask, or sorted, are *loose*: their order depends on all samples. Indices of loose rows
(the inverse of a sort, `nonzero` of a loose mask) may only be used to index loose rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from persample._internal import tracing
from persample.errors import get_op_name
from persample.layouts.call import Call
from persample.layouts.ids import find_layout_of_ids, make_sample_ids
from persample.layouts.indexing import Indexing, Selection, is_mask
from persample.layouts.layout import Layout, Lost, Scattered, Where
from persample.layouts.motion import Motion

# Part of an error message, after the name of the function.
UNKNOWN_VALUES = "moves samples by an index or mask whose values are not known when a step is compiled"


# ---- selecting and writing ----


def find_motion_by_index(call: Call) -> Motion:
    """The motion of a call that selects or writes entries by an index."""
    indexing = Indexing(call)
    trace = tracing.get_trace()
    if trace is not None and _depends_on_invented(indexing, trace):
        lost = Lost(f"{get_op_name(call.func)} {UNKNOWN_VALUES}")
        return Motion((_find_masked_fill_layout(indexing) or lost,))
    where = _find_written_layout(indexing) if indexing.writes else _find_selected_layout(indexing)
    return Motion((where,), depends_on_values=True)


def _depends_on_invented(indexing: Indexing, trace: tracing.Trace) -> bool:
    """Whether a mask, or an index along the batch dimension, has invented values."""
    layouts = [indexing.get_layout(t) for t in (indexing.base, indexing.value) if isinstance(t, Tensor)]
    invented: set[int] = set()  # the dimensions that are indexed by invented values
    dim = 0
    for part in indexing.iterate_parts():
        if isinstance(part, Tensor) and trace.is_invented(part):
            if is_mask(part):
                return True
            invented.add(dim)
            layouts += [indexing.get_layout(part)] if indexing.writes else []
        dim += part.dim() if isinstance(part, Tensor) and is_mask(part) else part is not None
    if indexing.writes and not get_op_name(indexing.call.func).startswith("scatter"):
        # The value need not have the dimensions of the base.
        return bool(invented) and any(isinstance(where, Layout) for where in layouts[1:])
    return any(isinstance(where, Layout) and where.dim in invented for where in layouts)


def _find_masked_fill_layout(indexing: Indexing) -> Layout | None:
    """The layout of the base, if a mask writes one constant into it: then no value of the mask moves a sample."""
    (mask,) = indexing.item if len(indexing.item) == 1 else (None,)
    where, value = indexing.get_layout(indexing.base), indexing.value
    is_constant = not isinstance(value, Tensor) or (value.numel() == 1 and indexing.get_layout(value) is None)
    is_fill = indexing.writes and is_constant and isinstance(mask, Tensor) and is_mask(mask)
    if not is_fill or not isinstance(where, Layout):
        return None
    of_mask = indexing.get_layout(mask)
    if isinstance(of_mask, Layout):
        is_same = (of_mask.dim, of_mask.inner, of_mask.ids) == (where.dim, where.inner, where.ids)
    else:
        is_same = of_mask is None
    return where if is_same and not where.loose else None


def _find_selected_layout(indexing: Indexing) -> Where | None:
    batch = indexing.call.batch
    source = indexing.get_layout(indexing.base)
    selection = indexing.find_selection()
    moved = make_sample_ids(indexing.base, source, batch)[indexing.item]
    if not _can_index(source, selection):
        return _make_lost(indexing.call, "indexes by positions that depend on other samples")
    if _conflict(moved, selection.selected_by) or selection.has_conflict(batch):
        return _make_lost(indexing.call, "selects entries of a sample by values of another sample")
    owner = torch.where(moved < 0, selection.selected_by, moved)
    loose_index = isinstance(source, Layout) and source.loose_index
    return _make_where(owner, batch, selection.loose or selection.by_mask, loose_index)


def _find_written_layout(indexing: Indexing) -> Where | None:
    call, batch, item = indexing.call, indexing.call.batch, indexing.item
    where = indexing.get_layout(indexing.base)
    value = indexing.value if isinstance(indexing.value, Tensor) else None
    of_value = indexing.get_layout(value)
    selection = indexing.find_selection()
    selected_by = selection.selected_by
    covered = torch.zeros(indexing.base.shape, dtype=torch.bool, device=indexing.base.device)
    covered[item] = True
    by_samples = bool((selected_by >= 0).any())
    is_by_position = isinstance(where, Layout) and where.loose and not by_samples
    if is_by_position and not _writes_rows_alike(where, covered, value, of_value):  # type: ignore[arg-type]
        return _make_lost(call, "writes to rows by position, but their order depends on all samples")
    if not indexing.adds and bool(covered.all()):  # every entry of the base is overwritten
        where = None
    base = make_sample_ids(indexing.base, where, batch).clone()
    before = base[item]
    if before.numel() == 0:  # nothing is written: constants stay so, but now they are in the graph of the samples
        return where or Layout(0, ids=(-1,) * len(base))
    if not _can_index(where, selection):
        return _make_lost(call, "indexes by positions that depend on other samples")
    if (cause := _write_ids(indexing, base, before, selection)) is not None:
        return _make_lost(call, cause)
    # If constants differ between rows, the row that a sample gets depends on the number of rows of other samples.
    varies = value is not None and value.numel() > 1 and (indexing.in_order or value.dim() == before.dim())
    by_count = varies and of_value is None and (selection.loose or selection.by_mask)
    if by_count and value is not None and value.is_floating_point():
        return _make_lost(call, "writes constants to positions that depend on other samples")
    (mask,) = item if len(item) == 1 else (None,)
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:  # constants that it leaves out belong to its samples too
        of_mask = make_sample_ids(mask, indexing.get_layout(mask), batch)
        base = torch.where(base < 0, of_mask.view(*mask.shape, *[1] * (base.dim() - mask.dim())), base)
    loose = not by_samples and any(isinstance(w, Layout) and w.loose for w in (where, of_value))
    return _make_where(base, batch, loose, by_count)


def _write_ids(indexing: Indexing, base: Tensor, before: Tensor, selection: Selection) -> str | None:
    """Write the samples of the value into `base`, the samples of each entry, which were `before` at the item.

    Returns why the samples would be mixed, None if they are not. A constant belongs, once it is written, to the sample
    that selected the entry, else to the sample that was there.
    """
    batch, item, selected_by = indexing.call.batch, indexing.item, selection.selected_by
    value = indexing.value if isinstance(indexing.value, Tensor) else None
    ids = torch.full_like(before, -1)
    if value is not None:
        ids = make_sample_ids(value, indexing.get_layout(value), batch)
    if indexing.in_order:
        ids = base.masked_scatter(item[0], ids)[item]
    ids = ids.expand_as(before)
    overwrites = _conflict(ids, selected_by) or _conflict(before, selected_by)
    if overwrites or (indexing.adds and _conflict(before, ids)) or selection.has_conflict(batch):
        return "writes values of one sample over entries of another"
    base[item] = owner = torch.where(ids >= 0, ids, torch.where(selected_by >= 0, selected_by, before))
    return None if torch.equal(base[item], owner) else "writes values of several samples to the same entry"


def _writes_rows_alike(where: Layout, covered: Tensor, value: Tensor | None, of_value: Where | None) -> bool:
    """Whether the same values are written into each row of a loose tensor, or loose rows are written over all rows."""
    rows = covered.movedim(where.dim, 0)
    is_one_row = value is None or value.numel() == 1 or value.dim() < covered.dim() - where.dim
    is_alike = is_one_row or isinstance(of_value, Layout)
    return is_alike and (rows.numel() == 0 or bool((rows == rows[:1]).all()))


def _can_index(source: Where | None, selection: Selection) -> bool:
    """Whether indices of loose rows are used for loose rows, and only they are."""
    is_along = isinstance(source, Layout) and source.dim in selection.dims
    is_loose = isinstance(source, Layout) and source.loose
    if selection.loose_index:
        return is_along and is_loose
    return not (is_along and is_loose) or selection.by_mask or bool((selection.selected_by < 0).all())


def _conflict(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of sample ids have different samples for one entry."""
    return bool(((a >= 0) & (b >= 0) & (a != b)).any())


def _make_where(owner: Tensor, batch: int, loose: bool, loose_index: bool) -> Where | None:
    found = find_layout_of_ids(owner, batch, loose)
    return replace(found, loose_index=True) if loose_index and isinstance(found, Layout) else found


def _make_lost(call: Call, cause: str) -> Lost:
    shapes = ", ".join(str(tuple(t.shape)) for t in call.tensors)
    return Lost(f"{get_op_name(call.func)} of {shapes} {cause}")


# ---- lists of positions, and sorting ----


def find_motion_of_listing(call: Call, results: Sequence[Tensor]) -> Motion:
    """The motion of a call that lists positions (`nonzero`) or values (`unique`)."""
    layouts = [_find_listing_layout(call, i, len(results)) for i in range(len(results))]
    return Motion(tuple(layouts), depends_on_values=True)


def _find_listing_layout(call: Call, result: int, results: int) -> Where:
    where = call.where[0]
    if not isinstance(where, Layout):
        cause = f" in which the samples are mixed: {where.cause}" if where else ""
        return Lost(f"{get_op_name(call.func)} lists the entries of a tensor{cause}", listing=True)
    if get_op_name(call.func).startswith("unique"):
        return Lost("unique lists the values of all samples", listing=True)
    owner = make_sample_ids(call.tensors[0], where, call.batch)[call.tensors[0].bool()]
    is_loose_dim = where.loose and (results == 1 or result == where.dim)
    return Layout(0, ids=tuple(owner.tolist()), loose=True, loose_index=is_loose_dim)


def find_motion_of_sort(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """The motion of a sort along the batch dimension; None if it is along another one, or does not keep all entries."""
    where, tensor, order = call.where[0], call.tensors[0], results[-1]
    if not isinstance(where, Layout):
        return None
    numbers = [a for a in (*call.args[1:], call.kwargs.get("dim", -1)) if type(a) is int]
    if call.facts.operator == "topk" and "k" not in call.kwargs:
        numbers = numbers[1:]
    if not tensor.dim() or numbers[0] % tensor.dim() != where.dim or order.shape != tensor.shape:
        return None
    owner = make_sample_ids(tensor, where, call.batch).gather(where.dim, order)
    values = tensor.gather(where.dim, order)
    # Rows sorted by the numbers 0, 1, ... are in places that do not depend on other samples.
    is_numbering = tensor.dim() == 1 and torch.equal(values, torch.arange(len(values), device=values.device))
    found = find_layout_of_ids(owner, call.batch, loose=not is_numbering)
    if not isinstance(found, (Layout, Scattered)):
        return None
    if isinstance(found, Scattered):
        found = replace(found, cause=f"{get_op_name(call.func)} puts entries of different samples in one order")
    of_order = replace(found, loose_index=where.loose)
    return Motion((found, of_order) if len(results) == 2 else (of_order,), depends_on_values=True)
