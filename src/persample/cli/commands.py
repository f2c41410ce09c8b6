"""Argument parser and entry point of `persample` and `python -m persample`."""

from __future__ import annotations

import importlib
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import persample

if TYPE_CHECKING:
    from persample.cli.command import Command

BROKEN_PIPE, INTERRUPTED, TERMINATED = 141, 130, 143  # the exit codes of a program that the signal ends

# The module `persample.cli.NAME`, with _ for -, holds each command. It needs torch, and is imported when the command is
# called for.
COMMANDS = {
    "scan": "measure each example of a dataset",
    "query": "find examples in a scan",
    "report": "write an HTML report of a scan",
    "review": "decide about the suspects of a scan in a browser",
    "export": "write suspects to a file to fill in",
    "apply": "copy data with corrected labels",
    "compare": "compare two scans",
    "evaluate": "measure how well influence works for a model",
    "check": "compare per-sample gradients with a loop over a few samples",
    "audit": "test the claims of a private training, and measure what it reveals",
    "privacy-statement": "print the statement of a private training, and compute epsilon again",
    "monitor": "draw a training run",
    "explain": "explain an error, and how to get on",
    "bench": "measure the cost of per-sample gradients on this machine",
    "demo": "find wrong labels in the digits of scikit-learn",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name, and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    args = _make_parser(words).parse_args(words)
    from persample.cli.command import Terminated
    from persample.cli.user_code import UsageError

    try:
        code = load_command(args.command).run(args)
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
    except KeyboardInterrupt as error:
        print(f"persample {args.command}: stopped", file=sys.stderr)
        return TERMINATED if isinstance(error, Terminated) else INTERRUPTED


def load_command(name: str) -> Command:
    """Import a command."""
    command: Command = importlib.import_module(f"persample.cli.{name.replace('-', '_')}").COMMAND
    return command


def _make_parser(words: Sequence[str]) -> ArgumentParser:
    """The parser of a command line. Only the command that it names is imported, so that the help of all is quick."""
    parser = ArgumentParser("persample", description=persample.__doc__)
    parser.add_argument("--version", action="version", version=f"persample {persample.__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, formatter_class=RawDescriptionHelpFormatter)
        if name == chosen:
            _add_command(subparser, load_command(name))
    return parser


def _add_command(parser: ArgumentParser, command: Command) -> None:
    parser.description, parser.epilog = command.description, _format_exit_codes(command.exit_codes)
    command.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _format_exit_codes(exit_codes: Mapping[int, str]) -> str:
    """Format exit codes for the end of a help text.

    >>> print(_format_exit_codes({0: "done", 2: "wrong arguments"}))
    exit codes:
      0    done
      2    wrong arguments
    """
    return "\n".join(["exit codes:", *(f"  {code:<3}  {meaning}" for code, meaning in exit_codes.items())])
