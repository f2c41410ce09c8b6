"""The command line: `python -m persample`, or `persample`."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence

import persample
from persample.cli import bench, check, demo, query, report, scan
from persample.cli.entry import UsageError

BROKEN_PIPE, INTERRUPTED = 141, 130  # as of a program that the signal ends

COMMANDS = {
    "scan": scan.COMMAND,
    "query": query.COMMAND,
    "report": report.COMMAND,
    "check": check.COMMAND,
    "bench": bench.COMMAND,
    "demo": demo.COMMAND,
}


def _parser() -> ArgumentParser:
    parser = ArgumentParser("persample", description=persample.__doc__)
    parser.add_argument("--version", action="version", version=f"persample {persample.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        own = commands.add_parser(
            name, help=command.summary, description=command.description, formatter_class=RawDescriptionHelpFormatter
        )
        command.arguments(own)
        own.add_argument("--json", action="store_true", help="print the answer as JSON")
        own.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the arguments name, and gives its exit code."""
    args = _parser().parse_args(argv)
    try:
        code = COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who reads has read enough: `| head`
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
