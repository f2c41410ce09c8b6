"""Where things lie in the report's charts: axes, histograms, ranges and the curve of the noise scale, in percent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from persample.scanning.report.wording import tick
from persample.scanning.store import Array

_SPREAD = 50.0  # the ratio of large to small values from which on an axis is logarithmic
_DEEPEST = 1e-8  # of the largest value: what is smaller lies at the edge of a logarithmic axis
_MOST_DECADES = 7

# Ten colours that stay apart for colour-blind eyes (Petroff, 2021). The style sheet has them as --class-0 and so on,
# some a little darker or lighter, to be seen on its backgrounds.
PALETTE = (
    "#3f90da",
    "#ffa90e",
    "#bd1f01",
    "#94a4a2",
    "#832db6",
    "#a96b59",
    "#e76300",
    "#b9ac70",
    "#717581",
    "#92dadd",
)


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`."""

    low: float
    high: float
    log: bool = False

    def place(self, values: Array | Sequence[float]) -> Array:
        """Where values lie, in percent of the axis; what is outside lies at its ends."""
        found = np.asarray(values, dtype=np.float64)
        low, high = self.low, self.high
        if self.log:
            found, low, high = np.log(np.maximum(found, low)), math.log(low), math.log(high)
        return np.clip((found - low) / (high - low), 0, 1) * 100

    @cached_property
    def ticks(self) -> list[tuple[float, str]]:
        """Places in percent, and what stands there."""
        values = self._log_ticks() if self.log else self._linear_ticks()
        return [(round(float(at), 4), tick(v)) for at, v in zip(self.place(values), values, strict=True)]

    def _log_ticks(self) -> list[float]:
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        if last - first >= 2:
            step = -(-(last - first) // (_MOST_DECADES - 1))
            return [10.0**power for power in range(first, last + 1, step)]
        found = [m * 10.0**power for power in range(first - 1, last + 1) for m in (1, 2, 5)]
        return [v for v in found if self.low <= v <= self.high]

    def _linear_ticks(self, about: int = 5) -> list[float]:
        rough = (self.high - self.low) / about
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(i * step, 12) + 0.0 for i in range(first, last + 1)]


def axis_of(values: Array, padding: float = 0.0, log: bool | None = None) -> Axis:
    """An axis that all finite values lie on, logarithmic where their spread asks for it.

    >>> axis_of(np.array([0.0, 4.0, 10.0])).ticks
    [(0.0, '0'), (20.0, '2'), (40.0, '4'), (60.0, '6'), (80.0, '8'), (100.0, '10')]
    >>> axis_of(np.array([0.01, 1.0, 100.0])).ticks
    [(0.0, '0.01'), (25.0, '0.1'), (50.0, '1'), (75.0, '10'), (100.0, '100')]
    """
    finite = values[np.isfinite(values)].astype(np.float64)
    if not len(finite):
        return Axis(0.0, 1.0)
    low, high = float(finite.min()), float(finite.max())
    log = is_spread(finite) if log is None else log
    if log:
        low = max(float(finite[finite > 0].min()), high * _DEEPEST)
        low, high = (low, high) if low < high else (low / 2, high * 2)
        margin = (high / low) ** padding
        return Axis(low / margin, high * margin, True)
    if 0 <= low < 0.4 * high:
        low = 0.0
    if high - low <= 1e-12 * max(abs(high), abs(low)) or high == low:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    margin = padding * (high - low)
    return Axis(low - margin, high + margin)


def is_spread(values: Array) -> bool:
    """Whether values are better seen on a logarithmic axis: none is negative, and they differ by orders of magnitude.

    >>> is_spread(np.array([0.01, 0.1, 3.0])), is_spread(np.array([1.0, 2.0, 3.0])), is_spread(np.array([-1.0, 1e-3]))
    (True, False, False)
    """
    finite = values[np.isfinite(values)]
    positive = finite[finite > 0]
    if not len(positive) or (finite < 0).any() or 2 * len(positive) < len(finite):
        return False
    low, high = np.quantile(positive, [0.05, 0.99])
    return bool(high > _SPREAD * low)


def histogram(values: Array) -> dict[str, Any]:
    """Bars `(left, width, height)` of the finite values, the axes, and how many lie at the edge for being too small."""
    finite = values[np.isfinite(values)].astype(np.float64)
    axis = axis_of(finite)
    bins = int(np.clip(3 * len(finite) ** (1 / 3), 6, 48))
    counts, edges = np.histogram(axis.place(finite), bins=bins, range=(0, 100))
    upright = Axis(0.0, float(max(1, counts.max()) * 1.08))
    heights = upright.place(counts)
    bars = [(float(at), 100 / bins, float(h)) for at, h in zip(edges, heights, strict=False) if h > 0]
    whole = [(at, text) for at, text in upright.ticks if "." not in text]
    return {"x": axis, "bars": bars, "counts": whole, "at_edge": int((finite < axis.low).sum())}


def noise_curve(scale: float, largest: int) -> dict[str, Any]:
    """What a step gives with each batch size, in percent of the best: `1 / (1 + scale / size)`."""
    axis = Axis(1.0, max(64.0, float(largest), 16 * scale), True)
    at = np.linspace(0, 100, 81)
    sizes = axis.low * (axis.high / axis.low) ** (at / 100)
    gains = 100 / (1 + scale / sizes)
    line = " ".join(f"{x:.2f},{100 - y:.2f}" for x, y in zip(at, gains, strict=True))
    return {"x": axis, "line": line}


def rank_correlation(one: Array, other: Array) -> float:
    """Spearman's, but for ties.

    >>> round(rank_correlation(np.array([1.0, 2.0, 30.0]), np.array([4.0, 5.0, 6.0])), 6)
    1.0
    """
    if len(one) < 3:
        return math.nan
    first, second = (np.argsort(np.argsort(values)).astype(np.float64) for values in (one, other))
    return float(np.corrcoef(first, second)[0, 1])


def colours(count: int) -> list[str]:
    """A colour for each class, for a style sheet: those of the palette, or hues all around where it has too few."""
    if count <= len(PALETTE):
        return [f"var(--class-{i})" for i in range(count)]
    return [f"hsl({round(360 * i / count)} {70 - 20 * (i % 2)}% {(42, 54, 64)[i % 3]}%)" for i in range(count)]
