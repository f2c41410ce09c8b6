"""What a subcommand is made of."""

from __future__ import annotations

import json
import math
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Command:
    """A subcommand: what it is for, its arguments, and what it does, which gives the exit code."""

    summary: str
    description: str
    arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


def apart(args: Namespace) -> AbstractContextManager[Any]:
    """Has what the user's code prints on the error stream where the answer is JSON."""
    return redirect_stdout(sys.stderr) if args.json else nullcontext()


def as_json(value: Any) -> str:
    """For programs; what JSON has no number for is null.

    >>> as_json({"loss": float("nan"), "ids": [1, 2]})
    '{\\n  "loss": null,\\n  "ids": [\\n    1,\\n    2\\n  ]\\n}'
    """
    return json.dumps(_without_nan(value), indent=2)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def positive(text: str) -> int:
    """The type of an argument that counts something."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


positive.__name__ = "positive number"  # as argparse names it in its message


def number(value: float | None) -> str:
    """A figure for people.

    >>> number(12345.678), number(0.00012345), number(3.0), number(None)
    ('12,346', '0.0001234', '3', '–')
    """
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def number_or_none(text: str) -> int | None:
    """The type of an argument that counts something, or says that there is to be none of it."""
    if text == "none":
        return None
    try:
        return positive(text)
    except ValueError:
        raise ArgumentTypeError(f"expected a positive number or 'none', got '{text}'") from None
