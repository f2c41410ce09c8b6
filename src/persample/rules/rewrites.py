"""Functions of torch that are a few calls of other functions, which are followed one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from persample.rules.registry import HANDLED_FUNCTIONS, Rewrite


def broadcast_tensors(*tensors: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Each tensor is expanded by itself, so that a weight stays a weight."""
    given: Any = tensors[0] if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else tensors
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in given))
    return tuple(tensor.expand(shape) for tensor in given)


def nanmean(input: Tensor, *dims: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    """A sum, divided by the number of entries that are no NaN."""
    if kwargs.get("out") is not None:
        return NotImplemented
    return input.nansum(*dims, dtype=dtype, **kwargs) / input.isnan().logical_not().sum(*dims, **kwargs)


HANDLED_FUNCTIONS[torch.broadcast_tensors] = Rewrite(broadcast_tensors)
HANDLED_FUNCTIONS[torch.nanmean] = HANDLED_FUNCTIONS[Tensor.nanmean] = Rewrite(nanmean)
