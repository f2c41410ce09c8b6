"""The steps by which a call is followed that is like none before, in their order.

Each takes a call and the tracker, and returns the result, or `NEXT`. It may replace the call for those that come after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from persample._internal import tracing
from persample._internal.calling_code import is_called_by
from persample._internal.functions import DROPPED, find_dropped, find_results
from persample._internal.tree import find_tensors
from persample.errors import PerSampleError, get_op_name
from persample.forward.checkpointing import prepare_recomputation
from persample.forward.contributions import prepare_use, scales_statistic
from persample.forward.equivalents import PREPARATIONS, is_composite, make_inline, selects_first_rows, use_by_rows
from persample.forward.gradient_hooks import follow_tensor_hook
from persample.forward.results import check_motion, set_layouts
from persample.forward.sums import is_beside_sum, make_summed, note_sum, run_beside_sum
from persample.forward.use import check_not_mixed, make_mixed_error, run_use
from persample.layouts import (
    Call,
    Layout,
    Lost,
    Reduced,
    Scattered,
    enter_units,
    give_to_one_sample,
    lose_entries,
    mark_plain,
)
from persample.rules import RULES_VERSION, Rewrite, find_adapter, get_handler, get_rules

if TYPE_CHECKING:
    from persample.forward.tracker import Tracker

Step = Callable[["Followed", "Tracker"], Any]

# What a step returns if a call is not for it, and if the call must be run again, because samples are known now.
NEXT, AGAIN = object(), object()

_GRAD: Any = Tensor.grad


@dataclass
class Followed:
    """A call on its way through the steps.

    Attributes:
        call: the call; a step may replace it.
        tracker: what is known about the forward pass.
        has_samples: whether an argument depends on the batch.
    """

    call: Call
    tracker: Tracker
    has_samples: bool = field(init=False)

    def __post_init__(self) -> None:
        self.has_samples = any(self.call.where)

    @cached_property
    def handler(self) -> Any:
        """What is registered for the function: rules, a rewrite, or another function."""
        return get_handler(self.call.func)

    @cached_property
    def weights(self) -> dict[int, Tensor]:
        """The weights among the tensors of the call, by position."""
        where, is_weight = self.call.where, self.tracker.is_weight
        return {i: t for i, t in enumerate(self.call.tensors) if where[i] is None and is_weight(t)}

    def read_constant(self, tensor: Tensor) -> None:
        """Take a tensor of the call for the same for all samples."""
        where = [None if t is tensor else w for t, w in zip(self.call.tensors, self.call.where, strict=True)]
        self.call = replace(self.call, where=tuple(where))
        self.has_samples = any(where)


def follow(call: Call, tracker: Tracker) -> Any:
    """Run a call, and find where the samples lie in what it makes."""
    followed = Followed(call, tracker)
    for step in _STRICT_STEPS if tracker.is_isolated else STEPS:
        result = step(followed, tracker)
        if result is not NEXT:
            return result
    raise AssertionError("the last step takes every call")


# ---- calls that run as others ----


def _run_with_dropped_arguments(followed: Followed, tracker: Tracker) -> Any:
    dropped = find_dropped(followed.call.func)
    return _run_op_by_op(followed.call, tracker, dropped) if dropped else NEXT


def _audit_new_write(followed: Followed, tracker: Tracker) -> Any:
    """A write is followed by its memory, which no function mode sees, unless an audited pass had the same."""
    call = followed.call
    if tracker.path.advance_to_write(call, tracker):
        return NEXT
    return tracker.path.start_audit(tracker).follow(call.func, call.args, call.kwargs)


def _prepare(followed: Followed, tracker: Tracker) -> Any:
    if prepare := PREPARATIONS.get(followed.call.func):
        followed.call = prepare(followed.call)
    return NEXT


def _read_beside_weights(followed: Followed, tracker: Tracker) -> Any:
    """A tensor from outside that has the batch's size is a constant beside a weight of its shape."""
    if tracker.outside is None or tracker.is_inside or not followed.has_samples:
        return NEXT
    if followed.weights and (shapes := _list_shapes_of_weights(followed)):
        for tensor in followed.call.tensors:
            if tensor.shape in shapes and tracker.outside.was_taken(tensor):
                tracker.outside.add_constant(tensor)
                tracker.known.discard(tensor)
                followed.read_constant(tensor)
    return NEXT


def _rewrite(followed: Followed, tracker: Tracker) -> Any:
    if not followed.has_samples or not isinstance(followed.handler, Rewrite):
        return NEXT
    with tracker.mode:
        result = followed.handler.function(*followed.call.args, **followed.call.kwargs)
    return NEXT if result is NotImplemented else result


def _use_by_rows(followed: Followed, tracker: Tracker) -> Any:
    if not followed.has_samples or not any([type(where) is Scattered for where in followed.call.where]):
        return NEXT
    with tracker.mode:
        result = use_by_rows(followed.call, tracker.find_layout)
    return NEXT if result is NotImplemented else result


def _run_composite(followed: Followed, tracker: Tracker) -> Any:
    is_followed = not followed.has_samples or followed.handler is not None
    return NEXT if is_followed or not is_composite(followed.call.func) else _run_op_by_op(followed.call, tracker)


def _run_op_by_op(call: Call, tracker: Tracker, dropped: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Run a Python function of torch op by op, with an argument that torch has not handed over."""
    if "out" in dropped:
        raise PerSampleError(
            f"{get_op_name(call.func)}(out=...) is called in {tracker.place()}: torch does not pass `out` on to "
            "function modes, by which a recording follows the samples. Assign the result instead."
        )
    with tracker.mode:
        return make_inline(call.func)(*call.args, **call.kwargs, **dropped)


# ---- refusals, and calls that begin something ----


def _ask_detectors(followed: Followed, tracker: Tracker) -> Any:
    for ask in tracker.detectors.prepare if followed.has_samples else ():
        followed.call = ask(followed.call, tracker)
    return NEXT


def _start_by_use(followed: Followed, tracker: Tracker) -> Any:
    """A call that combines weights with tensors from outside shows what the samples are, if nothing has before."""
    call = followed.call
    if tracker.front is None or tracker.is_inside or followed.has_samples or not torch.is_grad_enabled():
        return NEXT
    if not followed.weights or call.facts.compares_tensors or call.facts.reads_values:
        return NEXT
    shapes = _list_shapes_of_weights(followed)
    others = [t for i, t in enumerate(call.tensors) if i not in followed.weights and t.shape not in shapes]
    is_started = others and tracker.front.start_by_use(replace(call, tensors=tuple(others)))
    return AGAIN if is_started else NEXT


def _list_shapes_of_weights(followed: Followed) -> set[torch.Size]:
    """The shapes of weights that a call combines with other tensors entry by entry.

    A tensor of such a shape is no batch: pretrained weights, a running average.
    """
    is_by_entry = followed.call.facts.is_pointwise or followed.call.facts.combines_pairs
    return {w.shape for w in followed.weights.values()} if is_by_entry else set()


def _follow_hook(followed: Followed, tracker: Tracker) -> Any:
    """Refuse hooks on weights, whose gradients are kept per sample, and follow those on gradients of samples."""
    call = followed.call
    if followed.weights and call.facts.registers_hook:
        raise PerSampleError(
            f"{get_op_name(call.func)} of a weight is called in {tracker.place()}: a recording keeps the gradients of "
            "weights per sample, and the hook would not run. Change the recorded gradients instead."
        )
    if call.func is Tensor.register_hook and isinstance(call.where[0], Layout):
        tracker.collector.retained.read_after_hooks(call.args[:1])
        if not tracker.is_coupled:
            return call.func(call.args[0], follow_tensor_hook(call.args[1], call.where[0], tracker.place(), tracker))
    return NEXT


# ---- weights and samples ----


def _multiply_sum(followed: Followed, tracker: Tracker) -> Any:
    """Weights beside a sum over the samples: learned variances, penalties."""
    call = followed.call
    if not followed.weights or not followed.has_samples or not torch.is_grad_enabled():
        return NEXT
    if not tracker.counted.holds_divisors or not is_beside_sum(call) or scales_statistic(call):
        return NEXT
    summed = make_summed(call, tracker.known)
    result = run_beside_sum(call, followed.weights, tracker)
    if not call.facts.is_bilinear:
        set_layouts(call, result, tracker, summed)
        return result
    tracker.set_layout(result, where := next(where for where in call.where if isinstance(where, Reduced)))
    note_sum(result, where, call, tracker, summed)
    return result


def _forget_sizes(followed: Followed, tracker: Tracker) -> Any:
    """Weights and tensors of which only the size depends on the batch: positions up to the longest sequence."""
    if not followed.weights or not followed.has_samples:
        return NEXT
    call = followed.call
    if all(where is None or (isinstance(where, Lost) and where.sized) for where in call.where):
        followed.call, followed.has_samples = replace(call, where=(None,) * len(call.where)), False
    return NEXT


def _prepare_use(followed: Followed, tracker: Tracker) -> Any:
    """Give rows of a batch of one, of a unit, or of coupled samples to the samples that own them."""
    if not followed.weights or not followed.has_samples or not torch.is_grad_enabled():
        return NEXT
    call = give_to_one_sample(followed.call) if tracker.batch == 1 else followed.call
    followed.call = prepare_use(call, tracker.place()) if tracker.is_coupled else enter_units(call)
    return NEXT


def _use_mixed_samples(followed: Followed, tracker: Tracker) -> Any:
    """Weights and a tensor of mixed samples: refused if a gradient comes back, or if there is no other output."""
    call = followed.call
    lost = next((where for where in call.where if isinstance(where, Lost)), None)
    if lost is None or not followed.weights or not torch.is_grad_enabled():
        return NEXT
    is_block = tracker.outside is not None and tracker.complain is None
    if not is_block or tracing.get_trace() is not None:
        return NEXT
    tracker.path.note_mixed_use(make_mixed_error(call, lost, tracker))
    result = _run(followed, tracker)
    for made in find_results(result, call.args):
        tracker.set_layout(made, lose_entries(lost))
    return result


def _use_weights(followed: Followed, tracker: Tracker) -> Any:
    """A use: a call that combines weights with samples."""
    if not followed.weights or not followed.has_samples or not torch.is_grad_enabled():
        return NEXT
    call, handler = followed.call, followed.handler
    tracker.buffers.save(call)
    rules, adapter = get_rules(call.func), find_adapter(handler)
    if not rules and adapter is None and isinstance(call.func, FunctionType):
        return _run_op_by_op(call, tracker)
    if adapter is not None:
        check_not_mixed(call, tracker)
        result = adapter(tracker, handler, call, followed.weights)
        set_layouts(call, result, tracker)
    else:
        prepare_recomputation(tracker)
        result, motion = run_use(call, followed.weights, rules, tracker)
        check_motion(call, motion, tracker)
        for made, layout in zip(find_results(result, call.args), motion.results, strict=True):
            tracker.set_layout(made, layout)
    for ask in tracker.detectors.after:
        ask(call, result, tracker)
    return result


# ---- calls that run as they are ----


def _move_samples(followed: Followed, tracker: Tracker) -> Any:
    if not followed.has_samples:
        return NEXT
    call, func = followed.call, followed.call.func
    if call.facts.moves_entries and call.is_inplace:  # its argument has another shape afterwards
        before = call.with_tensors([call.tensors[0].detach(), *call.tensors[1:]])
    else:
        before = call
    result = _run(followed, tracker)
    if call.facts.reads_values:
        return result
    set_layouts(before, result, tracker)
    if isinstance(followed.handler, Rewrite) or followed.weights or call.facts.statistics_at or func in DROPPED:
        return result
    if func is not Tensor.__getitem__ or not selects_first_rows(call.where[0], call.args[1], call.batch):
        mark_plain(before, result, RULES_VERSION.number)  # the values of the first rows decide in each call
    return result


def _combine_weights(followed: Followed, tracker: Tracker) -> Any:
    """Weights alone: the collector pulls gradients back through what is computed from them."""
    if not followed.weights or not (tracker.batch or torch.is_grad_enabled()):
        return NEXT
    with tracker.processes.saving_weights():
        result = _run(followed, tracker)
    func, args = followed.call.func, followed.call.args
    if (func == _GRAD.__set__ and args[1] is None) or (func == _GRAD.__get__ and is_called_by("zero_grad")):
        tracker.collector.receiver.note_zeroed(args[0])
    for made in find_tensors(result):
        if made.requires_grad and id(made) not in tracker.collector.parameters:
            tracker.set_layout(made, None)
        elif tracker.outside is not None and not made.requires_grad:  # as by detach(): no samples, of any size
            tracker.outside.add_constant(made)
    return result


def _combine_constants(followed: Followed, tracker: Tracker) -> Any:
    call, outside = followed.call, tracker.outside
    result = _run(followed, tracker)
    if outside is not None:
        for weight in followed.weights.values():  # in a pass without gradients, before the model is called
            outside.add_constant(weight)
        outside.note_call(call, result, tracker.batch, tracker.is_inside)
        is_judged = outside.has_reads and call.facts.imports_data and not tracker.is_inside and tracker.batch > 1
        if is_judged and (lost := outside.judge_import(result, tracker.batch)) is not None:
            tracker.set_layout(result, lost)
    return result


def _run(followed: Followed, tracker: Tracker) -> Any:
    """Run a call as it is, and tell the detectors."""
    call = followed.call
    tracker.buffers.save(call)
    result = call.func(*call.args, **call.kwargs)
    hidden = tracker.known.of_hidden_weights
    if not torch.is_grad_enabled() and (followed.weights or any(t in hidden for t in call.tensors)):
        for made in find_tensors(result):
            hidden[made] = True
    for ask in tracker.detectors.after:
        ask(call, result, tracker)
    return result


# The order matters. A write must be noted before anything else runs. Calls that run as others come before those that
# look at weights, since the others have their own. Refusals come before what they refuse.
STEPS: tuple[Step, ...] = (
    _run_with_dropped_arguments,
    _audit_new_write,
    _prepare,
    _read_beside_weights,
    _rewrite,
    _use_by_rows,
    _run_composite,
    _ask_detectors,
    _start_by_use,
    _follow_hook,
    _forget_sizes,
    _multiply_sum,
    _prepare_use,
    _use_mixed_samples,
    _use_weights,
    _move_samples,
    _combine_weights,
    _combine_constants,
)

# Steps that read a call in the user's favour. Isolated steps of private training do not have them.
_LENIENT = {_read_beside_weights, _forget_sizes, _use_mixed_samples}
_STRICT_STEPS = tuple(step for step in STEPS if step not in _LENIENT)
