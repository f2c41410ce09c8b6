"""The table of declarations, and the arithmetic that they share.

Most declarations give each dimension of the arguments and of the result a letter, as in einsum (`follow`).
"""

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
from persample.layouts.reductions import make_reduced

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
            be known about an argument (lost and reduced tensors, single samples, loose rows), and return a motion. All
            others get layouts of samples, and constants.
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


def keep(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """The motion of a function of one tensor that keeps the samples in their dimension."""
    where = call.where[0]
    if not isinstance(where, Layout) or any(call.where[1:]):
        return None
    return make_uniform_motion(move(where, where.dim), results)


# ---- letters ----

# A letter for each dimension of a tensor, as in einsum. Entries with the same index for a letter are combined; along a
# letter that the result lacks, they are added up. None: a dimension in which no sample may lie.
Letters = Sequence[Any]


def follow(call: Call, results: Sequence[Tensor], letters: Sequence[Letters], out: Letters) -> Motion | None:
    """The motion of a call, given the letters of its first tensors and of its results; the other tensors are constants.

    None if samples lie in a dimension without a letter, or if sizes do not fit.
    """
    motion = join(call, letters, out, is_returned=len(results) == 1 and results[0].dim() == len(out))
    where = None if motion is None else motion.results[0]
    if motion is None or not isinstance(where, Layout):
        return motion and make_uniform_motion(where, results)
    if where.dim == len(out):
        lost = lose(call, results, "sums over the samples")
        return make_uniform_motion(make_reduced(call, results), results) if call.facts.is_additive else lost
    sizes = {tensor.shape[own.dim] for tensor, own in call.pairs if isinstance(own, Layout)}
    if any(result.dim() <= where.dim or result.shape[where.dim] not in sizes for result in results):
        return None
    return Motion(motion.results * len(results), motion.aligned)


def join(call: Call, letters: Sequence[Letters], out: Letters, is_returned: bool = False) -> Motion | None:
    """The motion of the entries that a call combines, which need not be its results.

    An index belongs to the sample that it has in the arguments. A constant that varies along this dimension has a row
    for each index. So does a constant among the rows of an argument: it takes the sample of the row that it is combined
    with.

    Args:
        call: the call.
        letters: those of its first tensors.
        out: those of the entries. If it lacks that of the samples, the dimension of the layout is `len(out)`.
        is_returned: whether the call returns these entries.
    """
    letters, out = [list(of_tensor) for of_tensor in letters], list(out)
    found: Layout | None = None
    letter, size = None, 0
    for i, (tensor, where) in enumerate(call.pairs):
        if where is None:
            continue
        assert isinstance(where, Layout)
        here = letters[i][where.dim] if i < len(letters) else None
        if here is None:
            return None
        if found is None:
            found, letter, size = where, here, tensor.shape[where.dim]
        elif here != letter:
            if all(each.numel() for each in call.tensors):  # else there are no entries, in which samples could meet
                return _cross(call, _move_to(found, letter, out), _move_to(where, here, out), len(out), is_returned)
        elif tensor.shape[where.dim] != size:
            return None
        elif (found := merge_rows(found, where, size, call.batch)) is None:
            return lose(call, call.tensors[:1], DIFFERENT_ORDERS)
    if found is None:
        return None
    aligned = tuple(
        (i, move(found, own.index(letter)))
        for i, ((tensor, where), own) in enumerate(zip(call.pairs, letters, strict=False))
        if letter in own
        and tensor.shape[own.index(letter)] == size > 1
        and not (isinstance(where, Layout) and (where.inner, where.ids) == (found.inner, found.ids))
    )
    return Motion((_move_to(found, letter, out),), aligned)


def _move_to(layout: Layout, letter: Any, out: Letters) -> Layout:
    return move(layout, out.index(letter) if letter in out else len(out))


def _cross(call: Call, first: Layout, second: Layout, rank: int, is_returned: bool) -> Motion:
    """The motion of a call that combines each row of one argument with each row of another.

    `first` and `second` are where the samples of these rows lie in the entries, which have `rank` dimensions.
    """
    cause = f"{get_op_name(call.func)} combines each sample with every other"
    if rank in (first.dim, second.dim):
        return Motion((Lost(cause),))
    cause += (
        f": they lie in dimension {first.dim} of one argument and in dimension {second.dim} of another, counted in the "
        "result"
    )
    is_known = is_returned and sum(where is not None for where in call.where) == 2 and not call.has_loose_rows()
    return Motion((Crossed(cause, rows=(first, second)) if is_known else Lost(cause),))


def broadcast(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """The motion of a call that computes each entry of its results from the entries that broadcasting puts there."""
    shape = results[0].shape
    if any(result.shape != shape for result in results):
        return None
    letters = spell_broadcast(call, shape)
    return None if letters is None else follow(call, results, letters, range(len(shape)))


def join_broadcast(call: Call) -> Motion | None:
    """The motion of the entries that a call computes from broadcast tensors, before it combines them."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in call.tensors))
    letters = spell_broadcast(call, shape)
    return None if letters is None else join(call, letters, range(len(shape)))


def spell_broadcast(call: Call, shape: Sequence[int]) -> Sequence[Letters] | None:
    """The letters of tensors that are aligned at the ends of a shape; None if samples are repeated there."""
    for tensor, where in call.pairs:
        if isinstance(where, Layout) and tensor.shape[where.dim] != shape[where.dim - tensor.dim()]:
            return None
    return [range(len(shape) - tensor.dim(), len(shape)) for tensor in call.tensors]


def keep_leading(call: Call, results: Sequence[Tensor], leading: int, count: int = 1) -> Motion | None:
    """The motion of a function that treats each index of the first `leading` dimensions separately.

    The first `count` tensors and all results share these dimensions. All other tensors have no samples.
    """
    letters = [[*range(leading), *[None] * (tensor.dim() - leading)] for tensor in call.tensors[:count]]
    return follow(call, results, letters, range(leading))
