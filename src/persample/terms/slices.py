"""The term of a table with a row for each position, of which each row of the batch uses one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from persample._internal.precision import promote, widen
from persample.terms.base import Term, sum_squares


@dataclass(frozen=True)
class Slices(Term):
    """`g_n` is `values[n]` at the index `index[n]` of dimension `dim` of the weight, and zero elsewhere.

    `values` is `(batch, *weight.shape without dim)`, `index` is `(batch,)`, and `count` is the size of `dim`.
    """

    values: Tensor
    index: Tensor
    dim: int
    count: int

    @property
    def batch(self) -> int:
        return len(self.values)

    @property
    def shape(self) -> torch.Size:
        shape = list(self.values.shape[1:])
        shape.insert(self.dim, self.count)
        return torch.Size(shape)

    def dense(self) -> Tensor:
        result = self.values.new_zeros(self.batch, self.count, *self.values.shape[1:])
        result[torch.arange(self.batch, device=self.index.device), self.index] = self.values
        return result.movedim(1, 1 + self.dim)

    def some(self, start: int, stop: int) -> Slices:
        return Slices(self.values[start:stop], self.index[start:stop], self.dim, self.count)

    def part(self, start: int, stop: int) -> Slices:
        if self.dim:
            return Slices(self.values[:, start:stop], self.index, self.dim, self.count)
        is_inside = (self.index >= start) & (self.index < stop)
        values = self.values.masked_fill(~is_inside.view(-1, *[1] * (self.values.dim() - 1)), 0)
        return Slices(values, torch.where(is_inside, self.index - start, 0), 0, stop - start)

    def squared_norms(self) -> Tensor:
        return sum_squares(widen(self.values))

    def sum(self, weights: Tensor) -> Tensor:
        values, weights = promote(widen(self.values), weights)
        values = values * weights.view(-1, *[1] * (values.dim() - 1))
        total = values.new_zeros(self.count, *values.shape[1:]).index_add_(0, self.index, values)
        return total.movedim(0, self.dim)

    def dot(self, direction: Tensor) -> Tensor:
        values, direction = promote(widen(self.values), widen(direction))
        chosen = direction.movedim(self.dim, 0)[self.index]
        return (values.conj() * chosen).real.reshape(self.batch, self.values[:1].numel()).sum(1)
