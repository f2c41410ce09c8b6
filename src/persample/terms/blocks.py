"""Blocks of rows: what uses of parts of a weight contribute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from persample.terms.base import BLOCK, Term, sum_of
from persample.terms.dense import Dense


@dataclass(frozen=True)
class Blocks(Term):
    """`terms[i]` contributes to the rows from `starts[i]` on of a weight of `count` rows; no two to the same.

    `single`: each contributes to one row, and has no dim for it (`weight[e]`, a matrix of its own).
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
        own = self.terms[0].shape
        return torch.Size([self.count, *(own if self.single else own[1:])])

    def _size(self, term: Term) -> int:
        return 1 if self.single else term.shape[0]

    def _parts(self) -> Iterator[tuple[Term, int | slice]]:
        for term, start in zip(self.terms, self.starts, strict=True):
            yield term, start if self.single else slice(start, start + self._size(term))

    def dense(self) -> Tensor:
        made = [(term.dense(), at) for term, at in self._parts()]
        result = made[0][0].new_zeros(self.batch, *self.shape)
        for values, at in made:
            result[:, at] = values
        return result

    def some(self, start: int, stop: int) -> Blocks:
        return Blocks([term.some(start, stop) for term in self.terms], self.starts, self.count, self.single)

    def part(self, start: int, stop: int) -> Term:
        terms, starts = [], []
        for term, first in zip(self.terms, self.starts, strict=True):
            low, high = max(start, first), min(stop, first + self._size(term))
            if low < high:
                terms.append(term if self.single else term.part(low - first, high - first))
                starts.append(low - start)
        if not terms:
            like = self.terms[0].some(0, 0).dense()
            return Dense(like.new_zeros(self.batch, stop - start, *self.shape[1:]))
        return Blocks(terms, starts, stop - start, self.single)

    def compute_norms_and_compact(self) -> tuple[Tensor, Term]:
        squared, terms = zip(*(term.compute_norms_and_compact() for term in self.terms), strict=True)
        return sum_of(squared), Blocks(terms, self.starts, self.count, self.single)

    def squared_norms(self) -> Tensor:
        return sum_of([term.squared_norms() for term in self.terms])

    def sum(self, weights: Tensor) -> Tensor:
        return self._placed([term.sum(weights) for term in self.terms])

    def square_sum(self, numbers: int = BLOCK) -> Tensor:
        return self._placed([term.square_sum(numbers) for term in self.terms])

    def _placed(self, values: Sequence[Tensor]) -> Tensor:
        result = values[0].new_zeros(self.shape)
        for value, (_, at) in zip(values, self._parts(), strict=True):
            result[at] = value
        return result

    def dot(self, direction: Tensor) -> Tensor:
        return sum_of([term.dot(direction[at]) for term, at in self._parts()])

    def inner(self, other: Term) -> Tensor:
        pairs = self._pairs(other)
        if pairs is None:
            return super().inner(other)
        return sum_of([a.inner(b) for a, b in pairs] or [self.squared_norms() * 0])

    def gram(self, other: Term, numbers: int = BLOCK) -> Tensor:
        pairs = self._pairs(other)
        if not pairs:
            return super().gram(other, numbers)
        return sum_of([a.gram(b, numbers) for a, b in pairs])

    def _pairs(self, other: Term) -> list[tuple[Term, Term]] | None:
        """Where both contribute; None if their blocks are not the same."""
        if not isinstance(other, Blocks) or other.single != self.single:
            return None
        pairs = []
        for term, first in zip(self.terms, self.starts, strict=True):
            for another, second in zip(other.terms, other.starts, strict=True):
                low, high = max(first, second), min(first + self._size(term), second + self._size(another))
                if low < high and (first, term.shape) != (second, another.shape):
                    return None
                if low < high:
                    pairs.append((term, another))
        return pairs
