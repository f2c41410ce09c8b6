"""What `explain()` returns: the structure of the gradients, and how far the samples were followed by definition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from persample import _torch
from persample._internal.text import format_table
from persample.errors import get_op_name


@dataclass(frozen=True)
class TriedFunction:
    """A function that was tried rather than known, the module that called it, in words, and how often it did."""

    name: str
    place: str
    calls: int


class TriedFunctions(Counter[tuple[str, str]]):
    """Counts the calls whose motion was found by trial, in this pass or in an earlier one, by function and module."""

    def add(self, func: Callable[..., Any], place: str) -> None:
        """Count a call. The recomputation of a checkpoint does not count."""
        if _torch.get_backward_pass() < 0:
            self[get_op_name(func), place] += 1

    def list(self) -> list[TriedFunction]:
        """All functions, in the order of their first calls."""
        return [TriedFunction(name, place, calls) for (name, place), calls in self.items()]


@dataclass(frozen=True)
class Explanation:
    """How the gradients of a recording were found; `print` shows it as text.

    Attributes:
        parameters: for each parameter what was kept: the structure of its term, or "norms only", or "not used".
        tried: functions that persample does not know. Where they move the samples was observed on other values, not
            derived from their definition.
    """

    parameters: Mapping[str, str]
    tried: Sequence[TriedFunction]

    def __str__(self) -> str:
        table = format_table([*self.parameters.items()], ["parameter", "kept"], rule=True, indent="  ")
        return f"{table}\n\n{describe_tried(self.tried)}"


def describe_tried(tried: Sequence[TriedFunction]) -> str:
    """The functions that were tried, as text.

    >>> print(describe_tried([TriedFunction("kron", "module 'head' (Head)", 2)]))
    Tried on other values, because their definition is not known to persample:
      kron, in module 'head' (Head), 2 calls
    """
    if not tried:
        return "The definition of every function is known: none was tried."
    lines = [f"  {t.name}, in {t.place}, {t.calls} call{'s' if t.calls > 1 else ''}" for t in tried]
    return "\n".join(["Tried on other values, because their definition is not known to persample:", *lines])
