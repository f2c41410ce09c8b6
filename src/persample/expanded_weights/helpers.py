"""The extension point, and the helpers that rules written for it call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionMeta

from persample._internal.tree import find_tensors, map_tensors
from persample.backward import Receiver
from persample.errors import PerSampleError, get_op_name
from persample.expanded_weights.tensor import ExpandedWeight
from persample.forward import Tracker
from persample.layouts import Call, Layout
from persample.rules import HANDLED_FUNCTIONS, register_adapter
from persample.terms import Dense, Term, sum_dense

RuleClass = TypeVar("RuleClass", bound=type[torch.autograd.Function])

# The options by which a user of expanded weights says where the samples lie.
LAYOUT_OPTIONS = "batch_size and batch_first"

_MIXTURE = "ExpandedWeights currently does not support a mixture of ExpandedWeight parameters and normal Parameters"


def implements_per_sample_grads(torch_function: Callable[..., Any]) -> Callable[[RuleClass], RuleClass]:
    """Registers an `autograd.Function` as the rule of a torch function, in the place of one that it may have.

    Its `forward(ctx, kwarg_names, func, *args_and_kwargs)` gets the call flattened; its backward calls
    `set_grad_sample_if_exists` for each weight.

    >>> def scale(x, gain):
    ...     return x * gain
    >>> @implements_per_sample_grads(scale)
    ... class ScalePerSampleGrad(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, kwarg_names, func, *args_and_kwargs):
    ...         ctx.x, ctx.gain = args_and_kwargs
    ...         return forward_helper(func, args_and_kwargs, {})
    ...
    ...     @staticmethod
    ...     def backward(ctx, grad):
    ...         set_grad_sample_if_exists(ctx.gain, lambda gain: grad * ctx.x)
    ...         return None, None, grad * ctx.gain.orig_weight, None
    >>> HANDLED_FUNCTIONS.pop(scale) is ScalePerSampleGrad
    True
    """

    def register(rule: RuleClass) -> RuleClass:
        HANDLED_FUNCTIONS[torch_function] = rule
        return rule

    return register


def batch_size_error(found: int, expected: int) -> str:
    """The message for an input with another number of samples than expected."""
    return (
        f"Expected ExpandedWeights to have batch size matching input but got input batch size of {found} "
        f"with ExpandedWeight of batch size {expected}"
    )


def standard_kwargs(kwarg_names: Sequence[str], expanded_args: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Splits a flattened call, whose keyword arguments come last, into `(args, kwargs)`.

    >>> standard_kwargs(("bias",), (1, 2, 3))
    ((1, 2), {'bias': 3})
    """
    count = len(expanded_args) - len(kwarg_names)
    return tuple(expanded_args[:count]), dict(zip(kwarg_names, expanded_args[count:], strict=True))


def forward_helper(func: Callable[..., Any], expanded_args: Sequence[Any], expanded_kwargs: dict[str, Any]) -> Any:
    """Runs `func` on the original weights, after checking that input and expanded weights fit together."""
    check_call(func, expanded_args, expanded_kwargs)
    args, kwargs = map_tensors(original, (tuple(expanded_args), expanded_kwargs))
    return func(*args, **kwargs)


def original(tensor: Tensor) -> Tensor:
    """The weight behind an ExpandedWeight; any other tensor itself."""
    return tensor.orig_weight if isinstance(tensor, ExpandedWeight) else tensor


def check_call(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """The checks that hold for every rule; the first argument is the input."""
    input = args[0] if args else next(iter(kwargs.values()), None)
    name = get_op_name(func)
    if isinstance(input, ExpandedWeight):
        raise RuntimeError(
            "Expanded Weights do not support inputs that are also ExpandedWeights. "
            f"Input must be a Tensor, got {type(input).__name__} in function {name}"
        )
    if not isinstance(input, Tensor):
        raise RuntimeError(
            "Expanded Weights requires a Tensor as the first input to get the batch dimension, "
            f"got {type(input).__name__} in function {name}"
        )
    if input.dim() == 0:
        raise RuntimeError(f"Expanded Weights requires a batch dimension but got an input of size 0 in function {name}")
    if input.shape[0] == 0:
        raise RuntimeError(
            "0 is not a valid batch size for Expanded Weights but got input tensor of "
            f"{tuple(input.shape)} in function {name}"
        )
    expanded = expanded_weights_in((args, kwargs))
    for weight in expanded:
        if not weight.batch_first and input.dim() < 2:
            raise RuntimeError(
                f"Expanded Weights expected the batch in dim 1 but got an input of rank 1 in function {name}"
            )
        batch = input.shape[0 if weight.batch_first else 1]
        fits = batch <= weight.batch_size if weight.allow_smaller_batches else batch == weight.batch_size
        if not fits:
            raise RuntimeError(batch_size_error(batch, weight.batch_size))
    reductions = [weight.loss_reduction for weight in expanded]
    for reduction in reductions:
        if reduction != reductions[0]:
            raise RuntimeError(
                "Expected ExpandedWeights to all have the same loss_reduction argument but got one "
                f"with {reductions[0]} and one with {reduction}"
            )


def expanded_weights_in(value: Any) -> list[ExpandedWeight]:
    """All expanded weights among the arguments of a call."""
    return [t for t in find_tensors(value) if isinstance(t, ExpandedWeight)]


def is_batch_first(expanded_args_and_kwargs: Sequence[Any]) -> bool | None:
    """The `batch_first` of the expanded weights among the arguments, None where there is none."""
    found = {weight.batch_first for weight in expanded_weights_in(list(expanded_args_and_kwargs))}
    if len(found) > 1:
        raise RuntimeError("Got conflicting batch_first arguments in the same layer")
    return found.pop() if found else None


def set_grad_sample_if_exists(maybe_expanded_weight: Any, per_sample_grad_fn: Callable[[Tensor], Any]) -> None:
    """Stores `per_sample_grad_fn(original)` as the contribution of one use of an expanded weight."""
    original = unpack_expanded_weight_or_tensor(maybe_expanded_weight)
    if not isinstance(maybe_expanded_weight, ExpandedWeight):
        return
    contribution = per_sample_grad_fn(original)
    if maybe_expanded_weight.receive is not None:
        maybe_expanded_weight.receive(contribution)
    else:
        batch_size, loss_reduction = maybe_expanded_weight.batch_size, maybe_expanded_weight.loss_reduction
        add_grad_sample(maybe_expanded_weight.orig_weight, contribution, batch_size, loss_reduction)


def add_grad_sample(parameter: Tensor, rows: Tensor, batch_size: int, loss_reduction: str) -> None:
    """Adds to `parameter.grad_sample`, or sets it; samples that an input of a smaller batch lacked get zeros."""
    if loss_reduction == "mean":
        rows = rows * batch_size
    if len(rows) < batch_size:
        rows = torch.cat([rows, rows.new_zeros(batch_size - len(rows), *rows.shape[1:])])
    existing = getattr(parameter, "grad_sample", None)
    if existing is not None and existing.shape != rows.shape:
        raise RuntimeError(
            f"A grad_sample of shape {tuple(existing.shape)} is there already, and one of shape {tuple(rows.shape)} "
            "cannot be added to it. Please clear out the grad_sample parameter between batches."
        )
    parameter.grad_sample = rows if existing is None else existing + rows  # type: ignore[attr-defined]


def unpack_expanded_weight_or_tensor(maybe_expanded_weight: Any, func: Callable[[Tensor], Any] = lambda x: x) -> Any:
    """`func` of the original weight, or of a plain tensor without grad; None for what is no tensor."""
    if isinstance(maybe_expanded_weight, ExpandedWeight):
        return func(maybe_expanded_weight.orig_weight)
    if isinstance(maybe_expanded_weight, Tensor):
        if maybe_expanded_weight.requires_grad:
            raise RuntimeError(_MIXTURE)
        return func(maybe_expanded_weight)
    return None


def sum_over_all_but_batch_and_last_n(tensor: Tensor, n_dims: int) -> Tensor:
    """Sums what lies between the batch dim and the last `n_dims` dims.

    >>> sum_over_all_but_batch_and_last_n(torch.ones(2, 3, 4, 5), 1).shape
    torch.Size([2, 5])
    """
    between = list(range(1, tensor.dim() - n_dims))
    return tensor.sum(between) if between else tensor


# ---- terms as `grad_sample`, and registered rules under a tracker ----


def to_grad_sample(batch_size: int, loss_reduction: str) -> Receiver:
    """Takes terms as `parameter.grad_sample`, multiplied by the batch size if the loss was a mean."""

    def deliver(parameter: Tensor, terms: Sequence[Term]) -> None:
        add_grad_sample(parameter, sum_dense(terms).to(parameter.dtype), batch_size, loss_reduction)

    return Receiver(deliver)


def run_registered_function(tracker: Tracker, function: Any, call: Call, weights: Mapping[int, Tensor]) -> Any:
    """Run a use by an `autograd.Function` that was registered with `implements_per_sample_grads`."""
    layouts = [(t, where) for t, where in zip(call.tensors, call.where, strict=True) if isinstance(where, Layout)]
    dims = {where.dim for _, where in layouts if where.inner == 1 and where.ids is None}
    if tracker.batch == 1:  # any dimension of size 1 may be the batch dimension
        dims = {next((dim for dim in (0, 1) if layouts[0][0].shape[dim : dim + 1] == (1,)), 2)}
    if len(dims) != 1 or not dims <= {0, 1}:
        raise PerSampleError(
            f"The rule {function.__name__} registered for {get_op_name(call.func)} expects the batch in dim 0 or 1 of "
            f"its input, but in {tracker.place()} the samples lie elsewhere."
        )

    def expand(weight: Tensor) -> ExpandedWeight:
        result = ExpandedWeight(weight, tracker.batch, tracker.counted.given_reduction or "sum")
        result.set_batch_first(dims == {0})
        result.receive = lambda rows: tracker.collector.receive(weight, Dense(rows))
        return result

    given: list[Tensor] = [expand(t) if i in weights else t for i, t in enumerate(call.tensors)]
    args, kwargs = call.fill(given)
    return function.apply(tuple(kwargs), call.func, *args, *kwargs.values())


register_adapter(FunctionMeta, run_registered_function)
