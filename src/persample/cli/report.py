"""`persample report`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persample.cli.command import Command, format_json, parse_positive, redirect_user_output
from persample.cli.task import (
    add_directory_arguments,
    check_data,
    convert_scan_errors,
    explain_folder,
    get_data_path,
    has_data_files,
    import_scanning,
    load_data_files,
    load_scanned_task,
    read_origin,
)
from persample.cli.user_code import load_model_data_and_loss

if TYPE_CHECKING:
    from persample.scanning import Scan

_DESCRIPTION = """\
Write an HTML report of a scan: the examples that stand out, with images or texts, the distributions of
losses and gradient norms, the share of each layer, and the noise scale. The report is one file that opens
offline. PNG plots are written beside it.

    $ persample report scans/mine --module my_model:to_scan
    $ persample report scans/mine --by loss --out for-the-team.html

The examples are shown if --module names the function that returned the data, which is then called, or if the
data came from files (scan --images, --text) that have not changed. --no-data leaves them out. For texts, --module
names the function of the model, which is used to mark the tokens with the largest parts of the gradient.
"""

_EXIT_CODES = {0: "written", 2: "wrong arguments, or no finished scan", 4: "the disk is full"}


def _add_arguments(parser: ArgumentParser) -> None:
    add_report_arguments(parser)
    parser.add_argument("--out", metavar="FILE", help="file to write (default: DIR/report.html)")


def add_report_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of a page: what it shows, and how."""
    add_directory_arguments(parser, "to show the examples")
    parser.add_argument("--title", metavar="TEXT", help="title of the page")
    parser.add_argument("--by", metavar="COLUMN", help="column or score that ranks (default: mean_loss or loss)")
    parser.add_argument(
        "-k", type=parse_positive, metavar="N", help="number of examples to list (default: as many as may be wrong)"
    )
    parser.add_argument("--no-data", action="store_true", help="do not show the examples, only their numbers")


def _run(args: Namespace) -> int:
    scanning = import_scanning()
    with redirect_user_output(args), convert_scan_errors(args.directory), ExitStack() as stack:
        contents = load_contents(args, scanning, stack)
        options = {"data": contents.data, "show": contents.marker, "title": args.title, "by": args.by, "k": args.k}
        path = contents.scan.report(args.out, origin=read_origin(contents.scan), **options)
        where = contents.scan.store.locate(path)
    print(format_json({"report": where}) if args.json else f"report: {where}")
    if contents.note:
        print(f"persample report: {contents.note}", file=sys.stderr)
    return 0


@dataclass(frozen=True)
class Contents:
    """The scan, with its model if the user names a function; the examples; and a note on what is missing."""

    scan: Scan
    data: Any = None
    marker: Any = None  # of tokens
    note: str = ""


def load_contents(args: Namespace, scanning: Any, stack: ExitStack) -> Contents:
    """Read the scanned files, or call the function that the user names. `stack` keeps the scanned weights loaded."""
    found = scanning.Scan(args.directory)
    if getattr(args, "no_data", False):
        return Contents(found)
    origin = read_origin(found)
    checkpoints = (origin or {}).get("checkpoints")
    has_files = origin is not None and has_data_files(origin)
    if args.module and not has_files:
        with explain_folder(origin):
            model, data, loss_fn = load_model_data_and_loss(args.module, "data")
        return Contents(scanning.Scan(args.directory, model, loss_fn, checkpoints), data)
    if origin is None:
        return Contents(found)
    if not has_files:
        note = f"the examples are not shown; --module {origin['target']!r} would call the function for them"
        return Contents(found, note=note)
    if not Path(where := get_data_path(origin) or "").exists():
        return Contents(found, note=f"the examples are not shown, because {where} is not there any more")
    can_mark = bool(origin["tokenizer"]) and Path(origin["tokenizer"]).exists()
    if args.module and (can_mark or not origin["text"]):
        task = load_scanned_task(found, args.module)
        scan = scanning.Scan(args.directory, task.model, task.loss_fn, checkpoints)
        if task.marker is None:
            return Contents(scan, task.data)
        try:
            stack.enter_context(scan.load_model())
        except scanning.ScanError as error:
            return Contents(scan, task.data, note=f"tokens are not marked: {error}")
        return Contents(scan, task.data, task.marker)
    data = load_data_files(origin)
    check_data(found, data, origin)
    if not origin["text"]:
        return Contents(found, data)
    note = f"tokens are not marked; --module {origin['target']!r} would call the function for the model"
    if not can_mark:
        note = f"tokens are not marked, because the tokenizer {origin['tokenizer']!r} is no file"
    return Contents(found, data, note=note)


COMMAND = Command(_DESCRIPTION, _add_arguments, _run, _EXIT_CODES)
