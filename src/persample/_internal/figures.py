"""Figures of matplotlib, which is optional, in one style."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, BARS, ACCENT = "#1d1f24", "#5b616b", "#3f7fb5", "#b93a0a"


def make_figure(width: float = 6.4, height: float = 4.0) -> tuple[Figure, Axes]:
    """A figure without pyplot, which would choose a backend and keep the figure open."""
    figure = make_empty_figure(width, height)
    axes = figure.add_subplot()
    style_axes(axes)
    return figure, axes


def make_empty_figure(width: float, height: float) -> Figure:
    """A figure without axes. Raises `ImportError` without matplotlib."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def style_axes(axes: Axes) -> None:
    """Give axes the common style."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=MUTED, labelsize=9)
