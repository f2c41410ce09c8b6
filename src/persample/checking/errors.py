"""The error of rows, relative to their scale."""

from __future__ import annotations

import torch
from torch import Tensor

from persample.checking.subject import Gradient

# Lower bound of the scale of a row, relative to the largest gradient entry of the same sample. Some gradients are zero
# except for rounding, such as the gradient of a bias before a softmax: their own entries are no scale for errors.
LEAST_SCALE = 1e-3


def compute_error(got: Tensor, want: Tensor, scale: Tensor) -> float:
    """Largest difference between rows, relative to their scales. NaN in both tensors counts as equal."""
    same = (got == want) | (got.isnan() & want.isnan())
    difference = (got - want).abs().masked_fill(same, 0)
    return float((_find_largest(difference.nan_to_num(torch.inf, torch.inf)) / scale).max())


def compute_scales(rows: Gradient) -> dict[str, Tensor]:
    """Scale of each row: its largest entry, but at least `LEAST_SCALE` times the largest entry of the sample."""
    own = {name: find_largest_finite(part) for name, part in rows.items()}
    tiny = torch.tensor(torch.finfo(torch.float64).tiny, dtype=torch.float64)
    least = LEAST_SCALE * torch.stack([*own.values(), tiny.expand_as(next(iter(own.values())))]).amax(0)
    return {name: torch.maximum(part, least) for name, part in own.items()}


def find_largest_finite(rows: Tensor) -> Tensor:
    return _find_largest(rows.abs().nan_to_num(0, 0, 0))


def _find_largest(rows: Tensor) -> Tensor:
    """Largest entry of each row, shape `(batch,)`; zero for rows without entries."""
    matrix = rows.reshape(len(rows), rows[0].numel()).cpu().double()
    return matrix.amax(1) if matrix.numel() else matrix.new_zeros(len(matrix))
