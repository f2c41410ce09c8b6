"""A batch size and a clipping bound from the measured steps, with the reasons."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from persample._internal.text import format_count, format_table
from persample.errors import PerSampleError
from persample.monitoring.measurement import Measurement
from persample.monitoring.noise_scale import NoiseScale

_LAST = 20  # measured steps that the bound is taken from: norms change during training


@dataclass(frozen=True)
class Advice:
    """The result of `Monitor.advise`.

    Attributes:
        batch_size: the suggested batch size: the noise scale, rounded to a power of two. None if it is not known.
        max_norm: the suggested clipping bound: the median of the norms.
        bounds: quantiles of the norms, each with the share of samples that it clips as a bound.
        epsilons: by batch size, the epsilon of private training; empty if it was not asked for.
        reasons: sentences.

    >>> print(Advice(128, 0.5, {"median": 0.5}, {}, ["The noise scale is 120 (90 to 170)."]))
    batch size 128, clipping bound 0.5
      The noise scale is 120 (90 to 170).
    """

    batch_size: int | None
    max_norm: float | None
    bounds: dict[str, float]
    epsilons: dict[int, float] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The advice for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        size = "not known" if self.batch_size is None else str(self.batch_size)
        bound = "not known" if self.max_norm is None else f"{self.max_norm:.3g}"
        lines = [f"batch size {size}, clipping bound {bound}", *(f"  {reason}" for reason in self.reasons)]
        if self.epsilons:
            rows = [[str(size), f"{epsilon:.2f}"] for size, epsilon in self.epsilons.items()]
            lines.append(format_table(rows, ["batch size", "epsilon"], right={0, 1}, indent="  "))
        return "\n".join(lines)


def advise(
    noise_scale: NoiseScale | None,
    history: Sequence[Measurement],
    *,
    examples: int | None,
    epochs: float,
    noise_multiplier: float,
    delta: float | None,
) -> Advice:
    """See `Monitor.advise`."""
    size, about_size = _choose_size(noise_scale)
    bounds, about_bounds = _find_bounds(history)
    reasons = [about_size, *about_bounds]
    if history and history[-1].coupled:
        reasons.append(
            "The figures are of contributions to the batch's gradient: the samples influence each other. Private "
            "training refuses such a model, and its norms would be others."
        )
    epsilons = {}
    if examples is not None:
        used = history[-1].samples if history else None
        sizes = sorted({s for s in (size, used, size and 2 * size) if s and s <= examples})
        epsilons = {s: compute_epsilon(examples, s, epochs, noise_multiplier, delta or 1 / examples) for s in sizes}
        reasons.append(
            f"Epsilon is that of Poisson sampling with noise multiplier {noise_multiplier:g} for {epochs:g} epochs of "
            f"{examples:,} examples, at delta {delta or 1 / examples:.2g}. It does not depend on the bound."
        )
    return Advice(size, bounds.get("median"), bounds, epsilons, reasons)


def _choose_size(noise_scale: NoiseScale | None) -> tuple[int | None, str]:
    """The batch size, and the reason."""
    if noise_scale is None or noise_scale.value is None or math.isinf(noise_scale.high):
        low = 0.0 if noise_scale is None else noise_scale.low
        known = f"It is above {low:.3g}: use batches at least as large." if low > 0 else "Measure more steps."
        return None, f"The mean gradient cannot be told from noise yet, so the noise scale has no upper bound. {known}"
    return 2 ** max(0, round(math.log2(max(1.0, noise_scale.value)))), (
        f"The noise scale is {noise_scale}. Below this batch size, twice the batch needs almost half the steps; "
        "above it, larger batches save few steps (McCandlish et al., 2018). It grows during training."
    )


def _find_bounds(history: Sequence[Measurement]) -> tuple[dict[str, float], list[str]]:
    """Quantiles of the norms of the last steps, and what they mean."""
    last = [found.norms for found in history[-_LAST:] if math.isfinite(found.norms["median"])]
    if not last:
        return {}, []
    bounds = {name: statistics.median(norms[name] for norms in last) for name in ("25%", "median", "75%", "90%")}
    return bounds, [
        f"Half of the gradient norms of the last {format_count(len(last), 'measured step')} are below "
        f"{bounds['median']:.3g}, 90 % below {bounds['90%']:.3g}. A bound at the median clips half of the samples. "
        "Noise grows with the bound, bias shrinks with it; values between the 25 % quantile and the median are "
        "common in private training."
    ]


def compute_epsilon(examples: int, batch_size: int, epochs: float, noise_multiplier: float, delta: float) -> float:
    """The epsilon of private training, by Opacus' RDP accountant."""
    try:
        from opacus.accountants import RDPAccountant
    except ImportError as error:
        raise ImportError("The epsilon of private training needs Opacus: pip install 'persample[private]'") from error
    if not 0 < delta < 1:
        raise PerSampleError(f"delta must be between 0 and 1, got {delta}.")
    accountant = RDPAccountant()
    accountant.history.append(
        (noise_multiplier, batch_size / examples, max(1, math.ceil(epochs * examples / batch_size)))
    )
    return float(accountant.get_epsilon(delta=delta))
