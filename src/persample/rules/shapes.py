"""Reductions that several rules share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def sum_to_shape(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Sum `(batch, ...)` to `(batch, *shape)`: the gradient of a weight of `shape` that was broadcast.

    >>> import torch
    >>> sum_to_shape(torch.ones(2, 3, 4), (4,)).shape, sum_to_shape(torch.ones(2, 3, 4), (3, 1)).shape
    (torch.Size([2, 4]), torch.Size([2, 3, 1]))
    """
    missing = tuple(range(1, rows.dim() - len(shape)))
    if missing:
        rows = rows.squeeze(missing) if all([rows.shape[dim] == 1 for dim in missing]) else rows.sum(missing)
    repeated = [1 + d for d, size in enumerate(shape) if size == 1 and rows.shape[1 + d] != 1]
    return rows.sum(repeated, keepdim=True) if repeated else rows
