"""Numbers and columns, as the report calls them."""

from __future__ import annotations

import math
from typing import Any

NOT_FINITE = "not finite"
ABSENT = "–"

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

# The title of each column, and what it says in a line.
_COLUMNS = {
    "loss": ("Loss", "How wrong the model is on the example, by its own loss function."),
    "mean_loss": ("Mean loss", "The loss, averaged over all checkpoints: high for what is never learnt."),
    "norm": ("Gradient norm", "How hard a training step on this example alone would pull on the weights."),
    "self_influence": (
        "Self-influence",
        "The squared gradient norm times the learning rate, summed over the checkpoints: high for what only the "
        "example itself explains, such as a wrong label.",
    ),
    "alignment": (
        "Alignment",
        "The cosine between the example's gradient and the mean gradient: 1 pulls with the rest, 0 elsewhere, "
        "and below 0 against them.",
    ),
}


def number(value: Any) -> str:
    """A number in some three digits.

    >>> [number(v) for v in (0.024374, 12.345, 2085.9, 0.0000431, -0.41, 0, math.nan, None)]
    ['0.0244', '12.3', '2,086', '4.3×10⁻⁵', '−0.410', '0', 'not finite', '–']
    """
    if value is None:
        return ABSENT
    value = float(value)
    if not math.isfinite(value):
        return NOT_FINITE
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 999_999.5 or size < 1e-3:
        digits, exponent = f"{value:.1e}".split("e")
        text = f"{digits}×10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
    else:
        text = f"{value:,.{max(0, 2 - math.floor(math.log10(size)))}f}"
    return text.replace("-", "−")


def tick(value: float) -> str:
    """A round number at an axis.

    >>> [tick(v) for v in (0, 0.5, 20, 5000, 10000, 2e-6, -1.5)]
    ['0', '0.5', '20', '5,000', '10⁴', '2×10⁻⁶', '−1.5']
    """
    if value == 0 or 1e-3 <= abs(value) < 9999.5:
        return f"{value:,.6g}".replace("-", "−")
    digits, exponent = f"{value:.5e}".split("e")
    power = f"10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
    digits = digits.rstrip("0").rstrip(".").replace("-", "−")
    return power if digits == "1" else f"{digits}×{power}"


def counted(count: int, what: str) -> str:
    """How many there are of something.

    >>> counted(1, "example"), counted(1797, "example")
    ('1 example', '1,797 examples')
    """
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def title_of(column: str) -> str:
    """What a column is called.

    >>> title_of("self_influence"), title_of("norm/head.0")
    ('Self-influence', 'Norm of head.0')
    """
    if column.startswith("norm/"):
        return f"Norm of {column[5:]}"
    return _COLUMNS[column][0] if column in _COLUMNS else column


def meaning_of(column: str) -> str:
    """What a column says, in a line."""
    if column.startswith("norm/"):
        return f"The part of the gradient norm that lies in {column[5:]}."
    return _COLUMNS[column][1] if column in _COLUMNS else ""
