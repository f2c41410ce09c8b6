"""Numbers that were counted among the samples and read as Python numbers: `counts.tolist()`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from persample import _torch
from persample.layouts.divisors import (
    STATISTIC,
    Divisor,
    DivisorMode,
    SampleUnits,
    make_number_of_rows,
    make_sum_of_entries,
)
from persample.layouts.layout import Layout, Lost, Reduced, Where

# Numbers that depend on all samples, such as the number of valid tokens.
Totals = dict[float, Divisor]

# Orders of packed sequences that are kept at most; a model makes few in one forward pass.
_MOST_ORDERS = 64


@dataclass(frozen=True)
class PackedOrder:
    """The samples of a packed sequence, the longest first, and the number of rows of each step."""

    samples: tuple[int, ...]
    sizes: tuple[int, ...]

    def make_ids(self) -> tuple[int, ...]:
        """The sample of each row."""
        return tuple(n for size in self.sizes for n in self.samples[:size])

    def has_steps(self, *sizes: int) -> bool:
        """Whether there are steps with these numbers of rows, or none."""
        return all(size == 0 or size in self.sizes for size in sizes)

    def starts_with(self, rows: tuple[int, ...]) -> bool:
        """Whether these are the samples of the first rows of a step."""
        return self.samples[: len(rows)] == rows


class SizesRead(NamedTuple):
    """Sizes that the calling code has read."""

    sizes: frozenset[int] = frozenset()  # which may be the batch size
    own: frozenset[int] = frozenset()  # of dimensions that are not the samples'


@dataclass(frozen=True)
class Scale:
    """How a number was read by which a place in the code scales a sum over the samples."""

    is_factor: bool  # else a size or a count
    number: float
    batch: int
    may_be_own: bool  # whether it was also a size that each sample has, in all steps


class CountedSizes:
    """The numbers that one forward pass has read from tensors of samples, and others that a loss may be divided by.

    Loose rows may be split into groups of such sizes, because the sizes belong to the rows, but not by other numbers.
    """

    def __init__(
        self,
        divisors: DivisorMode = "batch",
        sites: dict[Any, Scale] | None = None,
        given_reduction: str | None = None,
        is_held: Callable[[Tensor], bool] | None = None,
    ) -> None:
        self.divisors = divisors  # what is done with divisors that are counted over all samples
        self.sites = {} if sites is None else sites  # by places in the code, from earlier steps of the model
        self.given_reduction = given_reduction  # how the loss combines the samples, if the user has said so
        self.sizes: set[int] | None = None  # of tensors, that the calling code may have read; None: any
        self.read_last = SizesRead()  # the sizes that the calling code has read right before a call
        self.wholes: set[int] = set()  # sizes of tensors, of which calls of the model have got parts
        self.given_integers: set[int] = set()  # among the arguments of the model
        self.is_held = is_held or (lambda tensor: True)  # whether a tensor is a part of the model
        self._seen: set[Any] = set()
        self._ends: dict[int, set[int]] = {}  # by the number of rows: where groups ended that were selected
        self.packed_orders: list[PackedOrder] = []
        self.totals: Totals = {}
        self.units: SampleUnits | None = None  # whose samples may be combined

    def start_batch(self, units: SampleUnits | None) -> None:
        """Set the units whose samples may be combined."""
        self.units = units

    def note_whole(self, sizes: Set[int]) -> None:
        """Note sizes of tensors, of which calls of the model have got parts."""
        self.wholes |= sizes if self.holds_divisors else set()

    def note_integers(self, numbers: Iterable[int]) -> None:
        """Note numbers among the arguments, which may count what all samples have, such as `num_items_in_batch`."""
        if self.holds_divisors:
            self.given_integers |= {*numbers}

    def add(self, numbers: Any) -> None:
        """Add what `tolist` or `item` returned for a tensor of samples."""
        if hasattr(numbers, "tolist"):  # an array of NumPy
            numbers = numbers.tolist()
        if isinstance(numbers, int):
            self._seen.add(numbers)
        elif isinstance(numbers, list) and all(isinstance(n, int) for n in numbers):
            self._seen.add(tuple(numbers))

    def may_know_size(self, *numbers: int) -> bool:
        """Whether the code that scales a loss may have one of these numbers from the size of a tensor."""
        return self.sizes is None or not self.holds_divisors or not self.sizes.isdisjoint(numbers)

    @property
    def holds_divisors(self) -> bool:
        """Whether the loss may be divided by numbers that are counted over all samples."""
        return self.divisors != "refuse"

    def add_packed(self, ids: Sequence[int], sizes: Sequence[int]) -> None:
        """Add the order of a packed sequence, given the sample of each row and the number of rows of each step."""
        order = PackedOrder(tuple(ids[: sizes[0]]), tuple(sizes))
        if order.make_ids() == tuple(ids) and order not in self.packed_orders:
            self.packed_orders = [*self.packed_orders[1 - _MOST_ORDERS :], order]

    def contains(self, sizes: Sequence[int]) -> bool:
        """Whether these sizes were counted; the last one may be the remaining size.

        >>> counted = CountedSizes()
        >>> counted.add([2, 0, 3])
        >>> counted.contains([2, 0, 3]), counted.contains([2, 0, 3, 4]), counted.contains([2, 3])
        (True, True, False)
        """
        seen = self._seen
        return tuple(sizes) in seen or tuple(sizes[:-1]) in seen or all(size in seen for size in sizes)

    def contains_range(self, start: int, stop: int, rows: int) -> bool:
        """Whether `start:stop` is one group of `rows` rows, if the groups have sizes that were counted.

        >>> counted = CountedSizes()
        >>> counted.add([2, 0, 3])
        >>> counted.contains_range(2, 5, rows=5), counted.contains_range(1, 5, rows=5)
        (True, False)
        """
        for sizes in self._seen:
            for ends in ((0, *accumulate(sizes)), (0, *sizes)) if isinstance(sizes, tuple) else ():
                if ends[-1] == rows and start in ends and stop in ends:  # sizes, or where groups end
                    return True
        # Groups whose sizes were read one by one, and which are selected one after the other.
        selected = self._ends.setdefault(rows, {0})
        is_next = start in selected and stop - start in self._seen
        if is_next:
            selected.add(stop)
        return is_next


def find_read_total(tensor: Tensor, where: Where | None, result: Any) -> Totals:
    """A number of all samples in `result`, which a function has read from a tensor: `item`, `tolist`, `numpy`.

    Code outside torch can add up a mask or lengths that it has read as a list or an array.
    """
    if isinstance(result, (int, float)):
        if isinstance(where, Reduced) and where.counts:
            return {result: where.divisors[0] if len(where.divisors) == 1 else Divisor("entries", result)}
        return {result: STATISTIC} if isinstance(where, (Reduced, Lost)) else {}
    if not isinstance(where, Layout) or tensor.is_floating_point() or tensor.is_complex():
        return {}
    with _torch.DisableTorchFunction():
        return {float(tensor.sum()): make_sum_of_entries(tensor, where)}


def find_listed_total(tensor: Tensor, where: Where | None) -> Totals:
    """The number of rows that a mask has picked, or that are listed (`nonzero`): `len` reads it from the shape."""
    if not tensor.dim():
        return {}
    if isinstance(where, Lost) and where.listing:
        return {tensor.shape[0]: Divisor("rows", tensor.shape[0])}
    if isinstance(where, Layout) and where.ids is not None and len(set(Counter(where.ids).values())) > 1:
        return {len(where.ids): make_number_of_rows(where, tensor.device)}
    return {}
