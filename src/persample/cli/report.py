"""`persample report`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from persample.cli.command import Command, apart, as_json, positive
from persample.cli.task import COMMAND_FILE, needed, one_line, task_from

_REPORT = """\
Write a page to look at from a scan: what stands out, with pictures or texts of the examples, how losses
and gradients are spread, what each layer has of them, and the noise scale. One file, which opens offline,
and PNG plots beside it.

    $ persample report scans/mine
    $ persample report scans/mine --by loss --out for-the-team.html

The examples are shown if the function that gave the data can be called again; --no-data leaves them out.
"""


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the directory of a scan")
    parser.add_argument("--out", metavar="FILE", help="the page to write (DIR/report.html)")
    parser.add_argument("--title", metavar="TEXT", help="its title")
    parser.add_argument("--by", metavar="COLUMN", help="what to rank the examples by (self_influence)")
    parser.add_argument("-k", type=positive, default=100, metavar="N", help="how many examples to list (100)")
    parser.add_argument("--no-data", action="store_true", help="show no examples, only their numbers")


def _run(args: Namespace) -> int:
    scanning = needed()
    with apart(args), one_line(args.directory):
        found = scanning.Scan(args.directory)
        known = (found.directory / COMMAND_FILE).is_file() and not args.no_data
        data = task_from(found.store.read_json(COMMAND_FILE)).data if known else None
        path = found.report(args.out, data=data, title=args.title, by=args.by, k=args.k)
    print(as_json({"report": str(path)}) if args.json else f"report: {path}")
    return 0


COMMAND = Command("write a page to look at from a scan", _REPORT, _arguments, _run)
