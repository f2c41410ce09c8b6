"""What a scan says of the dataset as a whole."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from persample.scanning.store import Array, Store
from persample.scanning.table import check_whole, column_names, column_of

MOST_CLASSES = 1000  # more labels than that are no classes


def summarised(store: Store) -> dict[str, Any]:
    """The number of examples, how each column is spread, and the noise scale with the batch size it suggests."""
    settings = store.settings()
    last = len(settings["checkpoints"]) - 1
    summary: dict[str, Any] = {"examples": check_whole(store), "shards": store.shards(last), "columns": {}}
    norms = column_of(store, "norm")
    in_mean = np.isfinite(norms) & np.isfinite(column_of(store, "loss"))  # by the last checkpoint, as the mean is
    finite = in_mean.copy()
    for name in column_names(store):
        if name == "label":
            labels, counts = np.unique(column_of(store, name), return_counts=True)
            if len(labels) <= MOST_CLASSES:
                summary["labels"] = {str(label): int(count) for label, count in zip(labels, counts, strict=True)}
        elif name != "id":
            column = column_of(store, name)
            finite &= np.isfinite(column)
            summary["columns"][name] = _spread(column)
    summary["not_finite"] = np.flatnonzero(~finite)[:100].tolist()
    if "noise_scale" in settings["quantities"]:
        mean = store.read_arrays(f"mean-{last}.npz") or {}
        of_mean = math.fsum(float(np.square(part, dtype=np.float64).sum()) for part in mean.values())
        summary |= noise(norms[in_mean].astype(np.float64), of_mean)
    return summary


def noise(norms: Array, square_of_mean: float) -> dict[str, Any]:
    """The noise scale of McCandlish et al. (2018) of a dataset, and a batch size to start from: the next power of two.

    >>> noise(np.array([2.0, 2.0]), 3.0)  # two gradients of length 2, at an angle of 60 degrees
    {'mean_gradient_norm': 1.732..., 'noise_scale': 1.0, 'suggested_batch_size': 1}
    """
    size, mean_square = len(norms), float(np.square(norms).mean()) if len(norms) else math.nan
    found: dict[str, Any] = {
        "mean_gradient_norm": math.sqrt(square_of_mean),
        "noise_scale": None,
        "suggested_batch_size": None,
    }
    if size < 2 or not math.isfinite(mean_square):
        return found
    gradient = (size * square_of_mean - mean_square) / (size - 1)  # both without the bias of a finite sample
    spread = (mean_square - square_of_mean) / (1 - 1 / size)
    if gradient <= 0:  # all noise: the gradient is too small to be seen in so many examples
        return found | {"suggested_batch_size": size}
    scale = max(0.0, spread) / gradient
    rounded = 2 ** round(math.log2(max(1.0, scale)))
    return found | {"noise_scale": scale, "suggested_batch_size": min(rounded, size)}


def _spread(column: Array) -> dict[str, float | None]:
    finite = column[np.isfinite(column)].astype(np.float64)
    if not len(finite):
        return dict.fromkeys(("mean", "least", "median", "90%", "99%", "most"))
    quantiles = np.quantile(finite, [0, 0.5, 0.9, 0.99, 1])
    named = zip(("least", "median", "90%", "99%", "most"), quantiles, strict=True)
    return {"mean": float(finite.mean()), **{name: float(value) for name, value in named}}
