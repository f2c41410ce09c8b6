"""The functions whose motion a forward pass found by trial."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from persample import _torch
from persample.errors import get_op_name


@dataclass(frozen=True)
class TriedFunction:
    """A function that was tried rather than known, the module that called it, in words, and how often it did."""

    name: str
    place: str
    calls: int


class TriedFunctions:
    """Counts the calls whose motion was found by trial, in this pass or in an earlier one."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, func: Callable[..., Any], place: str) -> None:
        """Count a call. The recomputation of a checkpoint does not count."""
        if _torch.get_backward_pass() < 0:
            self._counts[get_op_name(func), place] += 1

    def list(self) -> list[TriedFunction]:
        """All functions, in the order of their first calls."""
        return [TriedFunction(name, place, calls) for (name, place), calls in self._counts.items()]
