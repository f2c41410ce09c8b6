"""Explains in words why an example stands out: what is unusual about it among the examples of this scan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from persample.scanning.report.charts import keep_finite
from persample.scanning.report.wording import format_number, get_title
from persample.scanning.store import Array

MAX_REASONS = 3

# A value is mentioned if at most this share of all examples has a value as extreme. There are no limits on the values
# themselves: what is a large loss or a negative cosine depends on the data.
RARE_SHARE = 0.05


class Reasons:
    """Compares an example with all examples.

    `scores` are what the examples are ranked `by`; `opinions` says what the model says about some examples.

    >>> columns = {"loss": np.array([0.1] * 50 + [2.0]), "norm": np.array([1.0] * 50 + [12.0])}
    >>> reasons = Reasons(columns, by="norm", scores=columns["norm"])
    >>> reasons.find(50), reasons.find(0)
    (['highest loss of all', 'largest gradient of all, 12 times the median'], ['gradient norm: rank 2 of 51'])
    """

    def __init__(
        self, columns: Mapping[str, Array], by: str, scores: Array, opinions: Mapping[int, str] | None = None
    ) -> None:
        self._columns, self._by, self._opinions = columns, by, opinions or {}
        self._scores, self._sorted_scores = scores, np.sort(keep_finite(scores))
        self._sorted = {name: np.sort(keep_finite(column)) for name, column in columns.items()}
        self._shares = _compute_layer_shares(columns)
        self._sorted_shares = {layer: np.sort(keep_finite(share)) for layer, share in self._shares.items()}

    def find(self, i: int) -> list[str]:
        """At most three reasons why example `i` stands out, the strongest first; its rank if there is no other."""
        loss = self._check_loss(i, "loss", "loss") or self._check_loss(i, "mean_loss", "mean loss")
        opinion = self._opinions.get(i)
        reasons = [
            *self._check_finite(i),
            *([opinion] if opinion else []),
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

    def _check_loss(self, i: int, name: str, title: str) -> list[str]:
        value = self._get_value(i, name)
        if not math.isfinite(value) or (share := _compute_share_above(self._sorted[name], value)) > self._limit:
            return []
        return [f"highest {title} of all" if share < 1.5 / len(self._sorted[name]) else f"{title} {_say_top(share)}"]

    def _check_length(self, i: int) -> list[str]:
        name, title = ("norm", "gradient") if "norm" in self._columns else ("self_influence", "self-influence")
        value = self._get_value(i, name)
        if not math.isfinite(value) or (share := _compute_share_above(self._sorted[name], value)) > self._limit:
            return []
        text = f"largest {title} of all" if share < 1.5 / len(self._sorted[name]) else f"{title} {_say_top(share)}"
        median = float(np.median(self._sorted[name]))
        times = value / median if median > 0 else math.inf
        if not 1.05 <= times < 1e6:
            return [text]
        return [f"{text}, {f'{times:.2g}' if times < 99.5 else format_number(round(times))} times the median"]

    def _check_alignment(self, i: int) -> list[str]:
        name = "alignment" if "alignment" in self._columns else "estimated_alignment"
        cosine = self._get_value(i, name)
        if not math.isfinite(cosine):
            return []
        values = self._sorted[name]
        share = int(np.searchsorted(values, cosine, side="right")) / len(values)
        if share > self._limit:
            return []
        finding = (
            "gradient points against the others" if cosine < 0 else "gradient has little in common with the others"
        )
        kind = "cosine" if name == "alignment" else "estimated cosine"
        return [f"{finding}: {kind} {_format_cosine(cosine)}, lowest {_format_percent(share)}"]

    def _check_layers(self, i: int) -> list[str]:
        """The layer with the most unusual share. Each further layer makes an unusual share in one of them likelier."""
        found = []
        for layer, shares in self._shares.items():
            if math.isfinite(shares[i]):
                rarity = _compute_share_above(self._sorted_shares[layer], float(shares[i]))
                found.append((rarity, layer, float(shares[i])))
        if not found:
            return []
        rarity, layer, share = min(found)
        if rarity > self._limit / len(found):
            return []
        median = float(np.median(self._sorted_shares[layer]))
        text = f"{share:.0%} of the gradient in layer {layer} (median {median:.0%})"
        return [text.replace("%", " %")]

    @property
    def _limit(self) -> float:
        """At least one example of a small dataset can be unusual."""
        return max(RARE_SHARE, 1 / max(1, len(self._scores)))

    def _describe_rank(self, i: int) -> str:
        title, value = get_title(self._by).lower(), float(self._scores[i])
        if not math.isfinite(value):
            return f"{title} is not finite"
        rank = 1 + len(self._sorted_scores) - int(np.searchsorted(self._sorted_scores, value, side="right"))
        return f"{title}: rank {rank:,} of {len(self._sorted_scores):,}"


def _compute_share_above(values: Sequence[float] | Array, value: float) -> float:
    """The share of sorted values that are this value or larger."""
    return (len(values) - int(np.searchsorted(values, value))) / len(values)


def _say_top(share: float) -> str:
    return f"in the top {_format_percent(share)}"


def _format_cosine(cosine: float) -> str:
    return f"{cosine:.2f}".replace("-", "−")


def _compute_layer_shares(columns: Mapping[str, Array]) -> dict[str, Array]:
    """The share of each layer in the squared gradient norms, if there are several layers."""
    squares = {name[5:]: np.square(c, dtype=np.float64) for name, c in columns.items() if name.startswith("norm/")}
    if len(squares) < 2:
        return {}
    total = np.sum(list(squares.values()), axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return {layer: square / total for layer, square in squares.items()}


def _format_percent(share: float) -> str:
    """A share in percent, rounded up, so that no example is described as rarer than it is.

    >>> _format_percent(0.0026), _format_percent(0.03)
    ('0.3 %', '3 %')
    """
    percent = round(100 * share, 9)
    return f"{math.ceil(10 * percent) / 10:g} %" if percent < 1 else f"{math.ceil(percent)} %"
