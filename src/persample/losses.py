"""Loss functions that users pass: how to call them, and how to compute the loss of each sample."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample._internal.text import describe_value
from persample.errors import PerSampleError

LossFunction = Callable[..., Any]


# ---- how check() and scan() call a loss: with a batch ----


def takes_outputs(loss_fn: Any) -> bool:
    """Whether a loss takes outputs and targets, and not the model: a loss module, or a function from torch.

    >>> takes_outputs(nn.MSELoss()), takes_outputs(F.mse_loss), takes_outputs(lambda model, batch: model(batch).sum())
    (True, True, False)
    """
    func = get_function(loss_fn)
    if not callable(func):
        raise PerSampleError(f"loss_fn must be a function or a loss module, got {describe_value(loss_fn)}")
    return isinstance(func, nn.Module) or str(getattr(func, "__module__", "")).partition(".")[0] == "torch"


def check_inputs_and_targets(loss_fn: Any, batch: Any) -> None:
    """Raise unless the batch is a pair, which a loss of outputs and targets requires."""
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        raise PerSampleError(
            f"{get_name(loss_fn)} takes outputs and targets, so the batch must be (inputs, targets), got "
            f"{describe_value(batch)}. For any other batch, pass a function loss_fn(model, batch)."
        )


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call the model. A tuple, list or dict of inputs is unpacked into arguments."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def compute_loss(model: nn.Module, batch: Any, loss_fn: LossFunction) -> Any:
    """Compute `loss_fn(model(inputs), targets)` or `loss_fn(model, batch)`, depending on `takes_outputs`."""
    if not takes_outputs(loss_fn):
        return loss_fn(model, batch)
    inputs, targets = batch
    return loss_fn(call_model(model, inputs), targets)


def compute_sample_losses(model: nn.Module, batch: Any, loss_fn: LossFunction, dim: int = 0) -> Any:
    """Compute the loss of each sample, shape `(batch,)`, if possible; otherwise return the result of `loss_fn`.

    A loss from torch is reduced for each sample separately, as if the sample were the whole batch. For any other loss
    the result of `loss_fn` is returned as it is. `dim` is the batch dimension of the unreduced loss. If the unreduced
    loss has no such dimension, its first dimension is the batch.

    >>> batch = torch.ones(2, 3), torch.tensor([[0.0, 0.0, 3.0], [1.0, 1.0, 1.0]])
    >>> compute_sample_losses(nn.Identity(), batch, nn.MSELoss())
    tensor([2., 0.])
    >>> compute_sample_losses(nn.Identity(), batch, F.l1_loss)
    tensor([1.3333, 0.0000])
    """
    reduction = _get_reduction(loss_fn)
    if not takes_outputs(loss_fn) or reduction is None:
        return compute_loss(model, batch, loss_fn)
    inputs, targets = batch
    outputs = call_model(model, inputs)
    if not is_class_loss(loss_fn):
        _check_shapes(loss_fn, outputs, targets)
    entries = _remove_reduction(loss_fn)(outputs, targets)
    if not entries.dim():  # a module of the user with an attribute `reduction` that its forward() ignores
        return entries
    dim = dim if entries.dim() > dim else 0
    entries = _flatten_samples(entries, dim)
    if reduction in ("sum", "batchmean"):
        return entries.sum(1)
    if not (is_class_loss(loss_fn) and not targets.is_floating_point()):
        return entries.sum(1) / max(1, entries.shape[1])
    return entries.sum(1) / _flatten_samples(_compute_class_weights(loss_fn, outputs, targets), dim).sum(1)


# ---- how compile() calls a loss: with the arguments of a step ----


def compute_step_loss(
    model: nn.Module, loss_fn: LossFunction, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Tensor]:
    """Call a loss with the arguments of a compiled step; return its result, and the loss in it.

    A loss module is called as `loss_fn(model(x), y)`, a function as `loss_fn(model, *args, **kwargs)`. The result is
    the loss, or a tuple with the loss first.
    """
    if isinstance(loss_fn, nn.Module):
        inputs, target = args
        result = loss_fn(model(inputs), target)
    else:
        result = loss_fn(model, *args, **kwargs)
    loss = result[0] if isinstance(result, tuple) else result
    check_is_scalar(loss, "a tensor with one element, or a tuple with such a tensor first")
    return result, loss


def check_is_scalar(loss: Any, expected: str) -> None:
    """Raise unless the loss is a tensor with one element. `expected` says in the message what is required."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise PerSampleError(f"loss_fn returned {describe_value(loss)}. It must return {expected}.")


# ---- losses from torch ----


def _check_shapes(loss_fn: Any, outputs: Tensor, targets: Tensor) -> None:
    """Raise for shapes `(batch, 1)` and `(batch,)`, which torch would broadcast to `(batch, batch)`."""
    if outputs.dim() == targets.dim():
        return
    try:
        together = torch.broadcast_shapes(outputs.shape, targets.shape).numel()
    except RuntimeError:  # the loss does not broadcast these shapes, but pairs them in another way
        return
    if together > max(outputs.numel(), targets.numel()):
        raise PerSampleError(
            f"{get_name(loss_fn)} has outputs of shape {tuple(outputs.shape)} and targets of shape "
            f"{tuple(targets.shape)}. Broadcasting would compare each sample with the targets of all samples: give "
            "outputs and targets the same shape."
        )


def _flatten_samples(entries: Tensor, dim: int) -> Tensor:
    """Reshape to `(batch, entries per sample)`."""
    entries = entries.movedim(dim, 0)
    return entries.reshape(len(entries), -1)


def _get_reduction(loss_fn: Any) -> str | None:
    """The reduction of a loss from torch; None for any other loss."""
    if isinstance(loss_fn, nn.Module):
        return getattr(loss_fn, "reduction", None)
    func, options = _split_partial(loss_fn)
    return options.get("reduction", "mean") if getattr(func, "__module__", "") == F.__name__ else None


def _remove_reduction(loss_fn: Any) -> Any:
    if not isinstance(loss_fn, nn.Module):
        return partial(loss_fn, reduction="none")
    unreduced: Any = copy.copy(loss_fn)
    unreduced.reduction = "none"
    return unreduced


def is_class_loss(loss_fn: Any) -> bool:
    """Whether a loss compares scores of classes with labels: the cross entropy or the NLL loss of torch."""
    func = get_function(loss_fn)
    return isinstance(func, (nn.CrossEntropyLoss, nn.NLLLoss)) or func in (F.cross_entropy, F.nll_loss)


def get_function(loss_fn: Any) -> Any:
    """The function or module of a loss, without the arguments that a `functools.partial` adds."""
    return _split_partial(loss_fn)[0]


def get_ignored_label(loss_fn: Any) -> int:
    """The label that a loss ignores: its `ignore_index`, by default -100.

    >>> get_ignored_label(nn.CrossEntropyLoss(ignore_index=255)), get_ignored_label(nn.MSELoss())
    (255, -100)
    """
    func, options = _split_partial(loss_fn)
    return int(getattr(func, "ignore_index", options.get("ignore_index", -100)))


def _compute_class_weights(loss_fn: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    """Weight of each entry in the mean: the weight of its class, or 0 for an ignored entry."""
    func, options = _split_partial(loss_fn)
    used: dict[str, Any] = {key: getattr(func, key, options.get(key, default)) for key, default in _CLASS_OPTIONS}
    return F.nll_loss(-torch.ones_like(outputs), targets, reduction="none", **used)


_CLASS_OPTIONS = (("weight", None), ("ignore_index", -100))


def _split_partial(loss_fn: Any) -> tuple[Any, dict[str, Any]]:
    """The function and the keyword arguments of a `functools.partial`, or any other function without arguments."""
    return (loss_fn.func, loss_fn.keywords) if isinstance(loss_fn, partial) else (loss_fn, {})


# ---- words for messages ----


def get_name(func: Any) -> str:
    """Name of a function, or class name of a module."""
    return getattr(func, "__name__", type(func).__name__)
