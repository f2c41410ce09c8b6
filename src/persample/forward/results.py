"""The layouts of what a call has made, and tensors that belong to no sample, which refuse gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from persample import _torch
from persample._internal.functions import find_results
from persample._internal.tree import iterate_tensors
from persample.errors import SamplesMixed, raise_or_complain
from persample.forward.contributions import find_coupled_motion
from persample.forward.detectors import Context
from persample.forward.sums import note_sum
from persample.forward.use import run_use
from persample.layouts import (
    Call,
    Crossed,
    Divided,
    Layout,
    Lost,
    Motion,
    Reduced,
    Scattered,
    Summed,
    Where,
    find_layout_of_base,
    find_listed_total,
    find_motion_with_units,
    has_mixed_pairs,
)


def set_layouts(call: Call, result: Any, context: Context, summed: Summed | None = None) -> None:
    """Find and set the layout of each result. `summed`: how the call adds up samples, if it changes its arguments."""
    results = find_results(result, call.args) if result is not None or call.is_inplace else ()
    if not results or call.facts.returns_argument or call.facts.differentiates:
        return
    context.counted.sizes = None if context.is_inside or context.outside is None else context.outside.sizes
    motion = find_coupled_motion(call, results) if context.is_coupled else find_motion_with_units(call, results)[1]
    check_motion(call, motion, context)
    for made, layout in zip(results, motion.results, strict=True):
        if not context.is_inside:
            context.counted.totals.update(find_listed_total(made, layout))
        if call.is_inplace and made._base is not None and (layout != call.where[0] or type(layout) is Lost):
            _update_base(made, layout, context)  # a lost view may have a base that is not: rows chosen by position
        if layout is not None or made._base is not None:
            context.set_layout(made, layout)
            note_sum(made, layout, call, context, summed)
        elif not context.is_inside and context.outside is not None:
            context.outside.add_constant(made)


def _update_base(view: Tensor, layout: Where | None, context: Context) -> None:
    """Set the layout of a base after a write through one of its views."""
    assert view._base is not None
    before, *_ = context.known.get(view._base) or (Lost("the tracker has not seen it"),)
    context.set_layout(view._base, find_layout_of_base(view, layout, before, context.batch))


def check_motion(call: Call, motion: Motion, context: Context) -> None:
    """Note a motion that was found by trial, and have the detectors check it."""
    if motion.is_tried:
        context.collector.receiver.note_tried(call.func, context.place())
    for ask in context.detectors.check_motion:
        ask(call, motion, context)


# ---- tensors that belong to no sample ----


def guard_output(output: Tensor, context: Context) -> Tensor:
    """An output of the model that refuses gradients if it belongs to no sample."""
    layout = context.find_layout(output)
    if isinstance(layout, Reduced) and output.dim() and _torch.find_node(output) is not None and context.batch > 1:
        output.register_hook(make_gradient_refusal(f"{layout.cause}, in {layout.place}", context))
    if layout is None and context.is_weight(output):
        if output.dim() and output.shape[0] == context.batch > 1 and output.stride(0) == 0:
            call = Call(Tensor.clone, (output,), {}, (output,), (None,), context.batch)
            return run_use(call, {0: output}, (), context, Motion((Layout(0),)))[0]  # row n is sample n's
        output = output.view_as(output) if output.is_leaf else output
        output.register_hook(make_gradient_refusal("it was computed from weights alone", context))
    return output


def refuse_mixed_outputs(outputs: Any, mixed_use: SamplesMixed, context: Context) -> None:
    """Raise: samples were mixed before a use of weights, and no output that has a graph is free of that."""
    found = [context.find_layout(tensor) for tensor in iterate_tensors(outputs) if tensor.requires_grad]
    if found and all(type(layout) is Lost for layout in found):
        raise mixed_use


def is_refused(where: Where | None) -> bool:
    """Whether a gradient that comes back through a tensor is refused."""
    return isinstance(where, Lost) and not isinstance(where, (Scattered, Divided))


def make_gradient_refusal(cause: str, context: Context, pairs: Crossed | None = None) -> Callable[[Tensor], None]:
    """A hook for a tensor in which samples are mixed; of `pairs`, only some may have a gradient."""
    advice, complain = context.advice, context.complain  # not the tracker: the hook must not keep it alive
    batch, units = context.batch, context.counted.units

    def refuse(grad: Tensor) -> None:
        if pairs is not None and not has_mixed_pairs(grad, pairs, batch, units):
            return
        message = f"The loss depends on a tensor in which the samples of the batch are mixed: {cause}. {advice}"
        raise_or_complain(SamplesMixed(message), complain)

    return refuse
