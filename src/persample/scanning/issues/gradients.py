"""Issues that the stored gradients and losses show: wrong labels, outliers, duplicates, harmful examples."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from persample.scanning.estimates import count_far_out
from persample.scanning.issues.base import Issue, flag
from persample.scanning.results import Scan
from persample.scanning.store import Array

MAX_ROWS = 20_000  # examples; the pairs of more take too long without being asked for
DISTANCE = 1.5  # interquartile ranges of the leverages, beyond which an example is an outlier: benchmarks/datalab.py
TOLERANCE = 0.03  # relative difference of the gradients of duplicates


def find_label_issues(scan: Scan) -> Iterator[Issue]:
    """The examples before the cut of the default ranking. The score is the probability of the label.

    It is the geometric mean over the checkpoints: exp(-mean loss), for a cross entropy.
    """
    if scan.default_ranking is None or not scan.estimate_wrong_labels():
        return
    losses = scan.column("mean_loss" if "mean_loss" in scan.columns else "loss")
    scores = np.nan_to_num(np.exp(-np.maximum(losses.astype(np.float64), 0)), nan=0.0)
    scores[list(scan.skipped)] = 1.0
    yield flag("label", len(scan), scan.suspects().ids.tolist(), scores)


def find_gradient_issues(scan: Scan) -> Iterator[Issue]:
    """Outliers by the leverage of their gradients, and groups of examples with the same gradient."""
    if scan.settings["project"] is None or len(scan) < 3:
        return
    found = scan.outliers(len(scan))
    leverages = np.zeros(len(scan))
    leverages[found.ids.numpy()] = found.scores.numpy()
    measured = np.delete(leverages, list(scan.skipped))
    usual = max(float(np.median(measured)), 1e-12)
    count = count_far_out(measured, DISTANCE)
    yield flag("outlier", len(scan), found.ids[:count].tolist(), usual / np.maximum(leverages, usual))
    if len(scan) <= MAX_ROWS:
        groups = scan.duplicates(TOLERANCE)
        yield flag("near_duplicate", len(scan), [i for group in groups for i in group], groups=groups)


def find_data_value(scan: Scan) -> Iterator[Issue]:
    """Examples whose training step raises the loss of the others: the inner product with the sum of their gradients.

    The score is 0.5 where there is no effect, as in Datalab, and 0 for the most harmful example.
    """
    name = next((name for name in ("alignment", "estimated_alignment") if name in scan.columns), None)
    mean = scan.summary.get("mean_gradient_norm")
    if name is None or mean is None or "norm" not in scan.columns:
        return
    cosines, norms = (np.nan_to_num(scan.column(column).astype(np.float64)) for column in (name, "norm"))
    values = norms * (cosines * mean * (len(scan) - len(scan.skipped)) - norms)
    largest = max(float(np.abs(values).max()), 1e-300)
    yield flag("data_value", len(scan), _find_far_below(values), 0.5 + values / largest / 2)


def _find_far_below(values: Array) -> Array:
    """The negative values far below the others."""
    order = np.argsort(values, kind="stable")[: count_far_out(-values)]
    return order[values[order] < 0]
