"""Finding how an op moves the samples, once for each set of shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from persample.errors import op_name
from persample.layout import Layout, Lost, Reduced, Where, regular
from persample.motion.by_ids import by_ids, is_moved
from persample.motion.by_trial import by_trial, reduced
from persample.motion.kinds import BILINEAR, DIVISIONS, INDEX_DTYPES, LIKES, LINEAR, MAKERS, MOVES, WRITES
from persample.motion.motion import Motion, everywhere
from persample.motion.op import Op
from persample.tree import map_tensors

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
    for i, where in enumerate(op.where):
        if isinstance(where, Lost) and not (op.func in MOVES and not is_moved(op, i)):
            return everywhere(where, results)
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
        return Motion(tuple(_all_of(owner, r, op) for r in results))
    with torch.no_grad():
        if op.func in MOVES or op.func in WRITES:
            motion = by_ids(op)
            if motion is not None:
                return motion
        for where in op.where:
            if isinstance(where, Lost):
                return everywhere(where, results)
        return by_trial(op, results)


def _all_of(sample: int, result: Tensor, op: Op) -> Where:
    """Where the samples lie in something that is all of one sample."""
    if result.dim():
        return regular(0, (sample,) * result.shape[0], op.batch)
    return reduced(op) if op.batch == 1 else Lost("it is one number of one sample")


def _after_reduction(op: Op) -> Where:
    reduced = [where for where in op.where if isinstance(where, Reduced)]
    apart = any(isinstance(where, Layout) for where in op.where)
    divides_by_it = op.func in DIVISIONS and not isinstance(op.where[0], Reduced)
    if apart or op.func not in LINEAR or (op.func in BILINEAR and len(reduced) > 1) or divides_by_it:
        return Lost(f"{reduced[0].cause} (in {reduced[0].place}), and {op_name(op.func)} is not linear in that sum")
    return reduced[0]


# Functions of such names put entries where an index tells, so its values matter, not its shape alone.
_BY_INDEX = re.compile(
    "item|index|gather|scatter|select|take|put|mask|repeat_interleave|segment|bincount|bucket|search"
)


def _key(op: Op) -> Any:
    """What the motion depends on, or None where that includes values."""
    if _BY_INDEX.search(op_name(op.func)) and any(t.dtype in INDEX_DTYPES for t in op.tensors):
        return None
    described = [(t.shape, t.dtype, t.requires_grad, where) for t, where in zip(op.tensors, op.where, strict=True)]
    supply = iter(described)
    key = (op.func, op.batch, _hashable(map_tensors(lambda _: next(supply), (op.args, op.kwargs))))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_hashable, value))
    if isinstance(value, dict):
        return tuple((key, _hashable(part)) for key, part in value.items())
    if isinstance(value, slice):
        return (slice, value.start, value.stop, value.step)
    if isinstance(value, (int, float)):
        return (type(value), value)
    return value
