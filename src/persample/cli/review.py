"""`persample review`."""

from __future__ import annotations

import sys
import webbrowser
from argparse import ArgumentParser, Namespace
from contextlib import ExitStack

from persample._internal.text import format_count
from persample.cli.command import Command, format_json, parse_positive, redirect_user_output
from persample.cli.report import add_report_arguments, load_contents
from persample.cli.task import convert_scan_errors, import_scanning, read_origin

_DESCRIPTION = """\
Serve the report of a scan on this machine, to decide about its suspects: accept the suggested label, keep the
label, choose another one, remove the example, or mark it as unsure. Decisions are stored in the folder of the scan at
once, and previews are loaded when they are looked at. Only programs of this machine that know the address, which
contains a token, get an answer. Ctrl-C ends it.

    $ persample review scans/photos
    $ persample review scans/photos -k 100000                       # every example, most suspicious first
    $ persample export scans/photos --reviewed --suspects fixes.csv  # the decisions
    $ persample apply fixes.csv --images photos/ --out photos-fixed/
"""

_EXIT_CODES = {0: "ended by Ctrl-C", 2: "wrong arguments, or no finished scan"}


def _add_arguments(parser: ArgumentParser) -> None:
    add_report_arguments(parser)
    parser.add_argument(
        "--port", type=parse_positive, metavar="N", help="port of the loopback interface (default: free)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def _run(args: Namespace) -> int:
    scanning = import_scanning()
    with redirect_user_output(args), convert_scan_errors(args.directory), ExitStack() as stack:
        contents = load_contents(args, scanning, stack)
        from persample.scanning import make_review_server

        origin = read_origin(contents.scan)
        options = {"data": contents.data, "show": contents.marker, "title": args.title, "by": args.by, "k": args.k}
        server = stack.enter_context(make_review_server(contents.scan, port=args.port or 0, origin=origin, **options))
        if contents.note:
            print(f"persample review: {contents.note}", file=sys.stderr)
        print(format_json({"address": server.address}) if args.json else server.address, flush=True)
        if args.open:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            count = len(server.decisions.read())
            command = f"persample export {args.directory} --reviewed --suspects fixes.csv"
            print(f"\n{format_count(count, 'decision')}: {command}")
    return 0


COMMAND = Command(_DESCRIPTION, _add_arguments, _run, _EXIT_CODES)
