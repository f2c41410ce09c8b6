"""Argument parser and entry point of `persample` and `python -m persample`."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence

import persample
from persample.cli import apply, audit, bench, check, compare, demo, evaluate, export, monitor, query, report, scan
from persample.cli.user_code import UsageError

BROKEN_PIPE, INTERRUPTED = 141, 130  # the exit codes of a program that the signal ends

COMMANDS = {
    "scan": scan.COMMAND,
    "query": query.COMMAND,
    "report": report.COMMAND,
    "export": export.COMMAND,
    "apply": apply.COMMAND,
    "compare": compare.COMMAND,
    "evaluate": evaluate.COMMAND,
    "check": check.COMMAND,
    "audit": audit.COMMAND,
    "monitor": monitor.COMMAND,
    "bench": bench.COMMAND,
    "demo": demo.COMMAND,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name, and return its exit code."""
    args = _make_parser().parse_args(argv)
    try:
        code = COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of a pipe has closed it, such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except UsageError as error:
        if args.debug:
            raise
        print(f"persample {args.command}: error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print(f"persample {args.command}: stopped", file=sys.stderr)
        return INTERRUPTED


def _make_parser() -> ArgumentParser:
    parser = ArgumentParser("persample", description=persample.__doc__)
    parser.add_argument("--version", action="version", version=f"persample {persample.__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=command.summary,
            description=command.description,
            epilog=_format_exit_codes(command.exit_codes),
            formatter_class=RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.add_argument("--json", action="store_true", help="print the result as JSON")
        subparser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _format_exit_codes(exit_codes: Mapping[int, str]) -> str:
    """Format exit codes for the end of a help text.

    >>> print(_format_exit_codes({0: "done", 2: "wrong arguments"}))
    exit codes:
      0    done
      2    wrong arguments
    """
    return "\n".join(["exit codes:", *(f"  {code:<3}  {meaning}" for code, meaning in exit_codes.items())])
