"""Parts that all subcommands share."""

from __future__ import annotations

import json
import signal
import sys
import threading
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import Any

from persample._internal.text import replace_nonfinite


@dataclass(frozen=True)
class Command:
    """A subcommand. `run` returns the exit code."""

    description: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
    exit_codes: Mapping[int, str]


def redirect_user_output(args: Namespace) -> AbstractContextManager[Any]:
    """With --json, redirect what the user's code prints to the error stream."""
    return redirect_stdout(sys.stderr) if args.json else nullcontext()


class Terminated(KeyboardInterrupt):
    """SIGTERM: a scheduler wants the process to end, and may start it again."""


@contextmanager
def end_on_termination() -> Iterator[None]:
    """Treat SIGTERM in the block as Ctrl-C, so that files are closed and locks are released."""

    def stop(number: int, frame: Any) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():  # only there can signals be handled
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def format_json(value: Any) -> str:
    """Format as JSON. NaN and infinity, which JSON does not have, become null.

    >>> format_json({"loss": float("nan"), "ids": [1, 2]})
    '{\\n  "loss": null,\\n  "ids": [\\n    1,\\n    2\\n  ]\\n}'
    """
    return json.dumps(replace_nonfinite(value), indent=2)


def format_number(value: float | None) -> str:
    """A number with four significant digits; a dash for None.

    >>> format_number(12345.678), format_number(0.00012345), format_number(3.0), format_number(None)
    ('12,346', '0.0001234', '3', '–')
    """
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def parse_positive(text: str) -> int:
    """Parse an argument that is a positive integer."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ArgumentTypeError(f"expected a positive integer, got '{text}'")
    return number


def parse_numbers(text: str) -> tuple[float, ...]:
    """Parse numbers with commas between them."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise ArgumentTypeError(f"expected numbers with commas, such as 0.5,0.5,0.5, got '{text}'") from None


def parse_positive_or_none(text: str) -> int | None:
    """Parse an argument that is a positive integer or 'none'."""
    if text == "none":
        return None
    try:
        return parse_positive(text)
    except ArgumentTypeError:
        raise ArgumentTypeError(f"expected a positive integer or 'none', got '{text}'") from None
