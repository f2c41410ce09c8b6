"""The numbers behind the charts, for the page and for the PNG files: axes, histograms, layers, points, colours.

Positions are in percent of an axis.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from persample.scanning.report.wording import format_tick
from persample.scanning.store import Array

_LOG_RATIO = 50.0  # of large to small values, from which on an axis is logarithmic
_LOG_DEPTH = 1e-8  # of the largest value: smaller values lie at the edge of a logarithmic axis
_MAX_DECADES = 7  # with ticks
_LAYER_PADDING = 0.03

# Ten colours that colour-blind people can tell apart (Petroff, 2021). The style sheet has them as --class-0 and so on,
# some slightly darker or lighter for contrast with its backgrounds.
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


# ---- axes ----


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic axis from `low` to `high`."""

    low: float
    high: float
    log: bool = False

    def locate(self, values: Array | Sequence[float]) -> Array:
        """Positions of values; values outside the axis lie at its ends."""
        found = np.asarray(values, dtype=np.float64)
        low, high = self.low, self.high
        if self.log:
            found, low, high = np.log(np.maximum(found, low)), math.log(low), math.log(high)
        return np.clip((found - low) / (high - low), 0, 1) * 100

    def get_values(self, positions: Array) -> Array:
        """Values at positions.

        >>> Axis(1.0, 100.0, log=True).get_values(np.array([0, 50, 100]))
        array([  1.,  10., 100.])
        """
        if self.log:
            return self.low * (self.high / self.low) ** (positions / 100)
        return self.low + (self.high - self.low) * positions / 100

    @cached_property
    def ticks(self) -> list[tuple[float, str]]:
        """Positions and texts of the ticks."""
        values = self._choose_log_ticks() if self.log else self._choose_linear_ticks()
        return [(round(float(at), 4), format_tick(v)) for at, v in zip(self.locate(values), values, strict=True)]

    def _choose_log_ticks(self) -> list[float]:
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        if last - first >= 2:
            step = -(-(last - first) // (_MAX_DECADES - 1))
            return [10.0**power for power in range(first, last + 1, step)]
        found = [m * 10.0**power for power in range(first - 1, last + 1) for m in (1, 2, 5)]
        return [v for v in found if self.low <= v <= self.high]

    def _choose_linear_ticks(self, about: int = 5) -> list[float]:
        rough = (self.high - self.low) / about
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(i * step, 12) + 0.0 for i in range(first, last + 1)]


def choose_axis(values: Array, padding: float = 0.0, log: bool | None = None) -> Axis:
    """An axis for all finite values, logarithmic if they need it, with a margin of `padding` times its length.

    >>> choose_axis(np.array([0.0, 4.0, 10.0])).ticks
    [(0.0, '0'), (20.0, '2'), (40.0, '4'), (60.0, '6'), (80.0, '8'), (100.0, '10')]
    >>> choose_axis(np.array([0.01, 1.0, 100.0])).ticks
    [(0.0, '0.01'), (25.0, '0.1'), (50.0, '1'), (75.0, '10'), (100.0, '100')]
    """
    finite = keep_finite(values)
    if not len(finite):
        return Axis(0.0, 1.0)
    low, high = float(finite.min()), float(finite.max())
    log = needs_log_axis(finite) if log is None else log
    if log:
        low = max(float(finite[finite > 0].min()), high * _LOG_DEPTH)
        low, high = (low, high) if low < high else (low / 2, high * 2)
        margin = (high / low) ** padding
        return Axis(low / margin, high * margin, True)
    if 0 <= low < 0.4 * high:
        low = 0.0
    if high - low <= 1e-12 * max(abs(high), abs(low)) or high == low:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    margin = padding * (high - low)
    return Axis(low - margin, high + margin)


def needs_log_axis(values: Array) -> bool:
    """Whether a logarithmic axis shows the values better: none is negative, and they span orders of magnitude.

    >>> [needs_log_axis(np.array(v)) for v in ([0.01, 0.1, 3.0], [1.0, 2.0, 3.0], [-1.0, 1e-3])]
    [True, False, False]
    """
    finite = values[np.isfinite(values)]
    positive = finite[finite > 0]
    if not len(positive) or (finite < 0).any() or 2 * len(positive) < len(finite):
        return False
    low, high = np.quantile(positive, [0.05, 0.99])
    return bool(high > _LOG_RATIO * low)


def keep_finite(values: Array) -> Array:
    """The finite values, in float64."""
    return values[np.isfinite(values)].astype(np.float64)


# ---- charts ----


@dataclass(frozen=True)
class Histogram:
    """Counts of values between edges, with the median and the 99 % quantile."""

    axis: Axis
    edges: Array  # positions
    counts: Array
    median: float
    high: float
    at_edge: int  # values that are too small for a logarithmic axis; they are in the first bar

    @cached_property
    def count_axis(self) -> Axis:
        """The axis of the counts."""
        return Axis(0.0, float(max(1, self.counts.max()) * 1.08))

    @cached_property
    def bars(self) -> list[tuple[float, float, float]]:
        """`(left, width, height)` of each bar that is not empty, in percent."""
        heights, widths = self.count_axis.locate(self.counts), np.diff(self.edges)
        bars = zip(self.edges.tolist(), widths.tolist(), heights.tolist(), strict=False)
        return [(left, width, height) for left, width, height in bars if height > 0]

    @cached_property
    def count_ticks(self) -> list[tuple[float, str]]:
        """Ticks of the count axis at whole numbers."""
        return [(at, text) for at, text in self.count_axis.ticks if "." not in text]


def compute_histogram(values: Array) -> Histogram | None:
    """The histogram of the finite values; None if there are none."""
    finite = keep_finite(values)
    if not len(finite):
        return None
    axis = choose_axis(finite)
    bins = int(np.clip(3 * len(finite) ** (1 / 3), 6, 48))
    counts, edges = np.histogram(axis.locate(finite), bins=bins, range=(0, 100))
    median, high = np.quantile(finite, [0.5, 0.99]).tolist()
    return Histogram(axis, edges, counts, median, high, int((finite < axis.low).sum()))


@dataclass(frozen=True)
class LayerRanges:
    """For each layer, the median and the 99 % quantile of its gradient norms, and an axis for all of them."""

    axis: Axis
    ranges: dict[str, tuple[float, float]]


def compute_layer_ranges(columns: Mapping[str, Array]) -> LayerRanges | None:
    """The ranges of the columns `norm/LAYER` with finite values; None if there are none."""
    finite = {name[5:]: keep_finite(column) for name, column in columns.items() if name.startswith("norm/")}
    quantiles = {layer: np.quantile(norms, [0.5, 0.99]).tolist() for layer, norms in finite.items() if len(norms)}
    if not quantiles:
        return None
    ends = np.array(list(quantiles.values())).flatten()
    axis = choose_axis(ends, _LAYER_PADDING, log=needs_log_axis(ends) and bool((ends > 0).all()))
    return LayerRanges(axis, {layer: (median, high) for layer, (median, high) in quantiles.items()})


def select_points(losses: Array, norms: Array, suspects: Sequence[int], most: int) -> list[int]:
    """At most `most` examples for a scatter plot: suspects in their order, then others at random.

    Examples with a loss or norm that is not finite have no position, and are left out.
    """
    is_finite = np.isfinite(losses) & np.isfinite(norms)
    first = [i for i in suspects if is_finite[i]][:most]
    is_finite[first] = False
    others = np.random.default_rng(0).permutation(np.flatnonzero(is_finite))[: most - len(first)]
    return first + others.tolist()


def compute_noise_curve(scale: float, largest: int) -> tuple[Axis, Array]:
    """An axis of batch sizes, and `(positions, gains)`: the gain of a step with each size, in percent of the best step.

    The gain is `1 / (1 + scale / size)` for the noise scale `scale`.
    """
    axis = Axis(1.0, max(64.0, float(largest), 16 * scale), True)
    positions = np.linspace(0, 100, 81)
    return axis, np.stack([positions, 100 / (1 + scale / axis.get_values(positions))])


def compute_rank_correlation(one: Array, other: Array) -> float:
    """Spearman's rank correlation, without a correction for ties. NaN for fewer than three values.

    >>> round(compute_rank_correlation(np.array([1.0, 2.0, 30.0]), np.array([4.0, 5.0, 6.0])), 6)
    1.0
    """
    if len(one) < 3:
        return math.nan
    first, second = (np.argsort(np.argsort(values)).astype(np.float64) for values in (one, other))
    return float(np.corrcoef(first, second)[0, 1])


def choose_colours(count: int) -> list[str]:
    """A colour for each of `count` classes: of the palette if it has enough, else hues around the colour circle.

    >>> choose_colours(2), choose_colours(12)[:2]
    (['#3f90da', '#ffa90e'], ['#b62020', '#c48a4f'])
    """
    if count <= len(PALETTE):
        return list(PALETTE[:count])
    colours = []
    for i in range(count):
        lightness, saturation = (0.42, 0.54, 0.64)[i % 3], 0.7 - 0.2 * (i % 2)
        rgb = colorsys.hls_to_rgb(i / count, lightness, saturation)
        colours.append("#" + "".join(f"{round(255 * part):02x}" for part in rgb))
    return colours
