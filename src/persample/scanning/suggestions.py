"""Labels that the model suggests: what it says about the given label with all checkpoints.

The rule is that of confident learning (Northcutt et al., 2021). A class is suggested if its probability is larger than
that of the given label, and at least the mean probability that the model gives to this class where it is the label. So
a class that the model is rarely sure of needs less. Probabilities are means over the checkpoints that are trained and
have not memorised the labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from persample.scanning.store import Array

Part = Mapping[str, Array]  # columns of one checkpoint

MEMORISED = 0.97  # share of the given labels that a checkpoint predicts, from which on it says little about them
_TRAINED = 0.6  # of the largest share; a checkpoint below it is not trained yet


@dataclass(frozen=True)
class Opinion:
    """The most probable class of each example beside the given label, with its mean probability and that of the label.

    If the checkpoints differ in this class, the one with the largest sum of probabilities counts. Its probability is
    then a lower bound: a checkpoint stores only the best of the other classes.
    """

    other: Array
    other_probability: Array
    given_probability: Array


def compute_fit(part: Part) -> float:
    """The share of the given labels that a checkpoint predicts; NaN if there are none."""
    is_given = np.isfinite(part["given_probability"])
    fits = part["given_probability"][is_given] >= part["other_probability"][is_given]
    return float(fits.mean()) if len(fits) else float("nan")


def choose_checkpoints(fits: Sequence[float]) -> list[int]:
    """The checkpoints whose opinion counts: trained, and without memorised labels; else the trained one with least fit.

    >>> choose_checkpoints([0.3, 0.8, 0.9, 1.0]), choose_checkpoints([0.99, 1.0])
    ([1, 2], [0])
    """
    trained = [i for i, fit in enumerate(fits) if fit >= _TRAINED * max(fits)] or [len(fits) - 1]
    return [i for i in trained if fits[i] < MEMORISED] or [min(trained, key=lambda i: fits[i])]


def combine_checkpoints(parts: Sequence[Part]) -> Opinion:
    """The opinion of all checkpoints about the same examples."""
    others = np.stack([part["other"] for part in parts])
    probabilities = np.stack([part["other_probability"] for part in parts]).astype(np.float64)
    votes = np.stack([(probabilities * (others == own)).sum(0) for own in others])
    best = votes.argmax(0)[None]
    return Opinion(
        np.take_along_axis(others, best, 0)[0],
        np.take_along_axis(votes, best, 0)[0] / len(parts),
        np.stack([part["given_probability"] for part in parts]).mean(0, dtype=np.float64),
    )


def compute_confidence(labels: Array, given_probability: Array) -> dict[int, float]:
    """For each class, the mean probability of the given label among the examples with this label.

    >>> compute_confidence(np.array([0, 0, 1]), np.array([0.5, 1.0, 0.25]))
    {0: 0.75, 1: 0.25}
    """
    is_known = np.isfinite(given_probability)
    labels, given_probability = labels[is_known], given_probability[is_known]
    classes, at = np.unique(labels, return_inverse=True)
    means = np.bincount(at, given_probability, len(classes)) / np.bincount(at, minlength=len(classes))
    return {int(label): float(mean) for label, mean in zip(classes, means, strict=True)}


def suggest_labels(opinion: Opinion, confidence: Mapping[int, float]) -> Array:
    """The suggested class of each example, -1 where the given label is fine or no label is given."""
    limits = np.full(len(opinion.other), np.inf)  # a class that is nowhere given is not suggested
    for label, limit in confidence.items():
        limits[opinion.other == label] = limit
    is_better = opinion.other_probability > opinion.given_probability
    return np.where(is_better & (opinion.other_probability >= limits), opinion.other, -1)


def describe_last(labels: Array, part: Part) -> dict[str, Array]:
    """The columns `predicted`, `probability` and `given_probability` of one checkpoint."""
    given, other = part["given_probability"], part["other_probability"]
    says_other = ~(given >= other)  # also without a label
    predicted = np.where(says_other, part["other"], labels)
    probability = np.where(says_other, other, given)
    return {
        "predicted": np.where(np.isfinite(probability), predicted, -1),
        "probability": probability,
        "given_probability": given,
    }


def parse_confidence(stored: Mapping[str, Any] | None) -> dict[int, float]:
    """The result of `compute_confidence` from JSON, which has texts as keys."""
    return {int(label): float(value) for label, value in (stored or {}).items()}
