"""Strategies of correlated noise: sensitivities by brute force, errors by dense matrices, published values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import pytest
import torch

from persample.private import BandedInverse, BandedInverseRoot, BandedMatrix, Cancelling
from persample.private.correlated import make_noise
from persample.private.errors import PrivateTrainingError
from persample.private.noise import Noise
from persample.private.strategies import Strategy


@dataclass(frozen=True)
class Given(Strategy):
    """Given coefficients of C^-1, also such that C has negative or increasing ones."""

    inverse: tuple[float, ...]
    name = "given"

    @property
    def taps(self) -> Any:
        return np.array(self.inverse)


def make_matrix(coefficients: Any) -> Any:
    n = len(coefficients)
    return np.array([[coefficients[i - j] if i >= j else 0.0 for j in range(n)] for i in range(n)])


def list_patterns(steps: int, separation: int) -> Iterator[tuple[int, ...]]:
    for count in range(1, -(-steps // separation) + 1):
        for places in combinations(range(steps), count):
            if all(b - a >= separation for a, b in pairwise(places)):
                yield places


def find_sensitivity(strategy: Strategy) -> float:
    """The largest |C u| over all places of participations and all signs of their contributions."""
    matrix = make_matrix(strategy.coefficients)
    return max(
        float(np.linalg.norm(matrix[:, places] @ np.array(signs)))
        for places in list_patterns(strategy.steps, strategy.separation)
        for signs in product((1.0, -1.0), repeat=len(places))
    )


EXACT = [
    *(BandedInverseRoot(8, b, bands) for b in (1, 2, 3, 8) for bands in (1, 2, 4)),
    *(Cancelling(8, b, share) for b in (1, 3) for share in (0.0, 0.5, 0.95)),
    *(BandedInverse(8, b, 2) for b in (2, 3)),
    *(BandedMatrix(9, b, bands) for b in (3, 4, 9) for bands in (1, 2, 3)),
]
BOUNDED = [
    Given(7, 2, (1.0, 0.5)),
    Given(7, 3, (1.0, -1.4, 0.3)),
    Given(8, 2, (1.0, -0.1, -0.5)),
    BandedInverse(8, 3, 3),
]


@pytest.mark.parametrize("strategy", EXACT, ids=str)
def test_sensitivity(strategy: Strategy) -> None:
    assert strategy.sensitivity == pytest.approx(find_sensitivity(strategy), rel=1e-12)


@pytest.mark.parametrize("strategy", BOUNDED, ids=str)
def test_bound_of_the_sensitivity(strategy: Strategy) -> None:
    assert strategy.sensitivity >= find_sensitivity(strategy) * (1 - 1e-12)


@pytest.mark.parametrize("strategy", [*EXACT, *BOUNDED], ids=str)
def test_errors_by_dense_matrices(strategy: Strategy) -> None:
    noise = np.linalg.inv(make_matrix(strategy.coefficients))
    rows = np.linalg.norm(np.tril(np.ones_like(noise)) @ noise, axis=1)
    np.testing.assert_allclose(noise[:, 0], strategy.noise_coefficients, atol=1e-12)
    assert strategy.mean_error == pytest.approx(strategy.sensitivity * np.sqrt(np.mean(rows**2)))
    assert strategy.max_error == pytest.approx(strategy.sensitivity * rows.max())


def test_published_error_of_the_square_root() -> None:
    """Sum of squares of binomial(2 k, k) / 4^k = (ln n + gamma + ln 16) / pi + o(1) (Fichtenberger et al., 2023)."""
    n = 4096
    error = BandedInverseRoot(n, n, bands=n).max_error
    assert error == pytest.approx((math.log(n) + 0.5772156649 + math.log(16)) / math.pi, abs=1e-3)


def test_error_of_independent_noise() -> None:
    """Without correlation the last prefix sum has the noise of all steps, and a sample k participations."""
    strategy = BandedMatrix(40, 10, bands=1)
    assert strategy.sensitivity == pytest.approx(2) and strategy.max_error == pytest.approx(2 * math.sqrt(40))


@pytest.mark.parametrize(("steps", "separation"), [(64, 16), (500, 50), (500, 500)])
def test_optimised_bands_are_better(steps: int, separation: int) -> None:
    errors = [BandedInverse(steps, separation, bands).mean_error for bands in (1, 2, 4, 8)]
    assert all(b < a for a, b in pairwise(errors))
    for bands, error in zip((2, 4, 8), errors[1:], strict=True):
        assert error < BandedInverseRoot(steps, separation, bands).mean_error
    shares = np.linspace(0, 0.99, 100)
    assert errors[1] <= min(Cancelling(steps, separation, share).mean_error for share in shares) * 1.0001
    banded = [BandedMatrix(steps, separation, bands).mean_error for bands in (1, 2, 4, 8)]
    assert all(b < a for a, b in pairwise(banded))


def test_optimum_of_two_bands() -> None:
    """The optimum of a banded matrix with two bands, found by a fine grid."""
    n, best = 30, BandedMatrix(30, 30, bands=2)

    def measure(c: float) -> float:
        inverse = np.linalg.inv(make_matrix([1.0, c] + [0.0] * (n - 2)))
        return float(np.linalg.norm(np.tril(np.ones((n, n))) @ inverse) / math.sqrt(n) * math.hypot(1, c))

    assert best.mean_error == pytest.approx(min(map(measure, np.linspace(0, 1, 1001))), rel=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: BandedMatrix(10, 3, bands=4),
        lambda: BandedMatrix(10, 11, bands=1),
        lambda: BandedMatrix(0, 0, bands=1),
        lambda: BandedInverseRoot(10, 2, bands=0),
        lambda: Cancelling(10, 2, share=1.0),
        lambda: Cancelling(10, 2, share=-0.1),
        lambda: Cancelling(10, 2, share=math.nan),
        lambda: Given(10, 2, (0.5, -0.1)),
    ],
)
def test_refused(make: Any) -> None:
    with pytest.raises(PrivateTrainingError):
        make()


# ---- the noise ----

STRATEGIES = [
    BandedInverseRoot(12, 4, 4), Cancelling(12, 4, 0.7), BandedInverse(12, 3, 3), BandedMatrix(12, 4, 3),
]  # fmt: skip


def draw(noise: Noise, steps: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    rows = []
    for _ in range(steps):
        parts = [torch.zeros(5, 3, dtype=dtype), torch.zeros(7, dtype=dtype)]
        noise.add_to(parts, 2.0)
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


def make_plain(key: bytes) -> Noise:
    plain = Noise()
    plain._key = key
    return plain


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_noise_times_the_strategy_is_independent(strategy: Strategy) -> None:
    noise = make_noise(strategy)
    want = draw(make_plain(noise._key), 12).numpy()
    np.testing.assert_allclose(make_matrix(strategy.coefficients) @ draw(noise, 12).numpy(), want, atol=1e-12)


@pytest.mark.parametrize(
    "strategy", [BandedMatrix(9, 3, 1), BandedInverseRoot(9, 3, 1), Cancelling(9, 3, 0.0)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_band_is_independent_noise_to_the_bit(strategy: Strategy, dtype: torch.dtype) -> None:
    noise = make_noise(strategy)
    assert torch.equal(draw(noise, 9, dtype), draw(make_plain(noise._key), 9, dtype))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_restart_draws_the_same_noise(strategy: Strategy) -> None:
    noise = make_noise(strategy)
    draw(noise, 7)
    state = noise.get_state()
    want, again = draw(noise, 5), make_noise(strategy)
    again.set_state(state)
    torch.testing.assert_close(draw(again, 5), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_new_key_keeps_the_noise_of_earlier_steps(strategy: Strategy) -> None:
    """Rows after `mix` still take back the rows before: C times the noise is independent, with other rows from then."""
    noise = make_noise(strategy)
    keys = [noise._key]
    first = draw(noise, 5)
    state = noise.get_state()
    rows = []
    for _ in range(2):
        again = make_noise(strategy)
        again.set_state(state)
        again.mix()
        keys.append(again._key)
        again.set_state(again.get_state())  # a second checkpoint
        rows.append(make_matrix(strategy.coefficients) @ torch.cat([first, draw(again, 7)]).numpy())
    want = [draw(make_plain(key), 12).numpy() for key in keys]
    for found, later in zip(rows, want[1:], strict=True):
        np.testing.assert_allclose(found[:5], want[0][:5], atol=1e-12)
        np.testing.assert_allclose(found[5:], later[5:], atol=1e-12)
    assert np.abs(rows[0][5:] - rows[1][5:]).min() > 0


def test_changed_parameters_are_refused() -> None:
    noise = make_noise(BandedInverseRoot(12, 4, 4))
    noise.add_to([torch.zeros(3), torch.zeros(2)], 1.0)
    with pytest.raises(PrivateTrainingError, match="trainable parameters have changed"):
        noise.add_to([torch.zeros(3)], 1.0)


def test_a_fork_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = make_noise(BandedInverseRoot(12, 4, 4))
    monkeypatch.setattr("persample.private.correlated.getpid", lambda: -1)
    with pytest.raises(PrivateTrainingError, match="forked"):
        noise.add_to([torch.zeros(3)], 1.0)
