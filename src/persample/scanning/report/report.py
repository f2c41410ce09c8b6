"""Writes the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from persample._internal.files import remove_unfinished
from persample._internal.text import format_count
from persample.scanning.errors import ScanError
from persample.scanning.rankings import SMALLEST_FIRST
from persample.scanning.report.page import Page
from persample.scanning.report.plots import write_plots
from persample.scanning.report.predicted_masks import find_mask_reader
from persample.scanning.report.rendering import render
from persample.scanning.report.wording import get_title
from persample.scanning.results import Scan
from persample.scanning.source import Source
from persample.scanning.store import write_file


def write_report(
    scan: Scan,
    path: str | Path | None = None,
    *,
    data: Any = None,
    show: Callable[[Any], Any] | None = None,
    title: str | None = None,
    by: str | None = None,
    notes: Mapping[int, str] | None = None,
    remarks: Sequence[str] = (),
    k: int | None = None,
    plots: bool = True,
) -> Path:
    """Write a report as one HTML file without external resources, with PNG plots in a folder `plots` beside it.

    `path` is the file, by default `report.html` in the directory of the scan. `data` is the scanned data, or the same
    examples in another form, for previews. `show` is a function from an example to its preview: a text, or an image as
    an array, a tensor or a PIL image. By default, it is found in the example; an image with a mask is shown with the
    mask that the model predicts, if the scan has its model. Examples are ranked by `by`, one of `scan.rankings`, by
    default the mean loss or the loss. The first `k` are listed: by default as many as may be wrong (see
    `Scan.estimate_wrong_labels`), and at least 10. `notes` are remarks on examples by id, and `remarks` are sentences
    for the summary.

    >>> import persample, torch
    >>> x, y = torch.rand(40, 8, 8), torch.randint(3, (40,))
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    >>> found = persample.scan(model, torch.nn.CrossEntropyLoss(), (x, y), project=None)
    >>> write_report(found, data=(x, y), notes={7: "blurred"}, plots=False).name
    'report.html'
    """
    if k is not None and k < 0:
        raise ScanError(f"k must be a number of suspects, got {k}.")
    source = None if data is None else Source(data, skip_bad=bool(scan.skipped))
    if source is not None and source.size not in (None, len(scan)):
        raise ScanError(f"The scan has {len(scan)} examples, but `data` has {source.size}.")
    path = scan.directory / "report.html" if path is None else Path(path)
    remarks = [remarks] if isinstance(remarks, str) else list(remarks)
    with ExitStack() as stack:
        if show is None:
            show, reason = find_mask_reader(scan, source, stack)
            remarks += [reason] if reason else []
        page = Page(scan, by, k, dict(notes or {}), source, show)
        html = _render(page, title or "Dataset scan", remarks)
    remove_unfinished(path)
    with write_file(path, path.parent) as file:
        file.write(html.encode())
    if plots:
        write_plots(path.parent / "plots", page.columns, page.labels, page.suspects, page.get_class_name)
    return path


def _render(page: Page, title: str, remarks: Sequence[str]) -> str:
    return render(
        "persample.scanning.report",
        title=title,
        script="report.js",
        kind="dataset scan",
        page=page,
        remarks=remarks,
        about=page.scan.settings["about"],
        ranked_by=get_title(page.by).lower() if page.by else None,
        columns_with_smallest_first=SMALLEST_FIRST,
        smallest_first=page.by in SMALLEST_FIRST,
        format_count=format_count,
    )
