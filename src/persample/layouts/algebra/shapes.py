"""Functions that move entries without changing them: views, permutations, concatenations, splits, basic indexing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample.layouts.algebra.engine import declare, get_argument, make_motion, move, normalise_dims
from persample.layouts.call import Call
from persample.layouts.layout import Layout
from persample.layouts.motion import Motion

# ---- the same entries in the same order ----


def factorise(layout: Layout, shape: Sequence[int], new_shape: Sequence[int], batch: int) -> Layout | None:
    """The layout after a reshape; None if the samples no longer lie along one dimension.

    In row-major order the sample changes every `stride` entries. In the new shape, that stride must lie within one
    dimension, with the whole batch.
    """
    stride = layout.inner * math.prod(shape[layout.dim + 1 :])
    below = 1  # entries for each index of the dimension
    for dim in reversed(range(len(new_shape))):
        size = new_shape[dim]
        if below <= stride < below * size:
            inner, rest = divmod(stride, below)
            return Layout(dim, inner) if rest == 0 and size % (inner * batch) == 0 else None
        below *= size
    return None


@declare("view", "reshape", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "view_as", "reshape_as")
def _reshape(call: Call, results: Sequence[Tensor]) -> Motion | None:
    tensor, where, result = call.tensors[0], call.where[0], results[0]
    if not isinstance(where, Layout) or call.is_inplace or tensor.numel() != result.numel() or not tensor.numel():
        return None
    if where.ids is not None:  # a list of rows stays one if its dimension is not touched
        size, after = tensor.shape[where.dim], math.prod(tensor.shape[where.dim + 1 :])
        dims = [d for d, n in enumerate(result.shape) if n == size and math.prod(result.shape[d + 1 :]) == after]
        return make_motion(call, results, move(where, dims[0])) if len(dims) == 1 and size > 1 else None
    layout = factorise(where, tensor.shape, result.shape, call.batch)
    return None if layout is None or where.alternatives else make_motion(call, results, layout)


# ---- permuted dimensions ----


def _permute_to(call: Call, results: Sequence[Tensor], order: Sequence[int]) -> Motion | None:
    """Dimension i of the result is dimension `order[i]` of the argument."""
    where = call.where[0]
    if not isinstance(where, Layout) or where.alternatives or call.is_inplace:
        return None
    return make_motion(call, results, move(where, list(order).index(where.dim)))


@declare("transpose", "swapaxes", "swapdims")
def _transpose(call: Call, results: Sequence[Tensor]) -> Motion | None:
    rank = call.tensors[0].dim()
    first = get_argument(call, 1, "dim0", "axis0")
    second = get_argument(call, 2, "dim1", "axis1")
    if not isinstance(first, int) or not isinstance(second, int):
        return None
    order = list(range(rank))
    order[first % rank], order[second % rank] = second % rank, first % rank
    return _permute_to(call, results, order)


@declare("t", Tensor.T.__get__, Tensor.mT.__get__, Tensor.H.__get__, Tensor.mH.__get__, "adjoint")  # type: ignore[attr-defined]
def _transpose_last(call: Call, results: Sequence[Tensor]) -> Motion | None:
    rank = call.tensors[0].dim()
    if rank < 2 or (rank > 2 and call.func in (Tensor.T.__get__, Tensor.H.__get__)):  # type: ignore[attr-defined]
        return None
    return _permute_to(call, results, [*range(rank - 2), rank - 1, rank - 2])


@declare("permute")
def _permute(call: Call, results: Sequence[Tensor]) -> Motion | None:
    rank = call.tensors[0].dim()
    dims = call.kwargs.get("dims", call.args[1:])
    dims = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    return _permute_to(call, results, [dim % rank for dim in dims]) if len(dims) == rank else None


@declare("movedim", "moveaxis")
def _movedim(call: Call, results: Sequence[Tensor]) -> Motion | None:
    rank = call.tensors[0].dim()
    source, destination = get_argument(call, 1, "source"), get_argument(call, 2, "destination")
    sources = [source % rank] if isinstance(source, int) else [dim % rank for dim in source]
    targets = [destination % rank] if isinstance(destination, int) else [dim % rank for dim in destination]
    rest = iter(dim for dim in range(rank) if dim not in sources)
    order = [sources[targets.index(i)] if i in targets else next(rest) for i in range(rank)]
    return _permute_to(call, results, order)


# ---- repeated entries ----


@declare("expand", "broadcast_to", "expand_as", "repeat", "tile")
def _expand(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """New dimensions in front; a repeated batch keeps its pattern."""
    tensor, where, result = call.tensors[0], call.where[0], results[0]
    if not isinstance(where, Layout):
        return None
    layout = move(where, where.dim + result.dim() - tensor.dim())
    is_repeated = result.shape[layout.dim] != tensor.shape[where.dim]
    if is_repeated and (where.ids is not None or tensor.shape[where.dim] == 1):
        return None
    return make_motion(call, results, layout)


@declare("repeat_interleave")
def _repeat_interleave(call: Call, results: Sequence[Tensor]) -> Motion | None:
    tensor, where = call.tensors[0], call.where[0]
    repeats, dim = get_argument(call, 1, "repeats"), get_argument(call, 2, "dim")
    if not isinstance(where, Layout) or not isinstance(repeats, int) or dim is None or where.ids is not None:
        return None
    inner = where.inner * repeats if dim % tensor.dim() == where.dim else where.inner
    return make_motion(call, results, Layout(where.dim, inner)) if repeats else None


# ---- concatenation ----


def _join(call: Call, results: Sequence[Tensor], dim: int, rank: int, is_new: bool) -> Motion | None:
    """Concatenate along `dim`, or with `is_new` stack along a new dimension."""
    layouts = {where for where in call.where if where is not None}
    if len(layouts) != 1 or any(tensor.dim() != rank for tensor in call.tensors):
        return None
    (where,) = layouts
    assert isinstance(where, Layout)
    if is_new:
        return make_motion(call, results, move(where, where.dim + (dim <= where.dim)))
    if dim != where.dim:
        return make_motion(call, results, move(where, where.dim))
    if where.ids is not None or None in call.where:
        return None
    return make_motion(call, results, move(where, where.dim))


@declare(torch.cat, torch.concat, torch.concatenate)
def _cat(call: Call, results: Sequence[Tensor]) -> Motion | None:
    rank = results[0].dim()
    dim = get_argument(call, 1, "dim", "axis", default=0)
    return _join(call, results, dim % rank, rank, is_new=False)


@declare(torch.stack)
def _stack(call: Call, results: Sequence[Tensor]) -> Motion | None:
    rank = results[0].dim()
    dim = get_argument(call, 1, "dim", default=0)
    return _join(call, results, dim % rank, rank - 1, is_new=True)


# ---- parts ----


def _take_part(call: Call, results: Sequence[Tensor], dim: int) -> Motion | None:
    """Results are parts along `dim`, which they may have lost; parts of the batch are found by sample numbers."""
    tensor, where = call.tensors[0], call.where[0]
    if not isinstance(where, Layout) or where.alternatives or any(call.where[1:]) or dim % tensor.dim() == where.dim:
        return None
    is_dropped = bool(results) and results[0].dim() < tensor.dim()
    return make_motion(call, results, move(where, where.dim - (is_dropped and dim % tensor.dim() < where.dim)))


@declare("split", "chunk", "split_with_sizes", "tensor_split")
def _split(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return _take_part(call, results, get_argument(call, 2, "dim", default=0))


@declare("narrow", "select", "unbind", "unfold", "index_select")
def _select(call: Call, results: Sequence[Tensor]) -> Motion | None:
    dim = get_argument(call, 1, "dim", "dimension", default=0)
    if not isinstance(dim, int) or (call.func is F.unfold):
        return None
    return _take_part(call, results, dim)


@declare("flip", "roll")
def _reorder(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """Entries change places along some dimensions; samples that do are found by sample numbers."""
    tensor, where = call.tensors[0], call.where[0]
    position = 2 if call.func in (torch.roll, Tensor.roll) else 1
    dims = call.kwargs.get("dims", call.args[position] if len(call.args) > position else None)
    if not isinstance(where, Layout) or where.alternatives or dims is None:
        return None
    if position == 1 and isinstance(dims, int):
        dims = call.args[1:]
    if where.dim in normalise_dims(dims, tensor.dim()):
        return None
    return make_motion(call, results, move(where, where.dim))


@declare(F.pad)
def _pad(call: Call, results: Sequence[Tensor]) -> Motion | None:
    tensor, where = call.tensors[0], call.where[0]
    pad = get_argument(call, 1, "pad")
    if not isinstance(where, Layout) or any(call.where[1:]) or not isinstance(pad, (tuple, list)):
        return None
    first = tensor.dim() - len(pad) // 2
    amounts = pad[2 * (tensor.dim() - 1 - where.dim) :][:2] if where.dim >= first else ()
    return None if any(amounts) else make_motion(call, results, move(where, where.dim))


@declare(Tensor.__getitem__)
def _getitem(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """Numbers, slices, None and `...`, and one constant index that does not select samples."""
    where = call.where[0]
    if not isinstance(where, Layout) or where.alternatives or any(call.where[1:]):
        return None
    items = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    dim = _find_dim_after_indexing(items, where.dim, call.tensors[0].dim())
    return None if dim is None or not isinstance(dim, int) else make_motion(call, results, move(where, dim))


def _find_dim_after_indexing(items: Sequence[Any], sample_dim: int, rank: int) -> int | None:
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
