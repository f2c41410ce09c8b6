"""Issues of the data as a whole: rare classes, order, weak groups, properties that give labels away."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch

from persample.scanning.issues.base import Issue, flag
from persample.scanning.issues.contents import Contents
from persample.scanning.results import Scan
from persample.scanning.store import Array
from persample.scanning.stored_gradients import StoredGradients
from persample.scanning.table import get_class_name

_RARE = 0.1  # of the share that each class would have
_ROWS, _NEIGHBOURS, _SHUFFLES = 2000, 5, 200  # of the test for order
_MAX_P = 0.01
_GROUPS, _MIN_GROUP, _MAX_RATIO = 5, 20, 0.8  # of the accuracy of the others
_FAR = 4.0  # standard deviations
_BINS, _MAX_GAIN = 10, 0.5
_HELPERS = ("darkest", "brightest", "letters")  # properties that others of the list stand for


def find_rare_classes(scan: Scan, contents: Contents | None) -> Iterator[Issue]:
    """The examples of the rarest class, if it has less than a tenth of its share."""
    labels = _read_labels(scan)
    if labels is None or len(classes := np.unique(labels[labels >= 0])) < 2:
        return
    shares = {int(label): float((labels == label).mean()) for label in classes}
    rarest = min(shares, key=lambda label: shares[label])
    is_rare = shares[rarest] < _RARE / len(classes)
    ids = np.flatnonzero((labels == rarest) & is_rare)
    scores = np.where(labels == rarest, shares[rarest], 1.0) if is_rare else None
    yield flag("class_imbalance", len(scan), ids, scores, text=f"{_name(scan, rarest)}: " if is_rare else "")


def find_order(scan: Scan, contents: Contents | None) -> Iterator[Issue]:
    """Whether examples with similar gradients lie close to each other: a permutation test."""
    if scan.settings["project"] is None or len(scan) < 50:
        return
    ids, rows = StoredGradients(scan.store, len(scan.settings["checkpoints"]) - 1).sample_rows(_ROWS)
    products = (rows @ rows.T).fill_diagonal_(-2.0)
    nearest = products.topk(_NEIGHBOURS, 1).indices
    places = torch.arange(len(ids), dtype=torch.float64)

    def measure(order: torch.Tensor) -> float:
        return float((order[:, None] - order[nearest]).abs().mean())

    generator = torch.Generator().manual_seed(0)
    shuffled = [measure(places[torch.randperm(len(ids), generator=generator)]) for _ in range(_SHUFFLES)]
    found, mean, spread = measure(places), float(np.mean(shuffled)), float(np.std(shuffled))
    p = 0.5 * math.erfc((mean - found) / max(spread, 1e-12) / math.sqrt(2))
    info = {"count": int(p < _MAX_P), "text": f"examples close in the data are alike (p = {p:.1g})"}
    size = len(scan)
    yield Issue("non_iid", np.zeros(size, dtype=bool), np.ones(size), info if p < _MAX_P else {"count": 0}, p)


def find_weak_groups(scan: Scan, contents: Contents | None) -> Iterator[Issue]:
    """Groups in which the model agrees with far fewer labels: classes, and fifths of each property of the inputs."""
    labels = _read_labels(scan)
    if labels is None or "predicted" not in scan.columns:
        return
    is_right = scan.column("predicted") == labels
    found, scores = {}, np.ones(len(scan))
    for name, members in _list_groups(scan, labels, contents):
        count, others = int(members.sum()), is_right[~members & (labels >= 0)]
        if count < _MIN_GROUP or not len(others) or not others.mean():
            continue
        ratio = float(is_right[members].mean() / others.mean())
        spread = math.sqrt(max(1e-9, others.mean() * (1 - others.mean())) / count)
        if ratio < _MAX_RATIO and others.mean() - is_right[members].mean() > _FAR * spread:
            found[name] = members
            scores[members] = np.minimum(scores[members], ratio)
    ids = np.flatnonzero(np.any([np.zeros(len(scan), dtype=bool), *found.values()], axis=0))
    yield flag("underperforming_group", len(scan), ids, scores, text=f"{', '.join(found)}: " if found else "")


def _list_groups(scan: Scan, labels: Array, contents: Contents | None) -> Iterator[tuple[str, Array]]:
    for label in np.unique(labels[labels >= 0]).tolist():
        yield f"class {_name(scan, label)}", labels == label
    for name, values in _list_properties(contents):
        edges = np.unique(np.nanquantile(values, np.linspace(0, 1, _GROUPS + 1)))
        for low, high in pairwise(edges.tolist()):
            yield f"{name} {low:.3g} to {high:.3g}", (values >= low) & (values <= high)


def find_spurious(scan: Scan, contents: Contents | None) -> Iterator[Issue]:
    """Properties of the inputs that predict the label: the balanced accuracy of the best class of each tenth.

    The score is 1 where a property says nothing about the label, and 0 where it gives it away.
    """
    labels = _read_labels(scan)
    if labels is None or contents is None or not contents.properties:
        return
    scores = {name: 1 - _measure_gain(values, labels) for name, values in _list_properties(contents)}
    bad = {name: score for name, score in scores.items() if score < 1 - _MAX_GAIN}
    text = ", ".join(f"{name} predicts the label ({score:.2f})" for name, score in bad.items())
    info = {"count": len(bad), "properties": scores, "text": text}
    size = len(scan)
    overall = min(scores.values(), default=1.0)
    yield Issue("spurious_correlation", np.zeros(size, dtype=bool), np.ones(size), info, overall)


def _measure_gain(values: Array, labels: Array) -> float:
    """How much better than chance halves of the data predict the labels of the other halves by tenths of a property."""
    is_known = np.isfinite(values) & (labels >= 0)
    values, labels = values[is_known], labels[is_known]
    classes = np.unique(labels)
    edges = np.unique(np.quantile(values, np.linspace(0, 1, _BINS + 1))) if len(values) else np.zeros(0)
    if len(classes) < 2 or len(edges) < 3 or len(values) < 4 * len(classes):
        return 0.0
    bins, numbers = np.digitize(values, edges[1:-1]), np.searchsorted(classes, labels)
    is_first = np.random.default_rng(0).random(len(values)) < 0.5
    recalls = [_predict(bins, numbers, part, len(classes)) for part in (is_first, ~is_first)]
    return max(0.0, (float(np.mean(recalls)) - 1 / len(classes)) / (1 - 1 / len(classes)))


def _predict(bins: Array, numbers: Array, is_known: Array, classes: int) -> float:
    """The balanced accuracy on the other examples of the class that is likeliest in each bin of the known ones."""
    counts = np.zeros((_BINS, classes))
    np.add.at(counts, (bins[is_known], numbers[is_known]), 1)
    best = (counts / np.maximum(1, counts.sum(0))).argmax(1)
    hits, rest = best[bins[~is_known]] == numbers[~is_known], numbers[~is_known]
    return float(np.mean([hits[rest == k].mean() if (rest == k).any() else 1 / classes for k in range(classes)]))


def _list_properties(contents: Contents | None) -> Iterator[tuple[str, Array]]:
    for name, values in (contents.properties if contents else {}).items():
        if name not in _HELPERS and np.isfinite(values).any():
            yield name, values


def _read_labels(scan: Scan) -> Array | None:
    return scan.column("label") if "label" in scan.columns else None


def _name(scan: Scan, label: int) -> str:
    return get_class_name(scan.settings["classes"], label) or str(label)


FAMILIES = (find_rare_classes, find_order, find_weak_groups, find_spurious)
