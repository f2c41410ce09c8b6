"""How many labels are wrong, and where a list of suspects should end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from persample.scanning.store import Array
from persample.scanning.suggestions import Opinion, compute_confidence, suggest_labels

_Z = 1.96  # for 95 %
_FAR_OUT = 3.0  # interquartile ranges above the third quartile


@dataclass(frozen=True)
class WrongLabels:
    """An estimated number of wrong labels, with an interval from `low` to `high`."""

    count: int
    low: int
    high: int

    def __str__(self) -> str:
        return f"about {self.count:,} ({self.low:,} to {self.high:,})"


def estimate_wrong_labels(labels: Array, opinion: Opinion) -> WrongLabels:
    """The number of labels for which the model suggests another one, as in confident learning, with an interval."""
    confidence = compute_confidence(labels, opinion.given_probability)
    is_labelled = np.isfinite(opinion.given_probability)
    count = int((suggest_labels(opinion, confidence) >= 0).sum())
    low, high = _compute_binomial_interval(count, int(is_labelled.sum()))
    return WrongLabels(count, math.floor(low), math.ceil(high))


def count_far_out(scores: Array) -> int:
    """The number of scores that lie far above the others: three interquartile ranges above the third quartile.

    Square roots are compared, because the squares of normal errors have a long tail.

    >>> count_far_out(np.array([1.0, 1.1, 0.9, 1.0, 1.2, 0.8, 40.0])), count_far_out(np.arange(100.0))
    (1, 0)
    """
    finite = scores[np.isfinite(scores)]
    if len(finite) < 4:
        return 0
    roots = np.sign(finite) * np.sqrt(np.abs(finite))
    first, third = np.quantile(roots, [0.25, 0.75])
    return int((roots > third + _FAR_OUT * (third - first)).sum()) + int((~np.isfinite(scores)).sum())


def _compute_binomial_interval(count: int, size: int) -> tuple[float, float]:
    """Wilson's interval for a number of successes."""
    if not size:
        return 0.0, 0.0
    share, square = count / size, _Z**2
    middle = (share + square / (2 * size)) / (1 + square / size)
    half = _Z / (1 + square / size) * math.sqrt(share * (1 - share) / size + square / (4 * size**2))
    return max(0.0, middle - half) * size, min(1.0, middle + half) * size


def read_estimate(summary: dict[str, Any]) -> WrongLabels | None:
    """The estimate that a summary holds; None if the model is no classifier."""
    return WrongLabels(**summary["wrong_labels"]) if "wrong_labels" in summary else None
