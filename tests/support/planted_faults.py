"""Faults that can be planted into a right private training: `FAULTS[name](monkeypatch)` plants one.

A name is the name of the direct test that must find the fault, with the fault in brackets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from opacus.accountants import RDPAccountant
from torch import Tensor

from persample.gradients.squared_norms import SquaredNorms
from persample.private.arrivals import Arrivals
from persample.private.noise import Noise
from persample.private.sampling import PoissonSampler
from persample.private.units import BatchUnits

Patch = pytest.MonkeyPatch


def change_noise(change: Callable[[Noise, Any, Sequence[Tensor], float], None]) -> Callable[[Patch], None]:
    """Replace `Noise.add_to` by `change(noise, add_to, totals, std)`."""
    add_to = Noise.add_to

    def plant(patch: Patch) -> None:
        patch.setattr(Noise, "add_to", lambda noise, totals, std: change(noise, add_to, totals, std))

    return plant


def repeat_noise(noise: Noise, add_to: Any, totals: Sequence[Tensor], std: float) -> None:
    noise._draws = 0
    add_to(noise, totals, std)


def repeat_noise_in_parameters(noise: Noise, add_to: Any, totals: Sequence[Tensor], std: float) -> None:
    numbers = torch.zeros(max(total.numel() for total in totals))
    add_to(noise, [numbers], std)
    for total in totals:
        total += numbers[: total.numel()].view_as(total)


def change_bound(factor: float) -> Callable[[Patch], None]:
    """Clip at `factor` times the bound."""
    make_options = Arrivals._make_options

    def make_changed(arrivals: Arrivals) -> dict[str, Any]:
        options: dict[str, Any] = dict(make_options(arrivals))
        return {**options, "max_norm": factor * options["max_norm"]}

    return lambda patch: patch.setattr(Arrivals, "_make_options", make_changed)


def plant_clip_factors(patch: Patch, compute: Callable[[Tensor, float], Tensor]) -> None:
    """Have a flat bound clip rows with these norms by `compute(norms, max_norm)`."""

    def compute_weights(squares: SquaredNorms, max_norm: float, scale: float) -> Tensor:
        return compute(squares.compute_norms() * scale, max_norm) * scale

    patch.setattr(SquaredNorms, "compute_clip_weights", compute_weights)


def keep_large_batches(patch: Patch) -> None:
    """Clip small batches only."""
    plant_clip_factors(
        patch, lambda norms, bound: torch.ones_like(norms) if len(norms) > 16 else (bound / norms).clamp(max=1)
    )


def change_batches(change: Callable[[Iterator[list[int]]], Iterator[list[int]]]) -> Callable[[Patch], None]:
    """Replace the batches of the sampler."""
    iterate = PoissonSampler.__iter__
    return lambda patch: patch.setattr(PoissonSampler, "__iter__", lambda sampler: change(iterate(sampler)))


def draw_twice(batches: Iterator[list[int]]) -> Iterator[list[int]]:
    for batch in batches:
        yield batch
        yield batch
        next(batches, None)


def draw_larger(batches: Iterator[list[int]]) -> Iterator[list[int]]:
    """Each batch has the samples of three."""
    for batch in batches:
        yield sorted({*batch, *next(batches, []), *next(batches, [])})


def change_history(change: Callable[[float, float], tuple[float, float]]) -> Callable[[Patch], None]:
    """Let the accountant count another noise multiplier and sample rate."""
    step = RDPAccountant.step

    def step_changed(accountant: Any, *, noise_multiplier: float, sample_rate: float) -> None:
        noise_multiplier, sample_rate = change(noise_multiplier, sample_rate)
        step(accountant, noise_multiplier=noise_multiplier, sample_rate=sample_rate)

    return lambda patch: patch.setattr(RDPAccountant, "step", step_changed)


def count_half(patch: Patch) -> None:
    step, calls = RDPAccountant.step, iter(range(10**9))
    patch.setattr(RDPAccountant, "step", lambda accountant, **given: next(calls) % 2 or step(accountant, **given))


def mix_units(patch: Patch) -> None:
    """Each sample has the unit of the sample before it."""
    take = BatchUnits.take

    def take_mixed(units: BatchUnits, batch_size: int) -> Any:
        found: Any = take(units, batch_size)
        return [*found[-1:], *found[:-1]]

    patch.setattr(BatchUnits, "take", take_mixed)


FAULTS: dict[str, Callable[[Patch], None]] = {
    "noise (halved)": change_noise(lambda noise, add_to, totals, std: add_to(noise, totals, std / 2)),
    "noise (quartered)": change_noise(lambda noise, add_to, totals, std: add_to(noise, totals, std / 4)),
    "noise (missing in a layer)": change_noise(lambda noise, add_to, totals, std: add_to(noise, totals[2:], std)),
    "noise (missing in a bias)": change_noise(lambda noise, add_to, totals, std: add_to(noise, totals[:-1], std)),
    "noise (claimed twice)": change_history(lambda noise, rate: (2 * noise, rate)),
    "noise over steps (repeated)": change_noise(repeat_noise),
    "noise over parameters (repeated)": change_noise(repeat_noise_in_parameters),
    "clipping (at 10 C)": change_bound(10),
    "clipping (at 1.1 C)": change_bound(1.1),
    "clipping (missing)": change_bound(1e12),
    "clipping (of small batches only)": keep_large_batches,
    "batch sizes (a tenth is claimed)": change_history(lambda noise, rate: (noise, rate / 10)),
    "batch sizes (three times the rate)": change_batches(draw_larger),
    "repeated samples (in the next batch)": change_batches(draw_twice),
    "repeated samples (in the batch)": change_batches(lambda batches: (2 * batch for batch in batches)),
    "counted steps (a half)": count_half,
    "clipping of units (mixed up)": mix_units,
}
