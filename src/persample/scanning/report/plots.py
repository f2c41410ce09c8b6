"""The charts of the report as PNG files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from persample._internal.figures import ACCENT, BARS, INK, make_figure
from persample.scanning.errors import ScanError
from persample.scanning.folder import write_file
from persample.scanning.report.charts import (
    LayerRanges,
    choose_axis,
    choose_colours,
    compute_histogram,
    compute_layer_ranges,
    select_points,
)
from persample.scanning.report.wording import get_title
from persample.scanning.store import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_POINTS = 20_000
_MAX_CLASSES_IN_LEGEND = 30


def write_plots(
    folder: Path,
    columns: Mapping[str, Array],
    labels: Array | None,
    suspects: Sequence[int],
    get_class_name: Callable[[int], str],
) -> list[Path]:
    """Write `loss.png`, `norm.png`, `scatter.png` and `layers.png`, as far as there are columns for them."""
    figures = {name: _draw_histogram(columns[name], get_title(name)) for name in ("loss", "norm") if name in columns}
    if {"loss", "norm"} <= set(columns):
        figures["scatter"] = _draw_scatter(columns["loss"], columns["norm"], labels, suspects, get_class_name)
    if any(name.startswith("norm/") for name in columns):
        figures["layers"] = _draw_layers(compute_layer_ranges(columns))
    paths = {folder / f"{name}.png": figure for name, figure in figures.items()}
    for path, figure in paths.items():
        with write_file(path, folder.parent) as file:
            figure.savefig(file, format="png", dpi=150)
    return list(paths)


def _make_figure(width: float = 6.4, height: float = 4.0) -> tuple[Figure, Axes]:
    try:
        return make_figure(width, height)
    except ImportError as error:
        raise ScanError("Plots need matplotlib: pip install 'persample[scan]', or pass plots=False.") from error


def _draw_histogram(values: Array, title: str) -> Figure:
    figure, axes = _make_figure()
    if (histogram := compute_histogram(values)) is not None:
        edges = histogram.axis.get_values(histogram.edges)
        axes.bar(edges[:-1], histogram.counts, np.diff(edges), align="edge", color=BARS, edgecolor="white")
        if histogram.axis.log:
            axes.set_xscale("log")
        for name, value, style in (("median", histogram.median, "-"), ("99 %", histogram.high, "--")):
            axes.axvline(value, color=ACCENT, linestyle=style, linewidth=1.2, label=f"{name}: {value:.3g}")
        axes.legend(frameon=False, fontsize=9)
    axes.set_xlabel(title, color=INK)
    axes.set_ylabel("Examples", color=INK)
    return figure


def _draw_scatter(
    losses: Array, norms: Array, labels: Array | None, suspects: Sequence[int], get_class_name: Callable[[int], str]
) -> Figure:
    figure, axes = _make_figure(7.6, 5.0)
    points = np.array(select_points(losses, norms, suspects, _MAX_POINTS), dtype=int)
    x_axis, y_axis = choose_axis(losses), choose_axis(norms)
    x, y = np.maximum(losses, x_axis.low), np.maximum(norms, y_axis.low)
    classes = [None] if labels is None else np.unique(labels[points]).tolist()
    for label, colour in zip(classes, choose_colours(len(classes)), strict=True):
        own = points if labels is None else points[labels[points] == label]
        name = "examples" if label is None else get_class_name(label)
        axes.scatter(x[own], y[own], s=9, color=colour, alpha=0.8, linewidths=0, label=_escape(name))
    marked = np.intersect1d(suspects, points).astype(int)
    if len(marked):
        axes.scatter(x[marked], y[marked], s=26, facecolors="none", edgecolors=ACCENT, linewidths=0.8, label="suspects")
    if x_axis.log:
        axes.set_xscale("log")
    if y_axis.log:
        axes.set_yscale("log")
    axes.set_xlabel("Loss", color=INK)
    axes.set_ylabel("Gradient norm", color=INK)
    if 0 < len(classes) <= _MAX_CLASSES_IN_LEGEND and len(points):
        columns = 1 if len(classes) <= 15 else 2
        figure.legend(loc="outside right upper", frameon=False, fontsize=8, ncols=columns, markerscale=1.5)
    return figure


def _draw_layers(layers: LayerRanges | None) -> Figure:
    figure, axes = _make_figure(6.4, 1.2 + 0.32 * (len(layers.ranges) if layers else 0))
    if layers is not None:
        medians, highs = np.array(list(layers.ranges.values())).T
        rows = np.arange(len(medians))
        axes.barh(rows, highs - medians, left=medians, height=0.5, color=BARS)
        axes.plot(medians, rows, "o", color=INK, markersize=4)
        if layers.axis.log:
            axes.set_xscale("log")
        axes.set_xlim(layers.axis.low, layers.axis.high)
        axes.set_yticks(rows, [_escape(layer) for layer in layers.ranges])
        axes.invert_yaxis()
    axes.set_xlabel("Gradient norm: from the median (dot) to the 99 % quantile", color=INK)
    return figure


def _escape(name: str) -> str:
    """A name that matplotlib takes for text: no formula between dollars, and no leading underscore, which hides it."""
    return " " + name.replace("$", r"\$")
