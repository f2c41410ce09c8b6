"""The battery for a term: every answer against the dense form in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from persample._internal.precision import to_double
from persample.terms import (
    Algorithm,
    Dense,
    KroneckerSketch,
    Outer,
    Rows,
    Sides,
    Sketch,
    SparseSketch,
    TensorSketch,
    Term,
    add_terms,
    convert_to_double,
    find_factors,
    force_algorithm,
    make_groups,
    merge_samples,
    split_shape,
)
from persample.testing.comparison import assert_answer, assert_precise

TOLERANCES = {64: 1e-8, 32: 1e-5, 16: 5e-2}  # by the number of bits of the narrowest factor
NORM_ALGORITHMS: tuple[Algorithm | None, ...] = (None, "ghost", "pixels", "dense")  # None: the cheapest
BLOCK_SIZES = (1, 50, 10**9)


def check_term(term: Term, expected: Tensor | None = None, *, tolerance: float | None = None) -> None:
    """Check every answer of a term against its dense form in float64.

    The answers are: the dense form, also written to a tensor of another dtype; the terms of some samples and of some
    rows of the weight; norms, weighted sums, dot products, inner products, Gram matrices, sums of squares and random
    projections; sums with a term of the same class, of other classes, and with itself; the conversion to float64. They
    are computed with each algorithm that a term can choose, and also for one sample and for no samples.

    Args:
        term: A term of at least 3 samples, all different. Use random factors, with more than one row and column.
        expected: The per-sample gradients, `(batch, *weight.shape)`, such as those of `loop_gradients`. By default, the
            dense form of the term in float64, which is then not checked itself.
        tolerance: The largest difference, relative to the largest entry of an answer. By default, it depends on the
            dtype of the term's factors.

    Raises:
        AssertionError: An answer is wrong; the message names the answer and the difference.

    >>> check_term(Outer(torch.randn(4, 2, 3), torch.randn(4, 2, 5)))
    """
    case = make_term_case(term, expected, tolerance)
    for check in CHECKS.values():
        check(case)


@dataclass(frozen=True)
class TermCase:
    """A term, its dense form in float64, the tolerance of comparisons, and the bits of the narrowest factor."""

    term: Term
    expected: Tensor
    tolerance: float
    bits: int

    @property
    def batch(self) -> int:
        return len(self.expected)

    @property
    def rows(self) -> Tensor:
        """The expected gradients as a matrix, with one row for each sample."""
        return _flatten(self.expected)

    def compare(self, answer: str, actual: Any, expected: Tensor) -> None:
        answer = f"{type(self.term).__name__}.{answer}"
        assert_answer(answer, actual, expected, self.tolerance)
        assert_precise(answer, actual, self.bits)

    def require(self, what: str, actual: Any, expected: Any) -> None:
        """Assert that a property other than a tensor is equal to its expected value."""
        if actual != expected:
            raise AssertionError(f"{type(self.term).__name__}.{what} is {actual}, and {expected} is expected.")

    def compare_wide(self, answer: str, actual: Any, expected: Tensor) -> None:
        """Compare an answer that is a sum, and so must be in float32 or wider."""
        self.compare(answer, actual, expected)
        assert_precise(f"{type(self.term).__name__}.{answer}", actual, 32)


def make_term_case(term: Term, expected: Tensor | None = None, tolerance: float | None = None) -> TermCase:
    """The arguments of `check_term` with their defaults."""
    if term.batch < 3:
        raise ValueError(f"check_term needs a term of at least 3 samples, got {term.batch}.")
    factors = (factor for factor in find_factors(term) if factor.is_floating_point() or factor.is_complex())
    bits = min((torch.finfo(factor.dtype).bits for factor in factors), default=64)
    gradients = _convert(term).dense() if expected is None else expected
    return TermCase(term, to_double(gradients), TOLERANCES[bits] if tolerance is None else tolerance, bits)


def _convert(term: Term) -> Term:
    try:
        converted: Term = convert_to_double(term)
    except TypeError as error:
        raise AssertionError(
            f"{type(term).__name__} cannot be converted to float64, which variance() needs: make it a dataclass whose "
            f"fields are the factors ({error})."
        ) from error
    return converted


# ---- the dense form and its parts ----


def _check_dense(case: TermCase) -> None:
    case.compare("dense()", case.term.dense(), case.expected)
    case.require("batch", case.term.batch, case.batch)
    case.require("shape", case.term.shape, case.expected.shape[1:])


def _check_write(case: TermCase, scale: float, narrow: bool) -> None:
    dtype = case.term.dense().dtype
    if narrow:  # the parameter may have another dtype than the factors
        dtype = torch.complex64 if dtype.is_complex else torch.float32
    out = torch.full(case.expected.shape, torch.nan, dtype=dtype)
    case.term.write(out, scale)
    tolerance = max(case.tolerance, TOLERANCES[torch.finfo(dtype).bits])
    assert_answer(f"{type(case.term).__name__}.write(out, {scale}) to {dtype}", out, case.expected * scale, tolerance)


def _check_samples(case: TermCase) -> None:
    for start in range(case.batch + 1):
        for stop in range(start, case.batch + 1):
            some = case.term.some(start, stop)
            case.compare(f"some({start}, {stop}).dense()", some.dense(), case.expected[start:stop])
            case.require(f"some({start}, {stop}).batch", some.batch, stop - start)
            case.require(f"some({start}, {stop}).shape", some.shape, case.term.shape)


def _check_rows(case: TermCase) -> None:
    count = case.term.shape[0] if case.term.shape else 0
    for start in range(count):
        for stop in range(start + 1, count + 1):
            part, expected = case.term.part(start, stop), case.expected[:, start:stop]
            case.compare(f"part({start}, {stop}).dense()", part.dense(), expected)
            case.require(f"part({start}, {stop}).shape", part.shape, expected.shape[1:])


def _check_conversion(case: TermCase) -> None:
    values = _convert(case.term).dense()
    case.require("dense().dtype after the conversion to float64", values.dtype, case.expected.dtype)
    case.compare("dense() after the conversion to float64", values, case.expected)


# ---- answers ----


def _check_norms(case: TermCase) -> None:
    case.compare_wide("squared_norms()", case.term.squared_norms(), case.rows.abs().square().sum(1))


def _check_compact(case: TermCase) -> None:
    squared, compact = case.term.compute_norms_and_compact()
    case.compare_wide("compute_norms_and_compact()[0]", squared, case.rows.abs().square().sum(1))
    case.compare("compute_norms_and_compact()[1].dense()", compact.dense(), case.expected)


def _check_sum(case: TermCase) -> None:
    weights = torch.linspace(-1, 2, case.batch)
    total = (weights.to(case.rows) @ case.rows).view(case.expected.shape[1:])
    case.compare_wide("sum(weights)", case.term.sum(weights), total)


def _check_dot(case: TermCase) -> None:
    direction = _draw(case, 1)[0]
    products = (case.rows.conj() @ to_double(direction).flatten()).real
    case.compare_wide("dot(direction)", case.term.dot(direction), products)


def _check_inner(case: TermCase) -> None:
    first, second = case.term.some(0, case.batch - 1), case.term.some(1, case.batch)
    products = (case.rows[:-1].conj() * case.rows[1:]).real.sum(1)
    case.compare_wide("inner(term of the same class)", first.inner(second), products)


def _check_inner_of_other_classes(case: TermCase) -> None:
    for name, other, values in _make_others(case):
        products = (case.rows.conj() * _flatten(values)).real.sum(1)
        case.compare_wide(f"inner({name})", case.term.inner(other), products)
        case.compare_wide(f"inner(), called by {name}", other.inner(case.term), products)


def _check_gram(case: TermCase, block_size: int) -> None:
    products = (case.rows.conj() @ case.rows.mT).real
    answer = f"gram(term, block_size={block_size})"
    case.compare_wide(answer, case.term.gram(case.term, block_size), products)
    fewer = case.term.some(0, case.batch - 1)
    case.compare_wide(f"{answer} of another batch size", fewer.gram(case.term, block_size), products[:-1])
    case.compare_wide(f"{answer} of another batch size", case.term.gram(fewer, block_size), products[:, :-1])


def _check_gram_of_other_classes(case: TermCase) -> None:
    for name, other, values in _make_others(case):
        products = (case.rows.conj() @ _flatten(values).mT).real
        case.compare_wide(f"gram({name})", case.term.gram(other), products)
        case.compare_wide(f"gram(), called by {name}", other.gram(case.term), products.mT)


def _check_square_sum(case: TermCase, block_size: int) -> None:
    squares = case.expected.abs().square().sum(0)
    case.compare_wide(f"square_sum(block_size={block_size})", case.term.square_sum(block_size), squares)


def _check_projection(case: TermCase, method: str) -> None:
    """The projection of a term equals that of its dense form, so that projections of different terms are comparable."""
    if case.expected.is_complex():  # only real gradients can be projected
        return
    expected = Dense(case.expected).project(make_sketch(method, case.term.shape))
    case.compare_wide(f"project({method} sketch)", case.term.project(make_sketch(method, case.term.shape)), expected)


def _check_kronecker_projection(case: TermCase, size: int) -> None:
    """As `_check_projection`. With many numbers to keep, the sides are not projected."""
    if case.expected.is_complex():
        return
    sketch = KroneckerSketch(size, 1, "w", case.term.shape, torch.device("cpu"))
    expected = sketch.fold(sketch.sides.multiply_dense(case.expected))
    projected = sketch.fold(case.term.multiply_sides(sketch.sides))
    case.compare_wide(f"multiply_sides(), folded to {size}", projected, expected)


def _check_sides(case: TermCase) -> None:
    """The product with both sides, where each of them may be the identity."""
    if case.expected.is_complex():
        return
    rows, columns = split_shape(case.term.shape)
    draw = torch.Generator().manual_seed(3)
    left, right = (torch.randn(count, 2, generator=draw) for count in (rows, columns))
    for sides in (Sides(a, b, rows, columns) for a in (left, None) for b in (right, None)):
        given = [name for name in ("left", "right") if getattr(sides, name) is not None]
        expected = sides.multiply_dense(case.expected)
        case.compare_wide(f"multiply_sides() with {given}", case.term.multiply_sides(sides), expected)


def make_sketch(method: str, shape: torch.Size) -> Sketch:
    """A random projection to 16 numbers, always the same."""
    return TensorSketch(16, 1, "w", shape, torch.device("cpu")) if method == "tensor" else SparseSketch(16, 1, "w")


# ---- groups of samples ----


def _check_merged(case: TermCase, rows: Callable[[int], Tensor], weighted: bool) -> None:
    """A group of samples is like a sample with more positions; every answer has a row for each group."""
    ids = rows(case.batch)
    count = int(ids.max()) + 2  # the last group is empty
    factors = torch.linspace(0.5, 2, case.batch, dtype=torch.float64) if weighted else None
    merged = merge_samples(case.term, make_groups(ids, count, factors))
    scaled = case.expected if factors is None else case.expected * factors.view(-1, *[1] * len(case.term.shape))
    expected = case.expected.new_zeros(count, *case.term.shape).index_add_(0, ids, scaled)
    case.require("merge_samples(groups).batch", merged.batch, count)
    _check_total(case, "the other samples of its group", merged, expected)
    measured = merged.measure(compact=True)[2]
    case.compare("dense() of the groups after measure()", measured.dense(), expected)
    case.compare("some() of the groups", merged.some(1, count).dense(), expected[1:])


def _make_ragged_groups(batch: int) -> Tensor:
    return torch.arange(batch) * 2 % 3 // 2 * 2  # groups 0 and 2; group 1 is empty


def _make_very_ragged_groups(batch: int) -> Tensor:
    return torch.arange(batch).clamp(min=batch - 2) * 2  # nearly all samples in one group; some groups are empty


def _check_ragged_groups(case: TermCase) -> None:
    _check_merged(case, _make_ragged_groups, weighted=False)
    _check_merged(case, _make_very_ragged_groups, weighted=False)


# ---- sums with other terms, small batches ----


def _check_sum_of_one_class(case: TermCase) -> None:
    total = add_terms([case.term.some(0, case.batch - 1), case.term.some(1, case.batch)])
    _check_total(case, "a term of the same class", total, case.expected[:-1] + case.expected[1:])
    _check_total(case, "itself", add_terms([case.term, case.term]), 2 * case.expected)


def _check_sum_of_other_classes(case: TermCase) -> None:
    for name, other, values in _make_others(case):
        for total in (add_terms([case.term, other]), add_terms([other, case.term])):
            _check_total(case, name, total, case.expected + values)


def _check_total(case: TermCase, name: str, total: Term, expected: Tensor) -> None:
    rows, weights = _flatten(expected), torch.linspace(-1, 2, len(expected))
    products = (rows.conj() @ rows.mT).real
    weighted = (weights.to(rows) @ rows).view(expected.shape[1:])
    case.compare(f"dense() of the sum with {name}", total.dense(), expected)
    case.compare_wide(f"squared_norms() of the sum with {name}", total.squared_norms(), products.diagonal())
    case.compare_wide(f"sum(weights) of the sum with {name}", total.sum(weights), weighted)
    case.compare_wide(f"gram(term) of the sum with {name}", total.gram(total), products)


def _make_others(case: TermCase) -> Iterator[tuple[str, Term, Tensor]]:
    """Terms of other classes for the same weight: the name, the term, and its dense form in float64."""
    others: dict[str, Term] = {"Dense": Dense(_draw(case, case.batch))}
    if len(case.term.shape) == 2:
        rows, columns = case.term.shape
        others["Outer"] = Outer(_draw(case, case.batch, 2, columns), _draw(case, case.batch, 2, rows))
        ids = torch.arange(3 * case.batch).view(case.batch, 3) * 7 % rows
        others["Rows"] = Rows(ids, _draw(case, case.batch, 3, columns), rows)
    for name, other in others.items():
        if type(other) is not type(case.term):
            yield name, other, to_double(convert_to_double(other).dense())


def _check_small_batch(case: TermCase, batch: int) -> None:
    term, expected = case.term.some(0, batch), case.expected[:batch]
    squares = _flatten(expected).abs().square().sum(1)
    case.compare(f"dense() of {batch} samples", term.dense(), expected)
    case.compare_wide(f"squared_norms() of {batch} samples", term.squared_norms(), squares)
    case.compare_wide(f"sum(weights) of {batch} samples", term.sum(torch.ones(batch)), expected.sum(0))


# ---- tools ----


def _flatten(values: Tensor) -> Tensor:
    return values.reshape(len(values), values.shape[1:].numel())


def _draw(case: TermCase, batch: int, *shape: int) -> Tensor:
    """Random numbers in the dtype of the term, always the same: `(batch, *shape)`, by default the weight's shape."""
    size = (batch, *(shape or case.term.shape))
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(2), dtype=case.expected.dtype)
    return numbers.to(case.term.dense().dtype)


def _force(algorithm: Algorithm | None, check: Callable[[TermCase], None], case: TermCase) -> None:
    try:
        with force_algorithm(algorithm) if algorithm else nullcontext():
            check(case)
    except AssertionError as error:
        raise AssertionError(f"{error} Algorithm: {algorithm or 'the cheapest'}.") from None


def _list_checks() -> Iterator[tuple[str, Callable[[TermCase], None]]]:
    yield "dense", _check_dense
    yield "some", _check_samples
    yield "part", _check_rows
    yield "conversion to float64", _check_conversion
    for scale in (1.0, 3.0):
        for narrow in (False, True):
            name = f"write, scale {scale:g}{', narrow' if narrow else ''}"
            yield name, partial(_check_write, scale=scale, narrow=narrow)
    for algorithm in NORM_ALGORITHMS:
        ending = f", {algorithm}" if algorithm else ""
        yield f"squared_norms{ending}", partial(_force, algorithm, _check_norms)
        yield f"compute_norms_and_compact{ending}", partial(_force, algorithm, _check_compact)
        yield f"inner{ending}", partial(_force, algorithm, _check_inner)
        yield f"groups{ending}", partial(_force, algorithm, _check_ragged_groups)
        yield f"sum with one class{ending}", partial(_force, algorithm, _check_sum_of_one_class)
        yield f"sum with other classes{ending}", partial(_force, algorithm, _check_sum_of_other_classes)
    yield "groups, weighted", partial(_check_merged, rows=_make_ragged_groups, weighted=True)
    yield "very ragged groups, weighted", partial(_check_merged, rows=_make_very_ragged_groups, weighted=True)
    yield "groups of one sample", partial(_check_merged, rows=torch.arange, weighted=False)
    yield "sum", _check_sum
    yield "dot", _check_dot
    yield "inner, other classes", _check_inner_of_other_classes
    for block_size in BLOCK_SIZES:
        yield f"gram, block size {block_size}", partial(_check_gram, block_size=block_size)
        yield f"square_sum, block size {block_size}", partial(_check_square_sum, block_size=block_size)
    yield "gram, other classes", _check_gram_of_other_classes
    for method in ("tensor", "sparse"):
        yield f"project, {method}", partial(_check_projection, method=method)
    for size in (2, 16, 10**4):
        yield f"project, kronecker to {size}", partial(_check_kronecker_projection, size=size)
    yield "multiply_sides", _check_sides
    for batch in (1, 0):
        yield f"batch of {batch}", partial(_check_small_batch, batch=batch)


# Every check of the battery by name, in the order in which `check_term` runs them.
CHECKS: dict[str, Callable[[TermCase], None]] = dict(_list_checks())
