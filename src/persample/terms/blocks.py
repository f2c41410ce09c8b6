"""The term of uses of parts of a weight: blocks of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from persample.terms.base import BLOCK_SIZE, Term, add_tensors
from persample.terms.dense import Dense
from persample.terms.groups import Groups, merge_each
from persample.terms.kronecker import Sides


@dataclass(frozen=True)
class Blocks(Term):
    """`terms[i]` is the gradient of the rows from `starts[i]` on, in a weight of `count` rows. No two blocks overlap.

    With `single`, each term is the gradient of one row, without a dimension for it: `weight[e]`, the matrix of an
    expert, for example.
    """

    terms: Sequence[Term]
    starts: Sequence[int]
    count: int
    single: bool = False

    @property
    def batch(self) -> int:
        return self.terms[0].batch

    @property
    def shape(self) -> torch.Size:
        first = self.terms[0].shape
        return torch.Size([self.count, *(first if self.single else first[1:])])

    def _count_rows(self, term: Term) -> int:
        return 1 if self.single else term.shape[0]

    def _iterate_blocks(self) -> Iterator[tuple[Term, int | slice]]:
        """Each term with the index of its rows in the weight."""
        for term, start in zip(self.terms, self.starts, strict=True):
            yield term, start if self.single else slice(start, start + self._count_rows(term))

    def dense(self) -> Tensor:
        blocks = [(term.dense(), index) for term, index in self._iterate_blocks()]
        result = blocks[0][0].new_zeros(self.batch, *self.shape)
        for values, index in blocks:
            result[:, index] = values
        return result

    def some(self, start: int, stop: int) -> Blocks:
        return Blocks([term.some(start, stop) for term in self.terms], self.starts, self.count, self.single)

    def part(self, start: int, stop: int) -> Term:
        terms, starts = [], []
        for term, first in zip(self.terms, self.starts, strict=True):
            low, high = max(start, first), min(stop, first + self._count_rows(term))
            if low < high:
                terms.append(term if self.single else term.part(low - first, high - first))
                starts.append(low - start)
        if not terms:
            empty = self.terms[0].some(0, 0).dense()  # for its dtype and device
            return Dense(empty.new_zeros(self.batch, stop - start, *self.shape[1:]))
        return Blocks(terms, starts, stop - start, self.single)

    def merge_samples(self, groups: Groups) -> Blocks:
        return Blocks(merge_each(self.terms, groups), self.starts, self.count, self.single)

    def compact(self) -> Blocks:
        return Blocks([term.compact() for term in self.terms], self.starts, self.count, self.single)

    def measure(self, compact: bool = False, summed: bool = True) -> tuple[Tensor, Tensor | None, Term]:
        squares, floors, terms = zip(*(term.measure(compact, summed) for term in self.terms), strict=True)
        given = [floor for floor in floors if floor is not None]
        blocks = Blocks(terms, self.starts, self.count, self.single)
        return add_tensors(squares), add_tensors(given) if given else None, blocks

    def squared_norms(self) -> Tensor:
        return add_tensors([term.squared_norms() for term in self.terms])

    def sum(self, weights: Tensor) -> Tensor:
        return self._assemble([term.sum(weights) for term in self.terms])

    def square_sum(self, block_size: int = BLOCK_SIZE) -> Tensor:
        return self._assemble([term.square_sum(block_size) for term in self.terms])

    def _assemble(self, values: Sequence[Tensor]) -> Tensor:
        """A tensor of the weight's shape from the values of each block; zero elsewhere."""
        result = values[0].new_zeros(self.shape)
        for value, (_, index) in zip(values, self._iterate_blocks(), strict=True):
            result[index] = value
        return result

    def dot(self, direction: Tensor) -> Tensor:
        return add_tensors([term.dot(direction[index]) for term, index in self._iterate_blocks()])

    def inner(self, other: Term) -> Tensor:
        pairs = self._pair_blocks(other)
        if pairs is None:
            return super().inner(other)
        return add_tensors([a.inner(b) for a, b in pairs] or [self.squared_norms() * 0])

    def inner_and_size(self, other: Term) -> tuple[Tensor, Tensor]:
        pairs = self._pair_blocks(other)
        if not pairs:
            return super().inner_and_size(other)
        values, sizes = zip(*(a.inner_and_size(b) for a, b in pairs), strict=True)
        return add_tensors(values), add_tensors(sizes)

    def gram(self, other: Term, block_size: int = BLOCK_SIZE) -> Tensor:
        pairs = self._pair_blocks(other)
        if not pairs:
            return super().gram(other, block_size)
        return add_tensors([a.gram(b, block_size) for a, b in pairs])

    def multiply_sides(self, sides: Sides) -> Tensor:
        rows_each = sides.rows // self.count  # of the matrix, in one row of the weight
        if sides.left is None or (self.single and sides.columns != self.shape[2:].numel()):
            return super().multiply_sides(sides)
        parts = []
        for term, start in zip(self.terms, self.starts, strict=True):
            own = sides.select_rows(start * rows_each, (start + self._count_rows(term)) * rows_each)
            parts.append(term.multiply_sides(own))
        return add_tensors(parts)

    def _pair_blocks(self, other: Term) -> list[tuple[Term, Term]] | None:
        """The pairs of terms with the same rows; None if some blocks overlap only in part."""
        if not isinstance(other, Blocks) or other.single != self.single:
            return None
        pairs = []
        for term, first in zip(self.terms, self.starts, strict=True):
            for another, second in zip(other.terms, other.starts, strict=True):
                low, high = max(first, second), min(first + self._count_rows(term), second + self._count_rows(another))
                if low < high and (first, term.shape) != (second, another.shape):
                    return None
                if low < high:
                    pairs.append((term, another))
        return pairs
