"""`persample explain`."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from pathlib import Path

from persample.cli.command import Command, format_json
from persample.cli.user_code import UsageError
from persample.errors import find_code

_DESCRIPTION = """\
Explain an error of persample: what it means, an example, and the way out.

    $ persample explain E1
    $ persample explain "The samples of the batch are mixed in ..."     # the message, or a part of it
    $ persample explain                                                 # all codes
"""

_EXIT_CODES = {0: "explained", 2: "no such code, or a message without one"}


def read_pages() -> dict[str, str]:
    """The page of each code."""
    text = (Path(__file__).parents[1] / "explanations.md").read_text(encoding="utf-8")
    return {page.partition(":")[0]: page for page in re.split(r"^## ", text, flags=re.MULTILINE)[1:]}


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("error", nargs="*", metavar="CODE", help="a code such as E1, or the text of a message")


def _run(args: Namespace) -> int:
    pages, given = read_pages(), " ".join(args.error)
    if not given:
        titles = {code: page.splitlines()[0].partition(": ")[2] for code, page in pages.items()}
        print(format_json(titles) if args.json else "\n".join(f"{code:4} {title}" for code, title in titles.items()))
        return 0
    code = given.upper() if given.upper() in pages else find_code(given)
    if code is None:
        raise UsageError(f"There is no page about {given!r}. The codes are {', '.join(pages)}.")
    print(format_json({"code": code, "text": pages[code]}) if args.json else pages[code].strip())
    return 0


COMMAND = Command(_DESCRIPTION, _add_arguments, _run, _EXIT_CODES)
