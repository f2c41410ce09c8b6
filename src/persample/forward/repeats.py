"""Run a call of a torch function: with the effect of an earlier call like it, or by the steps.

Most calls of a warm pass end in `run_call`, so it makes as few calls of Python as possible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, is_grad_enabled

from persample._internal.facts import facts
from persample._internal.functions import is_inplace
from persample._torch import get_saved_tensor_hooks
from persample.forward.checkpointing import prepare_recomputation
from persample.forward.equivalents import without_unread_tensor
from persample.forward.program import Site
from persample.forward.results import set_layouts
from persample.forward.steps import AGAIN, NEXT, follow
from persample.forward.sums import note_sum
from persample.forward.use import Use, keep_effect, repeat_use
from persample.layouts import (
    BY_SHAPE,
    HAS_PARAMETERS,
    MEMO,
    SIZE_FREE,
    Call,
    Effect,
    Key,
    Layout,
    Where,
    find_plain_layout,
    make_call,
    make_size_free_key,
)
from persample.rules import RULES_VERSION

if TYPE_CHECKING:
    from persample.forward.tracker import Tracker


def run_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tracker: Tracker) -> Any:
    """Run a call as in an audited pass; audit the rest of the pass if no audited pass had it here."""
    path = tracker.path
    site = None if path.site is None else path.site.get(func)
    if site is None:
        return (path.audit or path.start_audit(tracker)).run(func, args, kwargs)
    path.site = site
    effect = site.effect
    if effect is not None:
        known, parameters = tracker.known.entries, tracker.collector.parameters
        if is_grad_enabled() and tracker.batch > 1 and site.matches(args, kwargs, known, parameters):
            return _repeat(func, args, kwargs, effect, tracker)
    elif func in BY_SHAPE and not kwargs and tracker.batch > 1:
        viewed = _run_by_shape(func, args, tracker)
        if viewed is not None:
            return viewed
    return run_by_keys(func, args, kwargs, tracker, tracker.find_known_layout, site)


def run_by_keys(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tracker: Tracker,
    find_layout: Callable[[Tensor], Where | None],
    site: Site | None = None,
) -> Any:
    """Run a call over its keys: without sizes, then with sizes, and then by the steps.

    `find_layout` says where the samples lie in an argument. `site` is the place of the call in the program; None if the
    pass is audited.
    """
    call = make_call(func, args, kwargs, tracker.batch, find_layout, tracker.counted)
    free: tuple[Key, int] | None = None
    if call.batch > 1 and call.func in SIZE_FREE:
        free = make_size_free_key(call, tracker.collector.parameters, tracker.is_inside, tracker.is_isolated)
    if free is not None and site is not None:
        result = _look_up(call, *free, site, tracker)
        if result is not NEXT:
            return result
    effect = MEMO.get(call.key) if torch.is_grad_enabled() else None
    if effect is not None and effect.rules_version == RULES_VERSION.number:
        result = _repeat_with_sizes(call, effect, tracker)
        if result is not NEXT:
            return result
    result = follow(without_unread_tensor(call, find_layout, tracker), tracker)
    if result is AGAIN:
        return run_call(call.func, call.args, call.kwargs, tracker)
    if free is not None:
        keep_effect(call, result, *free, tracker.known)
    return result


def _look_up(call: Call, key: Key, contents: int, site: Site, tracker: Tracker) -> Any:
    """Run a call that has the effect of an earlier one with its key without sizes; else return NEXT."""
    func, has_grad = call.func, torch.is_grad_enabled()
    if not has_grad and (contents & HAS_PARAMETERS or tracker.known.of_hidden_weights.entries):
        return NEXT
    effect = MEMO.get(key)
    if effect is not None and effect.rules_version == RULES_VERSION.number:
        if has_grad:
            site.note(effect, call.args, call.kwargs, tracker.known.entries, tracker.collector.parameters)
        return _repeat(func, call.args, call.kwargs, effect, tracker)
    if contents or is_inplace(func) or (tracker.is_isolated and facts(func).is_random):
        return NEXT
    if not tracker.is_inside and facts(func).imports_data:  # which may be a literal
        return NEXT
    return func(*call.args, **call.kwargs)  # of constants alone


def _repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], effect: Effect, tracker: Tracker) -> Any:
    """Run a call whose effect holds at any size."""
    is_checkpointed = get_saved_tensor_hooks() is not None and prepare_recomputation(tracker)
    if type(effect) is Use:
        result = repeat_use(args, kwargs, effect.plan, tracker, is_checkpointed)
    else:
        result = func(*args, **kwargs)
    layout = effect.motion.results[0]
    if type(result) is Tensor and not is_checkpointed:  # as `KnownTensors.set_layout`, without the call of a function
        tracker.known.entries[id(result)] = (ref(result), (layout, result.requires_grad))
    else:
        for each in [result] if isinstance(result, Tensor) else result:
            tracker.known.set_layout(each, layout)
    return result


def _repeat_with_sizes(call: Call, effect: Effect, tracker: Tracker) -> Any:
    """Run a call that has an effect for these sizes; return NEXT, without running it, if it must take the steps."""
    use = effect if isinstance(effect, Use) else None
    if use is not None and any([id(call.tensors[i]) not in tracker.collector.parameters for i in use.weights]):
        return NEXT
    for ask in tracker.detectors.prepare:
        call = ask(call, tracker)
    for ask in tracker.detectors.check_motion:
        ask(call, effect.motion, tracker)
    if use is not None:
        result = repeat_use(call.args, call.kwargs, use.plan, tracker, prepare_recomputation(tracker))
        tracker.set_layout(result, effect.motion.results[0])
    elif (layout := find_plain_layout(call, effect.motion)) is not None:
        result = call.func(*call.args, **call.kwargs)
        if isinstance(result, Tensor):  # not so for `x.grad` if there is none now
            tracker.set_layout(result, layout)
            note_sum(result, layout, call, tracker)
    else:
        return NEXT
    return result


def _run_by_shape(func: Any, args: tuple[Any, ...], tracker: Tracker) -> Tensor | None:
    """Run a function of one tensor whose motion follows from shapes; None, without running it, if it does not."""
    tensor: Tensor = args[0]
    known = tracker.known
    entry = known.entries.get(id(tensor))
    if entry is None and not tracker.is_inside:  # a tensor from outside may be judged now
        tracker.find_known_layout(tensor)
        entry = known.entries.get(id(tensor))
    if entry is None or entry[0]() is not tensor:
        return None
    layout, had_grad = entry[1]
    if type(layout) is not Layout or not layout.is_pattern:
        return None
    is_hidden = known.of_hidden_weights.entries and not torch.is_grad_enabled()
    if is_hidden or (tensor.requires_grad and not had_grad):  # the latter: a leaf, or made by an autograd.Function
        return None
    find, shape = BY_SHAPE[func], tensor.shape
    if func is Tensor.__getitem__:
        moved = find(layout, shape, (), args[1:], tracker.batch)
        if moved is None:
            return None
        result = func(*args)
    else:
        for arg in args[1:]:
            if isinstance(arg, Tensor):
                return None
        result = func(*args)
        moved = find(layout, shape, result.shape, args[1:], tracker.batch)
    if moved is None:
        set_layouts(make_call(func, args, {}, tracker.batch, tracker.find_layout, tracker.counted), result, tracker)
    elif get_saved_tensor_hooks() is None:
        known.entries[id(result)] = (ref(result), (moved, result.requires_grad))
    else:
        known.set_layout(result, moved)
    return result
