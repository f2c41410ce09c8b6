"""Progress of a scan: a bar in a terminal or a notebook, else a line every half minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Literal

from tqdm.std import tqdm

SECONDS_BETWEEN_LINES = 30.0

Mode = Literal["bar", "lines", "none"]


def choose_mode(progress: bool | None) -> Mode:
    """How progress is shown: as asked, or by default a bar where somebody watches, and lines for a log file."""
    if progress is not None:
        return "bar" if progress else "none"
    return "bar" if sys.stderr.isatty() or _is_notebook() else "lines"


def choose_bar() -> type[tqdm[Any]]:
    """The class of progress bars: one with widgets in notebooks that have them, else one of characters.

    `tqdm.auto` makes the same choice, but warns if there are no widgets.
    """
    if _is_notebook() and find_spec("ipywidgets") is not None:
        from tqdm.notebook import tqdm_notebook

        return tqdm_notebook
    return tqdm


@contextmanager
def show_progress(title: str, total: int | None, done: int, mode: Mode) -> Iterator[Callable[[int], None]]:
    """Show the progress of the block, which calls the yielded function with numbers of examples; `done` came before."""
    if mode == "bar":
        with choose_bar()(desc=title, total=total, initial=done, unit=" examples", dynamic_ncols=True) as bar:
            yield bar.update
        return
    lines = _Lines(title, total, done)
    yield lines.update if mode == "lines" else lambda count: None


def say(text: str, mode: Mode) -> None:
    """Print a line for the user, unless progress is not wanted."""
    if mode != "none":
        print(text, file=sys.stderr, flush=True)


class _Lines:
    """Prints a line from time to time."""

    def __init__(self, title: str, total: int | None, done: int) -> None:
        self._title, self._total, self._done, self._before = title, total, done, done
        self._start = self._printed = time.monotonic()

    def update(self, count: int) -> None:
        """Count examples as done."""
        self._done += count
        now = time.monotonic()
        if now - self._printed >= SECONDS_BETWEEN_LINES:
            self._printed = now
            print(f"persample: {self._title}: {self._describe(now)}", file=sys.stderr, flush=True)

    def _describe(self, now: float) -> str:
        rate = (self._done - self._before) / max(now - self._start, 1e-9)
        if self._total is None:
            return f"{self._done:,} examples, {rate:,.0f} per second"
        left = (self._total - self._done) / max(rate, 1e-9)
        share = self._done / max(1, self._total)
        return f"{self._done:,} of {self._total:,} ({share:.0%}), {format_seconds(left)} left"


def format_seconds(seconds: float) -> str:
    """A duration in words.

    >>> format_seconds(42.4), format_seconds(600), format_seconds(9000)
    ('42 s', '10 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _is_notebook() -> bool:
    """Whether the code runs in a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"
