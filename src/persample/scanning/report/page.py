"""The contents of the report, section by section. The template decides how they look."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import cached_property
from textwrap import shorten
from typing import Any

import numpy as np
from markupsafe import Markup

from persample._internal.text import format_count, format_list
from persample.scanning.errors import ScanError
from persample.scanning.examples import find_worst_output, format_probability, say_opinion
from persample.scanning.report.charts import (
    PALETTE,
    choose_axis,
    choose_colours,
    compute_histogram,
    compute_layer_ranges,
    compute_noise_curve,
    compute_rank_correlation,
    select_points,
)
from persample.scanning.report.previews import Deferred, Preview, find_content, make_preview
from persample.scanning.report.reasons import Reasons
from persample.scanning.report.similar import find_similar
from persample.scanning.report.wording import format_number, get_meaning, get_title
from persample.scanning.results import Scan
from persample.scanning.source import Source
from persample.scanning.store import Array
from persample.scanning.table import DESCRIPTIONS, get_class_name

MAX_POINTS = 1500  # in the scatter plot
MIN_ROWS, MAX_ROWS = 10, 200  # of the table
_MAX_CLASSES_IN_LEGEND = 40
_POINT_PREVIEW_SIDE = 48  # pixels
_POINT_PREVIEW_LENGTH = 120  # characters
_POINT_PREVIEW_BYTES = 1_000_000  # for all points, so that the page can be sent by mail
_READ_AT_ONCE = 32  # examples, which may be large
_TABLE_COLUMNS = ("loss", "mean_loss", "norm", "self_influence", "estimated_alignment", "alignment")
_MAX_CLASSES_IN_CONFUSION, _MAX_PAIRS = 12, 12
_COMPARED = ("loss", "confident", "el2n", "normalised_self_influence", "whitened_self_influence")  # rankings
_MIN_SHARED = 0.5  # of the first examples; below, rankings disagree
_SCATTER_PADDING = 0.03
_MIN_BAR_WIDTH = 0.4  # percent
_MAX_REASON = 300  # characters
_MASKS = (
    "The given mask, the mask that the model predicts, and the pixels where they differ, over the image. Class 0 has "
    "no colour. Pixels that the loss ignores do not count."
)


class Page:
    """The texts, numbers and positions of a report."""

    def __init__(
        self,
        scan: Scan,
        by: str | None,
        k: int | None,
        notes: dict[int, str],
        source: Source | None,
        show: Callable[[Any], Any] | None,
    ) -> None:
        columns = {name: scan.column(name) for name in scan.columns}
        self.scan, self._notes, self._source, self._show = scan, notes, source, show or find_content
        self.labels = columns.get("label")
        self.columns = {name: column for name, column in columns.items() if name not in DESCRIPTIONS}
        self.by = self._choose_ranking(by)
        self.scores = scan.scores_by(self.by) if self.by else np.zeros(len(scan))
        self.cut = scan.count_suspects(self.by)
        self.suspects: list[int] = scan.ranked(self.by, self._count_rows(k)).ids.tolist() if self.by else []
        if unknown := [i for i in notes if not 0 <= i < len(scan)]:
            raise ScanError(f"notes contains example {unknown[0]}, but the scan has examples 0 to {len(scan) - 1}.")

    def _choose_ranking(self, by: str | None) -> str | None:
        if by is not None and by not in (names := self.scan.rankings):
            raise ScanError(f"Suspects cannot be ranked by {by!r}. Choose from {', '.join(names) or 'nothing'}.")
        return by or self.scan.default_ranking

    def _count_rows(self, k: int | None) -> int:
        """The number of examples to list: up to the largest plausible number of wrong labels, and some to compare."""
        if k is not None:
            return k
        estimate = self.scan.estimate_wrong_labels()
        plausible = max(self.cut, estimate.high if estimate else 0)
        return min(MAX_ROWS, max(MIN_ROWS, plausible))

    # ---- classes ----

    def get_class_name(self, label: int) -> str:
        """The name of a class, or its number."""
        return get_class_name(self.scan.settings["classes"], label) or str(label)

    @cached_property
    def classes(self) -> list[dict[str, Any]]:
        """The classes of the examples, each with its name, colour and number of examples."""
        if self.labels is None:
            return []
        labels, counts = np.unique(self.labels, return_counts=True)
        colours = choose_colours(len(labels))
        if len(labels) <= len(PALETTE):
            colours = [f"var(--class-{i})" for i in range(len(labels))]  # these differ between light and dark mode
        classes = zip(labels.tolist(), counts.tolist(), colours, strict=True)
        return [{"label": i, "name": self.get_class_name(i), "count": n, "colour": colour} for i, n, colour in classes]

    @property
    def legend(self) -> list[dict[str, Any]]:
        """The classes of the legend: the largest ones if there are too many."""
        largest = sorted(self.classes, key=lambda one: -one["count"])[:_MAX_CLASSES_IN_LEGEND]
        return [one for one in self.classes if one in largest]

    def _get_class(self, i: int) -> dict[str, Any] | None:
        if self.labels is None:
            return None
        return self.classes[int(np.searchsorted([one["label"] for one in self.classes], self.labels[i]))]

    # ---- header and summary ----

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Names and values of the header."""
        settings = self.scan.settings
        sizes = [math.prod(shape) for shape in settings["parameters"].values()]
        when = datetime.fromtimestamp((self.scan.directory / "summary.json").stat().st_mtime)
        return [
            ("Examples", f"{len(self.scan):,}"),
            ("Parameters", f"{sum(sizes):,}"),
            ("Checkpoints", f"{len(settings['checkpoints']):,}"),
            ("Loss", settings["loss"]),
            *([("Rows", settings["coupled"])] if "coupled" in settings else []),
            ("Scanned", f"{when.day} {when:%B %Y}"),
        ]

    @property
    def cards(self) -> list[dict[str, str]]:
        """The figures of the summary."""
        quantiles, cards = self.scan.summary["columns"], []
        if loss := quantiles.get("loss"):
            text = f"The median is {format_number(loss['median'])}; 99 % are below {format_number(loss['99%'])}."
            cards.append({"name": "Mean loss", "value": format_number(loss["mean"]), "text": text})
        if norm := quantiles.get("norm"):
            text = f"99 % are below {format_number(norm['99%'])}"
            text += f", {format_number(norm['99%'] / norm['median'])} times the median." if norm["median"] else "."
            cards.append({"name": "Median gradient norm", "value": format_number(norm["median"]), "text": text})
        if noise := self.noise:
            text = f"{noise['advice']} {noise['meaning']}"
            cards.append({"name": "Noise scale", "value": noise["scale"], "text": text})
        if len(self.classes) > 1:
            counts = [one["count"] for one in self.classes]
            least = "" if min(counts) == max(counts) else f"{min(counts):,} to "
            text = f"Each has {least}{format_count(max(counts), 'example')}."
            cards.append({"name": "Classes", "value": f"{len(counts):,}", "text": text})
        if count := self.not_finite:
            ids = self.scan.summary["not_finite"]
            shown = format_list(ids[:8]) + (f" and {count - 8:,} more" if count > 8 else "")
            noun = "example" if count == 1 else "examples"
            text = f"A measured value is not finite for {noun} {shown}."
            cards.append({"name": "Not finite", "value": f"{count:,}", "text": text, "kind": "warning"})
        return cards

    @cached_property
    def not_finite(self) -> int:
        """The number of examples with a value that is not finite."""
        is_finite = [np.isfinite(np.delete(column, list(self.scan.skipped))) for column in self.columns.values()]
        return int((~np.all(is_finite, axis=0)).sum()) if is_finite else 0

    @cached_property
    def noise(self) -> dict[str, Any] | None:
        """The noise scale, the suggested batch size and their meaning; None if they were not measured."""
        summary = self.scan.summary
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
        if scale > len(self.scan):
            meaning = "The gradients of examples differ so much that even a batch of all examples gives a noisy step."
        axis, (positions, gains) = compute_noise_curve(scale, len(self.scan))
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

    # ---- table of suspects ----

    @cached_property
    def descriptions(self) -> dict[int, dict[str, Any]]:
        """What the scan knows about each listed example: name, label, prediction."""
        return dict(zip(self.suspects, self.scan.describe(self.suspects), strict=True))

    @property
    def table_columns(self) -> list[dict[str, str]]:
        """The measured columns of the table, including the one that suspects are ranked by."""
        names = [name for name in _TABLE_COLUMNS if name in self.columns]
        names += [self.by] if self.by and self.by not in names else []
        return [{"name": name, "title": get_title(name), "meaning": get_meaning(name)} for name in names]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The listed examples."""
        opinions = {i: say_opinion(example) for i, example in self.descriptions.items()}
        reasons = Reasons(self.columns, self.by, self.scores, opinions) if self.by else None
        names = [column["name"] for column in self.table_columns]
        values = {name: self.columns.get(name, self.scores) for name in names}
        return [
            {
                "rank": rank,
                "id": i,
                "name": self.descriptions[i].get("name"),
                "label": self._get_class(i),
                "model": _format_prediction(self.descriptions[i]),
                "suggested": self.descriptions[i].get("suggested"),
                "values": [(_format_sort_key(values[n][i]), format_number(values[n][i])) for n in names],
                "why": reasons.find(i) if reasons else [],
                "note": self._notes.get(i, ""),
                "preview": self.previews.get(i),
                "is_suspect": rank <= self.cut,
                "similar": self._describe_similar(i),
            }
            for rank, i in enumerate(self.suspects, 1)
        ]

    @cached_property
    def _similar(self) -> dict[int, list[tuple[int, float, bool]]]:
        return find_similar(self.scan, self.suspects)

    def _describe_similar(self, i: int) -> list[dict[str, Any]]:
        """The examples with gradients similar to that of example `i`: id, class, cosine, preview."""
        return [
            {
                "id": j,
                "label": label["name"] if (label := self._get_class(j)) else "",
                "cosine": f"{cosine:.2f}",
                "is_duplicate": is_duplicate,
                "preview": self.previews.get(j),
                "is_listed": j in self.descriptions,
            }
            for j, cosine, is_duplicate in self._similar.get(i, [])
        ]

    # ---- confusion of classes ----

    @cached_property
    def confusion(self) -> dict[str, Any] | None:
        """How often the model says each class for each given class, and the most frequent differences."""
        if self.labels is None or "predicted" not in self.scan.columns:
            return None
        predicted = self.scan.column("predicted")
        is_known = (predicted >= 0) & (self.labels >= 0)
        given, said = self.labels[is_known], predicted[is_known]
        classes = np.union1d(given, said)
        if len(classes) < 2:
            return None
        counts = np.zeros((len(classes), len(classes)), dtype=int)
        np.add.at(counts, (np.searchsorted(classes, given), np.searchsorted(classes, said)), 1)
        names = [self.get_class_name(int(label)) for label in classes]
        totals = counts.sum(1)
        pairs = [
            {
                "given": names[i],
                "said": names[j],
                "count": int(counts[i, j]),
                "share": f"{counts[i, j] / totals[i]:.0%}",
            }
            for i, j in zip(*np.nonzero(counts), strict=True)
            if i != j
        ]
        pairs.sort(key=lambda pair: -pair["count"])
        table = [
            (name, [(int(n), f"{100 * n / max(1, total):.0f}", i == j) for j, n in enumerate(row)])
            for i, (name, row, total) in enumerate(zip(names, counts, totals, strict=True))
        ]
        return {
            "names": names,
            "rows": table if len(names) <= _MAX_CLASSES_IN_CONFUSION else [],
            "pairs": pairs[:_MAX_PAIRS],
            "differences": int(counts.sum() - np.trace(counts)),
        }

    @property
    def estimate(self) -> str:
        """A sentence on how many labels are estimated to be wrong, or how many examples stand out."""
        found = self.scan.estimate_wrong_labels()
        if found is None:
            count = format_count(self.cut, "example")
            return f"{count} {'lies' if self.cut == 1 else 'lie'} far above all others." if self.by else ""
        noun = "label is" if found.count == 1 else "labels are"
        text = f"About {found.count:,} {noun} estimated to be wrong ({found.low:,} to {found.high:,})."
        if found.count == 0:
            text = f"No label is estimated to be wrong (at most {found.high:,})."
        return f"{text} {found.warning}".strip()

    @property
    def disagreement(self) -> list[tuple[str, int, int]]:
        """Rankings that share less than half of their first examples with this one: title, shared, of how many."""
        if self.by != self.scan.default_ranking or self.by is None:
            return []
        k = max(1, self.cut, len(self.scan) // 100)
        shares = self.scan.compare_rankings(k)
        chosen = [name for name in _COMPARED if shares.get(name, 1.0) < _MIN_SHARED]
        return [(get_title(name), round(shares[name] * k), k) for name in chosen]

    @property
    def noted(self) -> str:
        """A sentence on how many of the examples with notes are suspects; empty without notes."""
        if not self._notes:
            return ""
        count = len(set(self.suspects) & set(self._notes))
        return f"Examples with a note among them: {count:,} of {len(self._notes):,}."

    # ---- previews ----

    @cached_property
    def previews(self) -> dict[int, Preview]:
        """Previews of the suspects, and of points of the scatter plot up to a total size."""
        suspects = ((i, make_preview(value)) for i, value in self._read_contents(self.suspects))
        previews = {i: preview for i, preview in suspects if preview is not None}
        if self._source is None or self._source.size is None:  # a stream is read once, for the suspects
            return previews
        bytes_left = _POINT_PREVIEW_BYTES
        for i, value in self._read_contents([i for i in self.points if i not in previews]):
            value = value.content if isinstance(value, Deferred) else value
            preview = make_preview(value, _POINT_PREVIEW_SIDE, _POINT_PREVIEW_LENGTH)
            bytes_left -= len(preview.content) if preview else 0
            if bytes_left < 0:
                break
            if preview is not None:
                previews[i] = preview
        return previews

    @cached_property
    def marks(self) -> dict[str, Any] | None:
        """The kinds of marks in the listed texts, and why a kind is missing in some; None without kinds."""
        listed = [self.previews[i] for i in self.suspects if i in self.previews]
        kinds = list(dict.fromkeys(kind for preview in listed for kind in preview.kinds if kind))
        reasons = Counter(preview.reason for preview in listed if preview.reason)
        if not kinds and not reasons:
            return None
        described = [{"name": kind, "title": get_title(kind), "meaning": get_meaning(kind)} for kind in kinds]
        reason = shorten(reasons.most_common(1)[0][0], _MAX_REASON, placeholder=" …") if reasons else ""
        return {"kinds": described, "reason": reason, "without": reasons.total()}

    def _read_contents(self, ids: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """What to show of some examples."""
        if self._source is None:
            return
        at_once = _READ_AT_ONCE if self._source.size is not None else max(1, len(ids))
        for start in range(0, len(ids), at_once):
            for i, example in self._source.read_examples(ids[start : start + at_once]).items():
                yield i, self._show(example)

    # ---- charts ----

    @cached_property
    def points(self) -> list[int]:
        """The examples of the scatter plot."""
        if not {"loss", "norm"} <= set(self.columns):
            return []
        return select_points(self.columns["loss"], self.columns["norm"], self.suspects, MAX_POINTS)

    @property
    def scatter(self) -> dict[str, Any] | None:
        """The scatter plot of gradient norm against loss; None if one of them was not measured."""
        if not self.points:
            return None
        losses, norms = self.columns["loss"][self.points], self.columns["norm"][self.points]
        x, y = choose_axis(losses, _SCATTER_PADDING), choose_axis(norms, _SCATTER_PADDING)
        ranks = {i: rank for rank, i in enumerate(self.suspects, 1)}
        circles, details = [], []
        positions = zip(self.points, x.locate(losses).tolist(), y.locate(norms).tolist(), strict=True)
        for i, across, up in reversed(list(positions)):  # suspects last, so that they are drawn on top
            label = self._get_class(i)
            colour = label["colour"] if label else "var(--accent)"
            is_suspect = ranks.get(i, math.inf) <= self.cut
            circles.append((f"{across:.2f}", f"{100 - up:.2f}", colour, is_suspect, label["label"] if label else ""))
            details.append(self._describe_point(i, ranks.get(i)))
        is_finite = np.isfinite(self.columns["loss"]) & np.isfinite(self.columns["norm"])
        left_out = int((~is_finite).sum())
        return {
            "x": x,
            "y": y,
            "circles": circles,
            "details": _format_script_json(details),
            "description": _describe_scatter(losses, norms),
            "at_edge": int((losses < x.low).sum() + (norms < y.low).sum()),
            "left_out": left_out,
            "selected": len(circles) < len(self.scan) - left_out,
            "without_preview": self._source is not None and sum(i not in self.previews for i in self.points),
        }

    def _describe_point(self, i: int, rank: int | None) -> dict[str, Any]:
        """What the page shows if the point of example `i` is selected."""
        label, preview = self._get_class(i), self.previews.get(i)
        values = {name: format_number(self.columns[name][i]) for name in ("loss", "norm")}
        point: dict[str, Any] = {"id": i, **values}
        point |= {"label": label["name"]} if label else {}
        point |= {"note": self._notes[i]} if i in self._notes else {}
        if rank is not None:
            point |= {"rank": rank}  # the page copies the preview from the table
        elif preview is not None:
            point |= {"preview": [preview.kind, preview.content, preview.tiny]}
        return point

    @property
    def histograms(self) -> list[dict[str, Any]]:
        """The histograms of loss and gradient norm."""
        figures = []
        for name in ("loss", "norm"):
            histogram = compute_histogram(self.columns[name]) if name in self.columns else None
            if histogram is None:
                continue
            values, title = self.columns[name], get_title(name)
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

    @property
    def layers(self) -> dict[str, Any] | None:
        """The median and the 99 % quantile of the gradient norm of each layer; None if they were not measured."""
        layers = compute_layer_ranges(self.columns)
        if layers is None:
            return None
        shapes, groups = self.scan.settings["parameters"], self.scan.settings["groups"]
        rows = []
        for layer, (median, high) in layers.ranges.items():
            size = sum(math.prod(shapes[name]) for name in groups.get(layer, ()) if name in shapes)
            start, end = layers.axis.locate([median, high]).tolist()
            width = max(end - start, _MIN_BAR_WIDTH)
            rows.append((layer, f"{size:,}", format_number(median), format_number(high), start, width))
        return {"x": layers.axis, "rows": rows}

    @property
    def meanings(self) -> list[tuple[str, str]]:
        """Title and meaning of each column."""
        meanings = [(get_title(name), get_meaning(name)) for name in self.columns if not name.startswith("norm/")]
        if any(name.startswith("norm/") for name in self.columns):
            text = (
                "The gradient norm of each module. The squares of these norms add up to the square of the whole norm."
            )
            meanings.append(("Layers", text))
        if any(preview.kind == "panels" for preview in self.previews.values()):
            meanings.append(("Masks", _MASKS))
        kinds = self.marks["kinds"] if self.marks else []
        meanings += [(f"Tokens by {kind['title'].lower()}", kind["meaning"]) for kind in kinds]
        return meanings


def _format_prediction(example: dict[str, Any]) -> str:
    """The prediction of the model, with its probability."""
    if example.get("predicted") is not None:
        return f"{example['predicted']} ({format_probability(example['probability'])})"
    if "prediction" in example:
        where, prediction, target = find_worst_output(example)
        return f"{where}{format_number(prediction)} (target {format_number(target)})"
    return ""


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


def _format_sort_key(value: Any) -> str:
    return repr(float(value)) if math.isfinite(value) else ""


def _format_script_json(value: Any) -> Markup:
    """JSON in which no text can end the script element that contains it."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
