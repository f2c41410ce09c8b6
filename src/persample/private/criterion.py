"""Loss function with the call signature of the criterion that Opacus returns in ghost mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class Criterion:
    """Calls a loss function, and reduces it for each sequence separately if `shape` is given.

    `shape` is the shape `(batch, positions, ...)` of the logits before they were flattened. The loss of a sequence is
    then the mean over the positions that are not ignored, or the sum. The result is the mean or sum over the batch.

    >>> import torch
    >>> criterion = Criterion(torch.nn.CrossEntropyLoss(), "mean")
    >>> logits, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, -100, -100])
    >>> criterion(logits, labels, shape=(2, 3, 4)).shape
    torch.Size([])
    """

    def __init__(self, criterion: Callable[..., Tensor], loss_reduction: str) -> None:
        self.criterion = criterion
        self.loss_reduction = loss_reduction

    def __call__(self, *args: Any, shape: Any = None, **kwargs: Any) -> Tensor:
        if shape is None:
            return self.criterion(*args, **kwargs)
        losses = self._call_unreduced(*args, **kwargs).view(shape[0], shape[1])
        if self.loss_reduction == "sum":
            return losses.sum()
        target = kwargs["target"] if "target" in kwargs else args[1]
        counts = target.view(shape[0], shape[1]) != getattr(self.criterion, "ignore_index", None)
        return (losses.sum(1) / counts.sum(1).clamp(min=1)).mean()

    def _call_unreduced(self, *args: Any, **kwargs: Any) -> Tensor:
        before = self.criterion.reduction  # type: ignore[attr-defined]
        self.criterion.reduction = "none"  # type: ignore[attr-defined]
        try:
            return self.criterion(*args, **kwargs)
        finally:
            self.criterion.reduction = before  # type: ignore[attr-defined]
