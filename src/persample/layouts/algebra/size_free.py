"""Motions that do not depend on sizes, and layouts that follow from two shapes: for the hot path of the tracker.

The motion of most calls follows from the layouts and numbers of dimensions of the tensors and from the arguments that
are not tensors, if the batch has at least two samples and every layout is a pattern. Such a motion holds at every size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from persample._internal.facts import all_with, facts
from persample._internal.functions import is_inplace
from persample.layouts.algebra.engine import find_declared_motion
from persample.layouts.call import Call
from persample.layouts.layout import Layout

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
    layouts = [(tensor, where) for tensor, where in call.pairs if where is not None]
    if call.batch < 2 or not all(isinstance(where, Layout) and where.is_pattern for _, where in layouts):
        return False
    if call.facts.makes_like and len(layouts) > 1:  # full_like(x, y)
        return False
    return call.facts.size_free_if is None or call.facts.size_free_if(call)


# Functions of one tensor whose motion depends on sizes, and follows from the shapes. From the layout of the argument (a
# pattern), its shape and that of the result, the other arguments and the batch size, each finds the layout of the
# result, None if it is not known in this way.
FindLayout = Callable[[Layout, Sequence[int], Sequence[int], tuple[Any, ...], int], Layout | None]
BY_SHAPE: dict[Any, FindLayout] = {
    function: find
    for function in all_with("by_shape")
    if (find := facts(function).by_shape) is not None and not is_inplace(function)
}
