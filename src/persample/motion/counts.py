"""Numbers that were counted among the samples and have left torch, as the sizes of groups: `counts.tolist()`.

Rows whose order depends on all samples may be divided by such numbers, which go with the rows, but by no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_seen: set[Any] = set()


def forget() -> None:
    """A new forward pass begins."""
    _seen.clear()


def remember(numbers: Any) -> None:
    """Takes what `tolist` or `item` gave for a tensor of samples."""
    if isinstance(numbers, int):
        _seen.add(numbers)
    elif isinstance(numbers, list) and all(isinstance(n, int) for n in numbers):
        _seen.add(tuple(numbers))


def are_counted(sizes: Sequence[int]) -> bool:
    """Whether these sizes are such numbers; the last may be what remains.

    >>> remember([2, 0, 3]), are_counted([2, 0, 3]), are_counted([2, 0, 3, 4]), are_counted([2, 3])
    (None, True, True, False)
    """
    return tuple(sizes) in _seen or tuple(sizes[:-1]) in _seen or all(size in _seen for size in sizes)
