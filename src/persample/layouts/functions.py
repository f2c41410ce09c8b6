"""Sets of torch functions, by what they do to the entries of their arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

T: Any = torch.Tensor

# The operators that torch gives several names.
_SYNONYMS: dict[str, tuple[str, ...]] = {
    "abs": ("absolute",), "acos": ("arccos",), "acosh": ("arccosh",), "asin": ("arcsin",), "asinh": ("arcsinh",),
    "atan": ("arctan",), "atan2": ("arctan2",), "atanh": ("arctanh",), "cat": ("concat", "concatenate"),
    "clamp": ("clip",), "div": ("divide", "true_divide", "truediv"), "ge": ("greater_equal",),
    "gt": ("greater",), "le": ("less_equal",), "lt": ("less",), "movedim": ("moveaxis",), "mul": ("multiply",),
    "ne": ("not_equal",), "neg": ("negative",), "outer": ("ger",), "pos": ("positive",), "sub": ("subtract",),
    "transpose": ("swapaxes", "swapdims"), "trunc": ("fix",),
}  # fmt: skip

_OWNERS = (torch, T, F, torch.special)


def find_functions(*names: str) -> list[Any]:
    """All spellings of operators: functions, methods, aliases, `__add__`, reflected and in-place forms.

    >>> torch.add in find_functions("add"), T.__iadd__ in find_functions("add"), torch.divide in find_functions("div")
    (True, True, True)
    """
    found = []
    for each in (synonym for name in names for synonym in (name, *_SYNONYMS.get(name, ()))):
        spellings = (each, f"{each}_", f"__{each}__", f"__r{each}__", f"__i{each}__")
        found += [getattr(owner, spelling, None) for owner in _OWNERS for spelling in spellings]
    return [function for function in found if callable(function)]


# Only move, repeat or drop entries of their first argument (or of the tensors in it).
MOVES: set[Any] = {
    T.__getitem__, T.view, T.view_as, T.reshape, T.reshape_as, T.flatten, T.unflatten, T.squeeze, T.unsqueeze,
    T.transpose, T.swapaxes, T.swapdims, T.t, T.permute, T.movedim, T.moveaxis, T.expand, T.expand_as,
    T.broadcast_to, T.repeat, T.tile, T.repeat_interleave, T.chunk, T.split, T.split_with_sizes, T.tensor_split,
    T.unbind, T.narrow, T.select, T.unfold, T.flip, T.fliplr, T.flipud, T.roll, T.index_select, T.gather,
    T.take_along_dim, T.masked_select, T.diagonal, T.squeeze_, T.unsqueeze_, T.transpose_, T.swapaxes_, T.swapdims_,
    T.t_, T.contiguous,
    T.as_strided, torch.as_strided, T.hsplit, T.vsplit, T.dsplit, torch.hsplit, torch.vsplit, torch.dsplit,
    T.clone, T.detach, T.detach_, T.ravel, T.T.__get__, T.mT.__get__, T.data.__get__,
    torch.reshape, torch.flatten, torch.unflatten, torch.squeeze, torch.unsqueeze, torch.transpose, torch.swapaxes,
    torch.swapdims, torch.t, torch.permute, torch.movedim, torch.moveaxis, torch.broadcast_to, torch.tile,
    torch.repeat_interleave, torch.chunk, torch.split, torch.split_with_sizes, torch.tensor_split, torch.unbind,
    torch.narrow, torch.select, torch.flip, torch.fliplr, torch.flipud, torch.roll, torch.index_select, torch.gather,
    torch.take_along_dim, torch.masked_select, torch.diagonal, torch.clone, torch.detach, torch.ravel,
    torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack, torch.dstack,
    torch.column_stack, torch.atleast_1d, torch.atleast_2d, torch.atleast_3d,
    torch.unsafe_chunk, T.unsafe_chunk, torch.unsafe_split, T.unsafe_split, torch.unsafe_split_with_sizes,
    T.unsafe_split_with_sizes, torch.narrow_copy, T.narrow_copy, torch.alias_copy, torch.diagonal_copy,
    torch.expand_copy, torch.permute_copy, torch.split_with_sizes_copy, torch.squeeze_copy, torch.t_copy,
    torch.transpose_copy, torch.unbind_copy, torch.unfold_copy, torch.unsqueeze_copy, torch.view_copy,
    torch.pixel_shuffle, torch.pixel_unshuffle, torch.channel_shuffle, T.rot90, torch.rot90,
    torch.fft.fftshift, torch.fft.ifftshift, torch.linalg.diagonal,
}  # fmt: skip

# Divide by their second argument, and by their first one: not linear in it.
REVERSED_DIVISIONS: set[Any] = {T.__rtruediv__, T.__rdiv__}
DIVISIONS: set[Any] = {*find_functions("div")} - REVERSED_DIVISIONS

# Return the same entries with another dtype, or on another device.
CASTS: set[Any] = {
    T.to, T.type, T.cpu, T.cuda, T.float, T.double, T.half, T.bfloat16, T.int, T.long, T.short, T.bool, T.char, T.byte,
    T.cfloat, T.cdouble, T.chalf, T.pin_memory, torch.as_tensor, torch.asarray, torch.tensor,
}  # fmt: skip

# Those of MOVES that keep all entries in their order.
RESHAPES: set[Any] = {
    T.view, T.reshape, T.flatten, T.unflatten, T.ravel, torch.reshape, torch.flatten, torch.unflatten, torch.ravel,
}  # fmt: skip

# Those of MOVES that select entries by an index or a mask.
PICKS: set[Any] = {
    T.__getitem__, T.index_select, T.gather, T.take_along_dim, T.masked_select, T.repeat_interleave,
    torch.index_select, torch.gather, torch.take_along_dim, torch.masked_select, torch.repeat_interleave,
}  # fmt: skip

# Write entries of one tensor into another, or add them to it.
WRITES: set[Any] = {
    T.__setitem__, T.copy_, T.index_copy_, T.index_copy, T.index_add_, T.index_add, T.index_reduce_,
    T.index_reduce, T.index_put_, T.index_put,
    T.scatter_, T.scatter, T.scatter_add_, T.scatter_add, T.scatter_reduce_, T.scatter_reduce, T.masked_scatter_,
    T.masked_scatter, torch.index_copy, torch.index_add, torch.index_reduce, torch.index_put_, torch.index_put,
    torch.scatter, torch.scatter_add, torch.scatter_reduce, torch.masked_scatter,
}  # fmt: skip

# List the positions of entries, or the values that occur.
LISTS: set[Any] = {
    T.nonzero, T.argwhere, T.unique, T.unique_consecutive, torch.nonzero, torch.argwhere, torch.unique,
    torch.unique_consecutive, torch.where,
}  # fmt: skip

# Put entries in order.
SORTS: set[Any] = {T.sort, T.argsort, T.topk, torch.sort, torch.argsort, torch.topk}

# Make a tensor with the shape of their argument, and read none of its values.
LIKES: set[Any] = {
    torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like,
    torch.randint_like,
}  # fmt: skip

# Make a tensor with the dtype and device of their first argument, and read nothing else of it.
MAKERS: set[Any] = {
    T.new, T.new_zeros, T.new_ones, T.new_empty, T.new_empty_strided, T.new_full, T.new_tensor,
}  # fmt: skip

# The dtypes of indices and masks.
INDEX_DTYPES = {torch.bool, torch.uint8, torch.int64, torch.int32}
