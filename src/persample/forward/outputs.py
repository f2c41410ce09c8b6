"""Tensors that belong to no sample, such as some outputs of a model, refuse gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from persample._internal.tree import iterate_tensors
from persample.errors import SamplesMixed, raise_or_complain
from persample.forward.use import run_use
from persample.layouts import Call, Crossed, Layout, Lost, Motion, Reduced, has_mixed_pairs

if TYPE_CHECKING:
    from persample.forward.tracker import Tracker


def guard_output(output: Tensor, tracker: Tracker) -> Tensor:
    """An output of the model that refuses gradients if it belongs to no sample."""
    layout = tracker.find_layout(output)
    if isinstance(layout, Reduced) and output.dim() and output.grad_fn is not None and tracker.batch > 1:
        output.register_hook(make_gradient_refusal(f"{layout.cause}, in {layout.place}", tracker))
    if layout is None and tracker.is_weight(output):
        if output.dim() and output.shape[0] == tracker.batch > 1 and output.stride(0) == 0:
            return _give_to_each_sample(output, tracker)
        output = output.view_as(output) if output.is_leaf else output
        output.register_hook(make_gradient_refusal("it was computed from weights alone", tracker))
    return output


def refuse_mixed_outputs(outputs: Any, mixed_use: SamplesMixed, tracker: Tracker) -> None:
    """Raise: samples were mixed before a use of weights, and no output that has a graph is free of that."""
    found = [tracker.find_layout(tensor) for tensor in iterate_tensors(outputs) if tensor.requires_grad]
    if found and all(type(layout) is Lost for layout in found):
        raise mixed_use


def _give_to_each_sample(output: Tensor, tracker: Tracker) -> Tensor:
    """A tensor of weights that was expanded to the batch, with row n as sample n's."""
    call = Call(Tensor.clone, (output,), {}, (output,), (None,), tracker.batch)
    return run_use(call, {0: output}, (), tracker, Motion((Layout(0),)))[0]


def make_gradient_refusal(cause: str, tracker: Tracker, pairs: Crossed | None = None) -> Callable[[Tensor], None]:
    """A hook for a tensor in which samples are mixed; of `pairs`, only some may have a gradient."""
    advice, complain = tracker.advice, tracker.complain  # not the tracker: the hook must not keep it alive
    batch, units = tracker.batch, tracker.counted.units

    def refuse(grad: Tensor) -> None:
        if pairs is not None and not has_mixed_pairs(grad, pairs, batch, units):
            return
        message = f"The loss depends on a tensor in which the samples of the batch are mixed: {cause}. {advice}"
        raise_or_complain(SamplesMixed(message), complain)

    return refuse
