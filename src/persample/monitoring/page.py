"""The page of a monitored run: `persample monitor run.jsonl`. One HTML file without scripts or external resources."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from persample._internal.files import remove_unfinished
from persample.errors import PerSampleError
from persample.scanning import Axis, choose_axis, format_number, render, write_file

_MAX_BYTES = 1 << 30
_MAX_POINTS = 400  # of a line; a longer run is shown by every n-th measured step
_BOUNDS_SHOWN = 3.0  # times the largest value: bounds above it are cut off
_MAX_LAYERS = 10  # with a line each: as many as there are colours

Array = np.ndarray[Any, np.dtype[Any]]


def write_page(source: str | Path, path: str | Path | None = None, title: str | None = None) -> Path:
    """Write the page of a run that `monitor(..., out=source)` has measured, by default beside it as `.html`."""
    source = Path(source)
    path = source.with_suffix(".html") if path is None else Path(path)
    page = RunPage(read_run(source))
    html = render(
        "persample.monitoring",
        title=title or source.stem,
        style="page.css",
        kind="training run",
        page=page,
        about=page.about,
    )
    remove_unfinished(path)
    with write_file(path, path.parent) as file:
        file.write(html.encode())
    return path


def read_run(source: str | Path) -> list[dict[str, Any]]:
    """The lines of a run: what was monitored, then the measured steps. A last line that is not complete is left out."""
    path = Path(source)
    if not path.is_file():
        raise PerSampleError(f"There is no file {path}. Write one with persample.monitor(model, out=...).")
    if path.stat().st_size > _MAX_BYTES:
        raise PerSampleError(f"{path} is larger than {_MAX_BYTES} bytes.")
    lines = path.read_text("utf-8").splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise PerSampleError(f"Line {number} of {path} is not JSON: {error}.") from error
    if not found or not isinstance(found[0], dict) or "persample" not in found[0]:
        raise PerSampleError(f"{path} was not written by persample.monitor(model, out=...).")
    if len(found) < 2:
        raise PerSampleError(f"{path} has no measured step yet.")
    return found


@dataclass(frozen=True)
class Series:
    """A value of each step, perhaps with bounds."""

    name: str
    values: Array
    low: Array | None = None
    high: Array | None = None


@dataclass(frozen=True)
class Line:
    """A line of a chart. `points` are in percent, from the upper left corner; `band` is an area around it."""

    name: str
    points: str
    colour: str
    band: str = ""


@dataclass(frozen=True)
class Chart:
    """A chart over the steps."""

    title: str
    description: str
    x: Axis
    y: Axis
    lines: list[Line]


class RunPage:
    """The texts, numbers and positions of the page."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self.about, self.steps = lines[0], lines[1:]

    @cached_property
    def _shown(self) -> list[dict[str, Any]]:
        """The measured steps that lines go through."""
        every = -(-len(self.steps) // _MAX_POINTS)
        return self.steps[::every]

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Names and values of the header."""
        coupled = {str(step["coupled"]) for step in self.steps if step.get("coupled")}  # older files do not say
        return [
            *(("Figures of", kind) for kind in sorted(coupled)),
            ("Measured steps", f"{len(self.steps):,}"),
            ("Last step", f"{self.steps[-1]['step']:,}"),
            ("Samples in a step", f"{self.steps[-1]['samples']:,}"),
            ("Parameters", f"{sum(self.about['layers'].values()):,}"),
        ]

    @property
    def cards(self) -> list[dict[str, str]]:
        """The figures of the summary."""
        last = self.steps[-1]
        cards = [_describe_noise_scale(last["noise_scale"])]
        norms = {name: format_number(value) for name, value in last["norms"].items()}
        text = f"The largest is {norms['most']}; a bound at the median clips half of the samples."
        cards.append({"name": "Median gradient norm", "value": norms["median"], "text": text})
        if last["cosine_with_mean"] is not None:
            value = format_number(last["cosine_with_mean"])
            text = "1: all samples pull in one direction. 0: they cancel. Weighted by the norms."
            cards.append({"name": "Cosine with the mean", "value": value, "text": text})
        if count := sum(step["not_finite"] for step in self.steps):
            text = "Samples of measured steps with a gradient that is not finite."
            cards.append({"name": "Not finite", "value": f"{count:,}", "text": text, "kind": "warning"})
        return cards

    @property
    def warnings(self) -> list[tuple[int, str]]:
        """The last warnings, newest first, each with its step."""
        found = [(step["step"], text) for step in self.steps for text in step["warnings"]]
        return found[::-1][:20]

    @property
    def charts(self) -> list[Chart]:
        """The charts with values to show."""
        return [chart for chart in (self._norms, self._noise, self._cosines, self._clipped, self._layers) if chart]

    @property
    def hardest(self) -> list[tuple[str, str, str]]:
        """The samples with the largest norms of the run: id, norm, step."""
        found = [(value, str(i), step["step"]) for step in self.steps for i, value in step["hardest"]]
        largest = sorted(found, key=lambda one: -_to_number(one[0]))[:20]
        return [(i, format_number(value), f"{step:,}") for value, i, step in largest]

    @property
    def _norms(self) -> Chart | None:
        median = self._read("median, with the range from 25 % to 90 %", "norms", "median")
        low, high = (self._read("", "norms", name).values for name in ("25%", "90%"))
        series = [replace(median, low=low, high=high), self._read("largest", "norms", "most")]
        return self._draw("Gradient norms of single samples", series)

    @property
    def _noise(self) -> Chart | None:
        low, high = (self._read("", "noise_scale", name).values for name in ("low", "high"))
        value = self._read("noise scale", "noise_scale", "value")
        return self._draw("Noise scale, with its 95 % interval", [replace(value, low=low, high=high)])

    @property
    def _cosines(self) -> Chart | None:
        names = ("cosine_with_mean", "cosine_between")
        return self._draw("Cosines of gradients", [self._read(name.replace("_", " "), name) for name in names])

    @property
    def _clipped(self) -> Chart | None:
        series = [self._read(f"bound {bound}", "clipped", bound) for bound in self.steps[-1]["clipped"]]
        return self._draw("Share of clipped samples", series)

    @property
    def _layers(self) -> Chart | None:
        largest = sorted(self.about["layers"], key=lambda name: -self.about["layers"][name])[:_MAX_LAYERS]
        series = [self._read(name, "layers", name, "median") for name in self.about["layers"] if name in largest]
        return self._draw("Median norm by layer", series)

    def _read(self, name: str, *keys: str) -> Series:
        """A value of each shown step, NaN where it is missing."""
        found = []
        for step in self._shown:
            value: Any = step
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            found.append(_to_number(value))
        return Series(name, np.array(found))

    def _draw(self, title: str, series: Sequence[Series]) -> Chart | None:
        values = np.concatenate([one.values for one in series]) if series else np.array([])
        finite = values[np.isfinite(values)]
        if not len(finite):
            return None
        bounds = np.concatenate([[], *(b for one in series for b in (one.low, one.high) if b is not None)])
        finite = np.append(finite, bounds[bounds <= _BOUNDS_SHOWN * finite.max()])
        steps = np.array([step["step"] for step in self._shown], dtype=np.float64)
        x, y = choose_axis(steps), choose_axis(finite, 0.04)
        across = x.locate(steps)
        lines = [
            Line(one.name, _format_points(across, y, one.values), f"var(--class-{i})", _format_band(across, y, one))
            for i, one in enumerate(series)
        ]
        ends = ", ".join(f"{one.name} {format_number(one.values[-1])}" for one in series)
        return Chart(title, f"{title} over {len(steps)} measured steps. At the last step: {ends}.", x, y, lines)


def _describe_noise_scale(found: dict[str, Any] | None) -> dict[str, str]:
    name = "Noise scale"
    if found is None or (found["value"] is None and not found["low"]):
        return {"name": name, "value": "–", "text": "Not known: it needs steps with two or more samples."}
    if found["value"] is None or found["high"] is None:
        text = "The mean gradient cannot be told from noise yet, so there is no upper bound."
        return {"name": name, "value": f"> {format_number(found['low'])}", "text": text}
    interval = f"{format_number(found['low'])} to {format_number(found['high'])}"
    text = f"95 % interval {interval}. Larger batches than this save few steps."
    return {"name": name, "value": format_number(found["value"]), "text": text}


def _to_number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _format_points(across: Array, y: Axis, heights: Array) -> str:
    pairs = zip(across, y.locate(np.nan_to_num(heights)), np.isfinite(heights), strict=True)
    return " ".join(f"{at:.2f},{100 - up:.2f}" for at, up, is_finite in pairs if is_finite)


def _format_band(across: Array, y: Axis, series: Series) -> str:
    """The outline of the area between two bounds. A bound that is missing lies at the edge of the chart."""
    if series.low is None or series.high is None:
        return ""
    lower, upper = (y.locate(np.nan_to_num(b, nan=end)) for b, end in ((series.low, y.low), (series.high, y.high)))
    there = [f"{at:.2f},{100 - up:.2f}" for at, up in zip(across, upper, strict=True)]
    back = [f"{at:.2f},{100 - up:.2f}" for at, up in zip(across[::-1], lower[::-1], strict=True)]
    return " ".join(there + back)
