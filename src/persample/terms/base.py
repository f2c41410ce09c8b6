"""What every term is, and what it can answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from persample._internal.dtypes import promote, to_double, widen
from persample.terms.sketch import Sketch

# How many numbers a block of a dense form may have where nobody says otherwise: 4 MB in float32, which stay in cache.
BLOCK = 2**20


class Term(ABC):
    """What one use of a weight contributes to its per-sample gradients: a `(batch, *weight.shape)`, kept in factors.

    A term must be able to give its dense form, and the term of some of the samples or of some rows of the weight. Every
    answer has a default that goes through dense blocks; a term overrides it where its structure gives the answer for
    less. Answers are in float32 at least. `<g, h>` is the real part of the inner product.
    """

    @property
    @abstractmethod
    def batch(self) -> int:
        """The number of samples."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """The shape of the weight."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The contribution itself, `(batch, *weight.shape)`."""

    @abstractmethod
    def some(self, start: int, stop: int) -> Term:
        """The same for the samples from `start` to `stop`."""

    @abstractmethod
    def part(self, start: int, stop: int) -> Term:
        """The same for the rows `weight[start:stop]`."""

    def write(self, out: Tensor, scale: float = 1.0) -> None:
        """Writes the dense form, times `scale`, into `out`, which may be of another type."""
        out.copy_(self.dense())
        if scale != 1:
            out.mul_(scale)

    def compute_norms_and_compact(self) -> tuple[Tensor, Term]:
        """`squared_norms()`, and a term of the same gradients: the dense form, if it was made and is smaller."""
        return self.squared_norms(), self

    def squared_norms(self) -> Tensor:
        """`(batch,)`: |g_n|²."""
        return torch.cat([squares(block) for _, (block,) in self.by_samples()])

    def sum(self, weights: Tensor) -> Tensor:
        """`weight.shape`: the sum of weights[n] g_n."""
        return sum_of(torch.tensordot(weights[at].to(block), block, 1) for at, (block,) in self.by_samples())

    def dot(self, direction: Tensor) -> Tensor:
        """`(batch,)`: <g_n, direction>."""
        return self.inner(Same(direction, self.batch))

    def inner(self, other: Term) -> Tensor:
        """`(batch,)`: <g_n, h_n>, h being another contribution to the same weight."""
        return torch.cat([_matrix((a.conj() * b).real).sum(1) for _, (a, b) in self.by_samples(other)])

    def gram(self, other: Term, numbers: int = BLOCK) -> Tensor:
        """`(batch, batch of other)`: <g_n, h_m>, in blocks of so many numbers."""
        pairs = (promote(a, b) for a, b in self.by_rows(other, numbers=numbers))
        return sum_of((_matrix(a).conj() @ _matrix(b).mT).real for a, b in pairs)

    def square_sum(self, numbers: int = BLOCK) -> Tensor:
        """`weight.shape`: the sum of g_n², entry by entry."""
        parts = [block.abs().square().sum(0) for (block,) in self.by_rows(numbers=numbers)]
        return torch.cat(parts) if self.shape else parts[0]

    def project(self, sketch: Sketch) -> Tensor:
        """`(batch, sketch.size)`: the sketch of each g_n."""
        starts = range(0, max(1, self.rows), self._rows_a_block(BLOCK))
        return sum_of(sketch.of_dense(block, start) for start, (block,) in zip(starts, self.by_rows(), strict=True))

    @property
    def rows(self) -> int:
        """The rows of the weight."""
        return self.shape[0] if self.shape else 1

    def _rows_a_block(self, numbers: int) -> int:
        row = max(1, self.batch * self.shape[1:].numel())
        return max(1, numbers // row)

    def by_rows(self, *others: Term, numbers: int = BLOCK) -> Iterator[tuple[Tensor, ...]]:
        """The dense forms, in the accumulation type, of as many rows of the weight at a time as the bound allows."""
        terms = (self, *others)
        step = min(term._rows_a_block(numbers) for term in terms)
        if step >= self.rows:
            yield tuple(widen(term.dense()) for term in terms)
            return
        for start in range(0, self.rows, step):
            yield tuple(widen(term.part(start, min(start + step, self.rows)).dense()) for term in terms)

    def by_samples(self, *others: Term) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
        """The dense forms, in the accumulation type, of a few samples at a time; and which.

        So few that neither these nor their factors, which may be copied on the way, are more than a block.
        """
        factors = sum(t.numel() for t in find_factors(self)) // max(1, self.batch)
        step = max(1, BLOCK // max(1, self.shape.numel(), factors))
        for start in range(0, max(1, self.batch), step):
            stop = min(start + step, self.batch)
            yield slice(start, stop), tuple(widen(term.some(start, stop).dense()) for term in (self, *others))


class Same(Term):
    """A direction, the same for all samples."""

    def __init__(self, direction: Tensor, batch: int) -> None:
        self.direction = direction
        self._batch = batch

    @property
    def batch(self) -> int:
        return self._batch

    @property
    def shape(self) -> torch.Size:
        return self.direction.shape

    def dense(self) -> Tensor:
        return self.direction.expand(self.batch, *self.shape)

    def some(self, start: int, stop: int) -> Same:
        return Same(self.direction, stop - start)

    def part(self, start: int, stop: int) -> Same:
        return Same(self.direction[start:stop], self.batch)


def is_smaller_dense(term: Term, times: int = 1) -> bool:
    """Whether the dense form, exact, takes less memory than so many times the factors."""
    factors = list(find_factors(term))
    numbers = times * sum(t.numel() for t in factors)
    return term.batch * term.shape.numel() <= numbers and all(widen(t) is t for t in factors)


def _matrix(block: Tensor) -> Tensor:
    return block.reshape(len(block), block.shape[1:].numel())


def squares(block: Tensor) -> Tensor:
    """`(batch,)`: the sum of |entry|² of each sample.

    One pass over the block: three times as fast as squares that are written down and then added up. It adds up one
    after the other, so that long rows are taken in parts.
    """
    rows = _matrix(block)
    if rows.shape[1] > 2**16:
        rows = torch.linalg.vector_norm(block.reshape(*block.shape[:2], -1), dim=2)
    return torch.linalg.vector_norm(rows, dim=1).square()


def sum_of(parts: Iterator[Tensor] | Sequence[Tensor]) -> Tensor:
    """The sum of at least one tensor."""
    first, *rest = iter(parts)
    for part in rest:
        first = first + part
    return first


def find_factors(term: Term) -> Iterator[Tensor]:
    """The tensors that a term keeps."""
    for value in vars(term).values():
        for part in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(part, Tensor):
                yield part
            elif isinstance(part, Term):
                yield from find_factors(part)


def is_complex(term: Term) -> bool:
    """Whether a term's contribution is made of complex numbers."""
    return any(tensor.is_complex() for tensor in find_factors(term))


def convert_to_double(term: Any) -> Any:
    """The term with its factors in float64 (or complex128)."""
    changed: dict[str, Any] = {}
    for name, value in vars(term).items():
        if isinstance(value, Tensor):
            changed[name] = to_double(value)
        elif isinstance(value, Term):
            changed[name] = convert_to_double(value)
        elif name == "terms":
            changed[name] = [convert_to_double(part) for part in value]
    return replace(term, **changed)


def sum_dense(terms: Sequence[Term]) -> Tensor:
    """What several uses of one weight contribute together."""
    return sum_of([term.dense() for term in terms])
