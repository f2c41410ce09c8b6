"""Losses of labels that the model draws itself: their second moment is the Fisher matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import _torch
from persample.gradients import sample_labels
from persample.losses import (
    LossFunction,
    call_model,
    compute_sample_losses,
    get_function,
    get_ignored_label,
    get_name,
    is_class_loss,
    takes_outputs,
)
from persample.scanning.errors import ScanError

Labels = Literal["data", "sampled"]
Draw = Callable[[Tensor, Tensor], Tensor]  # labels from outputs and the labels of the data


def make_fitted_loss(loss_fn: LossFunction, labels: Labels | LossFunction) -> LossFunction:
    """The loss whose gradients a preconditioner is fitted to; see `PassOptions.fisher`."""
    if labels == "data":
        return loss_fn
    if labels != "sampled":
        if not callable(labels):
            raise ScanError(f"fisher must be 'data', 'sampled' or a loss function, got {labels!r}.")
        return labels
    draw = find_draw(loss_fn)

    def compute_losses(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        outputs = call_model(model, inputs)
        with torch.no_grad(), _torch.DisableTorchFunction():
            drawn = draw(outputs.detach(), targets)
        losses: Tensor = compute_sample_losses(lambda _: outputs, ((None,), drawn), loss_fn)  # type: ignore[arg-type]
        return losses

    return compute_losses


def find_draw(loss_fn: LossFunction) -> Draw:
    """How a model with this loss draws labels, for losses that are -log p of the labels; an error for others.

    >>> find_draw(nn.CrossEntropyLoss())(torch.tensor([[50.0, 0.0], [0.0, 50.0]]), torch.tensor([1, -100]))
    tensor([   0, -100])
    """
    func = get_function(loss_fn)
    kind = func if not isinstance(func, nn.Module) else type(func)
    if is_class_loss(loss_fn):
        ignored = get_ignored_label(loss_fn)
        return lambda outputs, targets: _draw_classes(outputs, targets, ignored)
    if takes_outputs(loss_fn) and kind in (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits):
        return lambda outputs, targets: outputs.sigmoid().bernoulli().to(targets.dtype)
    if takes_outputs(loss_fn) and kind in (nn.BCELoss, F.binary_cross_entropy):
        return lambda outputs, targets: outputs.bernoulli().to(targets.dtype)
    if takes_outputs(loss_fn) and kind in (nn.MSELoss, F.mse_loss):
        return _draw_numbers
    raise ScanError(
        f"fisher='sampled' is known for cross-entropy, NLL, binary cross-entropy and squared errors of torch, not for "
        f"{get_name(loss_fn)}. Pass a function of the model and a batch that draws the labels itself, for example by "
        "persample.sample_labels(logits), and returns their losses."
    )


def _draw_classes(outputs: Tensor, targets: Tensor, ignored: int) -> Tensor:
    labels = sample_labels(outputs.movedim(1, -1) if outputs.dim() > 1 else outputs)
    return labels if targets.is_floating_point() else torch.where(targets == ignored, targets, labels)


def _draw_numbers(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of a sample is the mean of n squares: -log p of a normal distribution with the variance n / 2."""
    count = outputs[0].numel() if outputs.dim() > 1 else 1
    return outputs + (count / 2) ** 0.5 * torch.randn_like(outputs)
