"""The plot of an audit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from persample._internal.figures import ACCENT, BARS, INK, MUTED, make_empty_figure, style_axes
from persample._internal.files import write_atomically
from persample.errors import PerSampleError

if TYPE_CHECKING:
    from persample.private.auditing.result import AuditResult


def write_plot(result: AuditResult, path: Path) -> Path:
    """Write an SVG file: the scores with and without canaries, and the bounds beside the claim."""
    try:
        import matplotlib

        figure = make_empty_figure(8.4, 3.4)
    except ImportError as error:
        raise PerSampleError("A plot needs matplotlib: pip install 'persample[scan]'") from error
    scores, bounds = figure.subplots(1, 2, width_ratios=[3, 2])
    for axes in (scores, bounds):
        style_axes(axes)
    _draw_scores(scores, result)
    _draw_bounds(bounds, result)
    with (
        matplotlib.rc_context({"svg.hashsalt": "persample", "svg.fonttype": "none"}),
        write_atomically(path) as file,
    ):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return path


def _draw_scores(axes: Any, result: AuditResult) -> None:
    everything = [*result.scores_in, *result.scores_out]
    edges = (min(everything), max(everything))
    for values, colour, label in (
        (result.scores_out, BARS, f"without: {len(result.scores_out)}"),
        (result.scores_in, ACCENT, f"with: {len(result.scores_in)}"),
    ):
        axes.hist(values, bins=30, range=edges, color=colour, alpha=0.6, label=label)
    axes.set_xlabel("Score: log-likelihood ratio of the canary", color=INK)
    axes.set_ylabel("Canaries" if result.method == "one run" else "Runs", color=INK)
    axes.legend(frameon=False, fontsize=9)


def _draw_bounds(axes: Any, result: AuditResult) -> None:
    values = {"claimed": result.claimed, "lower bound": result.epsilon, "if Gaussian": result.gaussian}
    shown = {name: value for name, value in values.items() if value is not None}
    colours = {"claimed": MUTED, "lower bound": ACCENT if result.exceeds else BARS, "if Gaussian": "#a9c6dc"}
    axes.bar(list(shown), list(shown.values()), color=[colours[name] for name in shown], width=0.6)
    for i, value in enumerate(shown.values()):
        axes.annotate(f"{value:.2f}", (i, value), ha="center", va="bottom", color=INK, fontsize=9)
    axes.set_ylabel(f"epsilon (delta {result.delta:g}, {100 * result.confidence:g} % confidence)", color=INK)
