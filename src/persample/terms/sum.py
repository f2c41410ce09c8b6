"""The term of several uses of one weight."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from persample._internal.precision import promote
from persample.terms.base import BLOCK_SIZE, Term, add_tensors, sum_dense
from persample.terms.blocks import Blocks
from persample.terms.dense import Dense
from persample.terms.groups import Groups, merge_each
from persample.terms.kronecker import Sides
from persample.terms.outer import Outer
from persample.terms.rounding import find_floor_of_products
from persample.terms.rows import Rows
from persample.terms.sketch import Sketch


@dataclass(frozen=True)
class Sum(Term):
    """`g_n` is the sum of the gradients of several terms. Norms and grams have cross terms."""

    terms: Sequence[Term]

    @property
    def batch(self) -> int:
        return self.terms[0].batch

    @property
    def shape(self) -> torch.Size:
        return self.terms[0].shape

    def dense(self) -> Tensor:
        return sum_dense(self.terms)

    def some(self, start: int, stop: int) -> Sum:
        return Sum([term.some(start, stop) for term in self.terms])

    def part(self, start: int, stop: int) -> Sum:
        return Sum([term.part(start, stop) for term in self.terms])

    def merge_samples(self, groups: Groups) -> Sum:
        return Sum(merge_each(self.terms, groups))

    def squared_norms(self) -> Tensor:
        squares = [term.squared_norms() for term in self.terms]
        cross_terms = [2 * a.inner(b) for i, a in enumerate(self.terms) for b in self.terms[i + 1 :]]
        return add_tensors(squares + cross_terms)

    def measure(self, compact: bool = False, summed: bool = True) -> tuple[Tensor, Tensor | None, Term]:
        length = self.shape.numel()
        squares, floors = [], []
        for i, term in enumerate(self.terms):
            own, floor, _ = term.measure(summed=summed)
            squares.append(own)
            floors.append(find_floor_of_products(own, length) if floor is None else floor)
            for other in self.terms[i + 1 :]:  # what the terms contribute can cancel, too
                value, size = term.inner_and_size(other)
                squares.append(2 * value)
                floors.append(find_floor_of_products(2 * size, length))
        return add_tensors(squares), add_tensors(floors), self

    def sum(self, weights: Tensor) -> Tensor:
        return add_tensors([term.sum(weights) for term in self.terms])

    def dot(self, direction: Tensor) -> Tensor:
        return add_tensors([term.dot(direction) for term in self.terms])

    def inner(self, other: Term) -> Tensor:
        return add_tensors([term.inner(other) for term in self.terms])

    def gram(self, other: Term, block_size: int = BLOCK_SIZE) -> Tensor:
        others = other.terms if isinstance(other, Sum) else [other]
        return add_tensors([a.gram(b, block_size) for a in self.terms for b in others])

    def project(self, sketch: Sketch) -> Tensor:
        return add_tensors([term.project(sketch) for term in self.terms])

    def multiply_sides(self, sides: Sides) -> Tensor:
        return add_tensors([term.multiply_sides(sides) for term in self.terms])


def add_terms(terms: Sequence[Term]) -> Term:
    """The sum of several terms of one weight: terms of the same class are merged, the rest becomes a `Sum`.

    >>> outer = Outer(torch.ones(2, 3, 4), torch.ones(2, 3, 5))
    >>> add_terms([outer, outer]).positions
    6
    """
    if len(terms) == 1:
        return terms[0]
    by_class: dict[type, list[Term]] = {}
    for term in terms:
        by_class.setdefault(type(term), []).append(term)
    merged = [part for same_class in by_class.values() for part in _merge(same_class)]
    merged.sort(key=lambda term: not isinstance(term, Rows))  # `Rows.inner` knows outer products
    return merged[0] if len(merged) == 1 else Sum(merged)


def _merge(terms: list[Any]) -> list[Term]:
    """Terms of one class as one term, or as they are if they cannot be merged."""
    first = terms[0]
    if isinstance(first, Outer):
        return [
            Outer(torch.cat(promote(*(t.input for t in terms)), 1), torch.cat(promote(*(t.grad for t in terms)), 1))
        ]
    if isinstance(first, Rows):
        ids = torch.cat([t.ids for t in terms], 1)
        return [Rows(ids, torch.cat(promote(*(t.grad for t in terms)), 1), first.count)]
    if isinstance(first, Dense):
        return [Dense(sum_dense(terms))]
    if isinstance(first, Blocks):
        return _merge_blocks(terms)
    return terms


def _merge_blocks(several: Sequence[Blocks]) -> list[Term]:
    """Add the blocks with the same rows; if blocks overlap only in part, the terms stay as they are."""
    found: dict[tuple[int, torch.Size], list[Term]] = {}
    for blocks in several:
        for term, start in zip(blocks.terms, blocks.starts, strict=True):
            found.setdefault((start, term.shape), []).append(term)
    first, keys = several[0], sorted(found)
    ranges = [(start, start + (1 if first.single else shape[0])) for start, shape in keys]
    if any(b.single != first.single for b in several) or any(a[1] > b[0] for a, b in itertools.pairwise(ranges)):
        return list(several)
    return [Blocks([add_terms(found[key]) for key in keys], [key[0] for key in keys], first.count, first.single)]
