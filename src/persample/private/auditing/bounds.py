"""Lower bounds of epsilon, with a confidence, from the scores of canaries that were in the training or not.

A high score says that the canary was probably in. Any scores give valid bounds; better scores give larger ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

Array = NDArray[np.float64]

# Shares of the canaries that are guessed to be in (those with the highest scores) and out (the lowest). Each choice is
# a test of its own, so that the confidence is divided among them. A few guesses at the ends are nearly all correct,
# many guesses are significant at a lower rate: which is better depends on epsilon.
_SHARES = ((1 / 2, 1 / 2), (1 / 8, 1 / 8), (1 / 32, 1 / 32), (1 / 8, 0.0), (1 / 32, 0.0))
_HELD_OUT = 0.25  # part of the runs that choose the threshold
_LARGEST = 60.0  # epsilon


# ---- one run ----


@dataclass(frozen=True)
class OneRunBound:
    """A lower bound of epsilon from one run with many canaries."""

    epsilon: float
    guesses: int
    correct: int


def bound_one_run(scores: Array, included: NDArray[np.bool_], delta: float, confidence: float) -> OneRunBound:
    """Bound of Steinke, Nasr and Jagielski (2023). Each canary must have been included by an independent fair coin.

    The canaries with extreme scores are guessed to be in or out; the others are left open. If the training is
    (epsilon, delta)-private, the number of correct guesses is hardly larger than a binomial number with the rate
    e^epsilon / (1 + e^epsilon), for any dependence between the canaries.
    """
    order = np.argsort(scores, kind="stable")
    choices = sorted(set(_choose_guesses(len(scores))))
    best = OneRunBound(0.0, 0, 0)
    for count_in, count_out in choices:
        correct = int(included[order[len(order) - count_in :]].sum() + (~included[order[:count_out]]).sum())
        guesses = count_in + count_out
        level = (1 - confidence) / len(choices)
        epsilon = invert_one_run(len(scores), guesses, correct, delta, level)
        if epsilon > best.epsilon or not best.guesses:
            best = OneRunBound(epsilon, guesses, correct)
    return best


def _choose_guesses(canaries: int) -> Iterator[tuple[int, int]]:
    for share_in, share_out in _SHARES:
        count_in, count_out = int(canaries * share_in), int(canaries * share_out)
        if count_in >= 4 or share_in == _SHARES[0][0]:
            yield max(count_in, 1), count_out


def invert_one_run(canaries: int, guesses: int, correct: int, delta: float, level: float) -> float:
    """The largest epsilon for which so many correct guesses have a probability of at most `level`; 0 if none has.

    >>> round(invert_one_run(100, 100, 100, 0.0, 0.05), 2), invert_one_run(100, 100, 55, 0.0, 0.05)
    (3.49, 0.0)
    """
    return _find_largest(lambda epsilon: bound_probability(canaries, guesses, correct, epsilon, delta) <= level)


def bound_probability(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Upper bound of the probability of so many correct guesses, if the training is (epsilon, delta)-private.

    With X binomial, the bound is P[X >= correct] + 2 canaries delta max_i P[correct - i <= X < correct] / i.
    """
    rate = 1 / (1 + math.exp(-epsilon))
    probability = float(stats.binom.sf(correct - 1, guesses, rate))
    if delta > 0 and correct > 0:
        distances = np.arange(1, correct + 1)
        below = np.cumsum(stats.binom.pmf(correct - distances, guesses, rate))
        probability += 2 * canaries * delta * float((below / distances).max())
    return min(probability, 1.0)


# ---- two worlds ----


@dataclass(frozen=True)
class TwoWorldsBound:
    """Lower bounds of epsilon from runs with and without one canary.

    `epsilon` makes no assumption. `gaussian` holds if the training is a Gaussian mechanism, or close to one, as many
    steps of DP-SGD are; it is usually larger. The rates are upper bounds, at the threshold of `epsilon`.
    """

    epsilon: float
    gaussian: float
    false_positive_rate: float
    false_negative_rate: float
    evaluated: int


def bound_two_worlds(scores_in: Array, scores_out: Array, delta: float, confidence: float) -> TwoWorldsBound:
    """Bounds from the error rates of a test by threshold.

    The first quarter of the runs of each world chooses the threshold. The others give upper bounds of both error rates
    (Clopper and Pearson, 1934), each with half of the error probability that `confidence` leaves.
    """
    first, rest = zip(*(_split(scores) for scores in (scores_in, scores_out)), strict=True)
    sizes = len(rest[0]), len(rest[1])
    level = (1 - confidence) / 2

    def evaluate(compute: Callable[[float, float], float]) -> tuple[float, float, float]:
        def compute_from_counts(missed: float, false: float) -> float:
            return compute(bound_rate(false, sizes[1], level), bound_rate(missed, sizes[0], level))

        threshold = _choose_threshold(first[0], first[1], sizes, compute_from_counts)
        missed, false = int((rest[0] < threshold).sum()), int((rest[1] >= threshold).sum())
        rates = bound_rate(false, sizes[1], level), bound_rate(missed, sizes[0], level)
        return max(0.0, compute(*rates)), *rates

    epsilon, false_positive, false_negative = evaluate(lambda fpr, fnr: convert_rates(fpr, fnr, delta))
    mu, _, _ = evaluate(compute_mu)
    return TwoWorldsBound(epsilon, convert_gaussian(mu, delta), false_positive, false_negative, sum(sizes))


def _split(scores: Array) -> tuple[Array, Array]:
    count = max(2, round(_HELD_OUT * len(scores)))
    return scores[:count], scores[count:]


def _choose_threshold(
    scores_in: Array, scores_out: Array, sizes: tuple[int, int], compute: Callable[[float, float], float]
) -> float:
    """The threshold with the best bound, if the scores of each world are distributed as those here, smoothed."""
    widths = [_choose_width(scores) for scores in (scores_in, scores_out)]
    points = np.sort(np.concatenate([scores_in, scores_out]))
    ends = [points[0] - 3 * max(widths), points[-1] + 3 * max(widths)]
    candidates = np.sort(np.concatenate([points, (points[1:] + points[:-1]) / 2, points + widths[1], ends]))
    missed = sizes[0] * stats.norm.cdf((candidates[:, None] - scores_in) / widths[0]).mean(axis=1)
    false = sizes[1] * stats.norm.sf((candidates[:, None] - scores_out) / widths[1]).mean(axis=1)
    found = [compute(*pair) for pair in zip(np.round(missed).tolist(), np.round(false).tolist(), strict=True)]
    best = np.flatnonzero(np.isclose(found, max(found)))
    return float(candidates[best[len(best) // 2]])


def _choose_width(scores: Array) -> float:
    """Width of a normal kernel that smooths a distribution (Silverman, 1986)."""
    low, high = np.quantile(scores, [0.25, 0.75])
    spread = min(float(scores.std()), float(high - low) / 1.34) or float(scores.std())
    return max(0.9 * spread * len(scores) ** -0.2, 1e-9 * float(np.abs(scores).max()) + 1e-30)


@cache
def bound_rate(count: float, total: int, level: float) -> float:
    """Upper bound of a rate of which `count` of `total` trials were seen; too small with probability `level`.

    >>> round(bound_rate(0, 100, 0.05), 4)
    0.0295
    """
    return 1.0 if count >= total else float(stats.beta.ppf(1 - level, count + 1, total - count))


def convert_rates(false_positive: float, false_negative: float, delta: float) -> float:
    """The least epsilon for which an (epsilon, delta)-private training allows a test with these error rates."""
    pairs = ((false_positive, false_negative), (false_negative, false_positive))
    return max((math.log((1 - delta - b) / a) for a, b in pairs if a > 0 and 1 - delta - b > 0), default=0.0)


def compute_mu(false_positive: float, false_negative: float) -> float:
    """Distance of two normal distributions with deviation 1 for which a test has these error rates."""
    return float(stats.norm.isf(false_positive) - stats.norm.ppf(false_negative))


def convert_gaussian(mu: float, delta: float) -> float:
    """Epsilon of a Gaussian mechanism with sensitivity `mu` and noise of deviation 1 (Balle and Wang, 2018).

    >>> round(convert_gaussian(1.0, 1e-5), 3)
    4.377
    """
    if not mu > 0:
        return 0.0

    def compute_delta(epsilon: float) -> float:
        tail = math.exp(epsilon + float(stats.norm.logcdf(-mu / 2 - epsilon / mu)))
        return float(stats.norm.cdf(mu / 2 - epsilon / mu)) - tail

    return _find_largest(lambda epsilon: compute_delta(epsilon) > delta)


def _find_largest(holds: Callable[[float], bool]) -> float:
    """The largest epsilon for which a condition holds that holds up to there; 0 if it never holds."""
    if not holds(0.0):
        return 0.0
    if holds(_LARGEST):
        return _LARGEST
    return float(optimize.bisect(lambda epsilon: 1.0 if holds(epsilon) else -1.0, 0.0, _LARGEST, xtol=1e-7))
