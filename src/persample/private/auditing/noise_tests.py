"""Tests of the noise: its deviation in each parameter, and its correlation over steps and parameters.

The noise of a step is its released gradient minus the clipped sum. Releases of empty batches are noise alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from persample.private.auditing.direct import DirectTest, NotTested, combine

Array = NDArray[np.float64]

EMPTY_RELEASES = 8
_MOST_RELEASES = 64  # that are compared with each other
_MOST_ENTRIES = 2**16  # of each of them
_MOST_PARAMETERS = 32  # that are compared with each other


class NoiseRecord:
    """The noise of releases, in units of the bound: the sum of squares of each parameter, and its first entries."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.sizes: list[int] = []
        self.squares: list[Array] = []  # for each release, `(parameters,)`
        self.entries: list[list[Array]] = []  # for each release and parameter

    def add(self, noise: Sequence[Tensor]) -> None:
        """Note the noise of a release: a vector for each parameter."""
        self.sizes = [len(part) for part in noise]
        self.squares.append(torch.stack([part.double().square().sum() for part in noise]).cpu().numpy())
        if len(self.entries) < _MOST_RELEASES:
            share = max(16, _MOST_ENTRIES // len(noise))
            self.entries.append([part[:share].double().cpu().numpy() for part in noise])


def test_deviation(record: NoiseRecord, noise_multipliers: Sequence[float]) -> DirectTest:
    """Whether the noise of each parameter has the claimed deviation.

    The sum of n squares of the noise, in units of the claimed deviation, has a chi-squared distribution with n degrees
    of freedom. A sum that is too small is a finding; more noise than claimed is none.

    Args:
        record: the noise of some releases.
        noise_multipliers: the claimed noise multiplier of each of them.
    """
    claimed = np.array(noise_multipliers)
    if not claimed.all():
        raise NotTested("no noise is claimed")
    squares = (np.stack(record.squares) / claimed[:, None] ** 2).sum(axis=0)
    counts = len(claimed) * np.array(record.sizes)
    of_all = float(stats.chi2.cdf(squares.sum(), counts.sum()))
    of_each = stats.chi2.cdf(squares, counts)
    worst = int(np.argmin(of_each))
    ratios = np.sqrt(squares / counts)
    finding = (
        f"{np.sqrt(squares.sum() / counts.sum()):.3f} times the claimed deviation in {counts.sum():,} numbers; "
        f"{ratios[worst]:.3f} in '{record.names[worst]}'"
    )
    return DirectTest("noise", finding, combine([of_all, *of_each.tolist()]))


def test_correlation_over_steps(record: NoiseRecord) -> DirectTest:
    """Whether the noise of any two releases is independent."""
    rows = np.stack([np.concatenate(parts) for parts in record.entries])
    pairs = [(rows[i], rows[j]) for i, j in combinations(range(len(rows)), 2)]
    return _test_pairs("noise over steps", pairs, "releases")


def test_correlation_over_parameters(record: NoiseRecord) -> DirectTest:
    """Whether the noise of any two parameters is independent; compared entry by entry from their first ones on."""
    largest = np.argsort([-size for size in record.sizes], kind="stable")[:_MOST_PARAMETERS]
    columns = [np.stack([parts[i] for parts in record.entries]) for i in largest]
    pairs = []
    for a, b in combinations(columns, 2):
        width = min(a.shape[1], b.shape[1])
        pairs.append((a[:, :width].ravel(), b[:, :width].ravel()))
    return _test_pairs("noise over parameters", pairs, "parameters")


def _test_pairs(name: str, pairs: Sequence[tuple[Array, Array]], what: str) -> DirectTest:
    """The largest correlation of pairs of vectors.

    For independent normal vectors with n entries, its square has a beta distribution with the parameters 1/2 and
    (n - 1) / 2, whatever their deviations are.
    """
    found = [(_correlate(a, b), len(a)) for a, b in pairs if len(a) > 1 and a.any() and b.any()]
    if not found:
        raise NotTested(f"there are no two {what} with noise to compare")
    p_values = [float(stats.beta.sf(r * r, 0.5, (n - 1) / 2)) for r, n in found]
    largest = found[int(np.argmin(p_values))][0]
    return DirectTest(name, f"largest correlation {largest:.3f} of {len(found):,} pairs of {what}", combine(p_values))


def _correlate(a: Array, b: Array) -> float:
    return float(np.clip(a @ b / np.sqrt((a @ a) * (b @ b)), -1, 1))
