"""What a scan knows about single examples, in words: name, label, what the model says."""

from __future__ import annotations

import math
from typing import Any

from persample._internal.text import format_values
from persample.scanning.store import Store
from persample.scanning.table import DESCRIPTIONS, get_class_name, get_column_names, read_column

_CLASSES = ("label", "predicted", "suggested", "worst_label")  # columns with numbers of classes


class Examples:
    """Descriptions of the examples of a scan."""

    def __init__(self, store: Store) -> None:
        self._classes = store.read_settings()["classes"]
        names = [name for name in get_column_names(store) if name in DESCRIPTIONS and name != "id"]
        self._columns = {name: read_column(store, name) for name in names}

    def describe(self, i: int) -> dict[str, Any]:
        """The name, the label and the prediction of example `i`, with names of classes; None where there is none."""
        values = {name: _to_plain(column[i]) for name, column in self._columns.items()}
        for name in _CLASSES:
            if name in values:
                values[name] = get_class_name(self._classes, int(values[name]))
        return values


def say_opinion(example: dict[str, Any]) -> str:
    """What the model says about the label of an example, in a few words; empty if it agrees or says nothing.

    >>> say_opinion({"label": "circle", "predicted": "triangle", "probability": 0.97, "suggested": "triangle"})
    'labelled circle, model says triangle (0.97)'
    >>> say_opinion({"prediction": 3.1, "target": 12.0})
    'target 12, model says 3.1'
    >>> say_opinion({"prediction": [3.1, 0.5], "target": [12.0, 0.5]})
    'output 0: target 12, model says 3.1'
    """
    predicted, suggested = example.get("predicted"), example.get("suggested")
    label = example.get("label") or "nothing"
    if predicted is not None and predicted != example.get("label"):
        return f"labelled {label}, model says {predicted} ({format_probability(example['probability'])})"
    if suggested is not None:
        probability = format_probability(example["suggested_probability"])
        return f"labelled {label}, earlier checkpoints say {suggested} ({probability})"
    if "worst_label" in example:
        probability = example["worst_probability"]
        verb = ("without", "adds", probability) if not example["worst_given"] else ("with", "removes", 1 - probability)
        return f"{verb[0]} label {example['worst_label']}, model {verb[1]} it ({format_probability(verb[2])})"
    if "prediction" in example:
        where, prediction, target = find_worst_output(example)
        return f"{where}target {format_values(target)}, model says {format_values(prediction)}"
    return ""


def find_worst_output(example: dict[str, Any]) -> tuple[str, float | None, float | None]:
    """Prediction and target of an example; of vectors, where they differ most, with the place in words.

    >>> find_worst_output({"prediction": [3.1, 0.5], "target": [12.0, 0.5]})
    ('output 0: ', 3.1, 12.0)
    """
    prediction, target = example["prediction"], example["target"]
    if not isinstance(prediction, list):
        return "", prediction, target
    differences = [
        math.inf if None in pair else abs(pair[0] - pair[1]) for pair in zip(prediction, target, strict=True)
    ]
    worst = max(range(len(differences)), key=differences.__getitem__)
    return f"output {worst}: ", prediction[worst], target[worst]


def format_probability(probability: float | None) -> str:
    """A probability with two digits that is never rounded to 1 or 0.

    >>> format_probability(0.999), format_probability(0.5), format_probability(None)
    ('0.99', '0.50', '?')
    """
    if probability is None:
        return "?"
    return f"{min(0.99, max(0.01, probability)):.2f}"


def _to_plain(value: Any) -> Any:
    if getattr(value, "ndim", 0):
        return [_to_plain(entry) for entry in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
