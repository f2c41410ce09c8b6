"""Find how a call moves the samples, once for each key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from persample._internal import tracing
from persample._internal.precision import INDEX_DTYPES
from persample.errors import get_op_name, raise_if_out_of_memory
from persample.layouts.algebra import DECLARATIONS, find_declared_motion
from persample.layouts.by_ids import find_crossed_motion, find_motion_by_ids, find_scattered_motion
from persample.layouts.by_index import UNKNOWN_VALUES, find_motion_by_index, find_motion_of_listing, find_motion_of_sort
from persample.layouts.by_trial import find_motion_by_trial
from persample.layouts.call import Call, Key, make_trial_key
from persample.layouts.ids import make_layout
from persample.layouts.layout import Crossed, Divided, Layout, Lost, Reduced, Scattered, lose_entries
from persample.layouts.makers import find_motion_of_maker, find_motion_of_sized
from persample.layouts.means import (
    add_divisors,
    find_refused_divisor,
    is_mean_over_valid_targets,
    require_equal_divisors,
)
from persample.layouts.motion import MEMO, Effect, Motion, make_uniform_motion
from persample.layouts.packed import find_packed_motion
from persample.layouts.reductions import (
    adds_up_one_sample,
    enter_divided,
    find_motion_after_reduction,
    leave_divided,
    make_reduced,
)


def find_motion(call: Call, results: Sequence[Tensor]) -> Motion:
    """How `call`, which returned `results`, moves the samples."""
    if call.batch == 0:
        return make_uniform_motion(Layout(0), results)
    trace = tracing.get_trace()
    motion = _find_motion(call, results) if trace is None else _find_traced_motion(call, results, trace)
    where = motion.results[0] if len(motion.results) == 1 else None
    if not isinstance(where, Reduced) or any(isinstance(own, Reduced) for own in call.where):
        return motion
    held = find_refused_divisor(call, where, motion.aligned) or add_divisors(call, where)
    return motion if held is where else Motion((held,), motion.aligned, depends_on_values=True)


def mark_plain(call: Call, result: Any, rules_version: int) -> None:
    """After a call without weights: later calls with its key may skip the steps, if all that it does is to return one
    new tensor."""
    has_possible_weight = any(t.requires_grad and where is None for t, where in call.pairs)
    if call.is_inplace or has_possible_weight or not isinstance(result, Tensor):
        return
    key = _find_memo_key(call)
    known = MEMO.get(key)
    where = None if known is None else known.motion.results[0]
    if known is not None and (isinstance(where, Layout) or (isinstance(where, Reduced) and not where.uneven)):
        MEMO.add(call.key, replace(known, rules_version=rules_version))


def find_plain_layout(call: Call, motion: Motion) -> Layout | Reduced | None:
    """Where the samples lie in the result of a call that may skip the steps; None if what it counts decides now."""
    where = motion.results[0]
    assert isinstance(where, (Layout, Reduced))
    if isinstance(where, Layout):
        return where
    is_required = is_mean_over_valid_targets(call) and tracing.get_trace() is not None  # of each run of a compiled step
    return None if is_required or find_refused_divisor(call, where, motion.aligned) else add_divisors(call, where)


def _find_motion(call: Call, results: Sequence[Tensor]) -> Motion:
    """Look up the motion of a call, or compute it and keep it if it holds for later calls."""
    if call.facts.handles_any_layout:
        return _ask_declaration(call, results)
    key = _find_memo_key(call)
    known = MEMO.get(key)
    if known is not None:
        return known.motion
    try:
        motion = _compute_motion(call, results)
    except Exception as error:  # the call itself has succeeded: only its motion could not be found. Not kept.
        raise_if_out_of_memory(error)
        return make_uniform_motion(Lost(f"{get_op_name(call.func)} could not be followed ({error})"), results)
    if any(isinstance(where, Scattered) for where in motion.results):  # never the same again
        motion = replace(motion, depends_on_values=True)
    is_lost = any(isinstance(where, Lost) for where in motion.results)
    # Calls with other values in an index, or outside a trace, may have a motion.
    has_index = is_lost and any(t.dtype in INDEX_DTYPES for t in call.tensors)
    is_traced = tracing.get_trace() is not None and (is_lost or _has_invented_index(call))
    is_uncertain = motion.depends_on_values or motion.is_tried  # trials have keys of their own
    if key is not None and not is_uncertain and not has_index and not is_traced:
        MEMO.add(key, Effect(motion))
    return motion


def _ask_declaration(call: Call, results: Sequence[Tensor]) -> Motion:
    motion = DECLARATIONS[call.func](call, results)
    assert motion is not None  # a declaration for any layout always knows the motion
    return motion


def _find_traced_motion(call: Call, results: Sequence[Tensor], trace: tracing.Trace) -> Motion:
    """The motion of a call while a step is traced, when tensors have no values; lost if it depends on values."""
    lost = make_uniform_motion(Lost(f"{get_op_name(call.func)} {UNKNOWN_VALUES}"), results)
    if is_mean_over_valid_targets(call):
        require_equal_divisors(call, trace)
    with tracing.suspend():
        try:
            if call.facts.handles_any_layout:
                return _ask_declaration(call, results)
        except Exception:  # it reads values
            return lost
        motion = _find_motion(trace.stand_in(call), results)
    return lost if motion.depends_on_values and not (call.facts.writes_entries or call.facts.picks_entries) else motion


def _compute_motion(call: Call, results: Sequence[Tensor]) -> Motion:
    if call.facts.casts and call.args and isinstance(call.args[0], Tensor):
        return make_uniform_motion(call.where[0], results)
    if (made := find_motion_of_maker(call, results)) is not None:
        return made
    if any(isinstance(where, Lost) for where in call.where):
        found = _find_motion_of_known_entries(call, results)
        if found is not None:
            return found
    if call.facts.lists_entries and (call.facts.operator != "where" or len(call.args) == 1):
        return find_motion_of_listing(call, results)
    for where in call.where:
        if isinstance(where, Lost):
            is_loop = where.listing and call.facts.operator == "unbind"
            return make_uniform_motion(None if is_loop else lose_entries(where), results)
    if any(isinstance(where, Reduced) for where in call.where):
        motion = find_motion_after_reduction(call, results)
        is_lost = any(isinstance(where, Lost) for where in motion.results)
        return _make_motion_of_one_sample(call, results, 0) if is_lost and call.batch == 1 else motion
    return _find_motion_of_samples(call, results)


def _find_motion_of_known_entries(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """The motion of tensors in which samples are mixed, but of which more is known; None if that does not tell it."""
    if any(isinstance(where, Lost) and where.sized for where in call.where):
        found = find_motion_of_sized(call, results)
        if found is not None:
            return found if isinstance(found, Motion) else _compute_motion(found, results)
    if any(isinstance(where, Scattered) for where in call.where):
        return find_scattered_motion(call, results)
    if any(isinstance(where, Crossed) for where in call.where):
        with torch.no_grad():
            crossed = find_crossed_motion(call, results)
        if crossed is not None:
            return crossed
    if any(isinstance(where, Divided) for where in call.where) and (entered := enter_divided(call)) is not None:
        return leave_divided(call, _compute_motion(entered, results))
    return None


def _find_motion_of_samples(call: Call, results: Sequence[Tensor]) -> Motion:
    """The motion of a call in which each tensor has layouts of samples, or is constant."""
    if call.counted.packed_orders and (packed := find_packed_motion(call, results)) is not None:
        return packed
    if any(isinstance(where, Layout) and where.by_rank for where in call.where):
        cause = f"{get_op_name(call.func)} selects rows by position, but their order depends on all samples"
        return make_uniform_motion(Lost(cause), results)
    samples = call.find_samples()
    is_single = len(samples) == 1 and (call.batch == 1 or not call.facts.writes_entries)
    if is_single and not adds_up_one_sample(call, results):
        return _make_motion_of_one_sample(call, results, *samples)  # no other sample that could be mixed in
    if call.facts.is_linear and not any(t.dim() for t in call.tensors):  # adds up losses of single samples
        return make_uniform_motion(make_reduced(call, results), results)
    try:
        declared = find_declared_motion(call, results)
    except (TypeError, ValueError, IndexError):  # arguments in a form that the declaration does not expect
        declared = None
    if declared is not None:
        return declared
    with torch.no_grad():
        moved = _find_moved_motion(call, results)
    return _try_call(call, results) if moved is None else moved


def _find_moved_motion(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """The motion of a call that moves entries, or that cannot be followed at all; None if it must be tried."""
    has_invented_index = _has_invented_index(call, first=1)
    is_fill = call.facts.operator == "masked_fill"  # takes a mask and moves no entries
    if call.facts.writes_entries or (call.facts.picks_entries and (any(call.where[1:]) or has_invented_index)):
        return find_motion_by_index(call)
    if has_invented_index and (call.facts.moves_entries or (not is_fill and _find_memo_key(call) is None)):
        return make_uniform_motion(Lost(f"{get_op_name(call.func)} {UNKNOWN_VALUES}"), results)
    if call.facts.moves_entries:
        return find_motion_by_ids(call, results)
    if any(isinstance(where, Layout) and where.loose_index for where in call.where):
        cause = f"{get_op_name(call.func)} computes with indices of rows whose order depends on all samples"
        return make_uniform_motion(Lost(cause), results)
    return find_motion_of_sort(call, results) if call.facts.sorts else None


def _try_call(call: Call, results: Sequence[Tensor]) -> Motion:
    """Find a motion by trial, or return that of an earlier trial under the same conditions."""
    key = None if tracing.get_trace() is not None else make_trial_key(call)
    return MEMO.get_or_find(key, lambda: replace(find_motion_by_trial(call, results), is_tried=True))


def _has_invented_index(call: Call, first: int = 0) -> bool:
    """Whether the values of an index or mask are invented, among the tensors from position `first` on."""
    trace = tracing.get_trace()
    return trace is not None and any(t.dtype in INDEX_DTYPES and trace.is_invented(t) for t in call.tensors[first:])


def _make_motion_of_one_sample(call: Call, results: Sequence[Tensor], sample: int) -> Motion:
    """The motion of a call with one sample: all results, and the constant rows beside this sample, belong to it."""
    layouts = tuple(_make_layout_of_one_sample(sample, result, call) for result in results)
    return Motion(
        layouts,
        tuple(
            (i, replace(where, ids=(sample,) * len(where.ids)))
            for i, where in enumerate(call.where)
            if isinstance(where, Layout) and where.ids is not None and -1 in where.ids
        ),
    )


def give_to_one_sample(call: Call) -> Call:
    """The same call in a batch of one, in which a sum over the samples belongs to the sample."""
    where = [
        _make_layout_of_one_sample(0, tensor, call) if isinstance(own, Reduced) else own for tensor, own in call.pairs
    ]
    return replace(call, where=tuple(where))


def _make_layout_of_one_sample(sample: int, result: Tensor, call: Call) -> Layout:
    """The layout of a result that belongs to one sample as a whole."""
    if not result.dim():
        return Layout(0, ids=(sample,))
    return make_layout(0, (sample,) * result.shape[0], call.batch, loose=call.has_loose_rows() and call.batch > 1)


# ---- what can be kept ----

# Functions with such names move entries by the values of an index.
_INDEXING_NAMES = re.compile(
    "item|index|gather|scatter|select|take|put|mask|repeat_interleave|segment|bincount|bucket|search|embedding"
)

# Functions with such names in which an index of samples does not move entries between samples.
_LOOKUPS = {"embedding", "embedding_bag"}


def _has_deciding_index(call: Call) -> bool:
    return any(
        t.dtype in INDEX_DTYPES and (where is None or call.facts.operator not in _LOOKUPS) for t, where in call.pairs
    )


def _find_memo_key(call: Call) -> Key | None:
    """The key of a call, None if its motion depends on values or if the key is unhashable."""
    has_indexing_name = _INDEXING_NAMES.search(get_op_name(call.func)) is not None
    if (has_indexing_name or call.facts.moves_entries) and _has_deciding_index(call):
        return None
    if any(isinstance(where, Reduced) for where in call.where):
        return None  # what was counted in the same pass decides
    if call.facts.operator == "as_strided":  # strides are not part of a key
        return None
    try:
        hash(call.key)
    except TypeError:
        return None
    return call.key
