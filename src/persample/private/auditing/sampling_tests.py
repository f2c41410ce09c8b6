"""Tests of the sampling: sizes of batches against the claimed rate, and samples that are in several batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from persample.private.auditing.direct import DirectTest, NotTested, combine

Counts = NDArray[np.int64]

_MOST_STEPS = 300  # whose batches are compared with each other
_MOST_AHEAD = 2  # batches that a loader may load before they are used


def test_batch_sizes(sizes: Sequence[int], population: int, rates: Sequence[float]) -> DirectTest:
    """Whether the batches are larger than claimed.

    The number of samples in all steps has a binomial distribution. With rates that differ, its tail is below that of
    the binomial distribution with their mean (Hoeffding, 1956).

    Args:
        sizes: the number of samples, or of units, in each step.
        population: the number of samples, or of units, in the data.
        rates: the claimed sampling rate of each step.
    """
    rate, total = float(np.mean(rates)), sum(sizes)
    finding = f"{total / len(sizes):.1f} in a step, {rate * population:.1f} of {population:,} claimed"
    return DirectTest("batch sizes", finding, float(stats.binom.sf(total - 1, len(sizes) * population, rate)))


def test_repeated_samples(
    drawn: Sequence[int], marks: Sequence[int], sizes: Sequence[int], population: int, rate: float
) -> DirectTest:
    """Whether samples are in one batch twice, or in two batches more often than by chance.

    Two independent batches have a binomial number of samples in common, with the square of the rate.

    Args:
        drawn: the indices of all samples that were loaded, in this order.
        marks: how many of them were loaded before each step.
        sizes: the number of samples in each step.
        population: the number of samples in the data.
        rate: the claimed sampling rate.
    """
    if not drawn:
        raise NotTested("the loader loads no samples from run.add_canaries(dataset) in this process")
    used = np.cumsum(sizes)
    ahead = next((a for a in range(_MOST_AHEAD + 1) if list(marks[: len(used) - a]) == used[a:].tolist()), None)
    if ahead is None:
        return _test_steps_without_samples(np.array(marks), used, population, rate)
    batches = [list(drawn[end - size : end]) for size, end in zip(sizes, used.tolist(), strict=True)][:_MOST_STEPS]
    twice = sum(len(batch) - len({*batch}) for batch in batches)
    if twice:
        return DirectTest("repeated samples", f"{twice:,} samples are in one batch twice", 0.0)
    sets = [{*batch} for batch in batches]
    common = [len(a & b) for a, b in combinations(sets, 2)]
    if not common:
        return DirectTest("repeated samples", "no sample is in the batch twice", 1.0)
    most = max(common)
    p_value = min(1.0, len(common) * float(stats.binom.sf(most - 1, population, rate**2)))
    expected = population * rate**2
    finding = f"at most {most} samples in two of {len(sets)} batches, {expected:.1f} expected"
    return DirectTest("repeated samples", finding, p_value)


def _test_steps_without_samples(marks: Counts, used: Counts, population: int, rate: float) -> DirectTest:
    """Whether steps use samples although none was loaded: batches that are empty have a known probability."""
    loaded, sizes = np.diff(marks, prepend=0), np.diff(used, prepend=0)
    without = int(((loaded == 0) & (sizes > 0) & (used > marks)).sum())
    if not without:
        raise NotTested("the steps use other numbers of samples than are loaded from run.add_canaries(dataset)")
    finding = f"{without} of {len(used)} steps use samples of earlier steps again"
    return DirectTest("repeated samples", finding, combine([(1 - rate) ** population] * len(used)))
