"""Tests of the accounting: the steps that were counted, and epsilon computed anew."""

from __future__ import annotations

import math
from collections.abc import Sequence

from opacus.accountants import GaussianAccountant, PRVAccountant

from persample.private.auditing.bounds import convert_gaussian
from persample.private.auditing.direct import DirectTest

Steps = Sequence[tuple[float, float, int]]  # noise multiplier, sample rate, number of steps

# Accountants compute upper bounds and approximations, which differ: a claim may be so much below the least of them.
_RELATIVE, _ABSOLUTE = 0.05, 0.05
_LEAST_NOISE = 0.4  # of the accountants


def test_counted_steps(history: Steps, made: int) -> DirectTest:
    """Whether the accountant has counted each step."""
    counted = sum(steps for _, _, steps in history)
    return DirectTest("counted steps", f"{counted:,} counted, {made:,} made", float(counted >= made))


def list_claims(history: Steps, made: int) -> tuple[list[float], list[float]]:
    """The claimed noise multiplier and sample rate of each of the last steps.

    >>> list_claims([(1.0, 0.1, 5), (2.0, 0.1, 1)], 2)
    ([1.0, 2.0], [0.1, 0.1])
    """
    claims = [(noise, rate) for noise, rate, steps in history for _ in range(steps)]
    claims += claims[-1:] * (made - len(claims))  # steps that were not counted
    return [noise for noise, _ in claims[-made:]], [rate for _, rate in claims[-made:]]


def test_claimed_epsilon(claimed: float, noise_multipliers: Sequence[float], rate: float, delta: float) -> DirectTest:
    """Whether a claimed epsilon is at least what steps with these settings spend."""
    spent = _compute_spent(noise_multipliers, rate, delta)
    p_value = float(claimed >= (1 - _RELATIVE) * spent - _ABSOLUTE)
    return DirectTest("claimed epsilon", f"{claimed:.3f} claimed, the steps spend {spent:.3f}", p_value)


def _compute_spent(noise_multipliers: Sequence[float], rate: float, delta: float) -> float:
    """Epsilon by the accountant with the least result; with little noise, epsilon of one step."""
    least = min(noise_multipliers)
    if not least:
        return math.inf
    if least < _LEAST_NOISE:
        return math.log1p(rate * math.expm1(convert_gaussian(1 / least, delta / rate)))
    prv, gdp = PRVAccountant(), GaussianAccountant()
    prv.history = [(noise, rate, noise_multipliers.count(noise)) for noise in sorted({*noise_multipliers})]
    if len(prv.history) > 1:
        return float(prv.get_epsilon(delta))
    gdp.history = list(prv.history)
    return min(float(prv.get_epsilon(delta)), float(gdp.get_epsilon(delta)))
