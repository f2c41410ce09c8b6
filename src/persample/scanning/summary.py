"""The summary of a scan: the dataset as a whole."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
from torch import Tensor

from persample.scanning.estimates import estimate_wrong_labels
from persample.scanning.gradient_sum import get_mean_file
from persample.scanning.store import Array, Store
from persample.scanning.suggestions import compute_confidence
from persample.scanning.table import (
    DESCRIPTIONS,
    check_shards,
    get_column_names,
    read_column,
    read_opinion,
    read_skipped,
)

MAX_CLASSES = 1000  # with more labels, they are not taken for classes


def summarise(store: Store, projected_mean: Tensor | None = None) -> dict[str, Any]:
    """The number of examples, the distribution of each column, and the noise scale with a suggested batch size.

    The noise scale is that of the gradients if their mean is stored, and else that of the projected gradients with the
    mean `projected_mean`.
    """
    settings = store.read_settings()
    last = len(settings["checkpoints"]) - 1
    summary: dict[str, Any] = {"examples": check_shards(store), "shards": store.count_shards(last), "columns": {}}
    norms = read_column(store, "norm")
    is_in_mean = np.isfinite(norms) & np.isfinite(read_column(store, "loss"))  # both are of the last checkpoint
    skipped = read_skipped(store)
    is_finite = is_in_mean.copy()
    for name in get_column_names(store):
        if name == "label":
            labels, counts = np.unique(np.delete(read_column(store, name), list(skipped)), return_counts=True)
            if len(labels) <= MAX_CLASSES:
                summary["labels"] = {str(label): int(count) for label, count in zip(labels, counts, strict=True)}
        elif name not in DESCRIPTIONS:
            column = read_column(store, name)
            is_finite &= np.isfinite(column) | (name == "el2n")  # without a label there is none
            summary["columns"][name] = _compute_quantiles(column)
    if (found := read_opinion(store)) is not None:
        labels, opinion, fits = found
        summary["confidence"] = {
            str(label): value for label, value in compute_confidence(labels, opinion.given_probability).items()
        }
        summary["fits"] = fits
        summary["wrong_labels"] = asdict(estimate_wrong_labels(labels, opinion, fits))
    is_finite[list(skipped)] = True
    summary["not_finite"] = np.flatnonzero(~is_finite)[:100].tolist()
    if skipped:
        summary["skipped"] = {str(i): reason for i, reason in skipped.items()}
    if "noise_scale" in settings["quantities"]:
        mean = store.read_arrays(get_mean_file(last))
        if mean is None and projected_mean is not None:
            # Also the lengths are those of projected gradients: most of their errors and of the mean's cancel.
            norms, mean = read_column(store, "length"), {"": projected_mean.numpy()}
        squared_mean = math.fsum(float(np.square(part, dtype=np.float64).sum()) for part in (mean or {}).values())
        summary |= estimate_noise_scale(norms[is_in_mean].astype(np.float64), squared_mean)
    return summary


def estimate_noise_scale(norms: Array, squared_mean: float) -> dict[str, Any]:
    """The noise scale of McCandlish et al. (2018), and the nearest power of two as a batch size to start from.

    `norms` are the gradient norms of all examples, `squared_mean` is the squared norm of the mean gradient.

    >>> estimate_noise_scale(np.array([2.0, 2.0]), 3.0)  # two gradients of length 2, at an angle of 60 degrees
    {'mean_gradient_norm': 1.732..., 'noise_scale': 1.0, 'suggested_batch_size': 1}
    """
    size, mean_square = len(norms), float(np.square(norms).mean()) if len(norms) else math.nan
    result: dict[str, Any] = {
        "mean_gradient_norm": math.sqrt(squared_mean),
        "noise_scale": None,
        "suggested_batch_size": None,
    }
    if size < 2 or not math.isfinite(mean_square):
        return result
    signal = (size * squared_mean - mean_square) / (size - 1)  # unbiased estimates of |G|² and tr(Σ)
    noise = (mean_square - squared_mean) / (1 - 1 / size)
    if signal <= 0:  # the noise hides the mean gradient
        return result | {"suggested_batch_size": size}
    scale = max(0.0, noise) / signal
    power_of_two = 2 ** round(math.log2(max(1.0, scale)))
    return result | {"noise_scale": scale, "suggested_batch_size": min(power_of_two, size)}


def _compute_quantiles(column: Array) -> dict[str, float | None]:
    finite = column[np.isfinite(column)].astype(np.float64)
    names = ("least", "median", "90%", "99%", "most")
    if not len(finite):
        return dict.fromkeys(("mean", *names))
    quantiles = np.quantile(finite, [0, 0.5, 0.9, 0.99, 1]).tolist()
    return {"mean": float(finite.mean()), **dict(zip(names, quantiles, strict=True))}
