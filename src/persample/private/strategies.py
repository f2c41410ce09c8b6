"""Strategies of correlated noise: which parts of the noise of earlier steps a step takes back.

Step t releases its clipped sum plus `std * (C^-1 Z)[t]`, where Z has one row of independent Gaussian numbers for each
step, and C is a lower triangular Toeplitz matrix with ones on its diagonal. All steps together are one Gaussian
mechanism on C G, where G has the clipped sums as rows (Denisov et al., 2022: also if they depend on earlier releases).
Its sensitivity is the largest norm of C u over the participations u of a sample. The error that counts in a training is
that of the prefix sums of the releases, because the weights are such sums.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.signal import lfilter
from torch import Tensor

from persample.private.errors import PrivateTrainingError


@dataclass(frozen=True)
class Strategy(ABC):
    """A matrix C for a training of `steps` steps, in which two batches with one sample are `separation` steps apart.

    Each sample of the data is in one of `separation` bins, by a draw of its own, and step t takes its batch from bin
    `t % separation`. So a sample is in at most `participations` batches.

    >>> Cancelling(steps=100, separation=20, share=0.5).participations
    5
    """

    steps: int
    separation: int

    name: ClassVar[str]
    is_stored: ClassVar[bool] = False  # whether C is banded, and the noise of earlier steps is kept; else C^-1 is

    def __post_init__(self) -> None:
        if not 1 <= self.separation <= self.steps:
            raise PrivateTrainingError(
                f"A strategy needs 1 <= separation <= steps, got separation={self.separation} and steps={self.steps}."
            )
        if self.taps[0] != 1:  # also raises if they are not possible
            raise PrivateTrainingError(f"The first of the taps must be 1, got {self.taps[0]}.")

    @property
    @abstractmethod
    def taps(self) -> Any:
        """The coefficients that are not 0: of C if `is_stored`, else of C^-1."""

    @cached_property
    def coefficients(self) -> Any:
        """`(steps,)`: the first column of C."""
        return self._pad() if self.is_stored else _invert(self.taps, self.steps)

    @cached_property
    def noise_coefficients(self) -> Any:
        """`(steps,)`: the first column of C^-1. Number j is the weight of the noise that was new j steps ago."""
        return _invert(self.taps, self.steps) if self.is_stored else self._pad()

    def _pad(self) -> Any:
        taps = self.taps[: self.steps]
        return np.concatenate([taps, np.zeros(self.steps - len(taps))])

    @property
    def participations(self) -> int:
        """The largest number of batches with one sample."""
        return math.ceil(self.steps / self.separation)

    @property
    def is_amplified(self) -> bool:
        """Whether the noise is that of DP-SGD with the steps of one bin, so that Poisson samples amplify privacy.

        It is if the columns of C of two participations have no rows in common (Choquette-Choo et al., 2023).
        """
        return self.is_stored and len(self.taps) <= self.separation

    def count_entries(self, steps: int) -> int:
        """The number of Gaussian mechanisms as which the first steps are counted."""
        return math.ceil(steps / self.separation) if self.is_amplified else 1

    def get_entry_rate(self, sample_rate: float) -> float:
        """The rate with which a sample is in one of them, if it is in a batch of any step with `sample_rate`."""
        return min(1.0, self.separation * sample_rate) if self.is_amplified else 1.0

    @cached_property
    def sensitivity(self) -> float:
        """The largest norm of C u, where u has vectors of norm 1 at places that are `separation` steps apart, or more.

        If columns do not overlap, or if the coefficients are not negative and do not increase, it is the norm for equal
        vectors at the places 0, b, 2 b, ... (Kalinin and Lampert, 2024). Other coefficients are replaced by the
        smallest upper bounds of their absolute values that do not increase, which gives an upper bound.
        """
        c = self.coefficients
        if not self.is_amplified:
            c = np.maximum.accumulate(np.abs(c)[::-1])[::-1]
        return float(np.linalg.norm(sum_columns(c, self.separation)))

    @property
    def column_norm(self) -> float:
        """The largest norm of a column of C: the sensitivity to a single participation."""
        return float(np.linalg.norm(self.coefficients))

    @property
    def mean_error(self) -> float:
        """Root of the mean squared error of the prefix sums, for noise of deviation `sensitivity`."""
        weights = (self.steps - np.arange(self.steps)) / self.steps
        return self.sensitivity * float(np.sqrt(weights @ np.cumsum(self.noise_coefficients) ** 2))

    @property
    def max_error(self) -> float:
        """The same for the prefix sum with the largest error, that of all steps."""
        return self.sensitivity * float(np.linalg.norm(np.cumsum(self.noise_coefficients)))


@dataclass(frozen=True)
class BandedInverseRoot(Strategy):
    """BISR: C^-1 has the first `bands` coefficients of the inverse square root of the prefix sums.

    From Kalinin, McKenna, Upadhyay and Lampert (2025), https://arxiv.org/abs/2505.12128. One band is DP-SGD.

    >>> BandedInverseRoot(steps=100, separation=20, bands=4).taps
    array([ 1.    , -0.5   , -0.125 , -0.0625])
    """

    bands: int

    name = "BISR"

    @property
    def taps(self) -> Any:
        j = np.arange(1, _check_bands(self.bands))
        return np.concatenate([[1.0], np.cumprod((2 * j - 3) / (2 * j))])


@dataclass(frozen=True)
class Cancelling(Strategy):
    """DP-lambda-CGD: each step takes back `share` of the noise that was new in the step before.

    From https://arxiv.org/abs/2601.22334. A share of 0 is DP-SGD.

    >>> Cancelling(steps=100, separation=20, share=0.5).coefficients[:4]
    array([1.   , 0.5  , 0.25 , 0.125])
    """

    share: float

    name = "DP-lambda-CGD"

    @property
    def taps(self) -> Any:
        if not 0 <= self.share < 1:
            raise PrivateTrainingError(f"share must be at least 0 and less than 1, got {self.share}.")
        return np.array([1.0, -self.share])


@dataclass(frozen=True)
class BandedInverse(Strategy):
    """C^-1 has `bands` coefficients, which are optimised for the steps and the separation. One band is DP-SGD.

    >>> bool(BandedInverse(100, 20, bands=4).mean_error < BandedInverseRoot(100, 20, bands=4).mean_error)
    True
    """

    bands: int

    name = "banded inverse"

    @cached_property
    def taps(self) -> Any:
        root = BandedInverseRoot(self.steps, self.separation, self.bands).taps[1:]
        start = np.log(-root / (1 + root.sum()))
        return _optimise(start, _make_negative, lambda taps: _compute_error(taps, None, self.steps, self.separation))


@dataclass(frozen=True)
class BandedMatrix(Strategy):
    """C has `bands` coefficients, which are optimised for the steps. One band is DP-SGD.

    With at most `separation` bands, the steps of each bin are DP-SGD on that bin, with Poisson samples (Choquette-Choo
    et al., 2023, https://arxiv.org/abs/2306.08153). C^-1 is not banded: the noise of `bands - 1` steps is kept.

    >>> strategy = BandedMatrix(steps=100, separation=20, bands=4)
    >>> strategy.is_amplified, strategy.count_entries(100), strategy.get_entry_rate(0.01)
    (True, 5, 0.2)
    """

    bands: int

    name = "banded matrix"
    is_stored = True

    def __post_init__(self) -> None:
        if self.bands > self.separation:
            raise PrivateTrainingError(
                f"A banded matrix must not have more bands than the separation, got bands={self.bands} and "
                f"separation={self.separation}: participations of a sample would overlap."
            )
        super().__post_init__()

    @cached_property
    def taps(self) -> Any:
        j = np.arange(1, _check_bands(self.bands))
        start = np.log(2 * j - 1)  # the square root of the prefix sums, with the ratios (2 j - 1) / 2 j
        return _optimise(start, _make_falling, lambda taps: _compute_error(None, taps, self.steps, self.steps))


def sum_columns(coefficients: Any, separation: int) -> Any:
    """The sum of the columns 0, b, 2 b, ... of C."""
    total = np.zeros(len(coefficients))
    for start in range(0, len(coefficients), separation):
        total[start:] += coefficients[: len(coefficients) - start]
    return total


def _check_bands(bands: int) -> int:
    if bands < 1:
        raise PrivateTrainingError(f"bands must be positive, got {bands}.")
    return bands


def _invert(taps: Any, count: int) -> Any:
    """The first coefficients of 1 / p, where p is the power series with the coefficients `taps`."""
    impulse = np.zeros(count)
    impulse[0] = 1.0
    return lfilter([1.0], taps, impulse)


def _optimise(start: Any, make_taps: Callable[[Tensor], Tensor], compute_error: Callable[[Tensor], Tensor]) -> Any:
    """The taps with the smallest error. `make_taps` makes those after the first one, which is 1, of any numbers."""

    def measure(point: Any) -> tuple[float, Any]:
        free = torch.tensor(point, dtype=torch.float64, requires_grad=True)
        error = compute_error(_with_one(make_taps(free))).log()
        (gradient,) = torch.autograd.grad(error, free)
        return error.item(), gradient.numpy()

    if not len(start):
        return np.ones(1)
    with torch.enable_grad():
        found = minimize(measure, start, jac=True, method="L-BFGS-B", options={"maxiter": 500}).x
    return _with_one(make_taps(torch.tensor(found))).numpy()


def _with_one(taps: Tensor) -> Tensor:
    return torch.cat([torch.ones(1, dtype=torch.float64), taps])


def _make_negative(free: Tensor) -> Tensor:
    """Negative numbers with a sum above -1: then no coefficient of the inverse is negative or above 1."""
    return -torch.cat([free, torch.zeros(1, dtype=free.dtype)]).softmax(0)[:-1]


def _make_falling(free: Tensor) -> Tensor:
    """Numbers that fall from 1 towards 0: then the coefficients of the inverse are bounded."""
    return free.sigmoid().cumprod(0)


def _compute_error(inverse: Tensor | None, forward: Tensor | None, steps: int, separation: int) -> Tensor:
    """The mean squared error of the prefix sums for the taps of C^-1 or of C, times the squared sensitivity."""
    c = _pad(forward, steps) if inverse is None else _invert_series(inverse, steps)
    noise = _invert_series(forward, steps) if inverse is None else _pad(inverse, steps)
    bound = c.abs().flip(0).cummax(0).values.flip(0)
    total = torch.zeros_like(c)
    for start in range(0, steps, separation):
        total = total + torch.nn.functional.pad(bound[: steps - start], (start, 0))
    weights = torch.arange(steps, 0, -1, dtype=c.dtype) / steps
    return total.square().sum() * (weights @ noise.cumsum(0).square())


def _pad(taps: Tensor | None, count: int) -> Tensor:
    assert taps is not None
    taps = taps[:count]
    return torch.nn.functional.pad(taps, (0, count - len(taps)))


def _invert_series(taps: Tensor | None, count: int) -> Tensor:
    """As `_invert`, with a gradient, by Newton's method: each round doubles the number of right coefficients."""
    whole = _pad(taps, count)
    found, size = torch.ones(1, dtype=whole.dtype), 1
    while size < count:
        size = min(2 * size, count)
        padded = 4 * size
        of_found = torch.fft.rfft(found, padded)
        product = torch.fft.irfft(of_found * (2 - torch.fft.rfft(whole[:size], padded) * of_found), padded)
        found = product[:size]
    return found
