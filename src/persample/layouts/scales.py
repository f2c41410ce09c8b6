"""What a number means that a sum over the samples is multiplied by or divided by: a size, a count, or a factor.

A sum that is divided by the batch size is a mean, and so is one that is divided by a number of all samples, such as the
number of tokens. A number of which nothing is known counts, too: `loss.sum() / num_tokens`. A number in the source code
(`loss.sum() / 2`) is a factor of each sample's loss, and so is a size that each sample has, such as its number of
positions. That size may equal the batch's by coincidence, in one step and not in the next. So the first reading of a
place in the code is kept for the steps that follow. If the size was read right before the call, as in
`loss.sum() / x.size(0)`, the number comes from it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from persample._internal import tracing
from persample._internal.calling_code import find_calling_frame, is_written_out
from persample.errors import get_op_name
from persample.layouts.call import Call
from persample.layouts.counts import Scale
from persample.layouts.divisors import EVEN, STATISTIC, Divisor, describe_divisors, make_sum_of_counts
from persample.layouts.layout import Lost, Reduced

# "size": the batch size, or the number of entries; "count": another number of all samples; "unclear": a size or a
# factor; "statistic": a number of all samples that is no divisor.
Meaning = Literal["size", "count", "factor", "unclear", "statistic"]

_MAX_SITES = 256  # of a model

ADVICE = "so its divisor depends on the batch (use reduction='sum', or take the mean of each sample first)"


@dataclass(frozen=True)
class _Reading:
    meaning: Meaning
    divisor: Divisor = EVEN  # of a count
    is_assumed: bool = False


def scale_sum(call: Call, found: Reduced) -> tuple[Reduced | Lost, bool]:
    """What a product with a number makes of a sum over the samples, or a quotient; whether that depends on values."""
    number, depends_on_values = _read_number(call, found)
    if number is None or not found.is_clear or (call.batch < 2 and not call.counted.wholes):
        return found, depends_on_values
    scaling = _Scaling(call, found, number)
    if not scaling.holds_divisors:
        reading = scaling.read()
    elif scaling.is_sum and scaling.can_assume and not depends_on_values and is_written_out(number):
        return found, False  # a factor, unless the user says what the loss is
    elif call.batch < 2:  # the first part of a batch
        reading = scaling.find_size() or _Reading("factor")
    else:
        reading = scaling.compare_with_earlier()
    return scaling.apply(reading), depends_on_values


def _read_number(call: Call, found: Reduced) -> tuple[int | float | None, bool]:
    """The number by which a sum over the samples is multiplied or divided, and whether it was read from a tensor.

    A tensor is read only as the divisor of a sum: reading waits for the device, and a factor of a mean is rarely the
    batch size.
    """
    if numbers := call.numbers:
        return numbers[0] or None, False
    others = [t for t, where in call.pairs if not isinstance(where, Reduced)]
    if not call.facts.is_division or found.kind != "sum" or not others or others[0].numel() != 1:
        return None, False
    if (trace := tracing.get_trace()) is not None and trace.is_invented(others[0]):
        return None, False
    return float(others[0].detach().real) or None, True


class _Scaling:
    """A sum over the samples, or a mean, which a call multiplies by a number or divides by it."""

    def __init__(self, call: Call, found: Reduced, number: float) -> None:
        self.call, self.found, self.number = call, found, number
        self.counted, self.batch = call.counted, call.batch
        self.is_division, self.is_sum = call.facts.is_division, found.kind == "sum"
        self.divisor = number if self.is_division else 1 / number
        self.sizes = (call.batch, found.entries)
        self.holds_divisors, given = call.counted.holds_divisors, call.counted.given_reduction
        self.is_given_sum = given == "sum"
        # Other parts of the loss can show what a number means of which nothing is known. Else it may remain unclear.
        self.can_assume = self.holds_divisors and given is None

    def apply(self, reading: _Reading) -> Reduced | Lost:
        """What the call returns, if the number has this meaning."""
        found, meaning, name = self.found, reading.meaning, get_op_name(self.call.func)
        if meaning == "statistic":
            return Lost(
                f"{found.cause}, and {name} scales that by {self.number:g}, which was computed from all samples"
            )
        if meaning == "count" and not (self.is_given_sum and self.holds_divisors):
            cause = f"{found.cause}, and {name} divides by {self.divisor:g}, which was counted over all samples"
            if reading.divisor is STATISTIC or not self.holds_divisors:
                return Lost(f"{cause}, {ADVICE}")
            is_assumed = reading.is_assumed and self.can_assume
            return replace(found, cause=cause, kind="mean", divisors=(reading.divisor,), is_assumed=is_assumed)
        if meaning == "factor" and self.is_sum and not self.is_division:  # `(6 / batch_size) * loss.sum()`
            return replace(found, is_assumed=self.can_assume and self.counted.divisors == "batch")
        if meaning == "size":
            cause = f"{found.cause}, and {name} {'divides' if self.is_sum else 'multiplies'} by {self.number:g}"
            return replace(found, cause=cause, kind="mean" if self.is_sum else "sum", divisors=())
        if meaning == "unclear":
            is_size = not self.is_sum or not self._find_total()
            stands_for = f"the batch size {self.batch}" if is_size else "a number of all samples"
            cause = (
                f"{found.cause}, and {name} scales that {found.kind} by {self.number:g}, which may stand for "
                f"{stands_for} or be a factor of its own"
            )
            return replace(found, cause=cause, kind="unclear", divisors=() if self.is_sum else found.divisors)
        return found

    # ---- the reading of one call ----

    def find_size(self) -> _Reading | None:
        """The reading of a number that comes from a size of the samples; None if that is not known.

        Such a number is the batch size or a multiple of it that was read last. A sum is also divided by the size of a
        tensor of which the calls of the model get parts.
        """
        number, read = self.number, self.counted.read_last.sizes
        is_of_whole = self.is_division and any(map(self._is_own_size, (number / n for n in self.counted.wholes)))
        if not self.is_sum and self.batch > 1:
            is_size = not self.is_division and number in self.sizes and number in read
            return _Reading("size") if is_size and not describe_divisors(self.found.divisors, self.batch) else None
        if self.batch > 1:
            if self.is_division and number in self.counted.read_last.own:
                return _Reading("factor")
            ratio = round(self.divisor / self.batch)
            is_multiple = ratio > 0 and math.isclose(self.divisor, ratio * self.batch, rel_tol=1e-12)
            if is_multiple and not read.isdisjoint((self.batch, ratio * self.batch)):
                return None if self.batch not in read and self._is_own_size(self.divisor) else _Reading("size")
            is_long = number != round(number, 3)  # 0.25 may be a weight, 0.03125 is the inverse of 32
            if is_multiple and ratio == 1 and not self.is_division and is_long:
                return _Reading("size")
        return _Reading("count") if is_of_whole else None

    def read(self) -> _Reading:
        """What the number means, as far as this call shows."""
        number, divisor, holds_divisors = self.number, self.divisor, self.holds_divisors
        divides_sum = self.is_division and self.is_sum
        is_size = number in self.sizes or (holds_divisors and self._is_own_size(number / self.batch))
        is_given = divisor in self.counted.given_integers
        is_item_count = self.is_given_sum and (is_given or (holds_divisors and len(self.call.tensors) == 1))
        if divides_sum and is_size and not is_item_count:
            return _Reading("size")
        if self.is_sum and divisor != 1 and (total := self._find_total()):
            is_short = not self.is_division and number == round(number, 1)  # 0.1 may be a weight, or the inverse of 10
            return _Reading("unclear") if is_short else _Reading("count", total)
        statistics = [n for n, of in self.counted.totals.items() if of is STATISTIC and not float(n).is_integer()]
        if not is_given and (_is_close_to_any(number, statistics) or _is_close_to_any(divisor, statistics)):
            return _Reading("statistic")
        if is_given and divides_sum:
            return _Reading("count", Divisor("items", divisor))
        if divides_sum and holds_divisors and self._may_count() and (divisor == 1 or not self._is_own_size(divisor)):
            return _Reading("count", Divisor("items", divisor), is_assumed=True)
        return _Reading("unclear" if self._may_be_size() else "factor")

    def _is_own_size(self, number: float) -> bool:
        """Whether a number is a product of sizes of what was added up: of `(B, T, C)`, the tokens of a sample."""
        products = {1}
        for size in self.found.sizes:
            products |= {size * product for product in products}
        return number in products

    def _find_total(self) -> Divisor | None:
        """The number of all samples that the divisor equals."""
        for total, known in self.counted.totals.items():
            if math.isclose(self.divisor, total, rel_tol=1e-6):
                return known
        for rows in self.found.uneven:
            if self.divisor == sum(rows):
                return make_sum_of_counts("rows", rows)
        if self.is_division and self.holds_divisors and float(self.divisor).is_integer():
            for known in self.found.divisors:  # the targets of the sum that are not ignored
                counts = known.count_by_sample(self.batch)
                if counts is not None and float(counts.sum()) == self.divisor:
                    return known
        return None

    def _may_count(self) -> bool:
        """Whether the number may count something: whether it is no part of the model, and not written in the code."""
        numbers = [tensor for tensor, where in self.call.pairs if where is None]
        if numbers:
            return not any(map(self.counted.is_held, numbers))
        return not is_written_out(self.number)

    def _may_be_size(self) -> bool:
        """Whether the number may be the batch size, for all that is known, or a multiple of it if the kind is given.

        A size is an integer, so a float as a factor (`0.1 * kl.sum()`) may be one only for a sum, as its inverse.
        Without a given reduction, a mean times a number is a mean (`* T**2`), and a multiple of the batch size by which
        a sum is divided is a factor (`/ num_items`), as a number is that is no multiple.
        """
        is_integer = isinstance(self.number, int)
        if not self.is_sum:
            return not self.can_assume and self.number in self.sizes and is_integer and not self.is_division
        if not self.counted.may_know_size(*self.sizes):
            return False
        if not is_integer and not self.is_division:
            return _is_close_to_any(self.divisor, self.sizes)
        ratio = self.divisor / self.batch
        is_multiple = math.isfinite(ratio) and ratio > 0.5 and abs(ratio - round(ratio)) < 1e-6 * ratio
        return not self.can_assume and is_multiple

    # ---- the readings of earlier steps ----

    def compare_with_earlier(self) -> _Reading:
        """The reading of the number, or that of its place in an earlier step, unless this shows that it was wrong."""
        known = self.find_size()
        reading = known or self.read()
        if reading.meaning == "statistic" or (self.is_sum and not self.is_division):
            return reading
        frame = find_calling_frame()
        sites, site = self.counted.sites, (self.call.func, frame.f_code, frame.f_lasti)
        before, may_be_own = sites.get(site), self.is_sum and self._is_own_size(self.number)
        if before is not None and (known is None or (before.is_factor and may_be_own)):
            reading = self._decide(before, reading, may_be_own or not self.is_sum)
            may_be_own &= before.may_be_own
        if reading.meaning != "unclear":
            if len(sites) >= _MAX_SITES:
                sites.pop(next(iter(sites)))
            sites[site] = Scale(reading.meaning == "factor", self.number, self.batch, may_be_own)
        return reading

    def _decide(self, before: Scale, reading: _Reading, may_be_factor: bool) -> _Reading:
        is_factor = reading.meaning == "factor"
        if before.is_factor == is_factor:
            return reading
        if before.is_factor and may_be_factor:
            return _Reading("factor")
        if is_factor and not before.may_be_own:  # it was no size of each sample before, and is one by coincidence
            return _Reading("count", Divisor("items", self.number), is_assumed=True)
        taken, rows = ("a size of each sample", self.batch) if before.is_factor else ("the batch size", before.batch)
        warnings.warn(
            f"A sum over the samples is divided by {self.number:g} for a batch of {self.batch} samples, and by "
            f"{before.number:g} for {before.batch} samples in an earlier step. There it was taken for {taken}, so that "
            f"rows differ by a factor of {rows}. Pass loss_reduction='sum' or 'mean' to record().",
            stacklevel=2,
        )
        return reading


def _is_close_to_any(number: float, totals: Iterable[float]) -> bool:
    return any(math.isclose(number, total, rel_tol=1e-6) for total in totals)
