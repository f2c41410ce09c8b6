"""The floors of squared norms: above them, norms and sums are right up to the tolerance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from persample.terms import Blocks, Dense, Folded, Outer, Patches, Rows, Sum, Term
from persample.terms.base import convert_to_double
from persample.terms.cost import force_algorithm
from persample.terms.rounding import TOLERANCE

pytestmark = pytest.mark.quick

B = 4


def make_factor(kind: str, positions: int, length: int, repeat: float) -> Tensor:
    """Vectors for each position. With a small `repeat` they are nearly equal."""
    first = {
        "normal": torch.randn(B, 1, length),
        "positive": torch.rand(B, 1, length),
        "constant": torch.rand(B, 1, 1).expand(B, 1, length),
    }[kind]
    return first * (1 + repeat * torch.randn(B, positions, 1)) + repeat * torch.randn(B, positions, length)


def make_outer(positions: int, inputs: int, outputs: int, kind: str, repeat: float) -> Outer:
    signs = torch.tensor([1.0, -1.0]).repeat(positions)[:positions, None]
    return Outer(
        make_factor(kind, positions, inputs, repeat), make_factor("normal", positions, outputs, repeat) * signs
    )


def assert_reliable(term: Term) -> None:
    """The errors of squared norms and of shares of a sum are within what their floor allows."""
    exact = convert_to_double(term).dense().flatten(1)
    squares, floor, same = term.measure()
    assert floor is not None
    assert same.batch == term.batch
    assert ((squares - exact.square().sum(1)).abs() <= 2 * TOLERANCE * floor + 5e-6 * squares).all()
    for n in range(B):
        weights = torch.zeros(B)
        weights[n] = 1.0
        error = (term.sum(weights).double().flatten() - exact[n]).norm()
        assert error <= TOLERANCE * max(floor[n], squares[n]).sqrt()


@pytest.mark.parametrize("repeat", [1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("kind", ["normal", "positive", "constant"])
@pytest.mark.parametrize("sizes", [(2, 16, 16), (2, 300, 64), (2, 2048, 32), (64, 64, 256), (300, 128, 512)], ids=str)
@pytest.mark.parametrize("algorithm", ["ghost", "dense"])
def test_outer_products(sizes: tuple[int, int, int], kind: str, repeat: float, algorithm: str) -> None:
    torch.manual_seed(0)
    with force_algorithm(algorithm):
        assert_reliable(make_outer(*sizes, kind, repeat))


def make_patches(repeat: float) -> Patches:
    x = torch.randn(B, 1, 8, 1).expand(B, 1, 8, 12) + repeat * torch.randn(B, 1, 8, 12)
    signs = torch.tensor([1.0, -1.0]).repeat(6)
    grad = torch.randn(B, 1, 16, 1).expand(B, 1, 16, 12) * signs
    return Patches(x, grad, [3], [1], [(1, 1)], [1], 1)


TERMS: dict[str, Callable[[float], Term]] = {
    "rows": lambda repeat: Rows(torch.zeros(B, 6, dtype=torch.long), make_outer(6, 3, 5, "normal", repeat).grad, 3),
    "sum of outer products and rows": lambda repeat: Sum(
        [
            Rows(torch.arange(4).repeat(B, 1), make_outer(4, 3, 5, "normal", repeat).grad, 4),
            make_outer(6, 5, 4, "normal", repeat),
        ]
    ),
    "sum that cancels": lambda repeat: Sum([o := make_outer(3, 5, 4, "normal", 1.0), Dense(-o.dense() * (1 + repeat))]),
    "folded": lambda repeat: Folded(make_outer(6, 12, 40, "positive", repeat), [40, 3, 4], [0]),
    "blocks": lambda repeat: Blocks([make_outer(6, 12, 40, "positive", repeat)], [1], 60),
}


@pytest.mark.parametrize("repeat", [1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("kind", TERMS, ids=str)
def test_other_terms(kind: str, repeat: float) -> None:
    torch.manual_seed(0)
    assert_reliable(TERMS[kind](repeat))


@pytest.mark.parametrize("repeat", [1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("algorithm", ["ghost", "pixels", "dense"])
def test_patches(algorithm: str, repeat: float) -> None:
    torch.manual_seed(0)
    with force_algorithm(algorithm):  # type: ignore[arg-type]
        assert_reliable(make_patches(repeat))


def test_one_position_needs_no_floor() -> None:
    assert make_outer(1, 3, 4, "normal", 1.0).measure()[1] is None


def test_ordinary_data_is_far_above_its_floor() -> None:
    torch.manual_seed(0)
    for sizes in ((8, 64, 64), (64, 256, 256), (256, 768, 768)):
        term = Outer(torch.randn(B, sizes[0], sizes[1]), torch.randn(B, sizes[0], sizes[2]))
        squares, floor, _ = term.measure()
        assert floor is not None
        assert (squares > 10 * floor).all()


def test_rows_in_half_precision_are_not_rounded_before_their_norm() -> None:
    torch.manual_seed(0)
    term = Outer(torch.randn(B, 9, 4).bfloat16(), torch.randn(B, 9, 5).bfloat16())
    expected = convert_to_double(term).dense().square().flatten(1).sum(1)
    for algorithm in ("ghost", "dense"):
        with force_algorithm(algorithm):
            torch.testing.assert_close(term.squared_norms().double(), expected, rtol=1e-6, atol=0.0)
            torch.testing.assert_close(term.measure(compact=True)[0].double(), expected, rtol=1e-6, atol=0.0)


# ---- many equal contributions: their sum is wrong by more if they are added up one after the other ----

MANY = 40_000
EQUAL: dict[str, Callable[[], Term]] = {
    "outer, small": lambda: Outer(torch.full((1, MANY, 1), 0.1), torch.full((1, MANY, 1), 0.7)),
    "outer": lambda: Outer(torch.full((1, MANY, 8), 0.1), torch.rand(1, 1, 8).expand(1, MANY, 8)),
    "outer, wide": lambda: Outer(torch.full((1, 2, 30 * MANY), 0.37), torch.full((1, 2, 3), 0.7)),
    "outer, one position": lambda: Outer(torch.full((1, 1, 30 * MANY), 0.37), torch.full((1, 1, 3), 0.7)),
    "rows": lambda: Rows(torch.ones(1, MANY, dtype=torch.long), torch.rand(1, 1, 8).repeat(1, MANY, 1), 3),
    "rows, one gradient": lambda: Rows(
        torch.ones(1, MANY, dtype=torch.long), torch.rand(1, 1, 8).expand(1, MANY, 8), 3
    ),
    "dense": lambda: Dense(torch.full((1, 30 * MANY), 0.37)),
    "patches": lambda: Patches(
        torch.rand(1, 1, 8, 1, 1).expand(1, 1, 8, 200, 200), torch.rand(1, 1, 16, 1, 1).expand(1, 1, 16, 200, 200),
        [3, 3], [1, 1], [(1, 1), (1, 1)], [1, 1], 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", EQUAL, ids=str)
def test_many_equal_contributions(kind: str) -> None:
    torch.manual_seed(0)
    term = EQUAL[kind]()
    exact = convert_to_double(term).dense()[0]
    squares, _, _ = term.measure()
    assert float(squares[0]) == pytest.approx(float(exact.square().sum()), rel=2 * TOLERANCE)
    error = (term.sum(torch.ones(1)).double() - exact).norm()
    assert error <= TOLERANCE * exact.norm()
