"""Motions that are found from the sample of each entry: those of tensors in which no dimension tells the samples apart.

A function that only moves entries is applied to a tensor of sample ids. Two kinds of tensors are followed in this way
alone:

- `Scattered`: a batch that was split into two dimensions (`h.view(2, B // 2, D)`), or columns that were sorted by
  themselves. Such a tensor may be moved, computed with entry by entry, and summed up. After a move, the samples may lie
  along one dimension again.
- `Crossed`: all pairs of rows: `a[:, None] - b`, `a @ b.T`. Only pairs of rows of one sample belong to a sample. A loss
  that is computed for all pairs, and then for the pairs on the diagonal alone (the generalised overlap of matched
  boxes), keeps the samples separate. Such a tensor may be moved and computed with entry by entry. Gradients of pairs of
  different samples must be zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from persample._internal import tracing
from persample._internal.facts import T
from persample._internal.functions import find_results
from persample._internal.tree import find_tensors
from persample.errors import get_op_name
from persample.layouts.algebra.engine import get_argument, merge_rows, move, normalise_dims
from persample.layouts.by_trial import is_row_equivariant
from persample.layouts.call import Call
from persample.layouts.divisors import SampleUnits
from persample.layouts.ids import find_layout_of_ids, make_sample_ids, make_strided_ids
from persample.layouts.layout import Crossed, Layout, Lost, Reduced, Scattered, Where, lose_entries
from persample.layouts.motion import Motion, make_uniform_motion
from persample.layouts.reductions import make_reduced

# ---- moves ----


def find_motion_by_ids(call: Call, results: Sequence[Tensor]) -> Motion:
    """The exact motion of a call of a function that moves entries."""
    moved = range(len(list(find_tensors(call.args[0] if call.args else next(iter(call.kwargs.values()))))))
    if any(call.where[len(moved) :]):
        return make_uniform_motion(Lost(f"{get_op_name(call.func)} indexes with per-sample values"), results)
    ids = _move_ids(call, {i: call.where[i] for i in moved})
    layouts = [where for i in moved if isinstance(where := call.where[i], (Layout, Scattered))]
    is_loose = any(where.loose for where in layouts)
    found: list[Where | None] = [find_layout_of_ids(part, call.batch, is_loose) for part in ids]
    first = call.where[0]
    for i, part in enumerate(ids):  # the entries of an empty tensor cannot show where the samples lie
        is_kept = isinstance(first, Layout) and part.dim() == call.tensors[0].dim() and first.ids is None
        if part.numel() == 0 and is_kept and part.shape[first.dim] == call.tensors[0].shape[first.dim]:  # type: ignore[union-attr]
            found[i] = first
    if is_loose:
        found = [_check_loose_rows(call, layouts, where, len(ids)) for where in found]
    if any(where.loose_index for where in layouts):
        found = [
            replace(where, loose_index=True) if isinstance(where, (Layout, Scattered)) else where for where in found
        ]
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


def _check_loose_rows(
    call: Call, layouts: Sequence[Layout | Scattered], found: Where | None, results: int
) -> Where | None:
    """`found`, or `Lost` if the call selects loose rows by their positions.

    A move must keep all loose rows, because which row is at a position depends on all samples. Loose rows may be split
    into groups of sizes that were counted among the samples.
    """
    where = call.where[0]
    by_position = Lost(f"{get_op_name(call.func)} selects rows by position, but their order depends on all samples")
    concatenates = isinstance(call.args[0], (list, tuple))
    if any(isinstance(own, Scattered) for own in layouts):
        return found if not concatenates and _keeps_rows(call) else by_position
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
    return found if results == 1 and keeps_all and not call.facts.picks_entries else by_position


def _keeps_rows(call: Call) -> bool:
    """Whether row i of each result consists of entries of row i."""
    tensor = call.tensors[0]
    parts = call.run([_number_rows(tensor.shape), *call.tensors[1:]])
    return all(len(part) == len(tensor) and torch.equal(part, _number_rows(part.shape)) for part in parts if part.dim())


def _number_rows(shape: torch.Size) -> Tensor:
    """A tensor in which each entry is the index of its row."""
    return torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)).expand(shape).clone()


# ---- scattered entries ----

_SUMS = {"sum", "mean"}

# Functions that combine entries along their argument `dim`.
_ALONG = _SUMS | {"softmax", "log_softmax", "amax", "amin", "logsumexp", "cumsum", "all", "any"}


def find_scattered_motion(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """The motion of a call with a scattered argument; None if the function may combine its entries."""
    if any(isinstance(where, (Lost, Reduced)) and not isinstance(where, Scattered) for where in call.where):
        return None
    found: Where | None
    if call.facts.moves_entries:
        return replace(find_motion_by_ids(call, results), depends_on_values=True)
    if call.facts.is_pointwise:
        if any(isinstance(where, (Layout, Scattered)) and (where.loose or where.loose_index) for where in call.where):
            return None
        found = _combine_entries(call, results[0].shape)
    elif call.func is T.copy_ and call.where[1] is not None:  # every entry is overwritten
        ids = make_sample_ids(call.tensors[1], call.where[1], call.batch).expand_as(call.tensors[0])
        found = find_layout_of_ids(ids, call.batch)
    elif call.facts.operator in _ALONG and not any(call.where[1:]):
        dims = get_argument(call, 1, "dim", "axis")
        is_sum = dims is None and call.facts.operator in _SUMS
        found = make_reduced(call) if is_sum else _combine_along(call, results, dims)
        if found is None:
            return None
    else:
        return None
    return replace(make_uniform_motion(found, results), depends_on_values=True)


def _combine_entries(call: Call, shape: torch.Size) -> Where | None:
    owner = torch.full(shape, -1, dtype=torch.int32, device=call.tensors[0].device)
    for tensor, where in call.pairs:
        ids = make_sample_ids(tensor, where, call.batch).expand_as(owner)
        if bool(((owner >= 0) & (ids >= 0) & (owner != ids)).any()):
            return Lost(f"{get_op_name(call.func)} combines entries of different samples")
        owner = torch.maximum(owner, ids)
    return find_layout_of_ids(owner, call.batch)


def _combine_along(call: Call, results: Sequence[Tensor], given: Any) -> Where | None:
    """The layout of a call that combines entries along some dimensions, if these entries belong to one sample."""
    where, result = call.where[0], results[0]
    if not isinstance(where, Scattered) or where.loose or len(results) > 1:
        return None
    owner = where.ids.amax(tuple(normalise_dims(given, where.ids.dim())), keepdim=True)
    if not bool((owner == where.ids).all()):
        return None
    owner = where.ids if result.shape == where.ids.shape else owner.reshape(result.shape)
    return find_layout_of_ids(owner, call.batch)


# ---- pairs of rows ----


def find_crossed_motion(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """The motion of a call with a tensor of pairs; None if the function may combine pairs."""
    crossed = call.where[0]
    if not all(where is None or isinstance(where, (Layout, Crossed)) for where in call.where):
        return None
    if call.facts.moves_entries or (call.facts.operator == "diag" and call.tensors[0].dim() == 2):
        if not isinstance(crossed, Crossed) or any(call.where[1:]):
            return None
        moved = (_move_ids(call, {0: layout}) for layout in crossed.rows)
        found = [_find_pairs(first, second, crossed, call.batch) for first, second in zip(*moved, strict=True)]
        return Motion(tuple(found), depends_on_values=True)
    if call.facts.is_pointwise and len(results) == 1:
        where = _combine_pairs(call, results[0].shape)
        return None if where is None else make_uniform_motion(where, results)
    return None


def has_mixed_pairs(gradient: Tensor, crossed: Crossed, batch: int, units: SampleUnits | None) -> bool:
    """Whether the gradient of a tensor of pairs is not zero for a pair of rows of different samples, or units."""
    first, second = (make_sample_ids(gradient, layout, batch) for layout in crossed.rows)
    if units is not None:
        unit = torch.tensor([*units.of_sample, -1], device=gradient.device)  # of the samples; -1 has none
        first, second = unit[first.long()], unit[second.long()]
    return bool((gradient != 0)[(first != second) & (first >= 0) & (second >= 0)].any())


def _combine_pairs(call: Call, shape: torch.Size) -> Crossed | None:
    crossed = next(where for where in call.where if isinstance(where, Crossed))
    found: dict[int, Layout] = {}
    for tensor, where in call.pairs:
        layouts = where.rows if isinstance(where, Crossed) else [where] if isinstance(where, Layout) else []
        for layout in layouts:
            here = move(layout, layout.dim + len(shape) - tensor.dim())
            size = tensor.shape[layout.dim]
            merged = merge_rows(found.get(here.dim, here), here, size, call.batch)
            if merged is None or layout.loose or layout.by_rank or size != shape[here.dim]:
                return None
            found[here.dim] = merged
    if len(found) != 2:
        return None
    first, second = sorted(found.values(), key=lambda layout: layout.dim)
    return Crossed(crossed.cause, crossed.place, rows=(first, second))


def _find_pairs(first: Tensor, second: Tensor, crossed: Crossed, batch: int) -> Where | None:
    """Where the samples lie, given those of both rows of each pair."""
    if bool(((first == second) | (first < 0) | (second < 0)).all()):
        return find_layout_of_ids(torch.maximum(first, second), batch)
    rows = find_layout_of_ids(first, batch), find_layout_of_ids(second, batch)
    if isinstance(rows[0], Layout) and isinstance(rows[1], Layout) and rows[0].dim != rows[1].dim:
        return Crossed(crossed.cause, crossed.place, rows=(rows[0], rows[1]))
    return Lost(crossed.cause, crossed.place)


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
