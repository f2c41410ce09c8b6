"""Whitening of projected gradients, and the choice of its damping."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from persample.scanning.errors import ScanError

Damping = float | Literal["auto"]

# "auto": the effective number of dimensions that it leaves. The first is for gradients of equal lengths, see
# `count_effective_dims`, the second for directions without lengths, the third an upper bound as a part of the rank.
# Chosen by the linear datamodeling score over ten tasks, and checked by benchmarks/damping.py on others: docs/scan.md.
DIMS_OF_EQUAL, DIMS_OF_DIRECTIONS, PART_OF_RANK = 10.0, 40.0, 1 / 3

# "auto": the least damping, for gradients and for directions without lengths. Where the effective dimensions ask for
# less than the mean eigenvalue, the LDS is about as high with this, or much higher (benchmarks/results/damping.json).
LEAST_DAMPING, LEAST_OF_DIRECTIONS = 1.0, 1e-3

# The damping of a block of entries is relative to its mean eigenvalue, which counts as at least this part of the mean
# of all blocks: rounding errors of a parameter whose gradient is zero (the bias of keys in attention) stay small.
LEAST_PART = 1e-6


def check_damping(damping: Damping) -> None:
    """Raise unless the damping is "auto" or a positive number."""
    is_number = isinstance(damping, (int, float)) and not isinstance(damping, bool)
    if damping != "auto" and not (is_number and 0 < float(damping) < float("inf")):
        raise ScanError(
            f"damping must be a positive number, relative to the mean eigenvalue, or 'auto', got {damping!r}."
        )


class Whitening:
    """`(M + D)⁻¹` for the second moment `M` of gradients and a diagonal `D`, the damping.

    `blocks` has the number of the block of each entry, such as its parameter; None is one block. `D` is `damping` times
    the mean eigenvalue of `M` in the block, so that layers with small gradients count as much as those with large ones.
    "auto" chooses the damping by `choose_damping`, at least `LEAST_DAMPING`, for gradients of the given `lengths`; None
    is for directions without lengths, at least `LEAST_OF_DIRECTIONS`. The attribute `damping` has the number.
    """

    def __init__(
        self,
        moment: Tensor,
        damping: Damping = "auto",
        lengths: Tensor | None = None,
        blocks: Tensor | None = None,
    ) -> None:
        check_damping(damping)
        means = compute_block_means(moment.diagonal(), blocks)
        if damping == "auto":
            scaled = means.rsqrt()[:, None] * moment * means.rsqrt()  # `D` is the identity here
            mean = float(scaled.trace()) / len(scaled)  # 1, or less if there are blocks of zeros
            dims, least = DIMS_OF_DIRECTIONS, LEAST_OF_DIRECTIONS
            if lengths is not None:
                dims, least = count_effective_dims(lengths), LEAST_DAMPING
            damping = max(least, mean * choose_damping(_compute_spectrum(scaled), dims))
        self.damping = float(damping)
        self._lower = torch.linalg.cholesky(moment + torch.diag(self.damping * means))

    def solve(self, rows: Tensor) -> Tensor:
        """`rows (M + D)⁻¹`, in float64."""
        return torch.cholesky_solve(rows.double().T, self._lower).T

    def compute_squares(self, rows: Tensor) -> Tensor:
        """`r (M + D)⁻¹ rᵀ` for each row `r`, in float64."""
        return torch.linalg.solve_triangular(self._lower, rows.double().T, upper=False).square().sum(0)


def compute_block_means(values: Tensor, blocks: Tensor | None) -> Tensor:
    """For each entry the mean of its block, which is at least `LEAST_PART` of the mean of all entries.

    >>> compute_block_means(torch.tensor([1.0, 3.0, 8.0]), torch.tensor([0, 0, 1]))
    tensor([2., 2., 8.])
    """
    mean = values.mean().clamp(min=_TINY**0.5)
    if blocks is None:
        return mean.expand(len(values))
    totals = torch.zeros(int(blocks.max()) + 1, dtype=values.dtype).index_add(0, blocks, values)
    return (totals / blocks.bincount().clamp(min=1))[blocks].clamp(min=LEAST_PART * mean)


def count_effective_dims(lengths: Tensor) -> float:
    """The effective number of dimensions that gradients of these lengths leave room for.

    A model that has hardly been trained has gradients of equal lengths, and has learnt in a few directions only. The
    longer the training, the fewer examples have all the gradient, and the more directions matter. The number is 10
    divided by the root of the effective share of the examples, `(Σ l²)² / (n Σ l⁴)`.

    >>> count_effective_dims(torch.ones(5)), count_effective_dims(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    (10.0, 20.0)
    """
    squares = lengths.double().square()
    share = squares.mean().square() / squares.square().mean().clamp(min=_TINY)
    return DIMS_OF_EQUAL / math.sqrt(max(float(share), 1 / len(lengths)))


def choose_damping(spectrum: Tensor, effective_dims: float) -> float:
    """The damping that leaves an effective number of dimensions `Σ e / (e + λ)`, at most a third of the rank.

    `spectrum` are the eigenvalues `e`, and `λ` is the damping times their mean; at least `LEAST_OF_DIRECTIONS`.

    >>> round(choose_damping(torch.ones(90), 40), 6)  # 90 / (1 + λ) = 30
    2.0
    """
    scaled = spectrum.double().clamp(min=0)  # rounding makes some eigenvalues negative
    scaled = scaled / scaled.mean().clamp(min=_TINY)
    wanted = min(effective_dims, PART_OF_RANK * int((scaled > _ROUNDING * scaled.max()).sum()))
    low, high = math.log10(LEAST_OF_DIRECTIONS), 12.0
    for _ in range(60):
        middle = (low + high) / 2
        if float((scaled / (scaled + 10**middle)).sum()) > wanted:
            low = middle
        else:
            high = middle
    return 10**low


_TINY, _ROUNDING, _MANY = torch.finfo(torch.float64).tiny, 1e-6, 1024


def _compute_spectrum(moment: Tensor) -> Tensor:
    """Eigenvalues divided by their sum; in float32 if there are so many that float64 would take much longer."""
    scaled = moment / moment.trace().clamp(min=_TINY)
    return torch.linalg.eigvalsh(scaled.float() if len(moment) > _MANY else scaled)
