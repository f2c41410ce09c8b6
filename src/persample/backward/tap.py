"""The autograd node that reads the gradient of a use's result in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from persample import _torch
from persample._internal import tracing
from persample._internal.dynamo import exclude_from_graph, skip_compilation
from persample.backward.recorded_use import RecordedUse
from persample.errors import PerSampleError


class Tap(torch.autograd.Function):
    """The identity. Its backward sees the gradient of a use's result, together with what the use saved.

    The function of the use ran before, under ordinary autograd with its weights detached. So torch's own backward
    computes the gradients of the activations (or the rule does, if it is `whole`), and no gradient of a weight is
    computed. The last argument is the anchor, a leaf that requires grad: through it the result requires grad even if no
    activation does.
    """

    @staticmethod
    def forward(ctx: Any, use: RecordedUse, saved: Sequence[Tensor], copy: bool, *tensors: Tensor) -> Any:
        # The results come first: if a result is a view that is changed in place, autograd looks at the first tensor.
        results = tensors[: len(use.plan.tapped)]
        ctx.use = use
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        if copy:
            return tuple(result.clone() for result in results)
        # Marking the result as changed in place costs nothing, and lets the user change it in place too.
        ctx.mark_dirty(*results)
        return results

    @staticmethod
    @exclude_from_graph
    @skip_compilation(with_callees=True)
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        use: RecordedUse = ctx.use
        if _torch.is_compiled_autograd_running():
            raise PerSampleError(
                "Compiled autograd runs the backward pass of a recording, and would keep nothing per sample. Call "
                "backward() inside the block, where compiled autograd is turned off, or turn it off yourself."
            )
        if torch.is_grad_enabled():
            use.refuse_second_derivative()
        # The anchor is not reached by autograd.grad(loss, inputs), which must leave no per-sample gradients.
        deliver = _torch.will_run_node(use.collector.anchor_node)
        if deliver and use.batch:  # in an empty batch nothing arrives
            use.collector.note_pass()
        input_grads: Sequence[Tensor | None] = [None] * len(use.plan.inputs)
        if (deliver or input_grads) and any(grad is not None for grad in grads):
            saved = ctx.saved_tensors  # reading them may start a recomputation, under the tracker
            with _torch.DisableTorchFunction():
                if use.collector.trace is None:
                    input_grads = use.backward(saved, grads, deliver)
                else:  # on a GPU, autograd runs in a thread that does not have the trace
                    with tracing.activate(use.collector.trace):
                        input_grads = use.backward(saved, grads, deliver)
        return None, None, None, *grads, *input_grads, None


def is_tap(node: Any) -> bool:
    """Whether a node of the autograd graph belongs to a tap."""
    return isinstance(getattr(node, "use", None), RecordedUse)
