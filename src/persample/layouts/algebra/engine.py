"""The table of declarations, and the arithmetic that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample._internal.tree import find_tensors
from persample.errors import get_op_name
from persample.layouts.call import Call
from persample.layouts.functions import MOVES
from persample.layouts.layout import Layout, Lost, Where
from persample.layouts.motion import Motion, make_uniform_motion

# Returns how a call moves the samples, or None if the declaration does not cover this call. It may read everything of
# the call and its results except the values of tensors.
Declaration = Callable[[Call, Sequence[Tensor]], Motion | None]

# Torch function -> its declaration.
DECLARATIONS: dict[Any, Declaration] = {}

_OWNERS = (torch, Tensor, F, torch.special)


def find_functions(*names: str) -> list[Any]:
    """All functions with these names: of torch, methods, operators (`__add__`), their reflected and in-place forms.

    >>> torch.add in find_functions("add"), Tensor.__iadd__ in find_functions("add")
    (True, True)
    """
    found = []
    for name in names:
        spellings = (name, f"{name}_", f"__{name}__", f"__r{name}__", f"__i{name}__")
        found += [getattr(owner, spelling, None) for owner in _OWNERS for spelling in spellings]
    return [function for function in found if callable(function)]


def declare(*functions: Any) -> Callable[[Declaration], Declaration]:
    """Register a declaration for some torch functions; a name stands for all functions with that name."""

    def register(declaration: Declaration) -> Declaration:
        for function in functions:
            for each in find_functions(function) if isinstance(function, str) else [function]:
                DECLARATIONS[each] = declaration
        return declaration

    return register


def find_declared_motion(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """How a call moves the samples, if its function is declared and the declaration covers the call."""
    declaration = DECLARATIONS.get(call.func)
    if declaration is None or call.kwargs.get("out") is not None or not results:
        return None
    if not call.args or (call.kwargs and not any(True for _ in find_tensors(call.args))):
        return None  # the tensors of keyword arguments may be in any order
    for tensor, where in zip(call.tensors, call.where, strict=True):
        if where is None:
            continue
        if not isinstance(where, Layout) or not is_plain(where) or not tensor.dim():
            return None
        if where.alternatives and call.func in MOVES:  # sample numbers move the alternatives too
            return None
    return declaration(call, results)


def is_plain(layout: Layout) -> bool:
    """Whether the order of the rows does not depend on the samples."""
    return not layout.loose and not layout.loose_index


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
        return layout if dim == layout.dim else Layout(dim, layout.inner)
    return Layout(dim, layout.inner, layout.ids)


def has_same_rows(a: Layout, b: Layout) -> bool:
    """Whether the rows of two tensors belong to the same samples in the same order."""
    return a.inner == b.inner and a.ids == b.ids


def make_motion(call: Call, results: Sequence[Tensor], layout: Where | None) -> Motion:
    """The motion with one layout for all results."""
    return make_uniform_motion(layout, results)


def lose(call: Call, results: Sequence[Tensor], cause: str) -> Motion:
    """The motion of a call that mixes samples; `cause` continues the name of the function."""
    return make_uniform_motion(Lost(f"{get_op_name(call.func)} {cause}"), results)


def align(call: Call, results: Sequence[Tensor], offsets: Iterable[int]) -> Motion | None:
    """The motion of a call whose tensors are aligned with its results.

    Dimension d of tensor i is dimension d + offsets[i] of every result. An index of a result belongs to the sample that
    it has in the arguments. A constant that varies along this dimension has a row for each index.
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
        elif found.dim != here.dim:
            return lose(
                call,
                results,
                f"combines each sample with every other: they lie in dimension {found.dim} of one argument and in "
                f"dimension {here.dim} of another, counted in the result",
            )
        elif tensor.shape[where.dim] != size:
            return None
        elif not has_same_rows(found, here):
            if found.ids is not None or here.ids is not None:  # rows in a list may follow the pattern of the others
                return None
            return lose(call, results, "has the samples in different orders in its arguments")
    if found is None or any(result.dim() <= found.dim or result.shape[found.dim] != size for result in results):
        return None
    aligned = tuple(
        (i, move(found, found.dim - offset))
        for i, (tensor, where, offset) in enumerate(pairs)
        if where is None and 0 <= found.dim - offset < tensor.dim() and tensor.shape[found.dim - offset] == size > 1
    )
    return Motion((found,) * len(results), aligned)


def broadcast(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """The motion of a call that computes each entry of its results from the entries that broadcasting puts there."""
    rank = results[0].dim()
    return align(call, results, [rank - tensor.dim() for tensor in call.tensors])
