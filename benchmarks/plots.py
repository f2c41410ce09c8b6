"""Pictures of a run, from the JSON in its directory: time, memory, growth."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update({
    "svg.hashsalt": "persample",  # the same figures give the same file
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
})  # fmt: skip

from matplotlib import pyplot  # noqa: E402  after the backend is chosen
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.ticker import LogLocator, NullLocator  # noqa: E402

Cell = dict[str, Any]

# Ours stands out; the others keep one colour each in all pictures.
COLOURS = {
    "ours": "#c8102e",
    "ours, 2 passes": "#f09aa6",
    "loop": "#b8b8b8",
    "ExpandedWeights": "#1f6f8b",
    "torch.func": "#e0a030",
    "Opacus hooks": "#5b8c5a",
    "Opacus ghost": "#a9c9a4",
    "BackPACK": "#7d5ba6",
}
SHOWN = ("dense", "norms", "clip")


def draw(directory: Path) -> Iterator[Path]:
    """Draws what there is; gives the files."""
    if (file := directory / "time.json").exists():
        yield _bars(file, "ratios", "ratio", "time / plain", "Strokes: quartiles.")
    if (file := directory / "memory.json").exists():
        yield _bars(file, "bytes", "peak", "peak memory / plain", "Strokes: after the first step.")
    if (file := directory / "growth.json").exists():
        yield _curves(file)


def _bars(file: Path, key: str, figure: str, label: str, strokes: str) -> Path:
    """A row for each quantity, a group of bars for each workload, an engine each bar; a plain step is the line at 1."""
    found = json.loads(file.read_text())
    tables = found[key]
    quantities = [q for q in SHOWN if any(q in table for table in tables.values())]
    canvas, rows = pyplot.subplots(len(quantities), 1, figsize=(11, 2.6 * len(quantities) + 0.8), squeeze=False)
    for axes, quantity in zip(rows[:, 0], quantities, strict=True):
        for place, table in enumerate(tables.values()):
            _group(axes, place, table.get(quantity, {}), figure)
        axes.axhline(1, color="black", linewidth=0.8)
        _logarithmic(axes)
        axes.set_xticks(range(len(tables)), list(tables))
        axes.tick_params(axis="x", length=0)
        axes.set_title(quantity, loc="left", fontweight="bold")
        axes.set_ylabel(label)
        axes.margins(x=0.01)
    _legend(canvas, [e for e in COLOURS if any(e in t.get(q, {}) for t in tables.values() for q in quantities)])
    return _save(canvas, file, found["machine"], f"{strokes} Crosses: an error, or a wrong answer.")


def _group(axes: Axes, place: int, cells: dict[str, Cell], figure: str) -> None:
    engines = [engine for engine in COLOURS if engine in cells]
    wide = 0.84 / max(1, len(engines))
    for i, engine in enumerate(engines):
        cell, x = cells[engine], place + (i - (len(engines) - 1) / 2) * wide
        if "failure" in cell:
            axes.plot(x, 1, marker="x", color=COLOURS[engine], markersize=5, zorder=3)
            continue
        value = cell[figure] / (cells["plain"]["peak"] if figure == "peak" else 1)
        axes.bar(x, value - 1, bottom=1, width=0.92 * wide, color=COLOURS[engine])
        if "quartiles" in cell:
            axes.vlines(x, *cell["quartiles"], color="#333333", linewidth=0.8)
        if "later" in cell:
            later = cell["later"] / cells["plain"]["peak"]
            axes.hlines(later, x - 0.4 * wide, x + 0.4 * wide, color="#333333", linewidth=1.2)
        if engine == "ours":
            axes.annotate(
                _short(value), (x, value), xytext=(0, 2 if value >= 1 else -2), textcoords="offset points",
                ha="center", va="bottom" if value >= 1 else "top", fontsize=7,
            )  # fmt: skip


def _curves(file: Path) -> Path:
    """A column for each axis of growth; above time, below memory."""
    found = json.loads(file.read_text())
    points, start = found["points"], found["start"]
    axes_of_growth = list(dict.fromkeys(point["axis"] for point in points))
    quantity = next(iter(points[0]["time"]))
    canvas, rows = pyplot.subplots(2, len(axes_of_growth), figsize=(11, 5.6), squeeze=False, sharey="row")
    engines = [e for e in COLOURS if e in points[0]["time"][quantity]]
    for column, axis in enumerate(axes_of_growth):
        own = [point for point in points if point["axis"] == axis]
        for row, (part, figure) in enumerate((("time", "milliseconds"), ("memory", "peak"))):
            panel = rows[row, column]
            scale = 1 if part == "time" else 1e-6
            for engine in ("plain", *engines):
                cells = [(p["value"], p[part][quantity].get(engine, {})) for p in own]
                known = [(value, cell[figure] * scale) for value, cell in cells if figure in cell]
                style = {"color": "black", "linestyle": "--"} if engine == "plain" else {"color": COLOURS[engine]}
                if known:
                    panel.plot(*zip(*known, strict=True), marker="o", markersize=3, linewidth=1.4, **style)
            _logarithmic(panel)
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            panel.set_xticks([point["value"] for point in own])
        rows[0, column].set_title(f"with the {axis}", loc="left", fontweight="bold")
        rows[1, column].set_xlabel(axis)
    rows[0, 0].set_ylabel(f"{quantity}: ms a step")
    rows[1, 0].set_ylabel(f"{quantity}: peak memory, MB")
    _legend(canvas, engines, plain=True)
    size = ", ".join(f"{name} {value}" for name, value in start.items())
    return _save(canvas, file, found["machine"], f"GPT of {found['layers']} layers; where it does not grow: {size}.")


def _logarithmic(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def _legend(canvas: Any, engines: list[str], plain: bool = False) -> None:
    handles = [Line2D([], [], color=COLOURS[engine], linewidth=5, label=engine) for engine in engines]
    if plain:
        handles.insert(0, Line2D([], [], color="black", linestyle="--", label="plain"))
    canvas.legend(handles=handles, loc="upper center", ncols=len(handles), handlelength=1.2, columnspacing=1.4)


def _save(canvas: Any, file: Path, machine: dict[str, Any], note: str) -> Path:
    where = f"torch {machine['torch']}, {machine['processor']}, {machine['threads']} threads, {machine['date']}"
    canvas.text(0.01, 0.005, f"{note} {where}", fontsize=7, color="#666666")
    canvas.tight_layout(rect=(0, 0.02, 1, 0.96))
    picture = file.with_suffix(".svg")
    canvas.savefig(picture, metadata={"Date": None})
    pyplot.close(canvas)
    return picture


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"
