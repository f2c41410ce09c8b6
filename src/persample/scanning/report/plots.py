"""The report's charts as PNG files, for papers and slides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from persample.scanning.errors import ScanError
from persample.scanning.report.figures import PALETTE, axis_of, is_spread
from persample.scanning.report.wording import title_of
from persample.scanning.store import Array, Store

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_POINTS = 20_000
_INK, _MUTED, _BARS, _SUSPECT = "#1d1f24", "#5b616b", "#3f7fb5", "#b93a0a"


def write_plots(
    store: Store,
    folder: Path,
    columns: Mapping[str, Array],
    labels: Array | None,
    suspects: Sequence[int],
    class_name: Callable[[int], str],
) -> list[Path]:
    """Writes what there is of `loss.png`, `norm.png`, `scatter.png` and `layers.png`."""
    figures = {name: _histogram(columns[name], title_of(name)) for name in ("loss", "norm") if name in columns}
    if {"loss", "norm"} <= set(columns):
        figures["scatter"] = _scatter(columns["loss"], columns["norm"], labels, suspects, class_name)
    if groups := {name[5:]: column for name, column in columns.items() if name.startswith("norm/")}:
        figures["layers"] = _layers(groups)
    written = []
    for name, figure in figures.items():
        with store.whole_file(folder / f"{name}.png") as file:
            figure.savefig(file, format="png", dpi=150)
        written.append(folder / f"{name}.png")
    return written


def _figure(width: float = 6.4, height: float = 4.0) -> tuple[Figure, Axes]:
    """A figure of its own: none of pyplot's, so that no backend is chosen and nothing stays open."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ScanError("Plots need matplotlib: pip install 'persample[scan]', or pass plots=False.") from error
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_MUTED, labelsize=9)
    return figure, axes


def _histogram(values: Array, title: str) -> Figure:
    figure, axes = _figure()
    finite = values[np.isfinite(values)].astype(np.float64)
    if len(finite):
        axis = axis_of(finite)
        edges = (np.geomspace if axis.log else np.linspace)(axis.low, axis.high, 49)
        edges[[0, -1]] = axis.low, axis.high  # rounding must not leave out the largest value
        axes.hist(np.maximum(finite, axis.low), bins=edges.tolist(), color=_BARS, edgecolor="white")
        if axis.log:
            axes.set_xscale("log")
        for share, style in ((0.5, "-"), (0.99, "--")):
            at, called = float(np.quantile(finite, share)), "median" if share == 0.5 else "99 %"
            axes.axvline(at, color=_SUSPECT, linestyle=style, linewidth=1.2, label=f"{called}: {at:.3g}")
        axes.legend(frameon=False, fontsize=9)
    axes.set_xlabel(title, color=_INK)
    axes.set_ylabel("Examples", color=_INK)
    return figure


def _scatter(
    losses: Array, norms: Array, labels: Array | None, suspects: Sequence[int], class_name: Callable[[int], str]
) -> Figure:
    figure, axes = _figure(7.6, 5.0)
    shown = np.flatnonzero(np.isfinite(losses) & np.isfinite(norms))
    x, y = (np.maximum(values, axis_of(values).low) for values in (losses, norms))
    marked = np.intersect1d(suspects, shown).astype(int)
    shown = np.union1d(marked, np.random.default_rng(0).permutation(shown)[:_MOST_POINTS])
    classes = [None] if labels is None else np.unique(labels[shown]).tolist()
    for place, label in enumerate(classes):
        own = shown if label is None or labels is None else shown[labels[shown] == label]
        name = "examples" if label is None else class_name(label)
        colour = _colour(place, len(classes))
        axes.scatter(x[own], y[own], s=9, color=colour, alpha=0.8, linewidths=0, label=_plain(name))
    if len(marked):
        axes.scatter(
            x[marked], y[marked], s=26, facecolors="none", edgecolors=_SUSPECT, linewidths=0.8, label="suspects"
        )
    if is_spread(losses):
        axes.set_xscale("log")
    if is_spread(norms):
        axes.set_yscale("log")
    axes.set_xlabel("Loss", color=_INK)
    axes.set_ylabel("Gradient norm", color=_INK)
    if 0 < len(classes) <= 30 and len(shown):
        columns = 1 if len(classes) <= 15 else 2
        figure.legend(loc="outside right upper", frameon=False, fontsize=8, ncols=columns, markerscale=1.5)
    return figure


def _layers(groups: Mapping[str, Array]) -> Figure:
    finite = {group: column[np.isfinite(column)].astype(np.float64) for group, column in groups.items()}
    finite = {group: column for group, column in finite.items() if len(column)}
    figure, axes = _figure(6.4, 1.2 + 0.32 * len(finite))
    if finite:
        ends = np.array([np.quantile(column, [0.5, 0.99]) for column in finite.values()])
        places = np.arange(len(finite))
        axes.barh(places, ends[:, 1] - ends[:, 0], left=ends[:, 0], height=0.5, color=_BARS)
        axes.plot(ends[:, 0], places, "o", color=_INK, markersize=4)
        axis = axis_of(ends.flatten(), 0.04, log=is_spread(ends.flatten()) and bool((ends > 0).all()))
        if axis.log:
            axes.set_xscale("log")
        axes.set_xlim(axis.low, axis.high)
        axes.set_yticks(places, [_plain(group) for group in finite])
        axes.invert_yaxis()
    axes.set_xlabel("Gradient norm: from the median (dot) to 99 %", color=_INK)
    return figure


def _colour(place: int, count: int) -> Any:
    if count <= len(PALETTE):
        return PALETTE[place]
    from matplotlib.colors import hsv_to_rgb

    return tuple(hsv_to_rgb((place / count, 0.6, (0.6, 0.75, 0.9)[place % 3])))


def _plain(name: str) -> str:
    """A name that matplotlib takes for no formula, and does not leave out of a legend."""
    return " " + name.replace("$", r"\$")
