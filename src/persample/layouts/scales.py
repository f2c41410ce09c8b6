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
from persample.layouts.divisors import EVEN, Divisor, describe_divisors, make_sum_of_counts
from persample.layouts.layout import Lost, Reduced

# "size": the batch size, or the number of entries; "count": another number of all samples; "unclear": a size or a
# factor; "statistic": a number of all samples that is no divisor.
Meaning = Literal["size", "count", "factor", "unclear", "statistic"]

_MAX_SITES = 256  # of a model

ADVICE = "so its divisor depends on the batch (use reduction='sum', or take the mean of each sample first)"


@dataclass(frozen=True)
class _Reading:
    meaning: Meaning
    divisor: Divisor | None = None  # of a count
    is_assumed: bool = False


def scale_sum(call: Call, found: Reduced) -> tuple[Reduced | Lost, bool]:
    """What a product with a number makes of a sum over the samples, or a quotient; whether that depends on values."""
    number, depends_on_values = _read_number(call, found)
    if number is None or not found.is_clear or (call.batch < 2 and not call.counted.wholes):
        return found, depends_on_values
    is_open = found.kind == "sum" and call.counted.given_reduction is None
    if not call.counted.holds_divisors:
        reading = _read(call, found, number)
    elif is_open and not depends_on_values and is_written_out(number, find_calling_frame()):
        return found, False  # a factor, unless the user says what the loss is
    elif call.batch < 2:  # the first part of a batch
        reading = _find_size(call, found, number) or _Reading("factor")
    else:
        reading = _compare_with_earlier(call, found, number)
    return _apply(call, found, number, reading), depends_on_values


def _apply(call: Call, found: Reduced, number: float, reading: _Reading) -> Reduced | Lost:
    name = get_op_name(call.func)
    divisor = number if call.facts.is_division else 1 / number
    if reading.meaning == "statistic":
        return Lost(f"{found.cause}, and {name} scales that by {number:g}, which was computed from all samples")
    if reading.meaning == "count" and not (call.counted.is_sum and call.counted.holds_divisors):
        cause = f"{found.cause}, and {name} divides by {divisor:g}, which was counted over all samples"
        if reading.divisor is None or not call.counted.holds_divisors:
            return Lost(f"{cause}, {ADVICE}")
        assumed = reading.is_assumed and call.counted.can_assume
        divided = {"kind": "mean", "is_share": True, "divisors": (reading.divisor,), "is_assumed": assumed}
        return replace(found, cause=cause, **divided)  # type: ignore[arg-type]
    if reading.meaning == "factor" and found.kind == "sum" and not call.facts.is_division:
        assumed = call.counted.can_assume and call.counted.divisors == "batch"
        return replace(found, is_assumed=assumed)  # `(6 / batch_size) * loss.sum()`
    if reading.meaning == "size":
        kind, verb = ("sum", "multiplies") if found.kind == "mean" else ("mean", "divides")
        return replace(found, cause=f"{found.cause}, and {name} {verb} by {number:g}", kind=kind, divisors=())  # type: ignore[arg-type]
    if reading.meaning == "unclear":
        is_size = found.kind == "mean" or not _find_total(call, found, divisor)
        meaning = f"the batch size {call.batch}" if is_size else "a number of all samples"
        cause = (
            f"{found.cause}, and {name} scales that {found.kind} by {number:g}, which may stand for {meaning} or be a "
            "factor of its own"
        )
        return replace(found, cause=cause, kind="unclear")
    return found


# ---- the reading of one call ----


def _find_size(call: Call, found: Reduced, number: float) -> _Reading | None:
    """The reading of a number that comes from a size of the samples; None if that is not known.

    Such a number is the batch size or a multiple of it that was read last. A sum is also divided by the size of a
    tensor of which the calls of the model get parts.
    """
    is_division, read, wholes = call.facts.is_division, call.counted.read_last.sizes, call.counted.wholes
    divides_whole = is_division and any(_is_product_of_sizes(found, number / whole) for whole in wholes)
    if call.batch < 2:
        return _Reading("count", EVEN) if divides_whole else None
    if found.kind == "mean":
        is_size = not is_division and number in (call.batch, found.entries) and number in read
        return _Reading("size") if is_size and not describe_divisors(found.divisors, call.batch) else None
    if is_division and number in call.counted.read_last.own:
        return _Reading("factor")
    size = number if is_division else 1 / number
    ratio = round(size / call.batch)
    is_multiple = ratio > 0 and math.isclose(size, ratio * call.batch, rel_tol=1e-12)
    if is_multiple and not read.isdisjoint((call.batch, ratio * call.batch)):
        is_own = call.batch not in read and _is_product_of_sizes(found, size)
        return None if is_own else _Reading("size")
    is_long = number != round(number, 3)  # 0.25 may be a weight, 0.03125 is the inverse of 32
    if is_multiple and ratio == 1 and not is_division and is_long:
        return _Reading("size")
    return _Reading("count", EVEN) if divides_whole else None


def _read(call: Call, found: Reduced, number: float) -> _Reading:
    """What a number means, as far as this call shows."""
    is_division, sizes = call.facts.is_division, (call.batch, found.entries)
    divisor = number if is_division else 1 / number
    is_size = number in sizes or (call.counted.holds_divisors and _is_product_of_sizes(found, number / call.batch))
    is_given = divisor in call.counted.given_integers
    is_item_count = call.counted.is_sum and (is_given or (call.counted.holds_divisors and len(call.tensors) == 1))
    if is_division and found.kind == "sum" and is_size and not is_item_count:
        return _Reading("size")
    if found.kind == "sum" and divisor != 1:
        total = _find_total(call, found, divisor)
        if total:
            is_short = not is_division and number == round(number, 1)  # 0.1 may be a weight, or the inverse of 10
            return _Reading("unclear") if is_short else _Reading("count", total[0])
    statistics = [n for n, of in call.counted.totals.items() if not (float(n).is_integer() or of)]
    if not is_given and (_is_close_to_any(number, statistics) or _is_close_to_any(divisor, statistics)):
        return _Reading("statistic")
    if is_given and is_division and found.kind == "sum":
        return _Reading("count", Divisor("items", divisor))
    if _may_count(call, found, number) and (divisor == 1 or not _is_product_of_sizes(found, divisor)):
        return _Reading("count", Divisor("items", divisor), is_assumed=True)
    return _Reading("unclear" if _may_be_size(call, found, number) else "factor")


def _is_product_of_sizes(found: Reduced, number: float) -> bool:
    """Whether a number is a product of sizes of what was added up: of `(B, T, C)`, the number of tokens of a sample."""
    products = {1}
    for size in found.sizes:
        products |= {size * product for product in products}
    return number in products


def _find_total(call: Call, found: Reduced, divisor: float) -> list[Divisor | None]:
    """The number of all samples that a divisor equals: nothing, or a divisor or None in a list."""
    for total, known in call.counted.totals.items():
        if math.isclose(divisor, total, rel_tol=1e-6):
            return [known]
    for rows in found.uneven:
        if divisor == sum(rows):
            return [make_sum_of_counts("rows", rows)]
    if call.facts.is_division and call.counted.holds_divisors and float(divisor).is_integer():
        for known in found.divisors:  # the targets of the sum that are not ignored
            counts = known.count_by_sample(call.batch)
            if counts is not None and float(counts.sum()) == divisor:
                return [known]
    return []


def _may_count(call: Call, found: Reduced, number: float) -> bool:
    """Whether a call divides a sum by a number that may count something: one that is no part of the model."""
    if not (call.facts.is_division and found.kind == "sum" and call.counted.holds_divisors):
        return False
    numbers = [tensor for tensor, where in call.pairs if where is None]
    return not (any(map(call.counted.is_held, numbers)) if numbers else is_written_out(number, find_calling_frame()))


def _may_be_size(call: Call, found: Reduced, number: float) -> bool:
    """Whether a number may be the batch size, for all that is known, or a multiple of it if the reduction is given.

    A size is an integer, so a float as a factor (`0.1 * kl.sum()`) may be one only for a sum, as its inverse. Without
    a given reduction, a mean times a number is a mean (`* T**2`), and a multiple of the batch size by which a sum is
    divided is a factor (`/ num_items`), as a number is that is no multiple.
    """
    is_division, sizes = call.facts.is_division, (call.batch, found.entries)
    if found.kind == "mean":
        return call.counted.is_open and number in sizes and isinstance(number, int) and not is_division
    if not call.counted.may_know_size(call.batch, found.entries):
        return False
    divisor = number if is_division else 1 / number
    if isinstance(number, float) and not is_division:
        return _is_close_to_any(divisor, sizes)
    ratio = divisor / call.batch
    return call.counted.is_open and math.isfinite(ratio) and ratio > 0.5 and abs(ratio - round(ratio)) < 1e-6 * ratio


def _is_close_to_any(number: float, totals: Iterable[float]) -> bool:
    return any(math.isclose(number, total, rel_tol=1e-6) for total in totals)


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


# ---- the readings of earlier steps ----


def _compare_with_earlier(call: Call, found: Reduced, number: float) -> _Reading:
    """The reading of a number, or that of its place in an earlier step, unless this step shows that it was wrong."""
    known, is_sum = _find_size(call, found, number), found.kind == "sum"
    reading = known or _read(call, found, number)
    if reading.meaning == "statistic" or (is_sum and not call.facts.is_division):
        return reading
    sites, site = call.counted.sites, _find_site(call)
    before, may_be_own = sites.get(site), is_sum and _is_product_of_sizes(found, number)
    if before is not None and (known is None or (before.is_factor and may_be_own)):
        reading = _decide(call, before, number, reading, may_be_own or not is_sum)
        may_be_own &= before.may_be_own
    if reading.meaning != "unclear":
        if len(sites) >= _MAX_SITES:
            sites.pop(next(iter(sites)))
        sites[site] = Scale(reading.meaning == "factor", number, call.batch, may_be_own)
    return reading


def _decide(call: Call, before: Scale, number: float, reading: _Reading, may_be_factor: bool) -> _Reading:
    is_factor = reading.meaning == "factor"
    if before.is_factor == is_factor:
        return reading
    if before.is_factor and may_be_factor:
        return _Reading("factor")
    if is_factor and not before.may_be_own:  # it was no size of each sample before, and is one by coincidence
        return _Reading("count", Divisor("items", number), is_assumed=True)
    taken, rows = ("a size of each sample", call.batch) if before.is_factor else ("the batch size", before.batch)
    warnings.warn(
        f"A sum over the samples is divided by {number:g} for a batch of {call.batch} samples, and by "
        f"{before.number:g} for {before.batch} samples in an earlier step. There it was taken for {taken}, so that "
        f"rows differ by a factor of {rows}. Pass loss_reduction='sum' or 'mean' to record().",
        stacklevel=2,
    )
    return reading


def _find_site(call: Call) -> tuple[object, ...]:
    """The place in the user's code that calls a function."""
    frame = find_calling_frame()
    return call.func, frame.f_code, frame.f_lasti
