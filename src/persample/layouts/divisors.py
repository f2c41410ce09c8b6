"""Divisors that count: the number of targets that are not ignored, the sum of a mask or of weights.

A mean over the tokens of a batch divides the loss of each sample by a number of all samples. The backward pass holds
that number constant, and so does a recording: the row of a sample is B times its share of the loss, and the mean of the
rows is the gradient of the batch. With `divisors="own"`, each sample's part is divided by its own number instead.
Private training refuses such a divisor, because it depends on the other samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from persample import _torch
from persample.layouts.ids import add_up_samples
from persample.layouts.layout import Layout, Scattered


@dataclass(eq=False)
class SampleUnits:
    """The unit of each sample, if rows are those of units, and the first sample of each unit.

    Attributes:
        have_met: whether samples of one unit were combined in a tensor that requires grad.
    """

    of_sample: tuple[int, ...]
    first: tuple[int, ...]
    have_met: bool = False


def make_sample_units(of_sample: Sequence[int]) -> SampleUnits | None:
    """The units of the samples of a batch; None if each sample has its own.

    >>> make_sample_units([7, 3, 7]).first
    (0, 1)
    """
    first: dict[int, int] = {}
    for n, unit in enumerate(of_sample):
        first.setdefault(unit, n)
    numbers = {unit: number for number, unit in enumerate(first)}
    if len(first) == len(of_sample):
        return None
    return SampleUnits(tuple([numbers[unit] for unit in of_sample]), tuple(first.values()))


# What is done with a divisor that counts: it is held constant, replaced by each sample's own number, or refused.
DivisorMode = Literal["batch", "own", "refuse"]


@dataclass(frozen=True, eq=False)
class Divisor:
    """A number by which the loss of all samples is divided, as the sum of what each sample adds to it.

    Attributes:
        what: what is counted, for descriptions.
        total: the number, if only that is known.
        count: what each sample of a batch of this size adds, computed when it is needed; None if a tensor that it reads
            has changed since. Without `total` and `count`, all samples add the same, as in an ordinary mean.
    """

    what: str
    total: float | None = None
    count: Callable[[int], Tensor | None] | None = None

    def count_by_sample(self, batch: int) -> Tensor | None:
        """`(batch,)`: what each sample adds, in float64; None if that is not known."""
        if self.count is not None:
            with _torch.DisableTorchFunction(), torch.no_grad():
                return self.count(batch)
        return torch.ones(batch, dtype=torch.float64) if self.total is None else None

    def count_by_row(self, batch: int, units: SampleUnits | None) -> Tensor | None:
        """What each sample adds, or each unit; None if that is not known."""
        counts = self.count_by_sample(batch)
        if counts is None or units is None:
            return counts
        unit = torch.tensor(units.of_sample, device=counts.device)
        return counts.new_zeros(len(units.first)).index_add_(0, unit, counts)

    def describe(self, batch: int, units: SampleUnits | None = None) -> str | None:
        """The divisor in words; None if all rows have equal parts of it, as in an ordinary mean."""
        counts = self.count_by_row(batch, units)
        if counts is not None and (counts.is_meta or torch.allclose(counts, counts[0])):
            return None
        total = self.total if counts is None else float(counts.sum())
        return self.what if total is None or math.isnan(total) else f"{total:.6g} {self.what}"


EVEN = Divisor("samples")

# Computed from numbers of all samples, so that no sample has one of its own.
COMPUTED = Divisor("a number of all samples", math.nan)

# Computed from outputs, or no sum: a loss may not be divided by it.
STATISTIC = Divisor("a statistic of all samples", math.nan)


def make_divisor(
    what: str, entries: Callable[[], Tensor], where: Layout | Scattered, sources: Sequence[Tensor] = ()
) -> Divisor:
    """A divisor to which each entry of a tensor adds its value; `entries` computes it from some tensors."""
    versions = [_get_version(tensor) for tensor in sources]

    def count(batch: int) -> Tensor | None:
        is_current = versions == [_get_version(tensor) for tensor in sources]
        return add_up_samples(entries().double(), where, batch) if is_current else None

    return Divisor(what, count=count)


def make_sum_of_entries(tensor: Tensor, where: Layout | Scattered) -> Divisor:
    """The sum of the entries of a mask or of weights."""
    kept = tensor.detach()
    what = "entries" if not (tensor.is_floating_point() or tensor.is_complex()) else "(sum of weights)"
    return make_divisor(what, lambda: kept, where, [kept])


def make_sum_of_counts(what: str, counts: Sequence[int]) -> Divisor:
    """A divisor to which each sample adds its count."""
    return make_divisor(what, lambda: torch.tensor(counts), Layout(0, ids=tuple(range(len(counts)))))


def make_number_of_rows(where: Layout | Scattered, device: torch.device) -> Divisor:
    """The number of rows (or entries, if they are scattered) of a tensor that was averaged."""
    if isinstance(where, Scattered):
        return make_divisor("entries", lambda: torch.ones(where.ids.shape, device=device), where)
    rows = Layout(0, ids=where.ids)
    return make_divisor("rows", lambda: torch.ones(len(where.ids or ()), device=device), rows)


def _get_version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def describe_divisors(divisors: Sequence[Divisor], batch: int, units: SampleUnits | None = None) -> str | None:
    """Some divisors in words, None if all of them are those of ordinary means."""
    return " and ".join(dict.fromkeys(filter(None, (divisor.describe(batch, units) for divisor in divisors)))) or None


def find_own_factors(divisors: Sequence[Divisor], batch: int, units: SampleUnits | None = None) -> Tensor | str | None:
    """`(batch,)`: by what to multiply B times the shares, so that each sample's part is divided by its own number.

    With units, each unit's part is divided by the number of the unit. None if nothing changes; the reason, in words, if
    a number is not known.
    """
    found: Tensor | None = None
    for number, divisor in enumerate(divisors):
        counts = divisor.count_by_row(batch, units)
        if counts is None:
            return f"how much each sample adds to the divisor ({divisor.describe(batch)}) is not known"
        factors = torch.where(counts > 0, counts.sum() / (len(counts) * counts), 0.0)
        if number and found is not None and not torch.allclose(found, factors):
            return "parts of the loss have different divisors"
        found = factors
    if found is None or torch.allclose(found, torch.ones_like(found)):
        return None
    return found if units is None else found[torch.tensor(units.of_sample, device=found.device)]
