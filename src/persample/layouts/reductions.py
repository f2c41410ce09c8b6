"""Reductions over the samples: which functions return a sum over the samples, and which divisors depend on the batch.

A loss is a sum over the samples of one term for each. A mean is one too, if its divisor is the same for each sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from persample.errors import get_op_name
from persample.layouts.call import Call
from persample.layouts.divisors import COMPUTED, EVEN, Divisor
from persample.layouts.layout import Divided, Layout, Lost, Reduced, Reduction, Where
from persample.layouts.motion import Motion, make_uniform_motion
from persample.layouts.scales import scale_sum


def make_reduced(call: Call, results: Sequence[Tensor] = (), reduction: str | None = None) -> Reduced:
    """The layout of a result that is a sum over the samples, or a mean; `reduction` is the argument of a loss."""
    kind = _find_kind(call, reduction)
    verb = "averages over" if kind == "mean" else "adds up"
    cause = f"{get_op_name(call.func)} {verb} the samples"
    is_sum = call.facts.operator in ("sum", "mean", "count_nonzero")
    counts = is_sum and not any(tensor.requires_grad for tensor in call.tensors)
    where = call.where[0] if call.tensors else None
    entries, sizes = 0, ()
    if isinstance(where, Layout) and where.ids is None:
        entries, shape = _count_entries(call, results), call.tensors[0].shape
        rows = shape[where.dim] // call.batch if shape and call.batch else 1
        sizes = tuple(size for size in (*shape[: where.dim], rows, *shape[where.dim + 1 :]) if size > 1)
    uneven = find_uneven_rows(call.pairs, call.batch)
    return Reduced(cause, kind=kind, entries=entries, sizes=sizes, uneven=uneven, counts=counts)


def make_root(call: Call, results: Sequence[Tensor]) -> Reduced:
    """The layout of a Euclidean norm of all samples: the square root of a sum over them."""
    cause = f"{get_op_name(call.func)} is the square root of a sum over the samples, and only its square is one"
    return replace(make_reduced(call, results), cause=cause, kind="root")


def _is_square(call: Call) -> bool:
    """Whether a call squares its only tensor."""
    is_power = call.facts.operator == "pow" and call.numbers == [2] and isinstance(call.args[0], Tensor)
    return len(call.tensors) == 1 and (is_power or call.facts.operator == "square")


def find_uneven_rows(pairs: Sequence[tuple[Tensor, Where | None]], batch: int) -> tuple[tuple[int, ...], ...]:
    """The samples' numbers of rows and entries in a tensor in which they have different numbers of rows, or ()."""
    for tensor, where in pairs:
        ids = where.ids if isinstance(where, Layout) and tensor.dim() else None
        if ids and len(set(rows := tuple(map(Counter(ids).__getitem__, range(batch))))) > 1:
            return rows, tuple(number * (tensor.numel() // len(ids)) for number in rows)
    return ()


def _combine_uneven_rows(sums: Sequence[Reduced]) -> tuple[tuple[int, ...], ...]:
    """The samples' numbers of rows in a sum of sums. Those of different samples are added up.

    Sums that were made before the batch grew have fewer numbers.
    """
    found: tuple[tuple[int, ...], ...] = ()
    for each in sums:
        is_disjoint = not any(a and b for rows in found for own in each.uneven for a, b in zip(rows, own, strict=False))
        if is_disjoint and len(found) == len(each.uneven):
            found = tuple(
                tuple(map(sum, zip_longest(a, b, fillvalue=0))) for a, b in zip(found, each.uneven, strict=True)
            )
        else:
            found = tuple(dict.fromkeys((*found, *each.uneven)))
    return found


def _count_entries(call: Call, results: Sequence[Tensor]) -> int:
    """The number of entries that a sum or a mean combines for each entry of its result, 0 if it is not known."""
    first = call.tensors[0]
    if call.facts.operator in ("sum", "mean") and len(results) == 1:
        return first.numel() // max(1, results[0].numel())
    if call.facts.averages_targets:
        return first.numel() // first.shape[1] if first.dim() > 1 and first.numel() else 0
    if call.facts.is_pointwise_loss:
        return torch.broadcast_shapes(*(tensor.shape for tensor in call.tensors)).numel()
    return 0


def _find_kind(call: Call, reduction: str | None) -> Reduction:
    """How a call that reduces over the samples combines them."""
    if call.facts.operator == "mean":
        return "mean"
    if call.facts.is_plain_sum or not call.facts.is_additive:
        return "sum"
    if call.kwargs.get("size_average") is not None or call.kwargs.get("reduce") is not None:  # legacy arguments
        return "sum" if call.kwargs.get("size_average") is False else "mean"
    reduction = reduction or call.kwargs.get("reduction", "mean")
    if reduction == "batchmean":  # divides by the size of dimension 0
        dims = {where.dim for where in call.where if isinstance(where, Layout)}
        return "mean" if dims == {0} else "sum"
    return "sum" if reduction == "sum" else "mean"


def adds_up_one_sample(call: Call, results: Sequence[Tensor]) -> bool:
    """Whether a call, all of whose samples are one, adds up the batch, and would do so with other samples, too.

    A mask may pick the rows of a single sample, and a batch may have one. In a batch of one, a sum over a given
    dimension may be over one of the sample's own, after `squeeze`.
    """
    if not call.facts.is_additive or len(results) != 1 or results[0].dim():
        return False
    if call.batch > 1:
        return call.has_loose_rows()
    is_loss = not call.facts.is_plain_sum and call.facts.operator != "mean"
    has_dim = len(call.args) > 1 or not call.kwargs.keys().isdisjoint({"dim", "axis"})
    return is_loss or not has_dim or all(tensor.shape == (1,) for tensor in call.tensors)


# ---- functions of a sum over the samples ----


def find_motion_after_reduction(call: Call, results: Sequence[Tensor]) -> Motion:
    """The motion of a call with a sum over the samples among its arguments."""
    sums = [where for where in call.where if isinstance(where, Reduced)]
    has_samples = any(isinstance(where, Layout) and t.dim() for t, where in call.pairs)
    if any(where.kind == "root" for where in sums):
        return make_uniform_motion(replace(sums[0], kind="sum") if _is_square(call) else Lost(sums[0].cause), results)
    if call.counted.holds_divisors and not has_samples and any(where.counts for where in sums):
        held = _combine_counts(call, sums)
        if held is not None:
            return make_uniform_motion(held, results)
    if has_samples and (divided := _divide_samples(call, sums)) is not None:
        return make_uniform_motion(divided, results)
    divides_by_sum = call.facts.is_division and not isinstance(call.where[0], Reduced)
    multiplies_sums = call.facts.is_bilinear and len(sums) > 1
    if has_samples or not call.facts.keeps_sums or multiplies_sums or divides_by_sum:
        cause = f"{sums[0].cause} (in {sums[0].place}), and {get_op_name(call.func)} is not linear in that sum"
        return make_uniform_motion(Lost(cause), results)
    found = _combine_sums(call, sums)
    if call.facts.is_bilinear:
        scaled, depends_on_values = scale_sum(call, found)
        return Motion((scaled,) * len(results), depends_on_values=depends_on_values)
    if call.facts.operator in ("sum", "mean"):
        is_sum = call.facts.operator == "sum" and results[0].numel() > 0
        found = replace(found, entries=found.entries * call.tensors[0].numel() // results[0].numel() if is_sum else 0)
    return make_uniform_motion(found, results)


# Of a number that was counted, these return that number for each sample too, except where it is small.
_BOUNDS = {"clamp", "clamp_min", "maximum", "max"}


def _combine_counts(call: Call, sums: Sequence[Reduced]) -> Reduced | None:
    """The layout of a function of numbers that were counted, or of a loss and such a number; None if it is neither."""
    others = [where for where in sums if not where.counts]
    counts = [where for where in sums if where.counts]
    if not others and not any(isinstance(where, Layout) for where in call.where):
        if call.facts.is_linear or call.facts.moves_entries:
            combined = _combine_sums(call, sums)
            if not _adds_number(call):
                return combined
            return replace(combined, divisors=(_find_complement(call, combined) or COMPUTED,))
        is_divided = call.facts.is_division and call.where[0] is None
        is_inverse = is_divided or call.facts.operator in ("rtruediv", "reciprocal")
        is_same = is_inverse or call.facts.operator in _BOUNDS or call.facts.is_bilinear
        divisors = counts[0].divisors if is_same and len(counts) == 1 else (COMPUTED,)
        return replace(counts[0], is_inverse=counts[0].is_inverse != is_inverse, divisors=divisors)
    if len(sums) != 2 or len(others) != 1 or not call.facts.is_bilinear:
        return None
    (found,), (count,) = others, counts
    is_division = call.facts.is_division
    if is_division and call.where[0] is count:
        return None
    divides = is_division != count.is_inverse
    name, verb = get_op_name(call.func), "divides" if divides else "scales"
    cause = f"{found.cause}, and {name} {verb} that by a number of all samples ({count.cause})"
    if found.kind == "mean":
        divisors = count.divisors if count.kind == "mean" and divides else (*found.divisors, COMPUTED)
        return replace(found, cause=cause, divisors=divisors)
    if divides and count.kind == "sum":
        return replace(found, cause=cause, kind="mean", divisors=count.divisors)
    return replace(found, cause=cause)


def _divide_samples(call: Call, sums: Sequence[Reduced]) -> Divided | None:
    """The layout of samples that are divided by one number of all samples, or multiplied by its inverse."""
    (count,) = sums if len(sums) == 1 else (None,)
    where = call.where[0] if call.facts.is_division else next(filter(lambda w: isinstance(w, Layout), call.where))
    numbers = [tensor for tensor, own in call.pairs if own is count]
    if count is None or not (call.counted.holds_divisors and count.counts and isinstance(where, Layout)):
        return None
    if not call.facts.is_bilinear or call.facts.is_division == count.is_inverse or numbers[0].dim():
        return None
    cause = f"{count.cause} (in {count.place}), and {get_op_name(call.func)} is not linear in that sum"
    return Divided(cause, layout=where, divisors=count.divisors)


def enter_divided(call: Call) -> Call | None:
    """The same call as if its samples had not been divided; None if the number would not be a divisor of the loss."""
    divided = [where for where in call.where if isinstance(where, Divided)]
    others = [where for where in call.where if where is not None and not isinstance(where, Divided)]
    is_product = call.facts.is_bilinear or call.facts.is_plain_sum
    is_first = not call.facts.is_division or isinstance(call.where[0], Divided)
    if len(divided) == 1 and is_first and (is_product or (call.facts.keeps_sums and not others)):
        return replace(call, where=tuple(w.layout if isinstance(w, Divided) else w for w in call.where))
    return None


def leave_divided(call: Call, motion: Motion) -> Motion:
    """The motion of a call, given that of `enter_divided`."""
    (divided,) = (where for where in call.where if isinstance(where, Divided))

    def divide(where: Where | None) -> Where | None:
        if isinstance(where, Layout):
            return replace(divided, layout=where)
        if isinstance(where, Reduced):
            return replace(where, kind="mean", counts=False, divisors=divided.divisors)
        return where

    return Motion(tuple(map(divide, motion.results)), motion.aligned, depends_on_values=True)


def _adds_number(call: Call) -> bool:
    """Whether a call adds more than an epsilon to what was counted, or subtracts what was counted from a number."""
    has_constants = any(where is None for where in call.where)
    is_sum = call.facts.is_linear and not call.facts.is_additive
    return is_sum and (has_constants or any(abs(number) > 1e-3 for number in call.numbers))


def _find_complement(call: Call, count: Reduced) -> Divisor | None:
    """The number of entries that a mask leaves out: the number of all entries, less those that were counted."""
    if call.facts.operator != "rsub" or call.kwargs or not call.counted.may_know_size(count.entries):
        return None
    counted = count.divisors[0].count if len(count.divisors) == 1 else None
    if counted is None or call.args[1] != count.entries or count.kind != "sum" or count.is_inverse:
        return None

    def count_rest(batch: int) -> Tensor | None:
        counts = counted(batch)
        return None if counts is None else count.entries / batch - counts

    return Divisor(count.divisors[0].what, count=count_rest)


def _combine_sums(call: Call, sums: Sequence[Reduced]) -> Reduced:
    """What a linear function makes of sums over the samples. The loss of a single sample counts as a sum.

    A part that may be a sum or a mean is what the other parts are.
    """
    single = [Reduced("the loss of a single sample", kind="sum") for where in call.where if isinstance(where, Layout)]
    sums = _correct_assumed(sums, bool(single))
    kinds = {where.kind: where for where in reversed([*sums, *single])}
    unclear = kinds.pop("unclear", None)
    if "mixed" in kinds:
        return kinds["mixed"]
    if unclear is not None and (not kinds or not call.counted.holds_divisors):
        return unclear
    if len(kinds) == 1:
        (kind,) = kinds
        has_same_entries = not single and len({where.entries for where in sums}) == 1
        entries = sums[0].entries if has_same_entries else 0
        combined = {"uneven": _combine_uneven_rows(sums), **_combine_divisors(sums, bool(single))}
        combined["is_assumed"] = not single and all(where.is_assumed for where in sums)
        return replace(sums[0], kind=kind, entries=entries, **combined)
    one, other = kinds["sum"], kinds["mean"]
    cause = f"{get_op_name(call.func)} combines a sum over the samples ({one.cause}) with a mean ({other.cause})"
    return Reduced(cause, other.place or one.place, "mixed")


def _correct_assumed(sums: Sequence[Reduced], has_single: bool) -> Sequence[Reduced]:
    """The parts of a loss, each of the kind that the others have if its own kind was only assumed."""
    known: set[Reduction] = {where.kind for where in sums if not where.is_assumed} | ({"sum"} if has_single else set())
    kind: Reduction = next(iter(known)) if len(known) == 1 else "sum"
    if len({where.kind for where in sums}) == 1 and not has_single:
        return sums
    return [
        replace(w, kind=kind, divisors=(), is_assumed=False) if w.is_assumed and w.kind != kind else w for w in sums
    ]


def _combine_divisors(sums: Sequence[Reduced], has_single: bool) -> dict[str, Any]:
    """What a sum of sums over the samples was divided by."""
    counts = all(where.counts for where in sums) and not has_single
    if len(sums) == 1 and not has_single:
        return {}
    if not any(where.is_share for where in sums):
        return {"counts": counts, "divisors": (COMPUTED,) if counts else ()}
    divisors = (divisor for where in sums for divisor in (where.divisors if where.is_share else (EVEN,)))
    return {"counts": counts, "divisors": tuple(dict.fromkeys(divisors))}
