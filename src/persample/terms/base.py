"""The base class of all terms: the methods that a structure must define, and the answers that follow from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from persample._internal.precision import promote, to_double, widen
from persample.terms.kronecker import Sides
from persample.terms.sketch import Sketch

if TYPE_CHECKING:
    from persample.terms.groups import Groups

# Default number of entries in a block of a dense form: 4 MB in float32, which fits into the cache.
BLOCK_SIZE = 2**20

_LINEAR_FACTORS = {"grad", "values"}  # in which every term is linear

_PART_SIZE = 2**14  # numbers whose squares are added up one after the other


AnyTerm = TypeVar("AnyTerm", bound="Term")


class Term(ABC):
    """The contribution of one use to the per-sample gradients of its weight: `(batch, *weight.shape)`, kept in factors.

    A subclass must define the dense form, and how to restrict the term to some samples or to some rows of the weight.
    Every answer has a default that works on blocks of the dense form. A subclass overrides an answer that its
    structure gives at less cost. Answers are computed in float32 or wider.

    In the docstrings, g_n is the gradient of sample n, and `<g, h>` the real part of the inner product.
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
        """The per-sample gradients, `(batch, *weight.shape)`."""

    @abstractmethod
    def some(self, start: int, stop: int) -> Term:
        """The term of the samples `start` to `stop`."""

    @abstractmethod
    def part(self, start: int, stop: int) -> Term:
        """The term of the rows `weight[start:stop]`."""

    def write(self, out: Tensor, scale: float = 1.0) -> None:
        """Write `scale` times the dense form into `out`, which may have another dtype."""
        out.copy_(self.dense())
        if scale != 1:
            out.mul_(scale)

    def compact(self) -> Term:
        """An equal term: the dense form if the norms need it and it is smaller, else self."""
        return self

    def compute_norms_and_compact(self) -> tuple[Tensor, Term]:
        """`squared_norms()` of `compact()`, and that term."""
        term = self.compact()
        return term.squared_norms(), term

    def squared_norms(self) -> Tensor:
        """`(batch,)`: |g_n|²."""
        return torch.cat([sum_squares(block) for _, (block,) in iterate_samples(self)])

    def measure(self, compact: bool = False, summed: bool = True) -> tuple[Tensor, Tensor | None, Term]:
        """`squared_norms()`, their floor (`terms/rounding.py`) or None, and an equal term.

        Norms of the dense form have no floor: they are the norms of the rows as torch computes them. They have one if
        `sum()` will compute the rows in another way.

        Args:
            compact: Return the dense form as the term if the norms needed it and it is smaller.
            summed: Whether `sum()` of the returned term will be called.
        """
        squares, term = self.compute_norms_and_compact() if compact else (self.squared_norms(), self)
        return squares, None, term

    def compute_exact_row(self, sample: int) -> Tensor:
        """`weight.shape`: g_n in float64, for a sample n whose norm is below its floor."""
        return to_double(self.some(sample, sample + 1).compute_exact_rows()[0])

    def compute_exact_rows(self) -> Tensor:
        """The dense form from factors in float64."""
        return convert_to_double(self).dense()

    def write_exact_rows(self, out: Tensor) -> None:
        """Write the dense form into `out`, `(count, batch / count, entries)` in float64, without cancellation."""
        out.copy_(self.compute_exact_rows().reshape(out.shape))

    def clear_samples(self, is_cleared: Tensor) -> Term:
        """The term with rows of zeros where the mask `is_cleared`, `(batch,)`, is true, also if they are not finite."""
        return map_factors(self, lambda factor: _clear_rows(factor, is_cleared))

    def weigh_samples(self, weights: Tensor) -> Term:
        """The term with the row of each sample multiplied by its weight, `(batch,)`."""

        def weigh(name: str, value: Any) -> Any:
            if isinstance(value, Term):
                return value.weigh_samples(weights)
            if isinstance(value, (list, tuple)) and any(isinstance(part, Term) for part in value):
                return type(value)(weigh(name, part) for part in value)
            if name not in _LINEAR_FACTORS:
                return None if name == "shared" else value
            return value * weights.to(value.device, value.dtype).view(-1, *[1] * (value.dim() - 1))

        return replace(self, **{name: weigh(name, value) for name, value in vars(self).items()})  # type: ignore[type-var]

    def merge_samples(self, groups: Groups) -> Term | None:
        """The term with a row for each group of samples, None if only the dense form can be added up."""
        return None

    def sum(self, weights: Tensor) -> Tensor:
        """`weight.shape`: the sum over n of weights[n] g_n."""
        return add_tensors(
            torch.tensordot(weights[samples].to(block), block, 1) for samples, (block,) in iterate_samples(self)
        )

    def sum_each(self, weights: Tensor, count: int) -> Tensor:
        """`(count, *weight.shape)`: `sum(weights)` of each of `count` equal parts of the samples.

        Terms of several weights of one shape can be one term, with the samples of each weight after those of the last.
        """
        values, weights = promote(widen(self.dense()), weights)
        parts = values.reshape(count, len(weights), self.shape.numel())
        return (weights @ parts).view(count, *self.shape)

    def dot(self, direction: Tensor) -> Tensor:
        """`(batch,)`: <g_n, direction>, for a direction with the shape of the weight."""
        return self.inner(SharedDirection(direction, self.batch))

    def inner(self, other: Term) -> Tensor:
        """`(batch,)`: <g_n, h_n>, where h is another term of the same weight and batch."""
        return torch.cat([_flatten_samples((a.conj() * b).real).sum(1) for _, (a, b) in iterate_samples(self, other)])

    def inner_and_size(self, other: Term) -> tuple[Tensor, Tensor]:
        """`inner(other)`, and the sum of the absolute values of what was added up."""
        products = [_flatten_samples(a.conj() * b) for _, (a, b) in iterate_samples(self, other)]
        return torch.cat([p.real.sum(1) for p in products]), torch.cat([p.abs().sum(1) for p in products])

    def gram(self, other: Term, block_size: int = BLOCK_SIZE) -> Tensor:
        """`(batch, other.batch)`: <g_n, h_m>, where h is another term of the same weight."""
        pairs = (promote(a, b) for a, b in iterate_rows(self, other, block_size=block_size))
        return add_tensors((_flatten_samples(a).conj() @ _flatten_samples(b).mT).real for a, b in pairs)

    def square_sum(self, block_size: int = BLOCK_SIZE) -> Tensor:
        """`weight.shape`: the sum over n of |g_n|², entry by entry."""
        parts = [block.abs().square().sum(0) for (block,) in iterate_rows(self, block_size=block_size)]
        return torch.cat(parts) if self.shape else parts[0]

    def project(self, sketch: Sketch) -> Tensor:
        """`(batch, sketch.size)`: the sketch of each g_n."""
        starts = range(0, max(1, count_rows(self)), _count_rows_per_block(self, BLOCK_SIZE))
        blocks = zip(starts, iterate_rows(self), strict=True)
        return add_tensors(sketch.project_dense(block, start) for start, (block,) in blocks)

    def multiply_sides(self, sides: Sides) -> Tensor:
        """`(batch, k, m)`: leftᵀ g_n right, where g_n is read as a matrix of `sides.rows` and `sides.columns`."""
        if sides.left is None:  # then there are few rows
            return sides.multiply_dense(widen_factors(self).dense())
        total, start = None, 0
        for (block,) in iterate_rows(self):
            stop = start + block.shape[1:].numel() // sides.columns
            part = sides.select_rows(start, stop).multiply_dense(block)
            total, start = part if total is None else total.add_(part), stop
        return add_tensors([total] if total is not None else [])


@dataclass(frozen=True)
class SharedDirection(Term):
    """`g_n = direction` for every one of `count` samples n."""

    direction: Tensor
    count: int

    @property
    def batch(self) -> int:
        return self.count

    @property
    def shape(self) -> torch.Size:
        return self.direction.shape

    def dense(self) -> Tensor:
        return self.direction.expand(self.batch, *self.shape)

    def some(self, start: int, stop: int) -> SharedDirection:
        return SharedDirection(self.direction, stop - start)

    def part(self, start: int, stop: int) -> SharedDirection:
        return SharedDirection(self.direction[start:stop], self.batch)


# ---- blocks of the dense form ----


def count_rows(term: Term) -> int:
    """The number of rows of the weight."""
    return term.shape[0] if term.shape else 1


def _count_rows_per_block(term: Term, block_size: int) -> int:
    row_size = max(1, term.batch * term.shape[1:].numel())
    return max(1, block_size // row_size)


def iterate_rows(*terms: Term, block_size: int = BLOCK_SIZE) -> Iterator[tuple[Tensor, ...]]:
    """Dense forms of some terms of one weight, widened, for consecutive blocks of rows of the weight.

    A block has at most `block_size` entries, but at least one row.
    """
    count = count_rows(terms[0])
    step = min(_count_rows_per_block(term, block_size) for term in terms)
    if step >= count:
        yield tuple(widen_factors(term).dense() for term in terms)
        return
    for start in range(0, count, step):
        stop = min(start + step, count)
        yield tuple(widen_factors(term.part(start, stop)).dense() for term in terms)


def iterate_samples(*terms: Term) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Dense forms of some terms of one batch, widened, for consecutive ranges of samples; with the range.

    Neither a dense form nor the factors of its samples, which may have to be copied, exceed `BLOCK_SIZE` entries,
    unless one sample does.
    """
    first = terms[0]
    factor_size = sum(t.numel() for t in find_factors(first)) // max(1, first.batch)
    step = max(1, BLOCK_SIZE // max(1, first.shape.numel(), factor_size))
    for start in range(0, max(1, first.batch), step):
        stop = min(start + step, first.batch)
        yield slice(start, stop), tuple(widen_factors(t.some(start, stop)).dense() for t in terms)


def is_dense_smaller(term: Term, times: int = 1) -> bool:
    """Whether the dense form, in float32 at least, takes no more memory than `times` the factors."""
    factors = list(find_factors(term))
    limit = times * sum(t.numel() * t.element_size() for t in factors)
    entry_size = max([4, *(t.element_size() for t in factors if t.is_floating_point() or t.is_complex())])
    return term.batch * term.shape.numel() * entry_size <= limit


def _flatten_samples(block: Tensor) -> Tensor:
    """`(batch, ...)` to `(batch, entries)`, also if the batch is empty."""
    return block.reshape(len(block), block.shape[1:].numel())


def sum_squares(block: Tensor) -> Tensor:
    """`(batch,)`: the sum of |entry|² over each sample.

    `vector_norm` takes one pass over the block and is three times as fast as `square().sum()`. It accumulates
    sequentially, so a long row is summed in parts to keep the rounding error small.
    """
    return compute_row_norms(block).square()


def compute_row_norms(block: Tensor) -> Tensor:
    """`(batch,)`: the norm of each sample; see `sum_squares`."""
    rows = _flatten_samples(block)
    count = rows.shape[1] // _PART_SIZE
    if count > 1:
        parts, rest = rows.tensor_split([count * _PART_SIZE], 1)
        norms = [torch.linalg.vector_norm(parts.unflatten(1, (count, _PART_SIZE)), dim=2)]
        rows = torch.cat([*norms, torch.linalg.vector_norm(rest, dim=1, keepdim=True)], 1)
    return torch.linalg.vector_norm(rows, dim=1)


def add_tensors(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of at least one tensor."""
    total, *rest = tensors
    for tensor in rest:
        total = total + tensor
    return total


def find_factors(term: Term) -> Iterator[Tensor]:
    """The tensors that a term keeps."""
    for value in vars(term).values():
        for part in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(part, Tensor):
                yield part
            elif isinstance(part, Term):
                yield from find_factors(part)


def is_complex(term: Term) -> bool:
    """Whether a factor of the term is complex, and so its gradients are."""
    return any(tensor.is_complex() for tensor in find_factors(term))


def map_factors(term: AnyTerm, function: Callable[[Tensor], Tensor]) -> AnyTerm:
    """The term with a function of each factor in its place."""

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        if isinstance(value, Term):
            return map_factors(value, function)
        return type(value)(map(convert, value)) if type(value) in (list, tuple) else value

    changed: Any = {name: convert(value) for name, value in vars(term).items()}
    return replace(term, **changed)  # type: ignore[type-var]  # each term is a dataclass


def _clear_rows(factor: Tensor, is_cleared: Tensor) -> Tensor:
    """The factor with zeros for some samples. Its strides stay, so that sums of the others add up in the same order."""
    if not (factor.is_floating_point() or factor.is_complex()):
        return factor
    own = factor
    for dim in range(1, factor.dim()):
        if factor.stride(dim) == 0 and factor.shape[dim]:  # expanded
            own = own.narrow(dim, 0, 1)
    return own.clone().masked_fill_(is_cleared.view(-1, *[1] * (factor.dim() - 1)), 0).expand(factor.shape)


def widen_factors(term: AnyTerm) -> AnyTerm:
    """The term with its factors in float32 at least, so that its dense form is not rounded to fewer digits."""
    return term if all(widen(t) is t for t in find_factors(term)) else map_factors(term, widen)


def convert_to_double(term: AnyTerm) -> AnyTerm:
    """The term with its factors in float64 or complex128."""
    return map_factors(term, to_double)


def sum_dense(terms: Sequence[Term]) -> Tensor:
    """The sum of the dense forms of several terms of one weight."""
    return add_tensors([term.dense() for term in terms])
