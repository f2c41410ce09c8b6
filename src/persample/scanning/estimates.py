"""How many labels are wrong, and where a list of suspects should end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from persample.scanning.store import Array
from persample.scanning.suggestions import (
    MEMORISED,
    Opinion,
    choose_checkpoints,
    compute_confidence,
    suggest_labels,
)

_Z = 1.96  # for 95 %
_MIN_FIT = 0.75  # share of the given labels that a trained model predicts
_FAR_OUT = 3.0  # interquartile ranges above the third quartile


@dataclass(frozen=True)
class WrongLabels:
    """An estimated number of wrong labels, with an interval from `low` to `high`. `warning` says if it is doubtful."""

    count: int
    low: int
    high: int
    warning: str = ""

    def __str__(self) -> str:
        return f"about {self.count:,} ({self.low:,} to {self.high:,})" + (f". {self.warning}" if self.warning else "")


@dataclass(frozen=True)
class NoEstimate:
    """Why the number of wrong labels cannot be estimated. It is false, as None would be."""

    reason: str

    def __bool__(self) -> Literal[False]:
        return False

    def __str__(self) -> str:
        return f"no estimate: {self.reason}"


def estimate_wrong_labels(labels: Array, opinion: Opinion, fits: Sequence[float]) -> WrongLabels:
    """The number of wrong labels, from the opinion of the model and the share of labels that each checkpoint predicts.

    Two numbers enclose it if the model has learnt the task and not the labels: that of suggested labels, which misses
    some, and that of the examples for which the model prefers any other class, which contains some that are only
    difficult. The estimate is their geometric mean. The interval goes from the lower end of a binomial interval of the
    first number to the upper end of that of the second.
    """
    confidence = compute_confidence(labels, opinion.given_probability)
    size = int(np.isfinite(opinion.given_probability).sum())
    sure = int((suggest_labels(opinion, confidence) >= 0).sum())
    preferred = int((opinion.other_probability > opinion.given_probability).sum())
    low, high = _compute_binomial_interval(sure, size)[0], _compute_binomial_interval(preferred, size)[1]
    return WrongLabels(round(math.sqrt(sure * preferred)), math.floor(low), math.ceil(high), _find_warning(fits))


def _find_warning(fits: Sequence[float]) -> str:
    best, used = max(fits), min(fits[i] for i in choose_checkpoints(fits))
    if used >= MEMORISED:
        return (
            f"Every checkpoint predicts at least {used:.0%} of the given labels: it may have memorised wrong ones, and "
            "the number may be too low. Scan earlier checkpoints as well."
        )
    if best < _MIN_FIT:
        return f"The model predicts only {best:.0%} of the given labels: the number may be too high. Train it longer."
    return ""


def count_far_out(scores: Array, distance: float = _FAR_OUT) -> int:
    """The number of scores that lie far above the others: `distance` interquartile ranges above the third quartile.

    Square roots are compared, because the squares of normal errors have a long tail.

    >>> count_far_out(np.array([1.0, 1.1, 0.9, 1.0, 1.2, 0.8, 40.0])), count_far_out(np.arange(100.0))
    (1, 0)
    """
    finite = scores[np.isfinite(scores)]
    if len(finite) < 4:
        return 0
    roots = np.sign(finite) * np.sqrt(np.abs(finite))
    first, third = np.quantile(roots, [0.25, 0.75])
    return int((roots > third + distance * (third - first)).sum()) + int((~np.isfinite(scores)).sum())


def _compute_binomial_interval(count: int, size: int) -> tuple[float, float]:
    """Wilson's interval for a number of successes."""
    if not size:
        return 0.0, 0.0
    share, square = count / size, _Z**2
    middle = (share + square / (2 * size)) / (1 + square / size)
    half = _Z / (1 + square / size) * math.sqrt(share * (1 - share) / size + square / (4 * size**2))
    return max(0.0, middle - half) * size, min(1.0, middle + half) * size


def read_estimate(summary: dict[str, Any], columns: Sequence[str]) -> WrongLabels | NoEstimate:
    """The estimate that a summary holds, or why there is none in a scan with these columns."""
    if "wrong_labels" in summary:
        return WrongLabels(**summary["wrong_labels"])
    if "prediction" in columns:
        return NoEstimate("the targets are numbers, not classes; suspects are examples that lie far above all others.")
    if "worst_label" in columns:
        return NoEstimate("an example has several labels; query worst_label, or rank by the loss.")
    if "label" not in columns:
        return NoEstimate("the examples have no class labels.")
    return NoEstimate(
        "the outputs of the model were not understood as scores of classes, or the quantities have no predictions."
    )
