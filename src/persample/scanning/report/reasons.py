"""Explains in words why an example stands out."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from persample.scanning.report.charts import keep_finite
from persample.scanning.report.wording import format_number, get_title
from persample.scanning.store import Array

MAX_REASONS = 3

# Thresholds from which on a value is worth mentioning.
_TOP_SHARE = 0.05  # of the examples by loss
_MIN_TIMES_MEDIAN = 3.0  # for gradient norms
_MAX_COSINE = -0.1  # with the mean gradient
_MIN_LAYER_SHARE = 0.5  # of a squared gradient norm
_MIN_EXTRA_SHARE = 0.15  # above the median share of the layer


class Reasons:
    """Compares an example with all examples.

    >>> reasons = Reasons({"loss": np.array([0.1] * 50 + [2.0]), "norm": np.array([1.0] * 50 + [12.0])}, by="norm")
    >>> reasons.find(50), reasons.find(0)
    (['highest loss of all', 'gradient 12 times the median'], ['gradient norm: rank 2 of 51'])
    """

    def __init__(self, columns: Mapping[str, Array], by: str) -> None:
        self._columns, self._by = columns, by
        self._sorted = {name: np.sort(keep_finite(column)) for name, column in columns.items()}
        self._medians = {name: _compute_median(column) for name, column in columns.items()}
        self._shares = _compute_layer_shares(columns)
        self._median_shares = {layer: _compute_median(share) for layer, share in self._shares.items()}

    def find(self, i: int) -> list[str]:
        """At most three reasons why example `i` stands out, the strongest first; its rank if there is no other."""
        loss = self._check_high(i, "loss", "loss") or self._check_high(i, "mean_loss", "mean loss")
        reasons = [
            *self._check_finite(i),
            *loss,
            *self._check_length(i),
            *self._check_alignment(i),
            *self._check_layers(i),
        ]
        return reasons[:MAX_REASONS] or [self._describe_rank(i)]

    def _get_value(self, i: int, name: str) -> float:
        """NaN if the scan has no such column."""
        return float(self._columns[name][i]) if name in self._columns else math.nan

    def _check_finite(self, i: int) -> list[str]:
        names = {"loss": "loss", "norm": "gradient"}
        return [
            f"{title} is not finite"
            for name, title in names.items()
            if name in self._columns and not math.isfinite(self._get_value(i, name))
        ]

    def _check_high(self, i: int, name: str, title: str) -> list[str]:
        value = self._get_value(i, name)
        if not math.isfinite(value):
            return []
        values = self._sorted[name]
        count = len(values) - int(np.searchsorted(values, value))  # examples with this value or a higher one
        if count == 1 and len(values) > 1:
            return [f"highest {title} of all"]
        share = count / len(values)
        return [f"{title} in the top {_format_percent(share)}"] if share <= _TOP_SHARE else []

    def _check_length(self, i: int) -> list[str]:
        name, title = ("norm", "gradient") if "norm" in self._columns else ("self_influence", "self-influence")
        value, median = self._get_value(i, name), self._medians.get(name, math.nan)
        if not (math.isfinite(value) and median > 0 and value >= _MIN_TIMES_MEDIAN * median):
            return []
        times = value / median
        return [f"{title} {f'{times:.2g}' if times < 99.5 else format_number(round(times))} times the median"]

    def _check_alignment(self, i: int) -> list[str]:
        cosine = self._get_value(i, "alignment" if "alignment" in self._columns else "estimated_alignment")
        return [f"points against the mean gradient (cosine −{-cosine:.2f})"] if cosine <= _MAX_COSINE else []

    def _check_layers(self, i: int) -> list[str]:
        for layer, shares in self._shares.items():
            share, median = float(shares[i]), self._median_shares[layer]
            if share >= _MIN_LAYER_SHARE and share >= median + _MIN_EXTRA_SHARE:
                return [f"{share:.0%} of the gradient in layer {layer} (median {median:.0%})".replace("%", " %")]
        return []

    def _describe_rank(self, i: int) -> str:
        values, value = self._sorted[self._by], self._get_value(i, self._by)
        title = get_title(self._by).lower()
        if not math.isfinite(value):
            return f"{title} is not finite"
        smallest_first = self._by in ("alignment", "estimated_alignment")
        before = np.searchsorted(values, value, side="left" if smallest_first else "right")
        rank = 1 + int(before if smallest_first else len(values) - before)
        return f"{title}: rank {rank:,} of {len(values):,}"


def _compute_layer_shares(columns: Mapping[str, Array]) -> dict[str, Array]:
    """The share of each layer in the squared gradient norms, if there are several layers."""
    squares = {name[5:]: np.square(c, dtype=np.float64) for name, c in columns.items() if name.startswith("norm/")}
    if len(squares) < 2:
        return {}
    total = np.sum(list(squares.values()), axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return {layer: square / total for layer, square in squares.items()}


def _compute_median(values: Array) -> float:
    """Median of the finite values; 0 if there are none."""
    finite = keep_finite(values)
    return float(np.median(finite)) if len(finite) else 0.0


def _format_percent(share: float) -> str:
    """A share in percent, rounded up, so that no example is described as rarer than it is.

    >>> _format_percent(0.0026), _format_percent(0.03)
    ('0.3 %', '3 %')
    """
    percent = round(100 * share, 9)
    return f"{math.ceil(10 * percent) / 10:g} %" if percent < 1 else f"{math.ceil(percent)} %"
