"""`persample report`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from persample.cli.command import Command, format_json, parse_positive, redirect_user_output
from persample.cli.task import COMMAND_FILE, add_directory_argument, convert_scan_errors, import_scanning, load_task

_DESCRIPTION = """\
Write an HTML report of a scan: the examples that stand out, with images or texts, the distributions of
losses and gradient norms, the share of each layer, and the noise scale. The report is one file that opens
offline. PNG plots are written beside it.

    $ persample report scans/mine
    $ persample report scans/mine --by loss --out for-the-team.html

The examples are shown if the function that returned the data can be called again. --no-data leaves them out.
"""

_EXIT_CODES = {0: "written", 2: "wrong arguments, or no finished scan", 4: "the disk is full"}


def _add_arguments(parser: ArgumentParser) -> None:
    add_directory_argument(parser)
    parser.add_argument("--out", metavar="FILE", help="file to write (default: DIR/report.html)")
    parser.add_argument("--title", metavar="TEXT", help="title of the report")
    parser.add_argument("--by", metavar="COLUMN", help="column that ranks the examples (default: self_influence)")
    parser.add_argument(
        "-k", type=parse_positive, default=100, metavar="N", help="number of examples to list (default: 100)"
    )
    parser.add_argument("--no-data", action="store_true", help="do not show the examples, only their numbers")


def _run(args: Namespace) -> int:
    scanning = import_scanning()
    with redirect_user_output(args), convert_scan_errors(args.directory):
        found = scanning.Scan(args.directory)
        known = (found.directory / COMMAND_FILE).is_file() and not args.no_data
        data = load_task(found.store.read_json(COMMAND_FILE)).data if known else None
        path = found.report(args.out, data=data, title=args.title, by=args.by, k=args.k)
    print(format_json({"report": str(path)}) if args.json else f"report: {path}")
    return 0


COMMAND = Command("write an HTML report of a scan", _DESCRIPTION, _add_arguments, _run, _EXIT_CODES)
