"""A matrix that is a weight of more dims, or of its dims in another order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from persample.terms.base import BLOCK, Term
from persample.terms.outer import Outer


@dataclass(frozen=True)
class Folded(Term):
    """The dims `out_dims` of the weight are the rows of the matrix of `term`, the others are its columns."""

    term: Outer
    weight_shape: Sequence[int]
    out_dims: Sequence[int]

    @property
    def batch(self) -> int:
        return self.term.batch

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.weight_shape)

    @property
    def _order(self) -> list[int]:
        """The dims of the weight as the matrix has them: first those of its rows."""
        return [*self.out_dims, *(d for d in range(len(self.weight_shape)) if d not in self.out_dims)]

    def _fold(self, matrix: Tensor) -> Tensor:
        """`(..., rows, columns)` as `(..., *weight.shape)`."""
        lead = matrix.dim() - 2
        order = self._order
        unfolded = matrix.reshape(*matrix.shape[:lead], *(self.weight_shape[d] for d in order))
        return unfolded.permute(*range(lead), *(lead + order.index(d) for d in range(len(order))))

    def _unfold(self, weight: Tensor) -> Tensor:
        return weight.permute(self._order).reshape(self.term.shape)

    def dense(self) -> Tensor:
        return self._fold(self.term.dense())

    def some(self, start: int, stop: int) -> Folded:
        return Folded(self.term.some(start, stop), self.weight_shape, self.out_dims)

    def part(self, start: int, stop: int) -> Folded:
        of_rows = 0 in self.out_dims
        dims = [d for d in self._order if (d in self.out_dims) == of_rows]
        sizes = [self.weight_shape[d] for d in dims]
        factor = (self.term.grad if of_rows else self.term.input).unflatten(-1, sizes)
        factor = factor.narrow(2 + dims.index(0), start, stop - start).flatten(2)
        term = Outer(self.term.input, factor) if of_rows else Outer(factor, self.term.grad)
        return Folded(term, [stop - start, *self.weight_shape[1:]], self.out_dims)

    def squared_norms(self) -> Tensor:
        return self.term.squared_norms()

    def sum(self, weights: Tensor) -> Tensor:
        return self._fold(self.term.sum(weights))

    def dot(self, direction: Tensor) -> Tensor:
        return self.term.dot(self._unfold(direction))

    def inner(self, other: Term) -> Tensor:
        return self.term.inner(other.term) if self._folds_like(other) else super().inner(other)  # type: ignore[attr-defined]

    def gram(self, other: Term, numbers: int = BLOCK) -> Tensor:
        if self._folds_like(other):
            return self.term.gram(other.term, numbers)  # type: ignore[attr-defined]
        return super().gram(other, numbers)

    def square_sum(self, numbers: int = BLOCK) -> Tensor:
        return self._fold(self.term.square_sum(numbers))

    def _folds_like(self, other: Term) -> bool:
        return isinstance(other, Folded) and list(other.out_dims) == list(self.out_dims)
