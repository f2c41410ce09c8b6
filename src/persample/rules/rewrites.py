"""Functions of torch that are a few calls of other functions, which are followed one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from persample._internal.facts import find_functions
from persample.rules.registry import HANDLED_FUNCTIONS, Rewrite


def broadcast_tensors(*tensors: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Each tensor is expanded by itself. Beside samples, a weight is given to each of them: what is computed from it,
    such as the entropy of a policy with a learned deviation, belongs to them, as it does for a sample alone."""
    given: Any = tensors[0] if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else tensors
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in given))
    whole = next((tensor for tensor in given if tensor.shape == shape and tensor.dim()), None)

    def expand(tensor: Tensor) -> Tensor:
        if whole is None or tensor.shape == shape or not tensor.requires_grad:
            return tensor.expand(shape)
        return torch.where(whole.isnan().logical_or(torch.tensor(True)), tensor, torch.zeros_like(tensor))

    return tuple(map(expand, given))


def expand_as(self: Tensor, other: Tensor) -> Tensor:
    """As `broadcast_tensors`, if the first tensor is the smaller one."""
    if torch.broadcast_shapes(self.shape, other.shape) != other.shape:
        return NotImplemented
    return broadcast_tensors(self, other)[0]


def nanmean(input: Tensor, *dims: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    """A sum, divided by the number of entries that are no NaN."""
    if kwargs.get("out") is not None:
        return NotImplemented
    return input.nansum(*dims, dtype=dtype, **kwargs) / input.isnan().logical_not().sum(*dims, **kwargs)


HANDLED_FUNCTIONS[torch.broadcast_tensors] = Rewrite(broadcast_tensors)
HANDLED_FUNCTIONS[Tensor.expand_as] = Rewrite(expand_as)
HANDLED_FUNCTIONS.update(dict.fromkeys(find_functions("nanmean"), Rewrite(nanmean)))
