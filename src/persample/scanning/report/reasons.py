"""Why an example stands out, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from persample.scanning.report.wording import number, title_of
from persample.scanning.store import Array

MOST_REASONS = 3

_TOP = 0.05  # of the examples: a value outside of it is nothing to speak of
_TIMES = 3.0  # the median: a gradient below it is nothing to speak of
_AGAINST = -0.1  # the cosine from which on a gradient points against the others
_MOSTLY = 0.5  # of a squared gradient
_UNUSUALLY = 0.15  # more than the layer has of most gradients


class Reasons:
    """What is to be said of each example, from its columns against those of all examples.

    >>> reasons = Reasons({"loss": np.array([0.1] * 50 + [2.0]), "norm": np.array([1.0] * 50 + [12.0])}, by="norm")
    >>> reasons.of(50), reasons.of(0)
    (['highest loss of all', 'gradient 12 times the median'], ['gradient norm: rank 2 of 51'])
    """

    def __init__(self, columns: Mapping[str, Array], by: str) -> None:
        self._columns, self._by = columns, by
        finite = {name: column[np.isfinite(column)].astype(np.float64) for name, column in columns.items()}
        self._sorted = {name: np.sort(column) for name, column in finite.items()}
        self._medians = {name: float(np.median(c)) if len(c) else math.nan for name, c in self._sorted.items()}
        self._shares = _shares(columns)
        self._usual_shares = {group: _median(share) for group, share in self._shares.items()}

    def of(self, i: int) -> list[str]:
        """At most three reasons, the weightiest first; the rank where there is no other."""
        loss = self._high(i, "loss", "loss") or self._high(i, "mean_loss", "mean loss")
        found = [*self._not_finite(i), *loss, *self._long(i), *self._against(i), *self._in_a_layer(i)]
        return found[:MOST_REASONS] or [self._rank(i)]

    def _value(self, i: int, name: str) -> float:
        """Not a number where the scan has no such column."""
        return float(self._columns[name][i]) if name in self._columns else math.nan

    def _not_finite(self, i: int) -> list[str]:
        names = [name for name in ("loss", "norm") if name in self._columns]
        called = {"loss": "loss", "norm": "gradient"}
        return [f"{called[name]} is not finite" for name in names if not math.isfinite(self._value(i, name))]

    def _high(self, i: int, name: str, called: str) -> list[str]:
        value = self._value(i, name)
        if not math.isfinite(value):
            return []
        values = self._sorted[name]
        as_high = len(values) - int(np.searchsorted(values, value))  # with itself, and with those that equal it
        if as_high == 1 and len(values) > 1:
            return [f"highest {called} of all"]
        share = as_high / len(values)
        return [f"{called} in the top {_percent(share)}"] if share <= _TOP else []

    def _long(self, i: int) -> list[str]:
        name, called = ("norm", "gradient") if "norm" in self._columns else ("self_influence", "self-influence")
        value, median = self._value(i, name), self._medians.get(name, math.nan)
        if not (math.isfinite(value) and median > 0 and value >= _TIMES * median):
            return []
        times = value / median
        return [f"{called} {f'{times:.2g}' if times < 99.5 else number(round(times))} times the median"]

    def _against(self, i: int) -> list[str]:
        cosine = self._value(i, "alignment")
        return [f"points against the mean gradient (cosine −{-cosine:.2f})"] if cosine <= _AGAINST else []

    def _in_a_layer(self, i: int) -> list[str]:
        shares = {group: float(share[i]) for group, share in self._shares.items()}
        for group, share in shares.items():
            usual = self._usual_shares[group]
            if share >= _MOSTLY and share >= usual + _UNUSUALLY:
                return [f"{share:.0%} of it in layer {group} (median {usual:.0%})".replace("%", " %")]
        return []

    def _rank(self, i: int) -> str:
        values, value = self._sorted[self._by], self._value(i, self._by)
        called = title_of(self._by).lower()
        if not math.isfinite(value):
            return f"{called} is not finite"
        smallest_first = self._by == "alignment"
        before = np.searchsorted(values, value, side="left" if smallest_first else "right")
        rank = 1 + int(before if smallest_first else len(values) - before)
        return f"{called}: rank {rank:,} of {len(values):,}"


def _shares(columns: Mapping[str, Array]) -> dict[str, Array]:
    """The part of each squared gradient that lies in each layer, where there are several."""
    squares = {name[5:]: np.square(c, dtype=np.float64) for name, c in columns.items() if name.startswith("norm/")}
    if len(squares) < 2:
        return {}
    total = np.sum(list(squares.values()), axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return {group: square / total for group, square in squares.items()}


def _median(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else 0.0


def _percent(share: float) -> str:
    """Rounded up, so that no example is said to be rarer than it is.

    >>> _percent(0.0026), _percent(0.03)
    ('0.3 %', '3 %')
    """
    percent = round(100 * share, 9)
    return f"{math.ceil(10 * percent) / 10:g} %" if percent < 1 else f"{math.ceil(percent)} %"
