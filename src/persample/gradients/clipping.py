"""Clipping: the factors that bound the norms of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from persample.errors import PerSampleError


def factors_of(norms: Tensor, max_norm: float, stabiliser: float | None = None) -> Tensor:
    """What makes each norm at most `max_norm`; a norm of zero stays. With a stabiliser, all are scaled by as much.

    >>> factors_of(torch.tensor([0.5, 4.0]), 1.0), factors_of(torch.tensor([0.5, 4.0]), 1.0, stabiliser=0.5)
    (tensor([1.0000, 0.2500]), tensor([1.0000, 0.2222]))
    """
    if not max_norm > 0:
        raise PerSampleError(f"max_norm must be positive, got {max_norm}")
    if stabiliser is not None:
        return max_norm / (norms + stabiliser)
    return (max_norm / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)
