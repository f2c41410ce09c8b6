"""What the page says, part by part; how it looks is in the template."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import numpy as np
from markupsafe import Markup

from persample.scanning.errors import ScanError
from persample.scanning.report.figures import axis_of, colours, histogram, is_spread, noise_curve, rank_correlation
from persample.scanning.report.previews import Preview, guessed, preview_of
from persample.scanning.report.reasons import Reasons
from persample.scanning.report.wording import counted, meaning_of, number, title_of
from persample.scanning.results import Scan
from persample.scanning.source import Source

MOST_POINTS = 1500  # of the scatter
_MOST_KEYS = 40  # of its legend
_SIDE_IN_SCATTER = 48
_WORDS_IN_SCATTER = 120
_PREVIEWS_IN_SCATTER = 1_000_000  # bytes, so that the page stays one that can be sent by mail
_READ_AT_ONCE = 32  # examples, which can be large
_IN_TABLE = ("loss", "mean_loss", "norm", "self_influence", "alignment")


class Page:
    """A scan in words, numbers and places on axes."""

    def __init__(
        self,
        scan: Scan,
        by: str | None,
        k: int,
        notes: dict[int, str],
        source: Source | None,
        show: Callable[[Any], Any] | None,
    ) -> None:
        columns = {name: scan.column(name) for name in scan.columns}
        self.scan, self._notes, self._source, self._show = scan, notes, source, show or guessed
        self.labels = columns.get("label")
        self.columns = {name: column for name, column in columns.items() if name not in ("id", "label")}
        self.by = self._chosen(by)
        self.suspects: list[int] = scan.ranked(self.by, k).ids.tolist() if self.by else []
        if unknown := [i for i in notes if not 0 <= i < len(scan)]:
            raise ScanError(f"There is no example {unknown[0]} to note anything on; the scan has {len(scan)}.")

    def _chosen(self, by: str | None) -> str | None:
        if by is not None and by not in self.columns:
            raise ScanError(f"Suspects cannot be ranked by {by!r}; there is {', '.join(self.columns) or 'nothing'}.")
        found = (name for name in ("self_influence", "norm", "loss", *self.columns) if name in self.columns)
        return by or next(found, None)

    # ---- classes ----

    def class_name(self, label: int) -> str:
        """What a class is called."""
        names = self.scan.settings["classes"]
        return str(names[label]) if names and 0 <= label < len(names) else str(label)

    @cached_property
    def classes(self) -> list[dict[str, Any]]:
        """The classes that occur, with a colour and the number of examples each."""
        if self.labels is None:
            return []
        found, counts = np.unique(self.labels, return_counts=True)
        every = zip(found.tolist(), counts.tolist(), colours(len(found)), strict=True)
        return [{"label": i, "name": self.class_name(i), "count": n, "colour": colour} for i, n, colour in every]

    @property
    def keys(self) -> list[dict[str, Any]]:
        """Those of the legend: the largest classes, where there are too many."""
        largest = sorted(self.classes, key=lambda one: -one["count"])[:_MOST_KEYS]
        return [one for one in self.classes if one in largest]

    # ---- header and summary ----

    def facts(self) -> list[tuple[str, str]]:
        """What was scanned."""
        settings = self.scan.settings
        sizes = [math.prod(shape) for shape in settings["parameters"].values()]
        when = datetime.fromtimestamp((self.scan.directory / "summary.json").stat().st_mtime)
        return [
            ("Examples", f"{len(self.scan):,}"),
            ("Parameters", f"{sum(sizes):,}"),
            ("Checkpoints", f"{len(settings['checkpoints']):,}"),
            ("Loss", settings["loss"]),
            ("Scanned", f"{when.day} {when:%B %Y}"),
        ]

    def cards(self) -> list[dict[str, str]]:
        """The numbers of the summary."""
        spread, cards = self.scan.summary["columns"], []
        if loss := spread.get("loss"):
            text = f"The median is {number(loss['median'])}; 99 % are below {number(loss['99%'])}."
            cards.append({"name": "Mean loss", "value": number(loss["mean"]), "text": text})
        if norm := spread.get("norm"):
            text = f"99 % are below {number(norm['99%'])}"
            text += f", {number(norm['99%'] / norm['median'])} times the median." if norm["median"] else "."
            cards.append({"name": "Median gradient norm", "value": number(norm["median"]), "text": text})
        if noise := self.noise:
            text = f"It suggests batches of about {noise['size']:,}. {noise['meaning']}"
            cards.append({"name": "Noise scale", "value": noise["scale"], "text": text})
        if self.labels is not None and len(self.classes) > 1:
            counts = [one["count"] for one in self.classes]
            span = "" if min(counts) == max(counts) else f"from {min(counts):,} to "
            text = f"They have {span}{counted(max(counts), 'example')} each."
            cards.append({"name": "Classes", "value": f"{len(counts):,}", "text": text})
        if count := self.not_finite:
            which = self.scan.summary["not_finite"]
            text = f"What was measured is no finite number in {'example' if count == 1 else 'examples'} "
            text += ", ".join(map(str, which[:8])) + (f" and {count - 8:,} more." if count > 8 else ".")
            cards.append({"name": "Not finite", "value": f"{count:,}", "text": text, "kind": "warning"})
        return cards

    @cached_property
    def not_finite(self) -> int:
        """The number of examples with a value that is no finite number."""
        finite = [np.isfinite(column) for column in self.columns.values()]
        return int((~np.all(finite, axis=0)).sum()) if finite else 0

    @cached_property
    def noise(self) -> dict[str, Any] | None:
        """The noise scale, the batch size that it suggests, and what it means; None where it was not measured."""
        summary = self.scan.summary
        size, scale = summary.get("suggested_batch_size"), summary.get("noise_scale")
        if size is None:
            return None
        found = {"size": size, "mean": number(summary["mean_gradient_norm"])}
        if scale is None:
            meaning = "The mean gradient cannot be told from noise in so many examples: take large batches."
            return found | {"scale": "very large", "meaning": meaning, "curve": None}
        meaning = "Smaller ones give noisy steps; much larger ones give little more per step."
        if scale > len(self.scan):
            meaning = "Single gradients differ so much that even a batch of all examples gives a noisy step."
        curve = noise_curve(scale, len(self.scan))
        curve["at"] = float(curve["x"].place([size])[0])
        curve["gain"] = 100 / (1 + scale / size) if size else 100.0
        return found | {"scale": number(scale), "meaning": meaning, "curve": curve}

    # ---- the table ----

    def table_columns(self) -> list[dict[str, str]]:
        """The measured columns of the table: what suspects are ranked by is one of them."""
        names = [name for name in _IN_TABLE if name in self.columns]
        names += [self.by] if self.by and self.by not in names else []
        return [{"name": name, "title": title_of(name)} for name in names]

    def rows(self) -> list[dict[str, Any]]:
        """The suspects."""
        reasons = Reasons(self.columns, self.by) if self.by else None
        names = [column["name"] for column in self.table_columns()]
        return [
            {
                "rank": rank,
                "id": i,
                "label": self._label(i),
                "values": [(_sortable(self.columns[name][i]), number(self.columns[name][i])) for name in names],
                "why": reasons.of(i) if reasons else [],
                "note": self._notes.get(i, ""),
                "preview": self.previews.get(i),
            }
            for rank, i in enumerate(self.suspects, 1)
        ]

    def _label(self, i: int) -> dict[str, Any] | None:
        if self.labels is None:
            return None
        place = int(np.searchsorted([one["label"] for one in self.classes], self.labels[i]))
        return self.classes[place]

    def noted(self) -> str:
        """How many of the examples with notes are among the suspects."""
        if not self._notes:
            return ""
        found = len(set(self.suspects) & set(self._notes))
        return f"{found:,} of the {counted(len(self._notes), 'example')} with a note are among them."

    # ---- previews ----

    @cached_property
    def previews(self) -> dict[int, Preview]:
        """What is shown of the suspects, and of as many points of the scatter as there is room for."""
        found = {i: p for i, value in self._shown(self.suspects) if (p := preview_of(value)) is not None}
        if self._source is None or self._source.size is None:  # a stream is read once, for the suspects
            return found
        room = _PREVIEWS_IN_SCATTER
        for i, value in self._shown([i for i in self.points if i not in found]):
            preview = preview_of(value, _SIDE_IN_SCATTER, _WORDS_IN_SCATTER)
            room -= len(preview.content) if preview else 0
            if room < 0:
                break
            if preview is not None:
                found[i] = preview
        return found

    def _shown(self, ids: Sequence[int]) -> Iterator[tuple[int, Any]]:
        if self._source is None:
            return
        at_once = _READ_AT_ONCE if self._source.size is not None else max(1, len(ids))
        for start in range(0, len(ids), at_once):
            for i, example in self._source.examples(ids[start : start + at_once]).items():
                yield i, self._show(example)

    # ---- charts ----

    @cached_property
    def points(self) -> list[int]:
        """The examples of the scatter: all suspects, and others at random; those that have no place are left out."""
        if not {"loss", "norm"} <= set(self.columns):
            return []
        finite = np.isfinite(self.columns["loss"]) & np.isfinite(self.columns["norm"])
        first = [i for i in self.suspects if finite[i]][:MOST_POINTS]
        finite[first] = False
        others = np.random.default_rng(0).permutation(np.flatnonzero(finite))[: MOST_POINTS - len(first)]
        return first + others.tolist()

    def scatter(self) -> dict[str, Any] | None:
        """Circles, axes and what is known of each example; None without losses and norms."""
        if not self.points:
            return None
        losses, norms = self.columns["loss"][self.points], self.columns["norm"][self.points]
        x, y = axis_of(losses, 0.03), axis_of(norms, 0.03)
        ranks = {i: rank for rank, i in enumerate(self.suspects, 1)}
        circles, known = [], []
        places = zip(self.points, x.place(losses).tolist(), y.place(norms).tolist(), strict=True)
        for i, across, up in reversed(list(places)):  # suspects last, so that they lie on top
            label, preview = self._label(i), self.previews.get(i)
            colour = label["colour"] if label else "var(--accent)"
            circles.append((f"{across:.2f}", f"{100 - up:.2f}", colour, i in ranks, label["label"] if label else ""))
            one = {"id": i, "loss": number(self.columns["loss"][i]), "norm": number(self.columns["norm"][i])}
            one |= {"label": label["name"]} if label else {}
            one |= {"note": self._notes[i]} if i in self._notes else {}
            if i in ranks:
                one |= {"rank": ranks[i]}  # the page takes the preview from its row
            elif preview is not None:
                one |= {"preview": [preview.kind, preview.content, preview.tiny]}
            known.append(one)
        left_out = int((~np.isfinite(self.columns["loss"]) | ~np.isfinite(self.columns["norm"])).sum())
        agreement = rank_correlation(losses, norms)
        seen = (
            f"Scatter of {counted(len(circles), 'example')}: loss from {number(losses.min())} to "
            f"{number(losses.max())} across, gradient norm from {number(norms.min())} to {number(norms.max())} up."
        )
        if math.isfinite(agreement):
            seen += f" The correlation of their ranks is {number(agreement)}."
        return {
            "x": x,
            "y": y,
            "circles": circles,
            "known": _safe_json(known),
            "seen": seen + " Suspects have a ring.",
            "at_edge": int((losses < x.low).sum() + (norms < y.low).sum()),
            "left_out": left_out,
            "selected": len(circles) < len(self.scan) - left_out,
            "without_preview": self._source is not None and sum(i not in self.previews for i in self.points),
        }

    def histograms(self) -> list[dict[str, Any]]:
        """Of loss and norm."""
        found = []
        for name in ("loss", "norm"):
            spread = self.scan.summary["columns"].get(name)
            if spread is None or spread["median"] is None:
                continue
            figure, title = histogram(self.columns[name]), title_of(name)
            marks = [("median", spread["median"]), ("99 %", spread["99%"])]
            figure["marks"] = [(float(figure["x"].place([v])[0]), text, number(v)) for text, v in marks]
            figure["title"], count = title, int(np.isfinite(self.columns[name]).sum())
            figure["seen"] = (
                f"Histogram of {title.lower()}, {counted(count, 'example')}: median {number(spread['median'])}, "
                f"99 % below {number(spread['99%'])}, from {number(spread['least'])} to {number(spread['most'])}."
            )
            found.append(figure)
        return found

    def layers(self) -> dict[str, Any] | None:
        """The median and the 99 % quantile of each layer's part of the gradient."""
        spread = {n[5:]: s for n, s in self.scan.summary["columns"].items() if n.startswith("norm/")}
        spread = {group: s for group, s in spread.items() if s["median"] is not None}
        if not spread:
            return None
        ends = np.array([[s["median"], s["99%"]] for s in spread.values()])
        axis = axis_of(ends.flatten(), 0.03, log=is_spread(ends.flatten()) and bool((ends > 0).all()))
        shapes, groups = self.scan.settings["parameters"], self.scan.settings["groups"]
        rows = []
        for (group, s), (start, end) in zip(spread.items(), axis.place(ends).tolist(), strict=True):
            size = sum(math.prod(shapes[name]) for name in groups.get(group, ()) if name in shapes)
            rows.append((group, f"{size:,}", number(s["median"]), number(s["99%"]), start, max(end - start, 0.4)))
        return {"x": axis, "rows": rows}

    def meanings(self) -> list[tuple[str, str]]:
        """Each column in a line."""
        found = [(title_of(name), meaning_of(name)) for name in self.columns if not name.startswith("norm/")]
        if any(name.startswith("norm/") for name in self.columns):
            found.append(("Layers", "How the gradient norm divides among the modules: the squares add up to its own."))
        return found


def _sortable(value: Any) -> str:
    return repr(float(value)) if math.isfinite(value) else ""


def _safe_json(value: Any) -> Markup:
    """JSON that can stand in a script element, whatever texts are in it."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
