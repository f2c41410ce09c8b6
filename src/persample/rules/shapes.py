"""Shapes that rules have in common."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def summed_to(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """The gradient `(batch, ...)` of a weight that was broadcast: added up where the weight, of `shape`, was repeated.

    >>> import torch
    >>> summed_to(torch.ones(2, 3, 4), (4,)).shape, summed_to(torch.ones(2, 3, 4), (3, 1)).shape
    (torch.Size([2, 4]), torch.Size([2, 3, 1]))
    """
    in_front = rows.dim() - 1 - len(shape)
    if in_front:
        rows = rows.sum(list(range(1, 1 + in_front)))
    repeated = [1 + d for d, size in enumerate(shape) if size == 1 and rows.shape[1 + d] != 1]
    return rows.sum(repeated, keepdim=True) if repeated else rows


def conjugate(number: complex) -> complex:
    """A factor of a function, as it stands in the function's gradient."""
    return number.conjugate()
