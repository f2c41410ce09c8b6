"""What every term is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class Term(ABC):
    """What one use of a weight contributes to its per-sample gradients: a `(batch, *weight.shape)`, kept in factors."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The contribution itself, `(batch, *weight.shape)`."""


def dense_sum(terms: Sequence[Term]) -> Tensor:
    """What several uses of one weight contribute together."""
    total = terms[0].dense()
    for term in terms[1:]:
        total = total + term.dense()
    return total


def promoted(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider of their types: under autocast, activations and gradients differ."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)
