"""`persample apply`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from persample._internal.text import format_count
from persample.cli.command import Command, format_json
from persample.cli.task import convert_scan_errors, import_scanning
from persample.cli.user_code import UsageError

_DESCRIPTION = """\
Copy a folder of images or a table, with the corrections of a file that `persample export` wrote and you have
filled in. The data itself is never changed.

    $ persample apply fixes.csv --images photos/ --out photos-fixed/
    $ persample apply fixes.csv --text reviews.csv --label mood --out reviews-fixed.csv
"""

_EXIT_CODES = {0: "written", 2: "wrong arguments, or the file does not fit the data", 4: "the disk is full"}


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("fixes", metavar="FILE", help="CSV file with a filled column new_label")
    parser.add_argument(
        "--from",
        dest="source",
        metavar="TOOL",
        default="csv",
        help="tool of the file, as in export (default: csv)",
    )
    parser.add_argument("--images", metavar="FOLDER", help="folder with a subfolder of images for each class")
    parser.add_argument("--text", "--table", metavar="TABLE", help="table: .csv, .jsonl or .parquet")
    parser.add_argument("--label", "--target", default="label", metavar="NAME", help="class column (default: label)")
    parser.add_argument("--out", required=True, metavar="PATH", help="folder or table to write; it must not exist")


def _run(args: Namespace) -> int:
    import_scanning()
    if bool(args.images) == bool(args.text):
        raise UsageError("apply takes either --images or --text")
    with convert_scan_errors(args.fixes):
        from persample.scanning import EXCHANGE_FORMATS, apply_to_folder, apply_to_table, import_fixes, read_fixes

        if args.source not in (known := ["csv", *EXCHANGE_FORMATS]):
            raise UsageError(f"--from must be one of {', '.join(known)}, got '{args.source}'")
        fixes = read_fixes(args.fixes) if args.source == "csv" else import_fixes(args.fixes, args.source)
        if args.images:
            apply_to_folder(fixes, args.images, args.out)
        else:
            apply_to_table(fixes, args.text, args.out, args.label)
    removed = sum(fix.removes for fix in fixes)
    if args.json:
        print(format_json({"out": args.out, "relabelled": len(fixes) - removed, "removed": removed}))
    else:
        print(f"{format_count(len(fixes) - removed, 'new label')}, {removed:,} removed: {args.out}")
    return 0


COMMAND = Command(_DESCRIPTION, _add_arguments, _run, _EXIT_CODES)
