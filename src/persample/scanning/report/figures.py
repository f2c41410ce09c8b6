"""The charts of a report: positions and texts, which the template draws."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from markupsafe import Markup

from persample._internal.text import format_count
from persample.scanning.report.charts import (
    choose_axis,
    compute_histogram,
    compute_layer_ranges,
    compute_noise_curve,
    compute_rank_correlation,
)
from persample.scanning.report.page import Page
from persample.scanning.report.wording import format_number, get_title
from persample.scanning.store import Array

_SCATTER_PADDING = 0.03
_MIN_BAR_WIDTH = 0.4  # percent


def draw_scatter(page: Page) -> dict[str, Any] | None:
    """The scatter plot of gradient norm against loss; None if one of them was not measured."""
    if not page.points:
        return None
    losses, norms = page.columns["loss"][page.points], page.columns["norm"][page.points]
    x, y = choose_axis(losses, _SCATTER_PADDING), choose_axis(norms, _SCATTER_PADDING)
    ranks = {i: rank for rank, i in enumerate(page.suspects, 1)}
    circles, details = [], []
    positions = zip(page.points, x.locate(losses).tolist(), y.locate(norms).tolist(), strict=True)
    for i, across, up in reversed(list(positions)):  # suspects last, so that they are drawn on top
        label = page.get_class(i)
        colour = label["colour"] if label else "var(--accent)"
        is_suspect = ranks.get(i, math.inf) <= page.cut
        circles.append((f"{across:.2f}", f"{100 - up:.2f}", colour, is_suspect, label["label"] if label else ""))
        details.append(_describe_point(page, i, ranks.get(i)))
    is_finite = np.isfinite(page.columns["loss"]) & np.isfinite(page.columns["norm"])
    left_out = int((~is_finite).sum())
    return {
        "x": x,
        "y": y,
        "circles": circles,
        "details": format_script_json(details),
        "description": _describe_scatter(losses, norms),
        "at_edge": int((losses < x.low).sum() + (norms < y.low).sum()),
        "left_out": left_out,
        "selected": len(circles) < len(page.scan) - left_out,
        "without_preview": page.source is not None and sum(i not in page.previews for i in page.points),
    }


def _describe_point(page: Page, i: int, rank: int | None) -> dict[str, Any]:
    """What the page shows if the point of example `i` is selected."""
    label, preview = page.get_class(i), page.previews.get(i)
    values = {name: format_number(page.columns[name][i]) for name in ("loss", "norm")}
    point: dict[str, Any] = {"id": i, **values}
    point |= {"label": label["name"]} if label else {}
    point |= {"note": page.notes[i]} if i in page.notes else {}
    if rank is not None:
        point |= {"rank": rank}  # the page copies the preview from the table
    elif preview is not None:
        point |= {"preview": [preview.kind, preview.content, preview.tiny]}
    return point


def draw_histograms(page: Page) -> list[dict[str, Any]]:
    """The histograms of loss and gradient norm."""
    figures = []
    for name in ("loss", "norm"):
        histogram = compute_histogram(page.columns[name]) if name in page.columns else None
        if histogram is None:
            continue
        values, title = page.columns[name], get_title(name)
        finite = values[np.isfinite(values)]
        median, high = format_number(histogram.median), format_number(histogram.high)
        description = (
            f"Histogram of {title.lower()}, {format_count(len(finite), 'example')}: median {median}, 99 % below "
            f"{high}, from {format_number(finite.min())} to {format_number(finite.max())}."
        )
        figures.append(
            {
                "title": title,
                "x": histogram.axis,
                "bars": histogram.bars,
                "counts": histogram.count_ticks,
                "marks": histogram.axis.locate([histogram.median, histogram.high]).tolist(),
                "median": median,
                "high": high,
                "at_edge": histogram.at_edge,
                "description": description,
            }
        )
    return figures


def draw_layers(page: Page) -> dict[str, Any] | None:
    """The median and the 99 % quantile of the gradient norm of each layer; None if they were not measured."""
    layers = compute_layer_ranges(page.columns)
    if layers is None:
        return None
    shapes, groups = page.scan.settings["parameters"], page.scan.settings["groups"]
    rows = []
    for layer, (median, high) in layers.ranges.items():
        size = sum(math.prod(shapes[name]) for name in groups.get(layer, ()) if name in shapes)
        start, end = layers.axis.locate([median, high]).tolist()
        width = max(end - start, _MIN_BAR_WIDTH)
        rows.append((layer, f"{size:,}", format_number(median), format_number(high), start, width))
    return {"x": layers.axis, "rows": rows}


def describe_noise(page: Page) -> dict[str, Any] | None:
    """The noise scale, the suggested batch size and their meaning; None if they were not measured."""
    summary = page.scan.summary
    size, scale = summary.get("suggested_batch_size"), summary.get("noise_scale")
    if size is None:
        return None
    advice = f"It suggests batches of about {size:,}." if size > 1 else "Any batch size gives good steps."
    noise = {"size": size, "mean": format_number(summary["mean_gradient_norm"]), "advice": advice}
    if scale is None:
        meaning = "The mean gradient cannot be distinguished from noise with this many examples: use large batches."
        return noise | {"scale": "very large", "meaning": meaning, "curve": None}
    meaning = "Smaller batches give noisy steps; much larger batches improve a step only little."
    if scale < 1:
        meaning = "The examples agree: the gradient of a single one is already close to the mean."
    if scale > len(page.scan):
        meaning = "The gradients of examples differ so much that even a batch of all examples gives a noisy step."
    axis, (positions, gains) = compute_noise_curve(scale, len(page.scan))
    curve = {
        "x": axis,
        "line": " ".join(f"{x:.2f},{100 - y:.2f}" for x, y in zip(positions, gains, strict=True)),
        "at": float(axis.locate([size])[0]),
        "gain": 100 / (1 + scale / size) if size else 100.0,
    }
    return noise | {
        "scale": "below 0.1" if scale < 0.1 else format_number(scale),
        "meaning": meaning,
        "curve": curve,
    }


def _describe_scatter(losses: Array, norms: Array) -> str:
    """A description for screen readers."""
    text = (
        f"Scatter plot of {format_count(len(losses), 'example')}: loss from {format_number(losses.min())} to "
        f"{format_number(losses.max())} on the horizontal axis, gradient norm from {format_number(norms.min())} to "
        f"{format_number(norms.max())} on the vertical axis."
    )
    correlation = compute_rank_correlation(losses, norms)
    if math.isfinite(correlation):
        text += f" Their rank correlation is {format_number(correlation)}."
    return text + " Suspects have a ring."


def format_script_json(value: Any) -> Markup:
    """JSON in which no text can end the script element that contains it."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
