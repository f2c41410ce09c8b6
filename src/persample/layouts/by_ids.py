"""The motion of functions that only move entries: the function is applied to a tensor of sample ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from persample._internal import tracing
from persample._internal.facts import T
from persample._internal.functions import find_results
from persample._internal.tree import find_tensors
from persample.errors import get_op_name
from persample.layouts.by_trial import is_row_equivariant
from persample.layouts.call import Call
from persample.layouts.ids import find_layout_of_ids, make_sample_ids, make_strided_ids
from persample.layouts.layout import Layout, Lost, Reduced, Scattered, Where, lose_entries
from persample.layouts.motion import Motion, make_uniform_motion

# ---- motions ----


def find_motion_by_ids(call: Call, results: Sequence[Tensor]) -> Motion:
    """The exact motion of a call of a function that moves entries."""
    moved = range(len(list(find_tensors(call.args[0] if call.args else next(iter(call.kwargs.values()))))))
    if any(call.where[len(moved) :]):
        return make_uniform_motion(Lost(f"{get_op_name(call.func)} indexes with per-sample values"), results)
    ids = _move_ids(call, {i: call.where[i] for i in moved})
    layouts = [where for i in moved if isinstance(where := call.where[i], Layout)]
    is_loose = any(where.loose for where in layouts)
    found: list[Where | None] = [find_layout_of_ids(part, call.batch, is_loose) for part in ids]
    first = call.where[0]
    for i, part in enumerate(ids):  # the entries of an empty tensor cannot show where the samples lie
        is_kept = isinstance(first, Layout) and part.dim() == call.tensors[0].dim() and first.ids is None
        if part.numel() == 0 and is_kept and part.shape[first.dim] == call.tensors[0].shape[first.dim]:  # type: ignore[union-attr]
            found[i] = first
    if is_loose:
        found = [_check_loose_rows(call, where, len(ids)) for where in found]
    if any(where.loose_index for where in layouts):
        found = [replace(where, loose_index=True) if isinstance(where, Layout) else where for where in found]
    if isinstance(first, Layout) and first.alternatives and len(moved) == 1:
        found[0] = _move_alternatives(call, first, found[0])
    return Motion(tuple(found), depends_on_values=is_loose)


def _move_ids(call: Call, moved: Mapping[int, Where | None]) -> tuple[Tensor, ...]:
    """The results of the call for sample ids in place of the moved tensors, which have these layouts."""
    is_strided = call.facts.operator == "as_strided"
    make_ids = make_strided_ids if is_strided else make_sample_ids
    ids = {i: make_ids(call.tensors[i], where, call.batch) for i, where in moved.items()}
    if not is_strided:
        ids = {i: part.clone() for i, part in ids.items()}
    args, kwargs = call.fill([ids.get(i, t) for i, t in enumerate(call.tensors)])
    kwargs.pop("out", None)
    return find_results(call.func(*args, **kwargs), args)


def _move_alternatives(call: Call, first: Layout, found: Where | None) -> Where | None:
    """`found`, with the alternatives of the first argument moved in the same way."""
    moved = [_move_ids(call, {0: other})[0] for other in first.alternatives]
    layouts = [find_layout_of_ids(ids, call.batch) for ids in moved]
    alternatives = tuple(layout for layout in layouts if isinstance(layout, Layout))
    return replace(found, alternatives=alternatives) if isinstance(found, Layout) else found


def _selects_group(call: Call, where: Layout) -> bool:
    """Whether a call is `rows[a:b]` with one of the groups of loose rows whose sizes were counted."""
    tensor = call.tensors[0]
    if call.facts.operator == "narrow":
        _, dim, start, length = (*call.args, *call.kwargs.values())
        start, stop = int(start), int(start) + int(length)
    elif call.func is T.__getitem__ and not isinstance(call.args[1], tuple):
        dim, item = 0, call.args[1]
        if not isinstance(item, slice) or item.step not in (None, 1):
            return False
        start, stop, _ = item.indices(tensor.shape[where.dim])
    else:
        return False
    return dim == where.dim and call.counted.contains_range(start, stop, tensor.shape[where.dim])


def _check_loose_rows(call: Call, found: Where | None, results: int) -> Where | None:
    """`found`, or `Lost` if the call selects loose rows by their positions.

    A move must keep all loose rows, because which row is at a position depends on all samples. Loose rows may be split
    into groups of sizes that were counted among the samples.
    """
    where = call.where[0]
    concatenates = isinstance(call.args[0], (list, tuple))
    sizes = [a for a in (*call.args[1:], *call.kwargs.values()) if isinstance(a, (list, tuple))]
    groups = call.facts.operator in ("split", "split_with_sizes") and bool(sizes) and call.counted.contains(sizes[0])
    if concatenates and any(w is None for w in call.where) and not is_row_equivariant(call, [found]):
        return Lost(f"{get_op_name(call.func)} joins constants with rows whose order depends on all samples")
    if concatenates or groups or not isinstance(where, Layout) or not isinstance(found, Layout):
        return found
    if _selects_group(call, where):
        return found
    before, after = where.ids or (), found.ids or ()
    # Each row still belongs to one sample, and the rows of one sample are in the same order as without other samples.
    if after == before or call.facts.reshapes:
        return found
    keeps_all = bool(before) == bool(after) and len(after) % max(1, len(before)) == 0
    if results == 1 and keeps_all and not call.facts.picks_entries:
        return found
    return Lost(f"{get_op_name(call.func)} selects rows by position, but their order depends on all samples")


# ---- views, where one shares memory with what is written ----


def find_layout_of_base(view: Tensor, layout: Where | None, before: Where | None, batch: int) -> Where | None:
    """The layout of the base of a view after a write into the view, which gave the view this layout.

    `before` is the layout of the base before the write.
    """
    base = view._base
    assert base is not None
    if isinstance(layout, (Lost, Reduced)) and not isinstance(layout, Scattered):
        return lose_entries(layout)
    with tracing.suspend():
        ids = make_strided_ids(base, before, batch)
        of_view = ids.as_strided(view.shape, view.stride(), view.storage_offset())
        of_view.copy_(make_sample_ids(view, layout, batch))
        is_loose = isinstance(layout, (Layout, Scattered)) and layout.loose
        return find_layout_of_ids(ids, batch, is_loose)


def find_layout_of_view(view: Tensor, base: Tensor, layout: Where | None, batch: int) -> Where | None:
    """The layout of a view that was made before samples were written into its base, which has this layout now."""
    if not isinstance(layout, (Layout, Scattered)):
        return None if isinstance(layout, Lost) and layout.listing else lose_entries(layout)
    with tracing.suspend():
        ids = make_strided_ids(base, layout, batch)
        return find_layout_of_ids(ids.as_strided(view.shape, view.stride(), view.storage_offset()), batch, layout.loose)
