"""Numbers that were counted among the samples and read as Python numbers: `counts.tolist()`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class CountedSizes:
    """The numbers that one forward pass has read from tensors of samples.

    Loose rows may be split into groups of such sizes, because the sizes belong to the rows, but not by other numbers.
    """

    def __init__(self) -> None:
        self._seen: set[Any] = set()

    def add(self, numbers: Any) -> None:
        """Add what `tolist` or `item` returned for a tensor of samples."""
        if isinstance(numbers, int):
            self._seen.add(numbers)
        elif isinstance(numbers, list) and all(isinstance(n, int) for n in numbers):
            self._seen.add(tuple(numbers))

    def contains(self, sizes: Sequence[int]) -> bool:
        """Whether these sizes were counted; the last one may be the remaining size.

        >>> counted = CountedSizes()
        >>> counted.add([2, 0, 3])
        >>> counted.contains([2, 0, 3]), counted.contains([2, 0, 3, 4]), counted.contains([2, 3])
        (True, True, False)
        """
        seen = self._seen
        return tuple(sizes) in seen or tuple(sizes[:-1]) in seen or all(size in seen for size in sizes)
