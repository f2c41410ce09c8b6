"""Whitening of projected gradients, and the choice of its damping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from persample.scanning.errors import ScanError

Damping = float | Literal["auto"]

# "auto" for influence: the damping if nothing is known about the training. Steps of the training are compared with what
# the candidates predict; a best cosine below the bound means that two checkpoints are of different trainings. All three
# were chosen by the linear datamodeling score on some tasks, and checked on others (benchmarks/damping.py).
USUAL_DAMPING, CANDIDATES, LEAST_COSINE = 3.0, tuple(0.1 * 3000 ** (i / 14) for i in range(15)), 0.2

# "auto" for directions without lengths: the effective number of dimensions that it leaves, an upper bound as a part of
# the rank, and the least damping.
DIMS_OF_DIRECTIONS, PART_OF_RANK, LEAST_OF_DIRECTIONS = 40.0, 1 / 3, 1e-3

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
    """

    def __init__(self, moment: Tensor, damping: float, blocks: Tensor | None = None) -> None:
        means = compute_block_means(moment.diagonal(), blocks)
        self._lower = torch.linalg.cholesky(moment + torch.diag(damping * means))

    def solve(self, rows: Tensor) -> Tensor:
        """`rows (M + D)⁻¹`, in the dtype of `M`."""
        return torch.cholesky_solve(rows.to(self._lower).T, self._lower).T

    def compute_squares(self, rows: Tensor) -> Tensor:
        """`r (M + D)⁻¹ rᵀ` for each row `r`, in the dtype of `M`."""
        return torch.linalg.solve_triangular(self._lower, rows.to(self._lower).T, upper=False).square().sum(0)


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


# ---- the choice for influence ----


def compare_with_step(moment: Tensor, blocks: Tensor | None, mean: Tensor, step: Tensor) -> Tensor:
    """For each of `CANDIDATES`, the cosine of `(M + D)⁻¹ mean` with a step of the training.

    `mean` is the mean gradient of a checkpoint, and `step` what the training subtracted from its weights until the next
    one. Whitened influence assumes that the training does what `(M + D)⁻¹` does: it reaches far in directions in which
    the gradients vary, and less far where the damping is larger than the eigenvalue. So the right damping predicts the
    step. The entries of each block are divided by the scale of its weights, `1 / sqrt(mean eigenvalue)`.
    """
    scaled = moment / moment.trace().clamp(min=_TINY)
    scaled = scaled.float() if len(moment) > _MANY else scaled
    scales = compute_block_means(scaled.diagonal(), blocks).sqrt()
    target = scales * step.to(scaled)
    found = [scales * Whitening(scaled, damping, blocks).solve(mean[None])[0] for damping in CANDIDATES]
    return torch.stack([cosine_similarity(prediction, target, dim=0) for prediction in found]).double()


def choose_damping(cosines: Sequence[Tensor]) -> float:
    """The damping for influence, from what `compare_with_step` found for steps of the training, if any.

    It is the geometric mean of `USUAL_DAMPING` and of the candidate with the best mean cosine.

    >>> choose_damping([])
    3.0
    """
    known = [part for part in cosines if is_of_training(part)]
    if not known:
        return USUAL_DAMPING
    return math.sqrt(USUAL_DAMPING * CANDIDATES[int(torch.stack(known).mean(0).argmax())])


def is_of_training(cosines: Tensor) -> bool:
    """Whether the step that `compare_with_step` got leads from a checkpoint to a later one of the same training."""
    return float(cosines.max()) >= LEAST_COSINE


# ---- the choice for directions ----


def choose_damping_of_directions(moment: Tensor) -> float:
    """The damping that leaves `DIMS_OF_DIRECTIONS` effective dimensions `Σ e / (e + λ)`, at most a third of the rank.

    `e` are the eigenvalues of the moment, and `λ` is the damping times their mean; at least `LEAST_OF_DIRECTIONS`.

    >>> round(choose_damping_of_directions(torch.eye(90)), 6)  # 90 / (1 + λ) = 30
    2.0
    """
    spectrum = _compute_spectrum(moment).double().clamp(min=0)  # rounding makes some eigenvalues negative
    spectrum = spectrum / spectrum.mean().clamp(min=_TINY)
    wanted = min(DIMS_OF_DIRECTIONS, PART_OF_RANK * int((spectrum > _ROUNDING * spectrum.max()).sum()))
    low, high = math.log10(LEAST_OF_DIRECTIONS), 12.0
    for _ in range(60):
        middle = (low + high) / 2
        if float((spectrum / (spectrum + 10**middle)).sum()) > wanted:
            low = middle
        else:
            high = middle
    return 10**low


_TINY, _ROUNDING, _MANY = torch.finfo(torch.float64).tiny, 1e-6, 1024


def _compute_spectrum(moment: Tensor) -> Tensor:
    """Eigenvalues divided by their sum; in float32 if there are so many that float64 would take much longer."""
    scaled = moment / moment.trace().clamp(min=_TINY)
    return torch.linalg.eigvalsh(scaled.float() if len(moment) > _MANY else scaled)
