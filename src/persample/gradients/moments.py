"""Squares of the rows, entry by entry: second moments, variances, the Fisher diagonal, the noise scale."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from persample._internal import host
from persample._internal.precision import widen
from persample.errors import PerSampleError
from persample.gradients.intake import Intake, add_over_processes
from persample.gradients.kept_terms import KeptTerms
from persample.terms import convert_to_double, widen_factors


def compute_second_moment(kept: KeptTerms, memory: int) -> dict[str, Tensor]:
    """`{name: shape}`: the mean over the rows of each entry's square."""
    count = max(1, kept.rows.count_all())
    squares = ((name, term.square_sum(memory // 4) * kept.scale**2) for name, term in kept.get_terms().items())
    return {name: add_over_processes(kept, name, part) / count for name, part in squares}


def compute_weighted_squares(kept: KeptTerms, weights: Tensor, memory: int) -> dict[str, Tensor]:
    """`{name: shape}`: the weighted sum over the rows of each entry's square."""
    if host.decides_late(weights.device):
        host.require((weights >= 0).all(), "fisher_diagonal() needs weights that are not negative.")
    elif bool((weights < 0).any()):
        raise PerSampleError("fisher_diagonal() needs weights that are not negative.")
    roots = weights.double().sqrt() * kept.scale
    found = {}
    for name, term in kept.get_terms().items():
        weighted = widen_factors(term).weigh_samples(roots)
        found[name] = add_over_processes(kept, name, weighted.square_sum(memory // 4))
    return found


def compute_variance(kept: KeptTerms, correction: int, memory: int) -> dict[str, Tensor]:
    """`{name: shape}`: the variance over the rows of each entry."""
    rows, count = kept.rows, kept.rows.count_all()
    factor = 1 / (count - correction) if count > correction else torch.nan
    scales = torch.full((rows.count,), kept.scale, device=rows.device, dtype=torch.float64)
    found = {}
    for name, term in kept.get_terms().items():
        exact = convert_to_double(term)  # the difference of squares below cancels in float32
        total = add_over_processes(kept, name, exact.sum(scales), double=True)
        squares = add_over_processes(kept, name, exact.square_sum(memory // 8) * kept.scale**2, double=True)
        spread = squares - total.abs().square() / max(1, count)
        found[name] = (spread.clamp(min=0) * factor).to(widen(kept.parameters[name]).abs().dtype)
    return found


def compute_noise_scale(intake: Intake, variance: Mapping[str, Tensor], mean: Mapping[str, Tensor]) -> Tensor:
    """tr(Σ) / |G|², from the variance of the rows and their mean."""
    noise = _sum_entries(intake, variance)
    of_mean = _sum_entries(intake, {name: part.abs().square() for name, part in mean.items()})
    return noise / (of_mean - noise / intake.rows.count_all())


def _sum_entries(intake: Intake, parts: Mapping[str, Tensor]) -> Tensor:
    sums = [intake.rows.processes.gather(part.sum(dtype=torch.float64)) for part in parts.values()]
    return torch.stack(sums).sum()
