"""The term without structure: the per-sample gradients themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from persample._internal.precision import promote, widen
from persample.terms.base import Term, is_dense_smaller, sum_squares, widen_factors
from persample.terms.kronecker import Sides
from persample.terms.products import multiply_stacks


@dataclass(frozen=True)
class Dense(Term):
    """`g_n = values[n]`, where `values` is `(batch, *weight.shape)`."""

    values: Tensor

    @property
    def batch(self) -> int:
        return self.values.shape[0]

    @property
    def shape(self) -> torch.Size:
        return self.values.shape[1:]

    def dense(self) -> Tensor:
        return self.values

    def compute_exact_rows(self) -> Tensor:
        return self.values

    def some(self, start: int, stop: int) -> Dense:
        return Dense(self.values[start:stop])

    def part(self, start: int, stop: int) -> Dense:
        return Dense(self.values[:, start:stop])

    def squared_norms(self) -> Tensor:
        return sum_squares(widen(self.values))

    def sum(self, weights: Tensor) -> Tensor:
        values, weights = promote(widen(self.values), weights)
        return (weights @ values.reshape(self.batch, self.shape.numel())).view(self.shape)

    def dot(self, direction: Tensor) -> Tensor:
        values, direction = promote(widen(self.values), widen(direction))
        rows = values.reshape(self.batch, self.shape.numel()).conj()
        return multiply_stacks(rows, direction.reshape(-1, 1)).squeeze(1).real

    def multiply_sides(self, sides: Sides) -> Tensor:
        return sides.multiply_dense(widen(self.values))

    def write(self, out: Tensor, scale: float = 1.0) -> None:
        torch.mul(self.values, scale, out=out)


def make_dense(term: Term, times: int = 1) -> Term:
    """The dense form, if it has no more entries than `times` the factors; else the term."""
    return Dense(widen_factors(term).dense()) if is_dense_smaller(term, times) else term


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
