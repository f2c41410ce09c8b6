"""Functions that move entries without changing them: views, permutations, concatenations, splits, basic indexing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample._internal.facts import T
from persample.layouts.algebra.engine import declare, follow, get_argument, keep, lose, move, normalise_dims
from persample.layouts.call import Call
from persample.layouts.ids import make_layout
from persample.layouts.layout import Layout, make_pattern
from persample.layouts.motion import Motion, make_uniform_motion

# ---- the same entries in the same order ----


def find_reshaped(
    layout: Layout, shape: Sequence[int], new_shape: Sequence[int], args: tuple[Any, ...], batch: int
) -> Layout | None:
    """The layout after a reshape; None if the samples no longer lie along one dimension.

    In row-major order the sample changes every `stride` entries. In the new shape, that stride must lie within one
    dimension, with the whole batch.
    """
    if layout.dim == 0 and layout.inner == 1 and shape[0] == batch and new_shape and new_shape[0] == batch:
        return make_pattern(0)
    if not 0 < math.prod(shape) == math.prod(new_shape):  # no entries, or a view with entries of another size
        return None
    stride = layout.inner * math.prod(shape[layout.dim + 1 :])
    below = 1  # entries for each index of the dimension
    for dim in reversed(range(len(new_shape))):
        size = new_shape[dim]
        if below <= stride < below * size:
            inner, rest = divmod(stride, below)
            return make_pattern(dim, inner) if rest == 0 and size % (inner * batch) == 0 else None
        below *= size
    return None


@declare("view", "reshape", moves_entries=True, reshapes=True, takes_sizes=True, by_shape=find_reshaped)
@declare("flatten", "unflatten", "ravel", moves_entries=True, reshapes=True, by_shape=find_reshaped)
@declare("squeeze", "unsqueeze", moves_entries=True, by_shape=find_reshaped)
@declare("view_as", "reshape_as", moves_entries=True)
def _reshape(call: Call, results: Sequence[Tensor]) -> Motion | None:
    tensor, where, result = call.tensors[0], call.where[0], results[0]
    if not isinstance(where, Layout) or call.is_inplace:
        return None
    if result.dtype != tensor.dtype:  # view(dtype): the same memory, with another number of entries in the last dim
        is_kept = where.dim < tensor.dim() - 1 or result.shape == tensor.shape
        return keep(call, results) if is_kept else lose(call, results, "splits or joins entries of different samples")
    if tensor.numel() != result.numel() or not tensor.numel():
        return None
    if where.ids is not None:  # a list of rows stays one if its dimension is not touched
        size, after = tensor.shape[where.dim], math.prod(tensor.shape[where.dim + 1 :])
        dims = [d for d, n in enumerate(result.shape) if n == size and math.prod(result.shape[d + 1 :]) == after]
        return make_uniform_motion(move(where, dims[0]), results) if len(dims) == 1 and size > 1 else None
    layout = find_reshaped(where, tensor.shape, result.shape, (), call.batch)
    return None if layout is None or where.alternatives else make_uniform_motion(layout, results)


# ---- permuted dimensions ----


def _permute_to(call: Call, results: Sequence[Tensor], order: Sequence[int]) -> Motion | None:
    """Dimension i of the result is dimension `order[i]` of the argument."""
    return None if call.is_inplace else follow(call, results, [range(len(order))], order)


@declare("transpose", moves_entries=True, is_size_free=True)
def _transpose(call: Call, results: Sequence[Tensor]) -> Motion | None:
    rank = call.tensors[0].dim()
    first = get_argument(call, 1, "dim0", "axis0")
    second = get_argument(call, 2, "dim1", "axis1")
    if not isinstance(first, int) or not isinstance(second, int):
        return None
    order = list(range(rank))
    order[first % rank], order[second % rank] = second % rank, first % rank
    return _permute_to(call, results, order)


@declare("t", "T", "mT", moves_entries=True)
@declare("H", "mH", "adjoint")
def _transpose_last(call: Call, results: Sequence[Tensor]) -> Motion | None:
    rank = call.tensors[0].dim()
    if rank < 2 or (rank > 2 and call.facts.operator in ("T", "H")):
        return None
    return _permute_to(call, results, [*range(rank - 2), rank - 1, rank - 2])


@declare("permute", moves_entries=True, is_size_free=True)
def _permute(call: Call, results: Sequence[Tensor]) -> Motion | None:
    rank = call.tensors[0].dim()
    dims = call.kwargs.get("dims", call.args[1:])
    dims = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    return _permute_to(call, results, [dim % rank for dim in dims]) if len(dims) == rank else None


@declare("movedim", moves_entries=True)
def _movedim(call: Call, results: Sequence[Tensor]) -> Motion | None:
    rank = call.tensors[0].dim()
    source, destination = get_argument(call, 1, "source"), get_argument(call, 2, "destination")
    sources = [source % rank] if isinstance(source, int) else [dim % rank for dim in source]
    targets = [destination % rank] if isinstance(destination, int) else [dim % rank for dim in destination]
    rest = iter(dim for dim in range(rank) if dim not in sources)
    order = [sources[targets.index(i)] if i in targets else next(rest) for i in range(rank)]
    return _permute_to(call, results, order)


# ---- repeated entries ----


def _find_expanded(
    where: Layout, shape: Sequence[int], new_shape: Sequence[int], args: tuple[Any, ...], batch: int
) -> Layout | None:
    return make_pattern(where.dim + len(new_shape) - len(shape), where.inner)


@declare("expand", "broadcast_to", moves_entries=True, takes_sizes=True, by_shape=_find_expanded)
@declare("repeat", "tile", moves_entries=True, takes_sizes=True)
@declare("expand_as", moves_entries=True)
def _expand(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """New dimensions in front; a repeated batch keeps its pattern."""
    tensor, where, result = call.tensors[0], call.where[0], results[0]
    if not isinstance(where, Layout):
        return None
    layout = move(where, where.dim + result.dim() - tensor.dim())
    is_repeated = result.shape[layout.dim] != tensor.shape[where.dim]
    if is_repeated and (where.ids is not None or tensor.shape[where.dim] == 1):
        return None
    return make_uniform_motion(layout, results)


@declare("repeat_interleave", moves_entries=True, picks_entries=True)
def _repeat_interleave(call: Call, results: Sequence[Tensor]) -> Motion | None:
    tensor, where = call.tensors[0], call.where[0]
    repeats, dim = get_argument(call, 1, "repeats"), get_argument(call, 2, "dim")
    if not isinstance(where, Layout) or not isinstance(repeats, int) or dim is None or where.ids is not None:
        return None
    inner = where.inner * repeats if dim % tensor.dim() == where.dim else where.inner
    return make_uniform_motion(Layout(where.dim, inner), results) if repeats else None


# ---- concatenation ----


def _join(call: Call, results: Sequence[Tensor], dim: int, rank: int, is_new: bool) -> Motion | None:
    """Concatenate along `dim`, or with `is_new` stack along a new dimension."""
    layouts = {where for where in call.where if where is not None}
    if len(layouts) != 1 or any(tensor.dim() != rank for tensor in call.tensors):
        return None
    (where,) = layouts
    assert isinstance(where, Layout)
    if dim == where.dim and not is_new and (where.ids is not None or None in call.where):
        return None
    return make_uniform_motion(move(where, where.dim + (is_new and dim <= where.dim)), results)


def _keeps_sizes(call: Call) -> bool:
    """Not so beside a constant along the dimension of the samples, which may be empty."""
    dim = get_argument(call, 1, "dim", "axis", default=0)
    return None not in call.where or all(w is None or dim % t.dim() != w.dim for t, w in call.pairs)  # type: ignore[union-attr]


@declare("cat", moves_entries=True, is_size_free=True, size_free_if=_keeps_sizes)
def _concatenate(call: Call, results: Sequence[Tensor]) -> Motion | None:
    rank = results[0].dim()
    dim = get_argument(call, 1, "dim", "axis", default=0)
    return _join(call, results, dim % rank, rank, is_new=False)


@declare("stack", moves_entries=True, is_size_free=True)
def _stack(call: Call, results: Sequence[Tensor]) -> Motion | None:
    rank = results[0].dim()
    dim = get_argument(call, 1, "dim", default=0)
    return _join(call, results, dim % rank, rank - 1, is_new=True)


# ---- parts ----


def _take_part(call: Call, results: Sequence[Tensor], dim: int) -> Motion | None:
    """Results are parts along `dim`, which they may have lost; parts of the batch are found by sample numbers."""
    rank = call.tensors[0].dim()
    others = [d for d in range(rank) if d != dim % rank]
    letters = [None if d == dim % rank else d for d in range(rank)]
    return follow(call, results, [letters], others if results[0].dim() < rank else range(rank))


@declare("split", "chunk", "split_with_sizes", "tensor_split", moves_entries=True, is_size_free=True)
def _split(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return _take_part(call, results, get_argument(call, 2, "dim", default=0))


@declare("narrow", moves_entries=True, is_size_free=True, takes_sizes=True)
@declare("index_select", moves_entries=True, is_size_free=True, picks_entries=True)
@declare("select", "unbind", T.unfold, moves_entries=True, is_size_free=True)
def _select(call: Call, results: Sequence[Tensor]) -> Motion | None:
    dim = get_argument(call, 1, "dim", "dimension", default=0)
    return _take_part(call, results, dim) if isinstance(dim, int) else None


@declare("flip", "roll", moves_entries=True, is_size_free=True)
def _reorder(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """Entries change places along some dimensions; samples that do are found by sample numbers."""
    tensor = call.tensors[0]
    position = 2 if call.facts.operator == "roll" else 1
    dims = call.kwargs.get("dims", call.args[position] if len(call.args) > position else None)
    if dims is None:
        return None
    if position == 1 and isinstance(dims, int):
        dims = call.args[1:]
    moved = normalise_dims(dims, tensor.dim())
    return follow(call, results, [[None if d in moved else d for d in range(tensor.dim())]], range(tensor.dim()))


def find_padding(call: Call) -> tuple[int, int] | None:
    """The entries that a call of `pad` adds before and after the samples; None if it does not say."""
    where, amounts = call.where[0], get_argument(call, 1, "pad")
    if not isinstance(where, Layout) or not isinstance(amounts, (tuple, list)):
        return None
    first = 2 * (call.tensors[0].dim() - 1 - where.dim)
    before, after = amounts[first : first + 2] or (0, 0)
    return before, after


@declare(F.pad, torch.constant_pad_nd, is_size_free=True, size_free_if=lambda call: find_padding(call) == (0, 0))
def _pad(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """Pairs of amounts for the last dimensions, the last one first; a negative amount removes entries."""
    tensor, where = call.tensors[0], call.where[0]
    padding = find_padding(call)
    if not isinstance(where, Layout) or any(call.where[1:]) or padding is None:
        return None
    before, after = padding
    if before == after == 0:
        return keep(call, results)
    is_constant = call.func is not F.pad or get_argument(call, 2, "mode", default="constant") == "constant"
    if not is_constant or where.loose:
        return None
    size = tensor.shape[where.dim]
    kept = where.get_ids(size, call.batch)[max(0, -before) : size - max(0, -after)]
    ids = (-1,) * max(0, before) + kept + (-1,) * max(0, after)
    return make_uniform_motion(make_layout(where.dim, ids, call.batch), results)


@declare("diag_embed")
def _diag_embed(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """The last dimension becomes the diagonal of a matrix."""
    rank = call.tensors[0].dim()
    dims = {get_argument(call, 2, "dim1", default=-2), get_argument(call, 3, "dim2", default=-1)}
    return follow(call, results, [[*range(rank - 1), None]], range(rank + 1)) if dims == {-2, -1} else None


@declare(torch.meshgrid)
def _meshgrid(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """Result i repeats tensor i along all dimensions but one."""
    order = list(range(len(results)))
    if call.kwargs.get("indexing") == "xy":
        order[:2] = reversed(order[:2])
    pairs = zip(call.where, order, strict=True)
    return Motion(tuple(move(where, dim) if isinstance(where, Layout) else None for where, dim in pairs))


@declare("slice_scatter", "select_scatter")
def _scatter_part(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """A part along `dim` is replaced; `select_scatter` takes a part without that dimension."""
    base, part = call.tensors
    dim = get_argument(call, 2, "dim", default=0) % base.dim()
    letters = [None if d == dim else d for d in range(base.dim())]
    of_part = letters if part.dim() == base.dim() else [*letters[:dim], *letters[dim + 1 :]]
    return follow(call, results, [letters, of_part], letters)


def _find_indexed(
    where: Layout, shape: Sequence[int], new_shape: Sequence[int], args: tuple[Any, ...], batch: int
) -> Layout | None:
    items = args[0] if isinstance(args[0], tuple) else (args[0],)
    if any([isinstance(item, Tensor) for item in items]):
        return None
    dim = find_dim_after_indexing(items, where.dim, len(shape))
    return None if dim is None else make_pattern(dim, where.inner)


@declare(T.__getitem__, moves_entries=True, picks_entries=True, by_shape=_find_indexed)
def _getitem(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """Numbers, slices, None and `...`, and one constant index that does not select samples."""
    where = call.where[0]
    if not isinstance(where, Layout) or where.alternatives or any(call.where[1:]):
        return None
    items = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    dim = find_dim_after_indexing(items, where.dim, call.tensors[0].dim())
    return None if dim is None or not isinstance(dim, int) else make_uniform_motion(move(where, dim), results)


def find_dim_after_indexing(items: Sequence[Any], sample_dim: int, rank: int) -> int | None:
    """The dimension of the samples after basic indexing, None if an item selects samples or is of another kind."""
    used = sum(item is not None and item is not Ellipsis for item in items)
    before = after = 0  # dimensions of the argument and of the result that have been passed
    has_index = False
    for item in [*items, *([] if any(item is Ellipsis for item in items) else [Ellipsis])]:
        width = 1
        added = 1
        if item is None:
            width = 0
        elif item is Ellipsis:
            width = added = rank - used
        elif isinstance(item, bool):
            return None
        elif isinstance(item, int):
            added = 0
        elif isinstance(item, Tensor):
            if item.dtype not in (torch.int64, torch.int32) or has_index:
                return None
            has_index, added = True, item.dim()
        elif not isinstance(item, slice):
            return None
        if before <= sample_dim < before + width:
            is_whole = item is Ellipsis or (isinstance(item, slice) and item == slice(None))
            return after + sample_dim - before if is_whole else None
        before += width
        after += added
    return None
