"""`autograd.grad` for parameters in a recording, whose weights are not in the graph of the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from persample import _torch
from persample._internal.graph import preserve_grads
from persample._internal.tree import find_tensors
from persample.errors import ROWS_ADVICE, PerSampleError

_SIGNATURE = inspect.signature(torch.autograd.grad)


def make_refusal(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> PerSampleError:
    """The error for a call of `autograd.grad` that asks for these parameters inside a block."""
    options = _SIGNATURE.bind(*args, **kwargs).arguments
    others = f" and {len(names) - 1} other parameters" if len(names) > 1 else ""
    message = (
        f"torch.autograd.grad asks for the gradient of '{names[0]}'{others} inside a recording, which keeps gradients "
        "of parameters per sample. Call backward() on the outputs instead: afterwards grads.sum(), or grads.mean() for "
        "a mean loss, has the same gradients by name, and grads.dense() has their rows. keep_grad=True also adds them "
        "to p.grad. Gradients of other tensors, such as the model's inputs, may be asked for in a call of their own."
    )
    if options.get("create_graph"):
        message += f" For gradients of these gradients (create_graph=True): {ROWS_ADVICE}"
    return PerSampleError(message)


def compute_parameter_gradients(
    run_backward: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
    parameters: Mapping[int, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Tensor | None, ...] | None:
    """The result of `autograd.grad` for parameters, from what a backward pass with `keep_grad` adds to their `grad`.

    None, without running anything, if that is not possible: with `create_graph` or `is_grads_batched`, or if some
    inputs are other tensors.
    """
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    options = given.arguments
    inputs = list(find_tensors(options["inputs"]))
    if options["create_graph"] or options["is_grads_batched"] or isinstance(options["inputs"], dict):
        return None
    if not all(id(t) in parameters for t in inputs):
        return None
    with ExitStack() as stack:
        for output in find_tensors(options["outputs"]):
            stack.enter_context(preserve_grads(output))
        with _torch.DisableTorchFunction():
            before = [(p, p.grad) for p in parameters.values()]
            for p, _ in before:
                p.grad = None
        try:
            run_backward(
                torch.autograd.backward, (options["outputs"], options["grad_outputs"], options["retain_graph"]), {}
            )
        finally:
            with _torch.DisableTorchFunction():
                found = [t.grad for t in inputs]
                for p, grad in before:
                    p.grad = grad
    if options["materialize_grads"]:
        return tuple(torch.zeros_like(t) if grad is None else grad for t, grad in zip(inputs, found, strict=True))
    if not options["allow_unused"] and any(grad is None for grad in found):
        raise RuntimeError("A tensor that autograd.grad is asked for was not used. Pass allow_unused=True.")
    return tuple(found)
