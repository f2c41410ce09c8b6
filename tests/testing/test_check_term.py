"""The battery for terms accepts right terms, and names the answer that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from persample.terms import Dense, Outer, Rows, Term
from persample.testing import check_term


def make_factors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 2, 3, dtype=dtype), torch.randn(4, 2, 5, dtype=dtype)


class Preserving(Outer):
    """Parts of the term are of the same class."""

    def some(self, start: int, stop: int) -> Any:
        return type(self)(self.input[start:stop], self.grad[start:stop])

    def part(self, start: int, stop: int) -> Any:
        return type(self)(self.input, self.grad[..., start:stop])


def change(method: str, replacement: Callable[..., Any]) -> Outer:
    """An outer product with one wrong method; `replacement(self, right result, *arguments)` is its result."""

    def wrong(self: Outer, *arguments: Any) -> Any:
        return replacement(self, getattr(Preserving, method)(self, *arguments), *arguments)

    return type("Wrong", (Preserving,), {method: wrong})(*make_factors())


def scale(self: Outer, right: Any, *arguments: Any) -> Any:
    return right * 1.001


# The wrong method, what it returns, and the answer in the message.
WRONG: dict[str, tuple[str, Callable[..., Any], str]] = {
    "norms": ("squared_norms", scale, r"squared_norms\(\)"),
    "norms in half precision": ("squared_norms", lambda self, right: right.half(), r"squared_norms\(\)"),
    "norms of another shape": ("squared_norms", lambda self, right: right[:, None], r"squared_norms\(\).*shape"),
    "norms that are NaN": ("squared_norms", lambda self, right: right * torch.nan, r"squared_norms\(\)"),
    "compact norms": ("compute_norms_and_compact", lambda self, right: (right[0] * 2, right[1]), "compact.*0"),
    "compact term": (
        "compute_norms_and_compact", lambda self, right: (right[0], Dense(self.dense() * 2)), r"compact\(\)\[1\]",
    ),
    "sum that ignores weights": ("sum", lambda self, right, weights: self.dense().sum(0), r"sum\(weights\)"),
    "sum of no samples": (
        "sum", lambda self, right, weights: right if len(weights) else right + 1, r"sum\(weights\) of 0 samples",
    ),
    "dot": ("dot", lambda self, right, direction: -right, r"dot\(direction\)"),
    "inner": ("inner", scale, r"inner\(term of the same class\)"),
    "inner with other classes": (
        "inner", lambda self, right, other: right if isinstance(other, Outer) else right + 1, r"inner\(Dense\)",
    ),
    "gram": ("gram", lambda self, right, *_: right.flip(0), r"gram\(term, block_size=1\)"),
    "gram of another batch size": (
        "gram", lambda self, right, other, *_: right if self.batch == other.batch else right.flip(1), "another batch",
    ),
    "gram of large blocks": (
        "gram", lambda self, right, other, size=50: right * (2 if size > 50 else 1), "block_size=1000000000",
    ),
    "gram with other classes": (
        "gram", lambda self, right, other, *_: right if isinstance(other, Outer) else right + 1, r"gram\(Dense\)",
    ),
    "square_sum": ("square_sum", lambda self, right, *_: right.flip(0), r"square_sum\(block_size=1\)"),
    "project": ("project", lambda self, right, sketch: right.roll(1, 1), r"project\(tensor sketch\)"),
    "some": ("some", lambda self, right, start, stop: Outer(right.input.flip(0), right.grad), r"some\(0, 2\)"),
    "shape of some": (
        "some", lambda self, right, start, stop: Outer(self.input, self.grad), r"some\(0, 0\)",
    ),
    "part": (
        "part", lambda self, right, start, stop: Outer(self.input, self.grad[..., : stop - start]), r"part\(1, 2\)",
    ),
    "write with a scale": (
        "write", lambda self, right, out, factor=1.0: out.copy_(self.dense()), r"write\(out, 3.0\) to torch.float64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answer_is_named(name: str) -> None:
    method, replacement, message = WRONG[name]
    with pytest.raises(AssertionError, match=message):
        check_term(change(method, replacement))


def test_wrong_norms_of_one_algorithm() -> None:
    class Wrong(Outer):
        def squared_norms(self) -> Tensor:
            from persample.terms.cost import choose_norm_algorithm

            factor = 2 if choose_norm_algorithm(2, 3, 5) == "ghost" else 1
            return Dense(self.dense()).squared_norms() * factor

    with pytest.raises(AssertionError, match=r"squared_norms\(\) is wrong.* Algorithm: ghost"):
        check_term(Wrong(*make_factors()))


def test_message_tells_the_difference() -> None:
    with pytest.raises(
        AssertionError, match=r"Wrong\.dot\(direction\) is wrong: it differs by 1\.0e-03 of the largest"
    ):
        check_term(change("dot", scale))


def test_wrong_dense_form_needs_expected_gradients() -> None:
    input, grad = make_factors()
    expected = torch.einsum("nto,nti->noi", grad, input)
    check_term(Outer(input, grad), expected)
    with pytest.raises(AssertionError, match=r"Outer\.dense\(\) is wrong"):
        check_term(Outer(input, grad), expected * 2)


def test_wrong_sum_with_itself() -> None:
    """A term that is changed by another answer."""

    @dataclass(frozen=True)
    class Counting(Dense):
        def dense(self) -> Tensor:
            return self.values

        def squared_norms(self) -> Tensor:
            result = super().squared_norms()
            self.values.mul_(1.01)
            return result

    with pytest.raises(AssertionError):
        check_term(Counting(torch.randn(4, 3, dtype=torch.float64)))


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["Outer", "Rows", "Dense"])
def test_terms_in_every_dtype(kind: str, dtype: torch.dtype) -> None:
    terms: dict[str, Term] = {
        "Outer": Outer(*make_factors(dtype)),
        "Rows": Rows(torch.randint(0, 5, (4, 6)), torch.randn(4, 6, 3, dtype=dtype), 5),
        "Dense": Dense(torch.randn(4, 5, 3, dtype=dtype)),
    }
    check_term(terms[kind])


def test_term_with_three_methods() -> None:
    """A new class has to define only the dense form and its parts."""

    @dataclass(frozen=True)
    class Diagonal(Term):
        """`g_n = diag(entries[n])`."""

        entries: Tensor
        start: int = 0
        stop: int | None = None

        @property
        def batch(self) -> int:
            return len(self.entries)

        @property
        def shape(self) -> torch.Size:
            return self.dense().shape[1:]

        def dense(self) -> Tensor:
            return self.entries.diag_embed()[:, self.start : self.stop]

        def some(self, start: int, stop: int) -> Term:
            return replace(self, entries=self.entries[start:stop])

        def part(self, start: int, stop: int) -> Term:
            return replace(self, start=self.start + start, stop=self.start + stop)

    check_term(Diagonal(torch.randn(4, 5)))


def test_term_that_is_no_dataclass() -> None:
    class Plain(Dense):
        def __init__(self, values: Tensor, other: int) -> None:
            super().__init__(values)

    with pytest.raises(AssertionError, match="make it a dataclass"):
        check_term(Plain(torch.randn(4, 3), 1))


def test_too_few_samples() -> None:
    with pytest.raises(ValueError, match="at least 3 samples, got 2"):
        check_term(Dense(torch.randn(2, 3)))
