"""Several uses of one weight."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from persample._internal.dtypes import promote
from persample.terms.base import BLOCK, Term, sum_dense, sum_of
from persample.terms.blocks import Blocks
from persample.terms.dense import Dense
from persample.terms.outer import Outer
from persample.terms.rows import Rows
from persample.terms.sketch import Sketch


@dataclass(frozen=True)
class Sum(Term):
    """`g_n` is the sum of what several terms, of different kinds, contribute. Norms and grams have cross terms."""

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

    def squared_norms(self) -> Tensor:
        own = [term.squared_norms() for term in self.terms]
        crossed = [2 * a.inner(b) for i, a in enumerate(self.terms) for b in self.terms[i + 1 :]]
        return sum_of(own + crossed)

    def sum(self, weights: Tensor) -> Tensor:
        return sum_of([term.sum(weights) for term in self.terms])

    def dot(self, direction: Tensor) -> Tensor:
        return sum_of([term.dot(direction) for term in self.terms])

    def inner(self, other: Term) -> Tensor:
        return sum_of([term.inner(other) for term in self.terms])

    def gram(self, other: Term, numbers: int = BLOCK) -> Tensor:
        others = other.terms if isinstance(other, Sum) else [other]
        return sum_of([a.gram(b, numbers) for a in self.terms for b in others])

    def project(self, sketch: Sketch) -> Tensor:
        return sum_of([term.project(sketch) for term in self.terms])


def add_terms(terms: Sequence[Term]) -> Term:
    """One term for several: those of a kind as one of that kind, the rest as a sum.

    >>> outer = Outer(torch.ones(2, 3, 4), torch.ones(2, 3, 5))
    >>> add_terms([outer, outer]).positions
    6
    """
    if len(terms) == 1:
        return terms[0]
    kinds: dict[type, list[Term]] = {}
    for term in terms:
        kinds.setdefault(type(term), []).append(term)
    merged = sorted((part for kind in kinds.values() for part in _merged(kind)), key=_rank)
    return merged[0] if len(merged) == 1 else Sum(merged)


def _rank(term: Term) -> int:
    """Rows before outer products, of which they know the inner product."""
    return 0 if isinstance(term, Rows) else 1


def _merged(terms: list[Any]) -> list[Term]:
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
        return _merged_blocks(terms)
    return terms


def _merged_blocks(several: Sequence[Blocks]) -> list[Term]:
    """Those of the same rows together; what overlaps in part stays apart."""
    found: dict[tuple[int, torch.Size], list[Term]] = {}
    for blocks in several:
        for term, start in zip(blocks.terms, blocks.starts, strict=True):
            found.setdefault((start, term.shape), []).append(term)
    first = several[0]
    ends = [(start, start + (1 if first.single else shape[0])) for start, shape in sorted(found)]
    if any(b.single != first.single for b in several) or any(a[1] > b[0] for a, b in itertools.pairwise(ends)):
        return list(several)
    keys = sorted(found)
    return [Blocks([add_terms(found[key]) for key in keys], [key[0] for key in keys], first.count, first.single)]
