"""Finding how an op moves the samples, once for each set of shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from persample.errors import op_name
from persample.layout import Layout, Lost, Reduced, Where, regular
from persample.motion.by_ids import by_ids
from persample.motion.by_index import by_index, by_order, listed
from persample.motion.by_trial import by_trial, reduced
from persample.motion.kinds import (
    BILINEAR,
    DIVISIONS,
    INDEX_DTYPES,
    LIKES,
    LINEAR,
    LISTS,
    MAKERS,
    MOVES,
    PICKS,
    SORTS,
    WRITES,
)
from persample.motion.motion import Motion, everywhere
from persample.motion.op import Op

_MOST_REMEMBERED = 20_000
_found: dict[Any, Motion] = {}
_known: dict[Any, Callable[[Op], Motion]] = {}


def motion(func: Callable[..., Any]) -> Callable[[Callable[[Op], Motion]], Callable[[Op], Motion]]:
    """Registers how a function moves the samples, for one that cannot be tried."""

    def register(known: Callable[[Op], Motion]) -> Callable[[Op], Motion]:
        _known[func] = known
        return known

    return register


def motion_of(op: Op, results: Sequence[Tensor]) -> Motion:
    """How `op`, which gave `results`, moves the samples."""
    if op.batch == 0:
        return everywhere(Layout(0), results)
    if op.func in _known:
        return _known[op.func](op)
    key = _key(op)
    if key in _found:
        return _found[key]
    motion = _motion_of(op, results)
    if key is not None and not motion.by_values:
        if len(_found) >= _MOST_REMEMBERED:
            _found.clear()
        _found[key] = motion
    return motion


def _motion_of(op: Op, results: Sequence[Tensor]) -> Motion:
    lists = op.func in LISTS and (op.func is not torch.where or len(op.args) == 1)
    for where in op.where:
        if isinstance(where, Lost) and not lists:
            gone_through = where.listed and op.func in (torch.unbind, Tensor.unbind)
            return everywhere(None if gone_through else where, results)
    if lists:
        return listed(op, results)
    if any(isinstance(where, Reduced) for where in op.where):
        return everywhere(_after_reduction(op), results)
    if op.func in MAKERS:
        return everywhere(None, results)
    if op.func in LIKES:
        like = op.where[0]
        of_many = isinstance(like, Layout) and (op.batch == 1 or like.ids is None or len(set(like.ids)) > 1)
        return everywhere(like if of_many else None, results)
    owners = op.samples()
    if len(owners) == 1 and not op.has_nobodys_rows():  # there is nobody to be mixed with
        (owner,) = owners
        loose = any(isinstance(where, Layout) and where.loose for where in op.where)
        return Motion(tuple(_all_of(owner, r, op, loose) for r in results))
    if op.func in LINEAR - MOVES - BILINEAR and not any(t.dim() for t in op.tensors):
        return everywhere(reduced(op), results)  # the losses of some samples, added up
    with torch.no_grad():
        if op.func in WRITES or (op.func in PICKS and any(op.where[1:])):
            return by_index(op)
        if op.func in MOVES:
            return by_ids(op)
        if any(isinstance(where, Layout) and where.places for where in op.where):
            cause = f"{op_name(op.func)} uses the places of rows whose order depends on all samples as numbers"
            return everywhere(Lost(cause), results)
        ordered = by_order(op, results) if op.func in SORTS else None
        return ordered or by_trial(op, results)


def _all_of(sample: int, result: Tensor, op: Op, loose: bool) -> Where:
    """Where the samples lie in something that is all of one sample."""
    if not result.dim():
        return Layout(0, ids=(sample,))
    return regular(0, (sample,) * result.shape[0], op.batch, loose and op.batch > 1)


def _after_reduction(op: Op) -> Where:
    reduced = [where for where in op.where if isinstance(where, Reduced)]
    apart = any(isinstance(where, Layout) and t.dim() for t, where in zip(op.tensors, op.where, strict=True))
    divides_by_it = op.func in DIVISIONS and not isinstance(op.where[0], Reduced)
    if apart or op.func not in LINEAR or (op.func in BILINEAR and len(reduced) > 1) or divides_by_it:
        return Lost(f"{reduced[0].cause} (in {reduced[0].place}), and {op_name(op.func)} is not linear in that sum")
    return reduced[0]


# Functions of such names put entries where an index tells, so its values matter, not its shape alone.
_BY_INDEX = re.compile(
    "item|index|gather|scatter|select|take|put|mask|repeat_interleave|segment|bincount|bucket|search"
)


@cache
def _goes_by_index(func: Callable[..., Any]) -> bool:
    return _BY_INDEX.search(op_name(func)) is not None


def _key(op: Op) -> Any:
    """What the motion depends on, or None where that includes values."""
    if _goes_by_index(op.func) and any(t.dtype in INDEX_DTYPES for t in op.tensors):
        return None
    parts = [op.func, op.batch]
    _describe((op.args, op.kwargs), iter(op.where), parts)
    key = tuple(parts)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _describe(value: Any, where: Iterator[Where | None], parts: list[Any]) -> None:
    """Adds to `parts` all that matters of some arguments: of a tensor its shape and type, and where its samples lie."""
    if isinstance(value, Tensor):
        parts += (value.shape, value.dtype, value.requires_grad, next(where))
    elif isinstance(value, (tuple, list)):
        parts += (type(value), len(value))
        for part in value:
            _describe(part, where, parts)
    elif isinstance(value, dict):
        parts += (dict, len(value))
        for name, part in value.items():
            parts.append(name)
            _describe(part, where, parts)
    elif isinstance(value, slice):
        _describe((slice, value.start, value.stop, value.step), where, parts)
    else:
        parts += (type(value), value)
