"""The table of declarations, and the arithmetic that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from persample._internal.facts import describe
from persample.errors import get_op_name
from persample.layouts.algebra.arguments import has_tensors_by_keyword, put_tensors_in_order
from persample.layouts.call import Call
from persample.layouts.ids import make_layout
from persample.layouts.layout import Crossed, Layout, Lost, make_pattern
from persample.layouts.motion import Motion, make_uniform_motion

# Returns how a call moves the samples, or None if the declaration does not cover this call. It may read everything of
# the call and its results. If it reads the values of tensors, the motion must say so (`depends_on_values`).
Declaration = Callable[[Call, Sequence[Tensor]], Motion | None]

# Torch function -> its declaration.
DECLARATIONS: dict[Any, Declaration] = {}

# Why a call mixes samples, after the name of its function.
DIFFERENT_ORDERS = "has the samples in different orders in its arguments (pairs in one call need record(units=...))"


def declare(*functions: Any, **known: Any) -> Callable[[Declaration], Declaration]:
    """Register a declaration for some torch functions; a name stands for all spellings of an operator.

    Args:
        functions: the functions, or names of operators.
        known: facts about them, as in `Facts`. A declaration that `handles_any_layout` must handle everything that can
            be known about an argument (lost and reduced tensors, single samples, loose rows), and return a motion.
    """

    def register(declaration: Declaration) -> Declaration:
        DECLARATIONS.update(dict.fromkeys(describe(*functions, **known), declaration))
        return declaration

    return register


def find_declared_motion(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """How a call moves the samples, if its function is declared and the declaration covers the call."""
    declaration = DECLARATIONS.get(call.func)
    if declaration is None or call.kwargs.get("out") is not None or not results:
        return None
    moves_entries = call.facts.moves_entries and not _is_reinterpretation(call)
    is_loose = False
    for tensor, where in call.pairs:
        if where is None:
            continue
        if not isinstance(where, Layout) or where.loose_index or not tensor.dim():
            return None
        if where.alternatives and moves_entries:  # sample numbers move the alternatives too
            return None
        is_loose |= where.loose
    if is_loose and (moves_entries or call.facts.reads_positions):
        return None
    positions: Sequence[int] = range(len(call.tensors))
    ordered = call
    if has_tensors_by_keyword(call):
        in_order = put_tensors_in_order(call)
        if in_order is None:
            return None
        ordered, positions = in_order
    motion = declaration(ordered, results)
    if motion is not None and motion.aligned:
        motion = replace(motion, aligned=tuple((positions[i], layout) for i, layout in motion.aligned))
        if is_loose:
            if not all(
                call.where[i] is None and _has_equal_rows(call.tensors[i], layout) for i, layout in motion.aligned
            ):
                cause = "combines constants that differ between rows with rows whose order depends on all samples"
                return lose(call, results, cause)
            return replace(motion, depends_on_values=True)
    return motion


def _has_equal_rows(tensor: Tensor, layout: Layout) -> bool:
    """Whether a constant with a row for each sample has the same values in all rows, such as an initial state."""
    rows = tensor.detach()
    return torch.equal(rows, rows.narrow(layout.dim, 0, 1).expand_as(rows))


def _is_reinterpretation(call: Call) -> bool:
    """Whether a call is `view(dtype)`, which splits or joins entries instead of moving them."""
    return call.facts.operator == "view" and isinstance(get_argument(call, 1, "dtype"), torch.dtype)


# ---- arguments ----


def get_argument(call: Call, position: int, *names: str, default: Any = None) -> Any:
    """An argument of a call, by its position or one of its names."""
    if len(call.args) > position:
        return call.args[position]
    return next((call.kwargs[name] for name in names if name in call.kwargs), default)


def normalise_dims(dims: Any, rank: int) -> set[int]:
    """The dimensions that an argument `dim` stands for: all for None and for an empty tuple."""
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return set(range(rank))
    if isinstance(dims, int):
        return {dims % rank} if rank else set()
    return {dim % rank for dim in dims}


# ---- layouts ----


def move(layout: Layout, dim: int) -> Layout:
    """The same rows along another dimension."""
    if layout.ids is None and not layout.alternatives:
        return layout if dim == layout.dim else make_pattern(dim, layout.inner)
    return Layout(dim, layout.inner, layout.ids, loose=layout.loose, by_rank=layout.by_rank)


def merge_rows(a: Layout, b: Layout, size: int, batch: int) -> Layout | None:
    """The rows of two tensors that are combined row by row, along the dimension of `a`; None if samples would meet.

    A row of no sample, combined with one of a sample, belongs to that sample.
    """
    if a.inner == b.inner and a.ids == b.ids:
        return a
    if a.ids is None and b.ids is None:
        return None
    of_a, of_b = a.get_ids(size, batch), b.get_ids(size, batch)
    if len(of_a) != len(of_b) or any(n != m and n >= 0 and m >= 0 for n, m in zip(of_a, of_b, strict=True)):
        return None
    merged = tuple(m if n < 0 else n for n, m in zip(of_a, of_b, strict=True))
    return make_layout(a.dim, merged, batch, a.loose or b.loose)


def lose(call: Call, results: Sequence[Tensor], cause: str) -> Motion:
    """The motion of a call that mixes samples; `cause` continues the name of the function."""
    return make_uniform_motion(Lost(f"{get_op_name(call.func)} {cause}"), results)


def cross(call: Call, results: Sequence[Tensor], cause: str, first: Layout, second: Layout) -> Motion:
    """The motion of a call that combines each row of one argument with each row of another.

    `first` and `second` are where the samples of these rows lie in the result.
    """
    lost = Lost(f"{get_op_name(call.func)} {cause}")
    arguments = [where for where in call.where if where is not None]
    is_known = len(arguments) == 2 and not call.has_loose_rows() and len(results) == 1
    return make_uniform_motion(Crossed(lost.cause, rows=(first, second)) if is_known else lost, results)


def find_common_rows(call: Call, shape: Sequence[int], offsets: Sequence[int]) -> Motion | None:
    """The motion of a call whose tensors are aligned with a result of this shape.

    Dimension d of tensor i is dimension d + offsets[i] of the result. An index of the result belongs to the sample that
    it has in the arguments. A constant that varies along this dimension has a row for each index. So does a constant
    among the rows of an argument: it takes the sample of the row that it is combined with.
    """
    found: Layout | None = None
    size = 0
    pairs = list(zip(call.tensors, call.where, offsets, strict=True))
    for tensor, where, offset in pairs:
        if where is None:
            continue
        assert isinstance(where, Layout)
        here = move(where, where.dim + offset)
        if found is None:
            found, size = here, tensor.shape[where.dim]
            continue
        if found.dim != here.dim and 0 in shape:  # no entries, in which samples could meet
            continue
        if found.dim != here.dim:
            return lose(call, call.tensors[:1], _describe_crossing(found, here))
        if tensor.shape[where.dim] != size:
            return None
        merged = merge_rows(found, here, size, call.batch)
        if merged is None:
            return lose(call, call.tensors[:1], DIFFERENT_ORDERS)
        found = merged
    if found is None or len(shape) <= found.dim or shape[found.dim] != size:
        return None
    aligned = tuple(
        (i, move(found, found.dim - offset))
        for i, (tensor, where, offset) in enumerate(pairs)
        if (where is None or (isinstance(where, Layout) and (where.inner, where.ids) != (found.inner, found.ids)))
        and 0 <= found.dim - offset < tensor.dim()
        and tensor.shape[found.dim - offset] == size > 1
    )
    return Motion((found,), aligned)


def _describe_crossing(first: Layout, second: Layout) -> str:
    return (
        f"combines each sample with every other: they lie in dimension {first.dim} of one argument and in dimension "
        f"{second.dim} of another, counted in the result"
    )


def repeat_result(motion: Motion | None, results: Sequence[Tensor]) -> Motion | None:
    """The motion with the layout of the first result for all results."""
    if motion is None or len(results) == 1:
        return motion
    return Motion((motion.results[0],) * len(results), motion.aligned)


def broadcast(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """The motion of a call that computes each entry of its results from the entries that broadcasting puts there."""
    shape = results[0].shape
    if any(result.shape != shape for result in results):
        return None
    rows = [
        move(where, where.dim + len(shape) - tensor.dim())
        for tensor, where in call.pairs
        if isinstance(where, Layout) and tensor.shape[where.dim] == shape[where.dim - tensor.dim()]
    ]
    if len(rows) == 2 and rows[0].dim != rows[1].dim and 0 not in shape:
        return cross(call, results, _describe_crossing(*rows), *rows)
    return repeat_result(find_common_rows(call, shape, [len(shape) - t.dim() for t in call.tensors]), results)


def keep_leading(call: Call, results: Sequence[Tensor], leading: int, count: int = 1) -> Motion | None:
    """The motion of a function that treats each index of the first `leading` dimensions separately.

    The first `count` tensors and all results share these dimensions. All other tensors have no samples.
    """
    if any(call.where[count:]):
        return None
    if any(isinstance(where, Layout) and where.dim >= leading for where in call.where):
        return None
    dims = replace(call, tensors=call.tensors[:count], where=call.where[:count])
    shape = results[0].shape[:leading]
    if any(result.shape[:leading] != shape for result in results):
        return None
    return repeat_result(find_common_rows(dims, shape, [0] * count), results)
