"""How the report writes numbers and names of columns."""

from __future__ import annotations

import math
from typing import Any

NOT_FINITE = "not finite"
MISSING = "–"

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

# Title and meaning of each column.
_COLUMNS = {
    "loss": ("Loss", "How wrong the model is on the example, measured by the loss function."),
    "mean_loss": ("Mean loss", "The loss, averaged over all checkpoints. High for examples that are never learnt."),
    "norm": ("Gradient norm", "How much a training step on this example alone would change the weights."),
    "self_influence": (
        "Self-influence",
        "The squared gradient norm times the learning rate, summed over the checkpoints. High for examples that no "
        "other example explains, such as wrong labels.",
    ),
    "estimated_alignment": (
        "Alignment (estimate)",
        "The cosine between the gradient of the example and the mean gradient, estimated from projected gradients: 1 "
        "means the same direction, 0 an unrelated direction, below 0 against the mean.",
    ),
    "el2n": (
        "EL2N",
        "The distance between the predicted probabilities and the given label, averaged over the checkpoints: 0 if the "
        "model is sure of the label.",
    ),
    "normalised_self_influence": (
        "Normalised self-influence",
        "The squared gradient norm as a multiple of its mean, averaged over the checkpoints.",
    ),
    "whitened_self_influence": (
        "Whitened self-influence",
        "The squared length of the gradient, in which directions that all examples have count less.",
    ),
    "confident": (
        "Confident learning",
        "How much more probable another class is than the given label, relative to what is usual for both classes.",
    ),
    "alignment": (
        "Alignment",
        "The cosine between the gradient of the example and the mean gradient: 1 means the same direction, 0 an "
        "unrelated direction, below 0 against the mean.",
    ),
}

# Title and meaning of each kind of marks in texts.
_MARKS = {
    "token_gradient": (
        "Part of the gradient",
        "The marked tokens have the largest parts of the example's gradient: a training step on it changes the weights "
        "most by what the model computes there (in language models, to predict the next token). Layers after a pooling "
        "do not count.",
    ),
    "token_loss": ("Loss", "The marked tokens are those that the model found least probable, given the text before."),
}


def format_number(value: Any) -> str:
    """A number with three significant digits.

    >>> [format_number(v) for v in (0.024374, 12.345, 2085.9, 0.0000431, -0.41, 0, math.nan, None)]
    ['0.0244', '12.3', '2,086', '4.3×10⁻⁵', '−0.410', '0', 'not finite', '–']
    """
    if value is None:
        return MISSING
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


def format_tick(value: float) -> str:
    """A round number for the tick of an axis.

    >>> [format_tick(v) for v in (0, 0.5, 20, 5000, 10000, 2e-6, -1.5)]
    ['0', '0.5', '20', '5,000', '10⁴', '2×10⁻⁶', '−1.5']
    """
    if value == 0 or 1e-3 <= abs(value) < 9999.5:
        return f"{value:,.6g}".replace("-", "−")
    digits, exponent = f"{value:.5e}".split("e")
    power = f"10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
    digits = digits.rstrip("0").rstrip(".").replace("-", "−")
    return power if digits == "1" else f"{digits}×{power}"


def get_title(column: str) -> str:
    """The title of a column, or of a kind of marks.

    >>> get_title("self_influence"), get_title("norm/head.0")
    ('Self-influence', 'Norm of head.0')
    """
    if column.startswith("norm/"):
        return f"Norm of {column[5:]}"
    return (_COLUMNS | _MARKS).get(column, (column, ""))[0]


def get_meaning(column: str) -> str:
    """The meaning of a column, or of a kind of marks."""
    if column.startswith("norm/"):
        return f"The gradient norm of the parameters in {column[5:]}."
    return (_COLUMNS | _MARKS).get(column, (column, ""))[1]
