"""The loss functions that users give: how they are called, and what each sample's own loss is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample.errors import PerSampleError

LossFunction = Callable[..., Any]


def takes_outputs(loss_fn: Any) -> bool:
    """Whether it takes outputs and targets: a loss module, or a function of torch, which never takes a model.

    >>> takes_outputs(nn.MSELoss()), takes_outputs(F.mse_loss), takes_outputs(lambda model, batch: model(batch).sum())
    (True, True, False)
    """
    func = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    if not callable(func):
        raise PerSampleError(f"loss_fn must be a function or a loss module, got {described(loss_fn)}")
    return isinstance(func, nn.Module) or str(getattr(func, "__module__", "")).partition(".")[0] == "torch"


def check_pair(loss_fn: Any, batch: Any) -> None:
    """Refuses a batch that a loss of outputs and targets cannot be computed of."""
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        raise PerSampleError(
            f"{name_of(loss_fn)} is a loss of outputs and targets, so the batch has to be (inputs, targets), got "
            f"{described(batch)}. For anything else pass loss_fn(model, batch)."
        )


def called(model: nn.Module, inputs: Any) -> Any:
    """The model's outputs; a tuple or dict of inputs is its arguments."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def loss_of(model: nn.Module, batch: Any, loss_fn: LossFunction) -> Any:
    """What the loss function gives for a batch, called as it takes it."""
    if not takes_outputs(loss_fn):
        return loss_fn(model, batch)
    inputs, targets = batch
    return loss_fn(called(model, inputs), targets)


def losses_of(model: nn.Module, batch: Any, loss_fn: LossFunction, dim: int = 0) -> Any:
    """`(batch,)`: each sample's own loss, where the function tells them apart; else what it gives.

    A loss of torch is reduced for each sample by itself, as if the sample were the whole batch. `dim` is where the
    samples lie in its entries, if there are as many dims.

    >>> batch = torch.ones(2, 3), torch.tensor([[0.0, 0.0, 3.0], [1.0, 1.0, 1.0]])
    >>> losses_of(nn.Identity(), batch, nn.MSELoss()), losses_of(nn.Identity(), batch, F.l1_loss)
    (tensor([2., 0.]), tensor([1.3333, 0.0000]))
    """
    reduction = _reduction(loss_fn)
    if not takes_outputs(loss_fn) or reduction is None:
        return loss_of(model, batch, loss_fn)
    inputs, targets = batch
    outputs = called(model, inputs)
    if not _is_of_classes(loss_fn):
        _check_shapes(loss_fn, outputs, targets)
    entries = _unreduced(loss_fn)(outputs, targets)
    if not entries.dim():  # a loss of the user's own, whose `reduction` is not as torch's
        return entries
    dim = dim if entries.dim() > dim else 0
    entries = _by_samples(entries, dim)
    if reduction in ("sum", "batchmean"):
        return entries.sum(1)
    if not (_is_of_classes(loss_fn) and not targets.is_floating_point()):
        return entries.sum(1) / max(1, entries.shape[1])
    return entries.sum(1) / _by_samples(_weights(loss_fn, outputs, targets), dim).sum(1)


def _check_shapes(loss_fn: Any, outputs: Tensor, targets: Tensor) -> None:
    """Refuses `(batch, 1)` beside `(batch,)`, of which torch makes `(batch, batch)`."""
    if outputs.dim() == targets.dim():
        return
    try:
        together = torch.broadcast_shapes(outputs.shape, targets.shape).numel()
    except RuntimeError:  # shapes that do not go together in this way have another meaning
        return
    if together > max(outputs.numel(), targets.numel()):
        raise PerSampleError(
            f"{name_of(loss_fn)} has outputs of shape {tuple(outputs.shape)} and targets of shape "
            f"{tuple(targets.shape)}, and would compare each with each, across the samples: give both one shape."
        )


def _by_samples(entries: Tensor, dim: int) -> Tensor:
    entries = entries.movedim(dim, 0)
    return entries.reshape(len(entries), -1)


def _reduction(loss_fn: Any) -> str | None:
    """How a loss of torch sums up its entries; None for another."""
    if isinstance(loss_fn, nn.Module):
        return getattr(loss_fn, "reduction", None)
    func, given = _unfolded(loss_fn)
    return given.get("reduction", "mean") if getattr(func, "__module__", "") == F.__name__ else None


def _unreduced(loss_fn: Any) -> Any:
    if not isinstance(loss_fn, nn.Module):
        return partial(loss_fn, reduction="none")
    unreduced: Any = copy.copy(loss_fn)
    unreduced.reduction = "none"
    return unreduced


def _is_of_classes(loss_fn: Any) -> bool:
    func, _ = _unfolded(loss_fn)
    return isinstance(func, (nn.CrossEntropyLoss, nn.NLLLoss)) or func in (F.cross_entropy, F.nll_loss)


def _weights(loss_fn: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    """What each entry counts in the mean: the weight of its class, or nothing if it is to be ignored."""
    func, given = _unfolded(loss_fn)
    asked: dict[str, Any] = {key: getattr(func, key, given.get(key, default)) for key, default in _CLASSES.items()}
    return F.nll_loss(-torch.ones_like(outputs), targets, reduction="none", **asked)


_CLASSES = {"weight": None, "ignore_index": -100}


def _unfolded(loss_fn: Any) -> tuple[Any, dict[str, Any]]:
    return (loss_fn.func, loss_fn.keywords) if isinstance(loss_fn, partial) else (loss_fn, {})


def name_of(func: Any) -> str:
    """What a function or a module is called."""
    return getattr(func, "__name__", type(func).__name__)


def described(value: Any) -> str:
    """What a value is, in words for an error message.

    >>> described(torch.ones(2, 3)), described([1, 2]), described("text")
    ('a tensor of shape (2, 3)', 'a list of 2', 'a str')
    """
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
