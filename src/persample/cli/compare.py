"""`persample compare`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from persample._internal.text import format_count
from persample.cli.command import Command, format_json, format_number, redirect_user_output
from persample.cli.task import convert_scan_errors, import_scanning

_DESCRIPTION = """\
Compare two scans, such as before and after labels were corrected: which labels changed, which suspects are
resolved, which are new.

    $ persample compare scans/photos scans/photos-fixed
"""

_EXIT_CODES = {0: "compared", 2: "wrong arguments, or no finished scans"}
_SHOWN = 20  # examples of each kind


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("before", metavar="BEFORE", help="directory of a scan")
    parser.add_argument("after", metavar="AFTER", help="directory of another scan")


def _run(args: Namespace) -> int:
    scanning = import_scanning()
    with redirect_user_output(args), convert_scan_errors(args.before):
        from persample.scanning import compare_scans

        before, after = scanning.Scan(args.before), scanning.Scan(args.after)
        found = compare_scans(before, after)
        lines = list(_describe(found, before, after))
    if args.json:
        answer = asdict(found)
        del answer["pairs"]
        print(format_json({"examples in both": len(found.pairs), **answer}))
    else:
        print("\n".join(lines))
    return 0


def _describe(found: Any, before: Any, after: Any) -> Iterator[str]:
    only = f"{len(found.only_before):,} only before, {len(found.only_after):,} only after"
    yield f"{format_count(len(found.pairs), 'example')} in both, {only}"
    old, new = found.wrong_labels
    if old and new:
        yield f"estimated wrong labels: {replace(old, warning='')} -> {replace(new, warning='')}"
        yield from (f"  {title}: {part.warning}" for title, part in (("before", old), ("after", new)) if part.warning)
    old, new = found.mean_loss
    if old is not None and new is not None:
        yield f"mean loss: {format_number(old)} -> {format_number(new)}"
    for title in ("relabelled", "resolved", "remaining", "new"):
        pairs = getattr(found, title)
        yield f"{title}: {len(pairs):,}"
        earlier = before.describe([i for i, _ in pairs[:_SHOWN]])
        for (_, j), was, now in zip(pairs, earlier, after.describe([j for _, j in pairs[:_SHOWN]]), strict=False):
            labels = [was["label"], now["label"]] if title == "relabelled" else [now.get("label")]
            yield "  ".join(filter(None, [f"  {j}", now.get("name"), " -> ".join(filter(None, labels))]))
        if len(pairs) > _SHOWN:
            yield f"  and {len(pairs) - _SHOWN:,} more"


COMMAND = Command(_DESCRIPTION, _add_arguments, _run, _EXIT_CODES)
