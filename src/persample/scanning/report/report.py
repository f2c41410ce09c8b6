"""Writes the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from persample._internal.files import remove_unfinished
from persample._internal.text import format_count
from persample.scanning.errors import ScanError
from persample.scanning.folder import write_file
from persample.scanning.rankings import SMALLEST_FIRST
from persample.scanning.report.answers import list_answers, list_issues, list_steps
from persample.scanning.report.figures import (
    describe_noise,
    draw_histograms,
    draw_layers,
    draw_scatter,
    format_script_json,
)
from persample.scanning.report.page import MAX_ROWS, Page
from persample.scanning.report.plots import write_plots
from persample.scanning.report.predicted_masks import find_mask_reader
from persample.scanning.report.rendering import render
from persample.scanning.report.review import ReviewServer
from persample.scanning.report.sections import (
    compare_rankings,
    count_confusions,
    describe_marks,
    list_columns,
    list_meanings,
    make_cards,
    make_rows,
    say_estimate,
    say_noted,
)
from persample.scanning.report.triage import make_gallery
from persample.scanning.report.wording import get_title
from persample.scanning.results import Scan
from persample.scanning.source import Source


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
    origin: Mapping[str, Any] | None = None,
) -> Path:
    """Write a report as one HTML file without external resources, with PNG plots in a folder `plots` beside it.

    `path` is the file, by default `report.html` in the directory of the scan. `data` is the scanned data, or the same
    examples in another form, for previews. `show` is a function from an example to its preview: a text, or an image as
    an array, a tensor or a PIL image. By default, it is found in the example; an image with a mask is shown with the
    mask that the model predicts, if the scan has its model. Examples are ranked by `by`, one of `scan.rankings`, by
    default the mean loss or the loss. The first `k` are listed: by default as many as may be wrong (see
    `Scan.estimate_wrong_labels`), and at least 10. `notes` are remarks on examples by id, and `remarks` are sentences
    for the summary. `origin` has the arguments of the command of the scan, for the next commands to copy.

    >>> import persample, torch
    >>> x, y = torch.rand(40, 8, 8), torch.randint(3, (40,))
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    >>> found = persample.scan(model, torch.nn.CrossEntropyLoss(), (x, y), project=None)
    >>> write_report(found, data=(x, y), notes={7: "blurred"}, plots=False).name
    'report.html'
    """
    path = scan.directory / "report.html" if path is None else Path(path)
    with _open_page(scan, data, show, remarks, by=by, k=k, notes=dict(notes or {})) as (page, remarks):
        html = render_page(page, title or "Dataset scan", remarks, origin)
    remove_unfinished(path)
    with write_file(path, path.parent) as file:
        file.write(html.encode())
    if plots:
        write_plots(path.parent / "plots", page.columns, page.labels, page.suspects, page.get_class_name)
    scan.store.synchronise()
    return path


def make_review_server(
    scan: Scan,
    *,
    data: Any = None,
    show: Callable[[Any], Any] | None = None,
    title: str | None = None,
    by: str | None = None,
    k: int | None = None,
    origin: Mapping[str, Any] | None = None,
    port: int = 0,
) -> ReviewServer:
    """A server of the page of `write_report` with decisions that are stored in the folder of the scan.

    Its `address` contains a token; `serve_forever()` answers until it is interrupted. `port` 0 takes a free one.
    """
    stack = ExitStack()
    opened = _open_page(scan, data, show, (), by=by, k=k, notes={}, rows=MAX_ROWS, has_previews=False)
    page, remarks = stack.enter_context(opened)
    server = ReviewServer(page, render_page(page, title or "Dataset scan", remarks, origin, is_served=True), port)
    server.stack = stack
    return server


@contextmanager
def _open_page(
    scan: Scan, data: Any, show: Callable[[Any], Any] | None, remarks: Sequence[str], **options: Any
) -> Iterator[tuple[Page, list[str]]]:
    """The page of a scan, and remarks with one on what is missing. The scanned weights are loaded in the block."""
    if (k := options["k"]) is not None and k < 0:
        raise ScanError(f"k must be a number of suspects, got {k}.")
    source = None if data is None else Source(data, skip_bad=bool(scan.skipped))
    if source is not None and source.size not in (None, len(scan)):
        raise ScanError(f"The scan has {len(scan)} examples, but `data` has {source.size}.")
    remarks = [remarks] if isinstance(remarks, str) else list(remarks)
    with ExitStack() as stack:
        if show is None:
            show, reason = find_mask_reader(scan, source, stack)
            remarks += [reason] if reason else []
        yield Page(scan, source=source, show=show, **options), remarks


def render_page(
    page: Page,
    title: str,
    remarks: Sequence[str] = (),
    origin: Mapping[str, Any] | None = None,
    is_served: bool = False,
) -> str:
    """The HTML of a page. One that is served keeps its decisions with the server, and asks it for previews."""
    gallery, confusion = make_gallery(page, is_served), count_confusions(page)
    return render(
        "persample.scanning.report",
        title=title,
        script="report.js",
        kind="dataset scan",
        about=page.scan.settings["about"],
        may_connect=is_served,
        page=page,
        remarks=remarks,
        answers=list_answers(page, confusion),
        steps=list_steps(page, origin),
        gallery=gallery,
        gallery_json=format_script_json(gallery),
        confusion=confusion,
        ranked_by=get_title(page.by).lower() if page.by else None,
        columns_with_smallest_first=SMALLEST_FIRST,
        smallest_first=page.by in SMALLEST_FIRST,
        format_count=format_count,
        **_describe_sections(page),
    )


def _describe_sections(page: Page) -> dict[str, Any]:
    marks, noise = describe_marks(page), describe_noise(page)
    return {
        "issues": list_issues(page),
        "rows": make_rows(page),
        "columns": list_columns(page),
        "estimate": say_estimate(page),
        "noted": say_noted(page),
        "comparisons": compare_rankings(page),
        "marks": marks,
        "cards": make_cards(page, noise),
        "noise": noise,
        "scatter": draw_scatter(page),
        "histograms": draw_histograms(page),
        "layers": draw_layers(page),
        "meanings": list_meanings(page, marks),
    }
