"""The command line: `persample` and `python -m persample`, with one module for each subcommand.

`main` runs a command. No other package imports this one.
"""

from persample.cli.commands import main

__all__ = ["main"]
