"""A contribution that is small, or has no structure to keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from persample._internal.dtypes import promote, widen
from persample.terms.base import Term, is_smaller_dense, squares


@dataclass(frozen=True)
class Dense(Term):
    """The per-sample gradients as they are: `values` is `(batch, *weight.shape)`."""

    values: Tensor

    @property
    def batch(self) -> int:
        return len(self.values)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape[1:]

    def dense(self) -> Tensor:
        return self.values

    def some(self, start: int, stop: int) -> Dense:
        return Dense(self.values[start:stop])

    def part(self, start: int, stop: int) -> Dense:
        return Dense(self.values[:, start:stop])

    def squared_norms(self) -> Tensor:
        return squares(widen(self.values))

    def sum(self, weights: Tensor) -> Tensor:
        values, weights = promote(widen(self.values), weights)
        return (weights @ values.reshape(self.batch, self.shape.numel())).view(self.shape)

    def write(self, out: Tensor, scale: float = 1.0) -> None:
        torch.mul(self.values, scale, out=out)


def measured_densely(term: Term, times: int = 1) -> tuple[Tensor, Term]:
    """`measured()` of a term whose norms take its dense form: kept if it is smaller than so many times the factors."""
    if not is_smaller_dense(term, times):
        return term.squared_norms(), term
    dense = Dense(term.dense())
    return dense.squared_norms(), dense
