"""Plots of results, from their JSON files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update(
    {
        "svg.hashsalt": "persample",  # equal results give equal files
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": "#e4e4e4",
        "legend.frameon": False,
    }
)

from matplotlib import pyplot  # noqa: E402  after the backend is chosen
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.ticker import LogLocator, NullLocator  # noqa: E402

from benchmarks.report import format_ratio  # noqa: E402
from benchmarks.run import Cell  # noqa: E402
from benchmarks.targets import FIRST_STEPS_MEMORY, HOST_TIME, VARIED_TIME  # noqa: E402

# The colour of each engine in all plots. persample stands out.
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
QUANTITIES = ("dense", "norms", "clip")


def draw_results(directory: Path) -> Iterator[Path]:
    """Draw the results of time, memory, growth and single steps that the directory contains; return the files."""
    if (file := directory / "time.json").exists():
        yield _draw_bars(file, "ratios", "ratio", "time / plain", "Strokes: quartiles.")
    if (file := directory / "memory.json").exists():
        yield _draw_bars(file, "bytes", "peak", "peak memory / plain", "Strokes: after the first step.")
    if (file := directory / "growth.json").exists():
        yield _draw_growth(file)
    if all((directory / f"{name}.json").exists() for name in ("varied", "host", "first_steps")):
        yield _draw_steps(directory)


def draw_scan(file: Path) -> Path:
    """Draw the growth of time and space of a scan and of its queries; return the file."""
    results = json.loads(file.read_text())
    scans, queries = results["growth"], results["questions"]
    canvas, (time_axes, space_axes, query_axes) = pyplot.subplots(1, 3, figsize=(11, 3.2))
    counts = [point["examples"] for point in scans]
    milliseconds = [1000 * point["seconds"] / point["examples"] for point in scans]
    time_axes.plot(counts, milliseconds, marker="o", color=COLOURS["ours"])
    time_axes.set_title("scan: ms per example", loc="left")
    for key, label in (("bytes_on_disk", "on disk"), ("peak_bytes", "peak memory of the process")):
        space_axes.plot(counts, [point[key] / 1e6 for point in scans], marker="o", label=label)
    space_axes.set_title("scan: MB", loc="left")
    for name in list(queries[0])[1:]:
        stored = [point["examples"] for point in queries]
        query_axes.plot(stored, [point[name] for point in queries], marker="o", label=name)
    query_axes.set_title("queries: seconds", loc="left")
    for axes in (time_axes, space_axes, query_axes):
        axes.set_xscale("log")
        axes.set_xlabel("examples")
    time_axes.set_ylim(bottom=0)
    for axes in (space_axes, query_axes):
        axes.set_yscale("log")
        axes.legend(fontsize=7)
    return _save(canvas, file, results["machine"], "")


def _draw_bars(file: Path, key: str, number: str, label: str, strokes: str) -> Path:
    """A panel for each quantity, a group of bars for each workload, a bar for each engine. The line at 1 is plain."""
    results = json.loads(file.read_text())
    tables = results[key]
    quantities = [q for q in QUANTITIES if any(q in table for table in tables.values())]
    canvas, panels = pyplot.subplots(len(quantities), 1, figsize=(11, 2.6 * len(quantities) + 0.8), squeeze=False)
    for axes, quantity in zip(panels[:, 0], quantities, strict=True):
        for position, table in enumerate(tables.values()):
            _draw_group(axes, position, table.get(quantity, {}), number)
        axes.axhline(1, color="black", linewidth=0.8)
        _use_log_scale(axes)
        axes.set_xticks(range(len(tables)), list(tables))
        axes.tick_params(axis="x", length=0)
        axes.set_title(quantity, loc="left", fontweight="bold")
        axes.set_ylabel(label)
        axes.margins(x=0.01)
    _add_legend(canvas, [e for e in COLOURS if any(e in t.get(q, {}) for t in tables.values() for q in quantities)])
    return _save(canvas, file, results["machine"], f"{strokes} Crosses: an error, or a wrong result.")


def _draw_group(axes: Axes, position: int, cells: dict[str, Cell], number: str) -> None:
    engines = [engine for engine in COLOURS if engine in cells]
    width = 0.84 / max(1, len(engines))
    for i, engine in enumerate(engines):
        cell, x = cells[engine], position + (i - (len(engines) - 1) / 2) * width
        if "failure" in cell:
            axes.plot(x, 1, marker="x", color=COLOURS[engine], markersize=5, zorder=3)
            continue
        value = cell[number] / (cells["plain"]["peak"] if number == "peak" else 1)
        axes.bar(x, value - 1, bottom=1, width=0.92 * width, color=COLOURS[engine])
        if "quartiles" in cell:
            axes.vlines(x, *cell["quartiles"], color="#333333", linewidth=0.8)
        if "later" in cell:
            later = cell["later"] / cells["plain"]["peak"]
            axes.hlines(later, x - 0.4 * width, x + 0.4 * width, color="#333333", linewidth=1.2)
        if engine == "ours":
            axes.annotate(
                format_ratio(value),
                (x, value),
                xytext=(0, 2 if value >= 1 else -2),
                textcoords="offset points",
                ha="center",
                va="bottom" if value >= 1 else "top",
                fontsize=7,
            )


def _draw_growth(file: Path) -> Path:
    """A column for each axis of growth: time above, memory below."""
    results = json.loads(file.read_text())
    points, start = results["points"], results["start"]
    growth_axes = list(dict.fromkeys(point["axis"] for point in points))
    quantity = next(iter(points[0]["time"]))
    canvas, panels = pyplot.subplots(2, len(growth_axes), figsize=(11, 5.6), squeeze=False, sharey="row")
    engines = [e for e in COLOURS if e in points[0]["time"][quantity]]
    for column, axis in enumerate(growth_axes):
        on_axis = [point for point in points if point["axis"] == axis]
        for row, (part, number) in enumerate((("time", "milliseconds"), ("memory", "peak"))):
            panel = panels[row, column]
            scale = 1 if part == "time" else 1e-6
            for engine in ("plain", *engines):
                cells = [(point["value"], point[part][quantity].get(engine, {})) for point in on_axis]
                values = [(value, cell[number] * scale) for value, cell in cells if number in cell]
                style = {"color": "black", "linestyle": "--"} if engine == "plain" else {"color": COLOURS[engine]}
                if values:
                    panel.plot(*zip(*values, strict=True), marker="o", markersize=3, linewidth=1.4, **style)
            _use_log_scale(panel)
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            panel.set_xticks([point["value"] for point in on_axis])
        panels[0, column].set_title(f"with the {axis}", loc="left", fontweight="bold")
        panels[1, column].set_xlabel(axis)
    panels[0, 0].set_ylabel(f"{quantity}: ms per step")
    panels[1, 0].set_ylabel(f"{quantity}: peak memory, MB")
    _add_legend(canvas, engines, plain=True)
    size = ", ".join(f"{name} {value}" for name, value in start.items())
    return _save(canvas, file, results["machine"], f"GPT of {results['layers']} layers; fixed sizes: {size}.")


def _draw_steps(directory: Path) -> Path:
    """The clipped sum on one thread: changing shapes and the first step, host time, memory of the first steps."""
    varied, host, first = (
        json.loads((directory / f"{name}.json").read_text()) for name in ("varied", "host", "first_steps")
    )
    panels = {
        "changing shapes: time": (
            {name: varied[name] for name in ("fixed shape", "varied shapes", "first step")},
            VARIED_TIME,
        ),
        "host time": ({name: host[name]["ratio"] for name in HOST_TIME}, HOST_TIME),
        "first two steps: memory": (
            {name: cell["ratio"] for name, cell in first["workloads"].items()},
            FIRST_STEPS_MEMORY,
        ),
    }
    widths = [len(values) + 1 for values, _ in panels.values()]
    canvas, columns = pyplot.subplots(1, len(panels), figsize=(11, 3.2), width_ratios=widths)
    for axes, (title, (values, targets)) in zip(columns, panels.items(), strict=True):
        axes.bar(range(len(values)), list(values.values()), width=0.6, color=COLOURS["ours"])
        for position, (name, value) in enumerate(values.items()):
            axes.annotate(format_ratio(value), (position, value), ha="center", va="bottom", fontsize=7)
            if name in targets:
                axes.hlines(targets[name], position - 0.4, position + 0.4, color="black", linewidth=1.2)
        axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
        axes.set_xticks(range(len(values)), [name.replace(", ", ",\n") for name in values], fontsize=7, rotation=20)
        axes.tick_params(axis="x", length=0)
        axes.set_title(title, loc="left", fontweight="bold")
    columns[0].set_ylabel("clip / plain")
    note = "One thread. Strokes: targets. Models: GPT of 4 layers; tiny tensors; the workloads of the other plots."
    return _save(canvas, directory / "steps.json", first["machine"], note)


def _use_log_scale(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def _add_legend(canvas: Any, engines: list[str], plain: bool = False) -> None:
    handles = [Line2D([], [], color=COLOURS[engine], linewidth=5, label=engine) for engine in engines]
    if plain:
        handles.insert(0, Line2D([], [], color="black", linestyle="--", label="plain"))
    canvas.legend(handles=handles, loc="upper center", ncols=len(handles), handlelength=1.2, columnspacing=1.4)


def _save(canvas: Any, file: Path, machine: dict[str, Any], note: str) -> Path:
    """Write the plot beside the JSON file, with a note and the machine in small print."""
    about = f"torch {machine['torch']}, {machine['processor']}, {machine['threads']} threads, {machine['date']}"
    canvas.text(0.01, 0.005, f"{note} {about}".strip(), fontsize=7, color="#666666")
    canvas.tight_layout(rect=(0, 0.02, 1, 0.96))
    plot = file.with_suffix(".svg")
    canvas.savefig(plot, metadata={"Date": None})
    pyplot.close(canvas)
    return plot
