"""A loss function that can be called as the one that Opacus' ghost mode gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class Criterion:
    """Calls the loss function itself; with `shape`, that of `(batch, positions, ...)` before it was flattened, it
    gives each sequence's mean over the positions that count, or sum, and these reduced over the batch.

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
        losses = self._unreduced(*args, **kwargs).view(shape[0], shape[1])
        if self.loss_reduction == "sum":
            return losses.sum()
        target = kwargs["target"] if "target" in kwargs else args[1]
        counts = target.view(shape[0], shape[1]) != getattr(self.criterion, "ignore_index", None)
        return (losses.sum(1) / counts.sum(1).clamp(min=1)).mean()

    def _unreduced(self, *args: Any, **kwargs: Any) -> Tensor:
        before = self.criterion.reduction  # type: ignore[attr-defined]
        self.criterion.reduction = "none"  # type: ignore[attr-defined]
        try:
            return self.criterion(*args, **kwargs)
        finally:
            self.criterion.reduction = before  # type: ignore[attr-defined]
