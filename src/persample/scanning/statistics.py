"""Rank correlations, areas under curves, and their confidence intervals by the bootstrap."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A number with a confidence interval.

    >>> print(Estimate(0.5, 0.41, 0.58))
    0.50 [0.41, 0.58]
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def estimate_lds(predicted: Tensor, measured: Tensor, resamples: int, generator: torch.Generator) -> Estimate:
    """The linear datamodeling score: mean over the tests of the rank correlation over the subsets.

    Both arguments are `(tests, subsets)`. The interval is over resampled tests and resampled subsets.
    """
    tests, subsets = predicted.shape
    value = float(correlate_ranks(predicted, measured).mean())
    found = []
    for _ in range(resamples):
        some_tests = torch.randint(tests, (tests, 1), generator=generator)
        some_subsets = torch.randint(subsets, (subsets,), generator=generator)
        correlations = correlate_ranks(predicted[some_tests, some_subsets], measured[some_tests, some_subsets])
        found.append(float(correlations.mean()))
    return _make_estimate(value, torch.tensor(found))


def correlate_ranks(one: Tensor, other: Tensor) -> Tensor:
    """Spearman's correlation of each row of a matrix with the same row of another; 0 for a constant row.

    >>> rows = torch.tensor([[1.0, 2.0, 9.0], [1.0, 1.0, 1.0]])
    >>> correlate_ranks(rows, torch.tensor([[1.0, 3.0, 2.0], [1.0, 2.0, 3.0]]))
    tensor([0.5000, 0.0000], dtype=torch.float64)
    """
    one, other = (_compute_ranks(part) for part in (one, other))
    one, other = (part - part.mean(1, keepdim=True) for part in (one, other))
    return (one * other).sum(1) / (one.norm(dim=1) * other.norm(dim=1)).clamp(min=1e-12)


def estimate_auc(scores: Tensor, is_positive: Tensor, resamples: int, generator: torch.Generator) -> Estimate:
    """The probability that a positive example has a larger score than a negative one; ties count one half."""
    positive, negative = scores[is_positive], scores[~is_positive]
    value = _compute_auc(positive, negative)
    found = []
    for _ in range(resamples):
        some = (part[torch.randint(len(part), (len(part),), generator=generator)] for part in (positive, negative))
        found.append(_compute_auc(*some))
    return _make_estimate(value, torch.tensor(found))


def _compute_auc(positive: Tensor, negative: Tensor) -> float:
    ordered = negative.sort().values
    below, at_most = (torch.searchsorted(ordered, positive.contiguous(), right=right) for right in (False, True))
    return float((below + at_most).double().mean()) / 2 / len(negative)


def _compute_ranks(values: Tensor) -> Tensor:
    """The rank of each entry in its row; equal entries have the mean of their ranks."""
    values = values.double().contiguous()
    ordered = values.sort(dim=1).values
    return (torch.searchsorted(ordered, values) + torch.searchsorted(ordered, values, right=True)).double() / 2


def _make_estimate(value: float, resampled: Tensor) -> Estimate:
    if not len(resampled):
        return Estimate(value, value, value)
    tail = (1 - CONFIDENCE) / 2
    low, high = torch.quantile(resampled.double(), torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Estimate(value, low, high)
