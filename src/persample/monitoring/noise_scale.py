"""The gradient noise scale over several steps, with an interval.

For a batch of B rows with mean squared norm m, and s the squared norm of their mean, unbiased estimates of the squared
norm of the true gradient G and of the trace of the rows' covariance are (McCandlish et al., 2018)

    |G|² = (B s - m) / (B - 1)        tr(Σ) = (m - s) / (1 - 1/B)

The noise scale is tr(Σ) / |G|². In a single batch the estimate of |G|² is often negative, so both parts are averaged
over steps before they are divided. The interval is that of Fieller (1954) for a ratio of two means. It has no upper end
if |G|² cannot be told from zero.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import NormalDist

CONFIDENCE = 0.95


@dataclass(frozen=True)
class NoiseScale:
    """An estimate of the noise scale: the batch size at which the noise of the mean gradient equals the gradient.

    `value` is None if the estimate of |G|² is not positive. The interval `low` to `high` contains the noise scale with
    a confidence of 95 % if the steps are independent and the noise scale did not change between them; `high` is
    infinite if |G|² cannot be told from zero.

    >>> str(NoiseScale(120.0, 90.0, 170.0, 50)), str(NoiseScale(None, 800.0, math.inf, 3))
    ('120 (90 to 170)', 'above 800')
    """

    value: float | None
    low: float
    high: float
    steps: int

    def __str__(self) -> str:
        if self.value is None or math.isinf(self.high):
            return f"above {self.low:.3g}" if self.low > 0 else "not known yet"
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


class NoiseScaleEstimate:
    """Averages the two parts of the noise scale over the last `window` steps."""

    def __init__(self, window: int) -> None:
        self._parts: deque[tuple[float, float]] = deque(maxlen=window)

    def add(self, noise: float, signal: float) -> None:
        """Add the estimates of tr(Σ) and |G|² of a step."""
        if math.isfinite(noise) and math.isfinite(signal):
            self._parts.append((noise, signal))

    def compute(self) -> NoiseScale | None:
        """The noise scale of the steps so far, None without any."""
        if not self._parts:
            return None
        return compute_ratio([noise for noise, _ in self._parts], [signal for _, signal in self._parts])


def compute_parts(squared_norms_mean: float, squared_norm_of_mean: float, batch_size: int) -> tuple[float, float]:
    """Unbiased estimates of tr(Σ) and |G|² from one batch of at least two rows."""
    m, s, size = squared_norms_mean, squared_norm_of_mean, batch_size
    return (m - s) / (1 - 1 / size), (size * s - m) / (size - 1)


def compute_ratio(noise: list[float], signal: list[float]) -> NoiseScale:
    """The ratio of the means of two lists, with Fieller's interval.

    >>> compute_ratio([10.0, 11.0, 9.0, 10.0], [1.0, 1.1, 0.9, 1.0]).value
    10.0
    """
    count = len(noise)
    a, b = sum(noise) / count, sum(signal) / count
    value = a / b if b > 0 else None
    if count < 2:
        return NoiseScale(value, 0.0, math.inf, count)
    # Variances and covariance of the means.
    degrees = count * (count - 1)
    aa = sum((x - a) ** 2 for x in noise) / degrees
    bb = sum((y - b) ** 2 for y in signal) / degrees
    ab = sum((x - a) * (y - b) for x, y in zip(noise, signal, strict=True)) / degrees
    t = _compute_t_quantile(count - 1) ** 2
    # All r with (a - r b)² <= t² Var(a - r b): a quadratic inequality in r.
    square, linear, constant = b * b - t * bb, a * b - t * ab, a * a - t * aa
    discriminant = linear * linear - square * constant
    if discriminant < 0 or square == 0 or (square > 0 and b <= 0):
        return NoiseScale(value, 0.0, math.inf, count)
    root = math.sqrt(discriminant)
    if square > 0:
        return NoiseScale(value, max(0.0, (linear - root) / square), (linear + root) / square, count)
    # |G|² cannot be told from zero. If tr(Σ) can, one root is positive, and the ratio is above it.
    return NoiseScale(value, (linear - root) / square if constant > 0 else 0.0, math.inf, count)


def _compute_t_quantile(degrees: int) -> float:
    """The two-sided quantile of Student's t, by the first terms of its expansion in 1 / degrees."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / degrees ** (power + 1) for power, term in enumerate(terms))
