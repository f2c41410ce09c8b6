"""The term of a weight that a product reads as a matrix, with several dimensions as rows or as columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from persample.terms.base import BLOCK_SIZE, Term
from persample.terms.dense import Dense
from persample.terms.kronecker import Sides
from persample.terms.outer import Outer

if TYPE_CHECKING:
    from persample.terms.groups import Groups


@dataclass(frozen=True)
class Folded(Term):
    """The matrix gradients of `term`, reshaped and permuted to `weight_shape`.

    The dimensions `out_dims` of the weight are the rows of the matrix, its other dimensions are the columns.
    """

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
        """The dimensions of the weight in the order of the matrix: rows first, then columns."""
        return [*self.out_dims, *(d for d in range(len(self.weight_shape)) if d not in self.out_dims)]

    def _fold(self, matrix: Tensor) -> Tensor:
        """`(..., rows, columns)` to `(..., *weight.shape)`."""
        lead = matrix.dim() - 2
        order = self._order
        unfolded = matrix.reshape(*matrix.shape[:lead], *(self.weight_shape[d] for d in order))
        return unfolded.permute(*range(lead), *(lead + order.index(d) for d in range(len(order))))

    def _unfold(self, weight: Tensor) -> Tensor:
        """`weight.shape` to `(rows, columns)`."""
        return weight.permute(self._order).reshape(self.term.shape)

    def dense(self) -> Tensor:
        return self._fold(self.term.dense())

    def some(self, start: int, stop: int) -> Folded:
        return Folded(self.term.some(start, stop), self.weight_shape, self.out_dims)

    def part(self, start: int, stop: int) -> Folded:
        in_rows = 0 in self.out_dims
        dims = [d for d in self._order if (d in self.out_dims) == in_rows]
        sizes = [self.weight_shape[d] for d in dims]
        factor = (self.term.grad if in_rows else self.term.input).unflatten(-1, sizes)
        factor = factor.narrow(2 + dims.index(0), start, stop - start).flatten(2)
        term = Outer(self.term.input, factor) if in_rows else Outer(factor, self.term.grad)
        return Folded(term, [stop - start, *self.weight_shape[1:]], self.out_dims)

    def merge_samples(self, groups: Groups) -> Folded:
        return Folded(self.term.merge_samples(groups), self.weight_shape, self.out_dims)

    def squared_norms(self) -> Tensor:
        return self.term.squared_norms()

    def measure(self, compact: bool = False, summed: bool = True) -> tuple[Tensor, Tensor | None, Term]:
        squares, floor, term = self.term.measure(compact, summed)
        return squares, floor, self if term is self.term else Dense(self._fold(term.dense()))

    def sum(self, weights: Tensor) -> Tensor:
        return self._fold(self.term.sum(weights))

    def dot(self, direction: Tensor) -> Tensor:
        return self.term.dot(self._unfold(direction))

    def inner(self, other: Term) -> Tensor:
        return self.term.inner(other.term) if self._is_folded_like(other) else super().inner(other)

    def inner_and_size(self, other: Term) -> tuple[Tensor, Tensor]:
        return self.term.inner_and_size(other.term) if self._is_folded_like(other) else super().inner_and_size(other)

    def gram(self, other: Term, block_size: int = BLOCK_SIZE) -> Tensor:
        return (
            self.term.gram(other.term, block_size) if self._is_folded_like(other) else super().gram(other, block_size)
        )

    def square_sum(self, block_size: int = BLOCK_SIZE) -> Tensor:
        return self._fold(self.term.square_sum(block_size))

    def multiply_sides(self, sides: Sides) -> Tensor:
        leading = next(d for d in range(len(self.weight_shape) + 1) if math.prod(self.weight_shape[:d]) == sides.rows)
        if list(self.out_dims) == list(range(leading)):
            return self.term.multiply_sides(sides)
        if list(self.out_dims) == list(range(leading, len(self.weight_shape))):  # its matrix is the transpose of ours
            return Outer(self.term.grad, self.term.input).multiply_sides(sides)
        return super().multiply_sides(sides)

    def _is_folded_like(self, other: Term) -> TypeGuard[Folded]:
        return isinstance(other, Folded) and list(other.out_dims) == list(self.out_dims)
