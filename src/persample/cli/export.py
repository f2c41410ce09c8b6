"""`persample export`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from persample._internal.text import format_count
from persample.cli.command import Command, format_json, parse_positive, redirect_user_output
from persample.cli.task import convert_scan_errors, find_texts, import_scanning, quote_texts

_DESCRIPTION = """\
Write the suspects of a scan to a CSV file: id, name, given label, suggested label and scores. Fill in the
column new_label with the name of a class or the word remove; an empty cell keeps the example as it is. Decisions
of `persample review` are filled in. The column key is the name as no spreadsheet changes it: join by key or id.

--to writes predictions for an annotation tool, or a dataset of Hugging Face with a column new_label; `persample
apply --from` reads the corrections.

    $ persample export scans/photos --suspects fixes.csv
    $ persample apply fixes.csv --images photos/ --out photos-fixed/
"""

_FORMATS = ("csv", "label-studio", "cvat", "argilla", "fiftyone", "dataset")
_EXIT_CODES = {0: "written", 2: "wrong arguments, or no finished scan", 4: "the disk is full"}


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="directory of a scan")
    parser.add_argument("--suspects", required=True, metavar="FILE", help="CSV file to write")
    parser.add_argument("--by", metavar="COLUMN", help="column or score that ranks (default: mean_loss or loss)")
    parser.add_argument(
        "-k", type=parse_positive, metavar="N", help="number of suspects (default: as many as labels may be wrong)"
    )
    parser.add_argument("--to", choices=_FORMATS, default="csv", help="format of the file (default: csv)")
    parser.add_argument("--prefix", default="", metavar="TEXT", help="begins the address of an image, with --to")
    parser.add_argument("--reviewed", action="store_true", help="the examples that were decided about in review")
    parser.add_argument("--accept", action="store_true", help="fill in the suggested labels")


def _run(args: Namespace) -> int:
    scanning = import_scanning()
    with redirect_user_output(args), convert_scan_errors(args.directory):
        from persample.scanning import export_suspects, write_suspects

        found = scanning.Scan(args.directory)
        if args.to == "csv":
            count = write_suspects(found, args.suspects, args.by, args.k, args.accept, args.reviewed)
        else:
            texts = quote_texts(find_texts(found), range(len(found)), None) or None
            count = export_suspects(found, args.suspects, args.to, args.by, args.k, texts, args.prefix)
    if args.json:
        print(format_json({"file": args.suspects, "suspects": count}))
    else:
        print(f"{format_count(count, 'suspect')}: {args.suspects}")
    return 0


COMMAND = Command(_DESCRIPTION, _add_arguments, _run, _EXIT_CODES)
