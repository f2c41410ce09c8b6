"""Find how a call moves the samples, once for each key."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from persample._internal import tracing
from persample.errors import get_op_name
from persample.layouts.algebra import find_declared_motion
from persample.layouts.by_ids import find_motion_by_ids
from persample.layouts.by_index import UNKNOWN_VALUES, find_motion_by_index, find_motion_of_listing, find_motion_of_sort
from persample.layouts.by_trial import find_motion_by_trial
from persample.layouts.cache import CACHE
from persample.layouts.call import Call, CallKey
from persample.layouts.functions import INDEX_DTYPES, LIKES, LISTS, MAKERS, MOVES, PICKS, SORTS, WRITES
from persample.layouts.layout import Layout, Lost, Reduced, make_layout
from persample.layouts.motion import Motion, make_uniform_motion
from persample.layouts.reductions import (
    SUMS,
    find_layout_after_reduction,
    find_unequal_divisors,
    is_mean_over_valid_targets,
    make_reduced,
    normalise_divisor,
    require_equal_divisors,
)

FindMotion = Callable[[Call], Motion]

# The functions whose motion is declared, filled when persample.layouts is imported.
_declared: dict[Callable[..., Any], FindMotion] = {}


def declare_motion(*functions: Callable[..., Any]) -> Callable[[FindMotion], FindMotion]:
    """Decorator: use the decorated function to find the motion of calls of these torch functions."""

    def declare(find: FindMotion) -> FindMotion:
        for function in functions:
            _declared[function] = find
        return find

    return declare


def find_motion(call: Call, results: Sequence[Tensor]) -> Motion:
    """How `call`, which returned `results`, moves the samples."""
    if call.batch == 0:
        return make_uniform_motion(Layout(0), results)
    trace = tracing.get_trace()
    return _find_motion(call, results) if trace is None else _find_traced_motion(call, results, trace)


def mark_simple(call: Call, result: Any) -> None:
    """After a call without weights: if calls with this key only return one new tensor, note that in their motion."""
    has_possible_weight = any(
        t.requires_grad and where is None for t, where in zip(call.tensors, call.where, strict=True)
    )
    has_own_divisor = is_mean_over_valid_targets(call)  # it must be checked in each call
    if call.is_inplace or has_possible_weight or has_own_divisor or not isinstance(result, Tensor):
        return
    key = _find_cache_key(call)
    motion = None if key is None else CACHE.get(key)
    if motion is not None and isinstance(motion.results[0], (Layout, Reduced)):
        motion.simple = motion.results[0]


def _find_motion(call: Call, results: Sequence[Tensor]) -> Motion:
    """Look up the motion of a call, or compute and cache it."""
    if call.func in _declared:
        return _declared[call.func](call)
    if is_mean_over_valid_targets(call):
        normalised = normalise_divisor(call)
        if isinstance(normalised, Lost):
            return make_uniform_motion(normalised, results)
        call = normalised
    key = _find_cache_key(call)
    if key is not None and (found := CACHE.get(key)) is not None:
        return found
    try:
        motion = _compute_motion(call, results)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # the call itself has succeeded: only its motion could not be found. Not cached.
        return make_uniform_motion(Lost(f"{get_op_name(call.func)} could not be followed ({error})"), results)
    is_lost = any(isinstance(where, Lost) for where in motion.results)
    # Calls with other values in an index, or outside a trace, may have a motion.
    has_index = is_lost and any(t.dtype in INDEX_DTYPES for t in call.tensors)
    is_traced = tracing.get_trace() is not None and (is_lost or _has_invented_index(call))
    if key is not None and not motion.depends_on_values and not has_index and not is_traced:
        motion = CACHE.add(key, motion)
    return motion


def _find_traced_motion(call: Call, results: Sequence[Tensor], trace: tracing.Trace) -> Motion:
    """The motion of a call while a step is traced, when tensors have no values; lost if it depends on values."""
    lost = make_uniform_motion(Lost(f"{get_op_name(call.func)} {UNKNOWN_VALUES}"), results)
    if is_mean_over_valid_targets(call):
        require_equal_divisors(call, trace)
    with tracing.suspend():
        try:
            if call.func in _declared:
                return _declared[call.func](call)
        except Exception:  # it reads values
            return lost
        motion = _find_motion(trace.stand_in(call), results)
    return lost if motion.depends_on_values and call.func not in WRITES and call.func not in PICKS else motion


def _compute_motion(call: Call, results: Sequence[Tensor]) -> Motion:
    if (unequal := find_unequal_divisors(call)) is not None:
        return make_uniform_motion(unequal, results)
    lists = call.func in LISTS and (call.func is not torch.where or len(call.args) == 1)
    for where in call.where:
        if isinstance(where, Lost) and not lists:
            is_loop = where.listing and call.func in (torch.unbind, Tensor.unbind)
            return make_uniform_motion(None if is_loop else where, results)
    if lists:
        return find_motion_of_listing(call, results)
    if any(isinstance(where, Reduced) for where in call.where):
        return make_uniform_motion(find_layout_after_reduction(call), results)
    if call.func in MAKERS:
        return make_uniform_motion(None, results)
    if call.func in LIKES:
        like = call.where[0]
        has_samples = isinstance(like, Layout) and (call.batch == 1 or like.ids is None or len(set(like.ids)) > 1)
        return make_uniform_motion(like if has_samples else None, results)
    samples = call.find_samples()
    if len(samples) == 1 and not call.has_constant_rows():  # no other sample that could be mixed in
        (sample,) = samples
        return Motion(tuple(_make_layout_of_one_sample(sample, result, call) for result in results))
    if call.func in SUMS and not any(t.dim() for t in call.tensors):  # adds up losses of single samples
        return make_uniform_motion(make_reduced(call), results)
    try:
        declared = find_declared_motion(call, results)
    except (TypeError, ValueError, IndexError):  # arguments in a form that the declaration does not expect
        declared = None
    if declared is not None:
        return declared
    with torch.no_grad():
        has_invented_index = _has_invented_index(call, first=1)
        if call.func in WRITES or (call.func in PICKS and (any(call.where[1:]) or has_invented_index)):
            return find_motion_by_index(call)
        if has_invented_index and (call.func in MOVES or (_find_cache_key(call) is None and call.func not in _FILLS)):
            return make_uniform_motion(Lost(f"{get_op_name(call.func)} {UNKNOWN_VALUES}"), results)
        if call.func in MOVES:
            return find_motion_by_ids(call, results)
        if any(isinstance(where, Layout) and where.loose_index for where in call.where):
            cause = f"{get_op_name(call.func)} computes with indices of rows whose order depends on all samples"
            return make_uniform_motion(Lost(cause), results)
        sorted_motion = find_motion_of_sort(call, results) if call.func in SORTS else None
        return sorted_motion or _try_call(call, results)


def _try_call(call: Call, results: Sequence[Tensor]) -> Motion:
    """Find a motion by trial. A trial under autocast has little precision, so its result is used once only."""
    motion = find_motion_by_trial(call, results)
    motion.depends_on_values |= torch.is_autocast_enabled(call.tensors[0].device.type)
    return motion


# Functions that take a mask and move no entries.
_FILLS = {Tensor.masked_fill, Tensor.masked_fill_, torch.masked_fill}


def _has_invented_index(call: Call, first: int = 0) -> bool:
    """Whether the values of an index or mask are invented, among the tensors from position `first` on."""
    trace = tracing.get_trace()
    return trace is not None and any(t.dtype in INDEX_DTYPES and trace.is_invented(t) for t in call.tensors[first:])


def _make_layout_of_one_sample(sample: int, result: Tensor, call: Call) -> Layout:
    """The layout of a result that belongs to one sample as a whole."""
    if not result.dim():
        return Layout(0, ids=(sample,))
    return make_layout(0, (sample,) * result.shape[0], call.batch, loose=call.has_loose_rows() and call.batch > 1)


# ---- what can be cached ----

# Functions with such names move entries by the values of an index.
_INDEXING_NAMES = re.compile(
    "item|index|gather|scatter|select|take|put|mask|repeat_interleave|segment|bincount|bucket|search|embedding"
)

# Functions with such names in which an index of samples does not move entries between samples.
_LOOKUPS = {torch.nn.functional.embedding, torch.embedding, torch.nn.functional.embedding_bag, torch.embedding_bag}


# Functions whose result depends on the strides of their argument, which are not part of a key.
_READING_STRIDES = {torch.as_strided, Tensor.as_strided}


def _has_indexing_name(func: Callable[..., Any]) -> bool:
    return _INDEXING_NAMES.search(get_op_name(func)) is not None


def _has_deciding_index(call: Call) -> bool:
    return any(
        t.dtype in INDEX_DTYPES and (where is None or call.func not in _LOOKUPS)
        for t, where in zip(call.tensors, call.where, strict=True)
    )


def _find_cache_key(call: Call) -> CallKey | None:
    """The key of a call, None if its motion depends on values or if the key is unhashable."""
    if (_has_indexing_name(call.func) or call.func in MOVES) and _has_deciding_index(call):
        return None
    if call.func in _READING_STRIDES:
        return None
    try:
        hash(call.key)
    except TypeError:
        return None
    return call.key
