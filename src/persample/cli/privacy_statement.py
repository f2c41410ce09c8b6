"""`persample privacy-statement`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from persample.cli.command import Command, format_json
from persample.cli.user_code import UsageError
from persample.errors import PerSampleError

_DESCRIPTION = """\
Print the statement of a private training that engine.write_statement("privacy.json") has written, and compute
epsilon again from its history of steps.

    $ persample privacy-statement privacy.json
"""

_EXIT_CODES = {
    0: "epsilon is as stated",
    1: "epsilon is not as stated",
    2: "wrong arguments, or the file is no statement",
}


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the statement")


def _run(args: Namespace) -> int:
    try:
        from persample.private import read_statement

        statement = read_statement(args.file)
    except (ImportError, OSError, PerSampleError) as error:
        raise UsageError(str(error)) from error
    again = {"epsilon computed again": statement.epsilon, "is as stated": statement.is_right}
    print(format_json({**statement.contents, **again}) if args.json else statement)
    return 0 if statement.is_right else 1


COMMAND = Command(_DESCRIPTION, _add_arguments, _run, _EXIT_CODES)
