"""Finding how an op moves the samples, once for each set of shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from persample._internal import tracing
from persample.errors import op_name
from persample.layouts.by_ids import by_ids
from persample.layouts.by_index import UNKNOWN_VALUES, by_index, by_order, listed
from persample.layouts.by_trial import by_trial, reduced
from persample.layouts.cache import CACHE
from persample.layouts.call import Op, op_of
from persample.layouts.functions import (
    ADDITIVE,
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
    SUMS,
    WRITES,
)
from persample.layouts.layout import Layout, Lost, Reduced, Where, regular, sample_ids
from persample.layouts.motion import Motion, everywhere

_known: dict[Any, Callable[[Op], Motion]] = {}


def motion(func: Callable[..., Any]) -> Callable[[Callable[[Op], Motion]], Callable[[Op], Motion]]:
    """Registers how a function moves the samples, for one that cannot be tried."""

    def register(known: Callable[[Op], Motion]) -> Callable[[Op], Motion]:
        _known[func] = known
        return known

    return register


def call_simple(op: Op, result: Any) -> None:
    """Notes that a call without weights gave one new tensor, and that all others of its kind will do the same."""
    may_be_weights = any(t.requires_grad and where is None for t, where in zip(op.tensors, op.where, strict=True))
    by_count = op.func in _MEANS_OF_THE_VALID and op.kwargs.get("reduction", "mean") == "mean"
    if op.inplace or may_be_weights or by_count or not isinstance(result, Tensor):
        return
    key = _key(op)
    motion = None if key is None else CACHE.get(key)
    if motion is not None and isinstance(motion.results[0], (Layout, Reduced)):
        motion.simple = motion.results[0]


def motion_of(op: Op, results: Sequence[Tensor]) -> Motion:
    """How `op`, which gave `results`, moves the samples."""
    if op.batch == 0:
        return everywhere(Layout(0), results)
    trace = tracing.get_trace()
    return _motion(op, results) if trace is None else _traced_motion(op, results, trace)


def _motion(op: Op, results: Sequence[Tensor]) -> Motion:
    if op.func in _known:
        return _known[op.func](op)
    if op.func in _MEANS_OF_THE_VALID and (fair := _with_fair_divisor(op)) is not op:
        return fair if isinstance(fair, Motion) else _motion(fair, results)
    key = _key(op)
    if key is not None and (found := CACHE.get(key)) is not None:
        return found
    try:
        motion = _motion_of(op, results)
    except Exception as error:  # the op itself has run: what it does to the samples is what could not be found
        motion = everywhere(Lost(f"{op_name(op.func)} could not be followed ({error})"), results)
    lost = any(isinstance(where, Lost) for where in motion.results)
    by_numbers = lost and any(t.dtype in INDEX_DTYPES for t in op.tensors)  # with others they may be found
    traced = tracing.get_trace() is not None and (lost or _has_made_up_numbers(op))  # as they may be with values
    if key is not None and not motion.by_values and not by_numbers and not traced:
        motion = CACHE.add(key, motion)
    return motion


def _motion_of(op: Op, results: Sequence[Tensor]) -> Motion:
    if (unequal := _unequal_rows(op)) is not None:
        return everywhere(unequal, results)
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
    if op.func in SUMS and not any(t.dim() for t in op.tensors):
        return everywhere(reduced(op), results)  # the losses of some samples, added up
    with torch.no_grad():
        made_up = _has_made_up_numbers(op, first=1)
        if op.func in WRITES or (op.func in PICKS and (any(op.where[1:]) or made_up)):
            return by_index(op)
        if made_up and (op.func in MOVES or (_key(op) is None and op.func not in _MASKED)):
            return everywhere(Lost(f"{op_name(op.func)} {UNKNOWN_VALUES}"), results)
        if op.func in MOVES:
            return by_ids(op, results)
        if any(isinstance(where, Layout) and where.places for where in op.where):
            cause = f"{op_name(op.func)} uses the places of rows whose order depends on all samples as numbers"
            return everywhere(Lost(cause), results)
        ordered = by_order(op, results) if op.func in SORTS else None
        return ordered or by_trial(op, results)


# Of the functions that a mask steers, those that move nothing.
_MASKED = {Tensor.masked_fill, Tensor.masked_fill_, torch.masked_fill}


def _has_made_up_numbers(op: Op, first: int = 0) -> bool:
    """Whether an index or mask is among the arguments whose values are not known while a step is traced."""
    trace = tracing.get_trace()
    return trace is not None and any(t.dtype in INDEX_DTYPES and trace.is_invented(t) for t in op.tensors[first:])


def _traced_motion(op: Op, results: Sequence[Tensor], trace: tracing.Trace) -> Motion:
    """How an op of tensors without values moves the samples; lost if values decide."""
    lost = everywhere(Lost(f"{op_name(op.func)} {UNKNOWN_VALUES}"), results)
    if op.func in _MEANS_OF_THE_VALID:
        _require_fair_divisor(op, trace)
    with tracing.suspend():
        try:
            if op.func in _known:
                return _known[op.func](op)
        except Exception:  # it looks at values
            return lost
        given = trace.stand_in(op)
        given.kind = op.kind
        motion = _motion(given, results)
    return lost if motion.by_values and op.func not in WRITES and op.func not in PICKS else motion


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


# ---- means over unequal parts: no sum of the samples' own means ----

_MEANS_OF_THE_VALID = {torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss}
_DIVISOR = "so its divisor depends on the batch: reduce by 'sum', or take each sample's mean first"


def _with_fair_divisor(op: Op) -> Op | Motion:
    """A mean over targets of which some are ignored, as a sum if each sample has as many that are not."""
    found = _valid_targets(op)
    if found is None:
        return op
    valid, owner = found
    counts = owner[valid & (owner >= 0)].bincount(minlength=op.batch)
    if bool((counts != counts[0]).any()):
        cause = f"{op_name(op.func)} is a mean over {counts.tolist()} targets of the samples that are not ignored"
        return everywhere(Lost(f"{cause}, {_DIVISOR}"), op.tensors[:1])
    return op if bool(valid.all()) else replace(op, kwargs={**op.kwargs, "reduction": "sum"})


def _valid_targets(op: Op) -> tuple[Tensor, Tensor] | None:
    """Which targets a mean is over, and whose they are; None if it is over all of them in any case."""
    where = op.where[0]
    if op.kwargs.get("reduction", "mean") != "mean" or len(op.args) > 2 or not isinstance(where, Layout):
        return None
    if len(op.samples()) == 1:
        return None
    logits, target = op.tensors[:2]
    if target.is_floating_point() or target.dim() != logits.dim() - 1 or where.dim == 1:
        return None
    valid = target != op.kwargs.get("ignore_index", -100)
    return valid, sample_ids(target, replace(where, dim=max(0, where.dim - 1)), op.batch)


def _require_fair_divisor(op: Op, trace: tracing.Trace) -> None:
    """Has each run check that the samples have equal numbers of targets that are not ignored."""
    found = _valid_targets(op)
    if found is not None:
        valid, owner = found
        # of nobody's, the row is left out again
        counts = torch.zeros(op.batch + 1, dtype=torch.int64, device=valid.device).index_add(
            0, (owner % (op.batch + 1)).flatten().long(), valid.flatten().long()
        )[:-1]
        cause = f"{op_name(op.func)} is a mean over different numbers of targets of the samples that are not ignored"
        trace.require((counts == counts[0]).all(), f"{cause}, {_DIVISOR}.")


def _unequal_rows(op: Op) -> Lost | None:
    """Why a mean over rows is no sum of the samples' means, where they have different numbers of rows."""
    if op.func not in ADDITIVE or op.kwargs.get("reduction", "mean") != "mean" or op_name(op.func) in _PLAIN_SUMS:
        return None
    if len(op.samples()) == 1:
        return None
    for tensor, where in zip(op.tensors, op.where, strict=True):
        if isinstance(where, Layout) and where.ids is not None and tensor.dim():
            counts = [where.ids.count(n) for n in range(op.batch)]
            averaged = op_name(op.func) != "mean" or _averages(op, where.dim, tensor.dim())
            if len(set(counts)) > 1 and averaged:
                return Lost(f"{op_name(op.func)} is a mean over {counts} rows of the samples, {_DIVISOR}")
    return None


_PLAIN_SUMS = {"sum", "nansum", "dot", "vdot", "inner", "einsum", "matmul", "__matmul__"}


def _averages(op: Op, dim: int, dims: int) -> bool:
    """Whether a call of `mean` goes over this dim."""
    given = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", op.kwargs.get("axis"))
    chosen = range(dims) if given is None or given == () else (given,) if isinstance(given, int) else given
    return any(d % dims == dim for d in chosen)


# Functions of such names put entries where an index tells, so its values matter, not its shape alone.
_BY_INDEX = re.compile(
    "item|index|gather|scatter|select|take|put|mask|repeat_interleave|segment|bincount|bucket|search|embedding"
)


# Of these, the ones that put things where the index is, if the index is the samples' own.
_LOOKUPS = {torch.nn.functional.embedding, torch.embedding, torch.nn.functional.embedding_bag, torch.embedding_bag}


@cache
def _goes_by_index(func: Callable[..., Any]) -> bool:
    return _BY_INDEX.search(op_name(func)) is not None


def _goes_by_values(op: Op) -> bool:
    return any(
        t.dtype in INDEX_DTYPES and (where is None or op.func not in _LOOKUPS)
        for t, where in zip(op.tensors, op.where, strict=True)
    )


def _key(op: Op) -> Any:
    """What the motion depends on, or None where that includes values."""
    if _goes_by_index(op.func) and _goes_by_values(op):
        return None
    key = described(op)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def described(op: Op) -> tuple[Any, ...]:
    """All that matters of a call, but the values of its tensors."""
    where = iter(op.where)
    return op.kind or op_of(op.func, op.args, op.kwargs, op.batch, lambda _: next(where)).kind
