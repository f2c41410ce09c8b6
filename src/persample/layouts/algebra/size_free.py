"""Motions that do not depend on sizes, and layouts that follow from two shapes: for the hot path of the tracker.

The motion of most calls follows from the layouts and numbers of dimensions of the tensors and from the arguments that
are not tensors, if the batch has at least two samples and every layout is a pattern. Such a motion holds at every size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from persample._internal.facts import all_with, find_functions
from persample._internal.functions import is_inplace
from persample.layouts.algebra import attention, layers, losses, shapes
from persample.layouts.algebra.engine import DECLARATIONS, find_declared_motion, get_argument
from persample.layouts.call import Call
from persample.layouts.layout import Layout, make_pattern

# Functions whose motion may be free of sizes; `find_size_free_layout` decides for a call.
SIZE_FREE = all_with("is_size_free")


def find_size_free_layout(call: Call, results: Sequence[Tensor]) -> Layout | None:
    """The layout of all results of a call of a function in SIZE_FREE, if it is the same at all sizes; else None."""
    if not _is_size_free(call):
        return None
    if call.facts.casts or call.facts.makes_like:
        layout = call.where[0]
    else:
        motion = find_declared_motion(call, results)
        layouts = set() if motion is None else set(motion.results)
        layout = layouts.pop() if len(layouts) == 1 else None
    return layout if isinstance(layout, Layout) and layout.is_pattern else None


def _is_size_free(call: Call) -> bool:
    layouts = [(tensor, where) for tensor, where in zip(call.tensors, call.where, strict=True) if where is not None]
    if call.batch < 2 or not all(isinstance(where, Layout) and where.is_pattern for _, where in layouts):
        return False
    dims = [(tensor.dim(), where.dim) for tensor, where in layouts if isinstance(where, Layout)]
    if call.facts.makes_like and len(layouts) > 1:  # full_like(x, y)
        return False
    declaration = DECLARATIONS.get(call.func)
    if declaration is layers.convolve:  # groups of channels may belong to samples
        return layers.is_batched_convolution(call) and all(dim == 0 for _, dim in dims)
    if declaration is losses.compare_classes:  # two other patterns are in the same order at some sizes only
        return len(layouts) == 2 and layouts[0][1] == layouts[1][1] and dims[0][1] == 0
    if declaration is attention.attend:  # rows of queries may
        return all(dim < rank - 2 for rank, dim in dims)
    if declaration is shapes.pad:  # rows beside the samples follow the pattern at some batch sizes only
        return shapes.find_padding(call) == (0, 0)
    if call.facts.operator == "cat" and None in call.where:  # a constant may be empty
        dim = get_argument(call, 1, "dim", "axis", default=0)
        return all(dim % rank != of_samples for rank, of_samples in dims)
    return True


# ---- layouts that follow from shapes ----

# From the layout of the argument (a pattern), its shape and that of the result, the other arguments and the batch size:
# the layout of the result, None if it is not known in this way.
FindLayout = Callable[[Layout, Sequence[int], Sequence[int], tuple[Any, ...], int], Layout | None]

# Functions of one tensor whose motion depends on sizes, and follows from the shapes.
BY_SHAPE: dict[Any, FindLayout] = {}


def _add_by_shape(*names: str) -> Callable[[FindLayout], FindLayout]:
    def add(find: FindLayout) -> FindLayout:
        for function in find_functions(*names):
            if not is_inplace(function):
                BY_SHAPE[function] = find
        return find

    return add


@_add_by_shape("view", "reshape", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze")
def _find_reshaped(
    where: Layout, shape: Sequence[int], new_shape: Sequence[int], args: tuple[Any, ...], batch: int
) -> Layout | None:
    if args and isinstance(args[0], torch.dtype):
        return None
    if where.dim == 0 and where.inner == 1 and shape[0] == batch and new_shape and new_shape[0] == batch:
        return where
    entries = math.prod(shape)
    return shapes.factorise(where, shape, new_shape, batch) if 0 < entries == math.prod(new_shape) else None


@_add_by_shape("expand", "broadcast_to")
def _find_expanded(
    where: Layout, shape: Sequence[int], new_shape: Sequence[int], args: tuple[Any, ...], batch: int
) -> Layout | None:
    return make_pattern(where.dim + len(new_shape) - len(shape), where.inner)


@_add_by_shape("getitem")
def _find_indexed(
    where: Layout, shape: Sequence[int], new_shape: Sequence[int], args: tuple[Any, ...], batch: int
) -> Layout | None:
    items = args[0] if isinstance(args[0], tuple) else (args[0],)
    if any([isinstance(item, Tensor) for item in items]):
        return None
    dim = shapes.find_dim_after_indexing(items, where.dim, len(shape))
    return None if dim is None else make_pattern(dim, where.inner)
