"""The command line: a file for each subcommand."""

from persample.cli.commands import main
from persample.cli.entry import UsageError

__all__ = ["UsageError", "main"]
