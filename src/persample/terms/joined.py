"""The term of rows with different structures, such as groups of samples of very different sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeGuard

import torch
from torch import Tensor

from persample.terms.base import BLOCK_SIZE, Term, add_tensors
from persample.terms.sketch import Sketch


@dataclass(frozen=True)
class Joined(Term):
    """`terms[i]` has the rows `rows[i]` of the batch, which are ascending; each row is in one of the terms."""

    terms: Sequence[Term]
    rows: Sequence[Tensor]

    @property
    def batch(self) -> int:
        return sum(term.batch for term in self.terms)

    @property
    def shape(self) -> torch.Size:
        return self.terms[0].shape

    def _join(self, values: Sequence[Tensor]) -> Tensor:
        """`(batch, ...)` from the values of each term, `(term.batch, ...)`."""
        dtype = reduce(torch.promote_types, (value.dtype for value in values))  # terms choose the dtype by their sizes
        result = values[0].new_empty(self.batch, *values[0].shape[1:], dtype=dtype)
        for rows, value in zip(self.rows, values, strict=True):
            result[rows] = value.to(dtype)
        return result

    def _map(self, change: Callable[[Term], Term]) -> Joined:
        return Joined([change(term) for term in self.terms], self.rows)

    def dense(self) -> Tensor:
        return self._join([term.dense() for term in self.terms])

    def some(self, start: int, stop: int) -> Joined:
        terms, found = [], []
        for term, rows in zip(self.terms, self.rows, strict=True):
            first, last = torch.searchsorted(
                rows.contiguous(), torch.tensor([start, stop], device=rows.device)
            ).tolist()
            if first < last:
                terms.append(term.some(first, last))
                found.append(rows[first:last] - start)
        return Joined(terms, found) if terms else Joined([self.terms[0].some(0, 0)], [self.rows[0][:0]])

    def part(self, start: int, stop: int) -> Joined:
        return self._map(lambda term: term.part(start, stop))

    def compact(self) -> Joined:
        return self._map(lambda term: term.compact())

    def squared_norms(self) -> Tensor:
        return self._join([term.squared_norms() for term in self.terms])

    def measure(self, compact: bool = False, summed: bool = True) -> tuple[Tensor, Tensor | None, Term]:
        squares, floors, terms = zip(*(term.measure(compact, summed) for term in self.terms), strict=True)
        known = [torch.zeros_like(s) if floor is None else floor for s, floor in zip(squares, floors, strict=True)]
        floor = None if all(floor is None for floor in floors) else self._join(known)
        return self._join(squares), floor, Joined(terms, self.rows)

    def clear_samples(self, is_cleared: Tensor) -> Joined:
        pairs = zip(self.terms, self.rows, strict=True)
        return Joined([term.clear_samples(is_cleared[rows]) for term, rows in pairs], self.rows)

    def weigh_samples(self, weights: Tensor) -> Joined:
        pairs = zip(self.terms, self.rows, strict=True)
        return Joined([term.weigh_samples(weights[rows]) for term, rows in pairs], self.rows)

    def sum(self, weights: Tensor) -> Tensor:
        return add_tensors([term.sum(weights[rows]) for term, rows in zip(self.terms, self.rows, strict=True)])

    def sum_each(self, weights: Tensor, count: int) -> Tensor:
        size = len(weights)
        return torch.stack([self.some(i * size, (i + 1) * size).sum(weights) for i in range(count)])

    def dot(self, direction: Tensor) -> Tensor:
        return self._join([term.dot(direction) for term in self.terms])

    def inner(self, other: Term) -> Tensor:
        if not self._has_rows_of(other):
            return super().inner(other)
        return self._join([a.inner(b) for a, b in zip(self.terms, other.terms, strict=True)])

    def inner_and_size(self, other: Term) -> tuple[Tensor, Tensor]:
        if not self._has_rows_of(other):
            return super().inner_and_size(other)
        pairs = [a.inner_and_size(b) for a, b in zip(self.terms, other.terms, strict=True)]
        return self._join([value for value, _ in pairs]), self._join([size for _, size in pairs])

    def _has_rows_of(self, other: Term) -> TypeGuard[Joined]:
        if not isinstance(other, Joined) or len(other.rows) != len(self.rows):
            return False
        return all(a is b or torch.equal(a, b) for a, b in zip(self.rows, other.rows, strict=True))

    def gram(self, other: Term, block_size: int = BLOCK_SIZE) -> Tensor:
        if isinstance(other, Joined):
            blocks = [other._join([a.gram(b, block_size).mT for b in other.terms]).mT for a in self.terms]
        else:
            blocks = [term.gram(other, block_size) for term in self.terms]
        return self._join(blocks)

    def square_sum(self, block_size: int = BLOCK_SIZE) -> Tensor:
        return add_tensors([term.square_sum(block_size) for term in self.terms])

    def project(self, sketch: Sketch) -> Tensor:
        return self._join([term.project(sketch) for term in self.terms])
