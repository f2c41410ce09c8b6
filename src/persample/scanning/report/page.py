"""The examples of a report: which are listed, what is known about them, and their previews."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import numpy as np

from persample.scanning.errors import ScanError
from persample.scanning.issues import Issues, find_issues
from persample.scanning.report.charts import PALETTE, choose_colours, select_points
from persample.scanning.report.previews import Deferred, Preview, find_content, make_preview
from persample.scanning.results import Scan
from persample.scanning.source import Source
from persample.scanning.table import DESCRIPTIONS, get_class_name

MAX_POINTS = 1500  # in the scatter plot
MIN_ROWS, MAX_ROWS = 10, 200  # of the table
_MAX_CLASSES_IN_LEGEND = 40
_POINT_PREVIEW_SIDE = 48  # pixels
_POINT_PREVIEW_LENGTH = 120  # characters
_POINT_PREVIEW_BYTES = 1_000_000  # for all points, so that the page can be sent by mail
_MAX_READ = 20_000  # examples that a report reads for issues of inputs
_READ_AT_ONCE = 32  # examples, which may be large


class Page:
    """What a report shows of a scan. The sections are functions of a page.

    `suspects` are offered for triage; the first `rows` of them (default: all) are `listed` in the table. Without
    `has_previews`, the page asks for previews one by one with `make_preview`.
    """

    def __init__(
        self,
        scan: Scan,
        by: str | None,
        k: int | None,
        notes: dict[int, str],
        source: Source | None = None,
        show: Callable[[Any], Any] | None = None,
        rows: int | None = None,
        has_previews: bool = True,
    ) -> None:
        columns = {name: scan.column(name) for name in scan.columns}
        self.scan, self.notes, self.source, self._show = scan, notes, source, show or find_content
        self.labels, self.has_previews = columns.get("label"), has_previews
        self.columns = {name: column for name, column in columns.items() if name not in DESCRIPTIONS}
        self.by = self._choose_ranking(by)
        self.scores = scan.scores_by(self.by) if self.by else np.zeros(len(scan))
        self.cut = scan.count_suspects(self.by)
        self.suspects: list[int] = scan.ranked(self.by, self._count_rows(k)).ids.tolist() if self.by else []
        self.listed = self.suspects[:rows]
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
        return min(MAX_ROWS if self.has_previews else len(self.scan), max(MIN_ROWS, plausible))

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

    @cached_property
    def descriptions(self) -> dict[int, dict[str, Any]]:
        """What the scan knows about each suspect: name, label, prediction."""
        return dict(zip(self.suspects, self.scan.describe(self.suspects), strict=True))

    @cached_property
    def issues(self) -> Issues:
        """The issues of the data, by name. Large data are not read for them."""
        return find_issues(self.scan, self.source if len(self.scan) <= _MAX_READ else None)

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

    def get_class(self, i: int) -> dict[str, Any] | None:
        """The class of an example, as in `classes`."""
        if self.labels is None:
            return None
        return self.classes[int(np.searchsorted([one["label"] for one in self.classes], self.labels[i]))]

    # ---- previews ----

    @cached_property
    def previews(self) -> dict[int, Preview]:
        """Previews of the suspects, and of points of the scatter plot up to a total size."""
        if not self.has_previews:
            return {}
        suspects = ((i, make_preview(value)) for i, value in self._read_contents(self.suspects))
        previews = {i: preview for i, preview in suspects if preview is not None}
        if self.source is None or self.source.size is None:  # a stream is read once, for the suspects
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

    def make_preview(self, i: int) -> Preview | None:
        """The preview of one example, which is read for it."""
        return next((make_preview(value) for _, value in self._read_contents([i])), None)

    def _read_contents(self, ids: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """What to show of some examples."""
        if self.source is None:
            return
        at_once = _READ_AT_ONCE if self.source.size is not None else max(1, len(ids))
        for start in range(0, len(ids), at_once):
            for i, example in self.source.read_examples(ids[start : start + at_once]).items():
                yield i, self._show(example)

    @cached_property
    def points(self) -> list[int]:
        """The examples of the scatter plot."""
        if not {"loss", "norm"} <= set(self.columns):
            return []
        return select_points(self.columns["loss"], self.columns["norm"], self.listed, MAX_POINTS)
