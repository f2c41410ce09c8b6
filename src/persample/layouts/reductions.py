"""Reductions over the samples: which functions return a sum over the samples, and which divisors depend on the batch.

A loss is a sum over the samples of one term for each. A mean is one too, if its divisor is the same for each sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample._internal import tracing
from persample.errors import get_op_name
from persample.layouts.call import Call
from persample.layouts.functions import MOVES, T, find_functions
from persample.layouts.layout import Layout, Lost, Reduced, Reduction, Where, make_sample_ids
from persample.layouts.motion import Motion, make_uniform_motion

# Can reduce over the batch to a sum over the samples (or a mean), in which each sample has its own term.
ADDITIVE: set[Any] = {
    torch.sum, T.sum, torch.mean, T.mean, torch.nansum, T.nansum,
    F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits, F.kl_div, F.poisson_nll_loss, F.gaussian_nll_loss, F.hinge_embedding_loss,
    F.margin_ranking_loss, F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss,
    F.soft_margin_loss, F.cosine_embedding_loss, F.triplet_margin_loss, F.triplet_margin_with_distance_loss,
    F.ctc_loss, torch.dot, T.dot, torch.vdot, T.vdot, torch.inner, T.inner, torch.einsum, torch.matmul,
    T.matmul, T.__matmul__,
}  # fmt: skip

# Divide by their second argument: not linear in it.
DIVISIONS: set[Any] = {*find_functions("div")} - {T.__rtruediv__, T.__rdiv__}

# Linear in one argument at a time: not linear in two sums over the samples.
BILINEAR: set[Any] = {*find_functions("mul"), *DIVISIONS}

# Of a sum over the samples, these return such a sum again, if all other arguments are constants or other sums.
LINEAR: set[Any] = {
    *find_functions("add", "sub", "neg", "pos"), *BILINEAR, torch.rsub, torch.sum, T.sum, torch.mean, T.mean,
    torch.stack, T.to, T.float, T.double, *MOVES,
}  # fmt: skip

# Linear in all arguments at once.
SUMS: set[Any] = LINEAR - BILINEAR - MOVES

# Add up the entries of a tensor.
_SUMS_OF_ENTRIES: set[Any] = {torch.sum, T.sum}
_MEANS_OF_ENTRIES: set[Any] = {torch.mean, T.mean}

# Losses whose mean is taken over the targets that are not `ignore_index`.
_MEANS_OVER_VALID_TARGETS = {F.cross_entropy, F.nll_loss}

# Losses with one entry for each entry of their arguments, which are broadcast.
_POINTWISE_LOSSES = {
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
    F.kl_div, F.poisson_nll_loss, F.gaussian_nll_loss, F.hinge_embedding_loss, F.margin_ranking_loss,
    F.soft_margin_loss,
}  # fmt: skip

# Functions of ADDITIVE, by name, that do not divide by a number of rows.
_PLAIN_SUMS = {"sum", "nansum", "dot", "vdot", "inner", "einsum", "matmul", "__matmul__"}


def make_reduced(call: Call, results: Sequence[Tensor] = (), reduction: str | None = None) -> Reduced:
    """The layout of a result that is a sum over the samples, or a mean; `reduction` is the argument of a loss."""
    kind = _find_kind(call, reduction)
    verb = "averages over" if kind == "mean" else "adds up"
    entries = _count_entries(call, results) if call.tensors and _has_pattern(call.where[0]) else 0
    cause = f"{get_op_name(call.func)} {verb} the samples"
    return Reduced(cause, kind=kind, entries=entries, uneven=_find_uneven_rows(call))


def _find_uneven_rows(call: Call) -> tuple[int, ...]:
    """The numbers of rows and entries of an argument in which samples have different numbers of rows, or ()."""
    for tensor, where in zip(call.tensors, call.where, strict=True):
        ids = where.ids if isinstance(where, Layout) and tensor.dim() else None
        if ids is not None and len({ids.count(n) for n in range(call.batch)}) > 1:
            return len(ids), tensor.numel()
    return ()


def _count_entries(call: Call, results: Sequence[Tensor]) -> int:
    """The number of entries that a sum or a mean combines for each entry of its result, 0 if it is not known."""
    first = call.tensors[0]
    if (call.func in _SUMS_OF_ENTRIES or call.func in _MEANS_OF_ENTRIES) and len(results) == 1:
        return first.numel() // max(1, results[0].numel())
    if call.func in _MEANS_OVER_VALID_TARGETS:
        return first.numel() // first.shape[1] if first.dim() > 1 and first.numel() else 0
    if call.func in _POINTWISE_LOSSES:
        return torch.broadcast_shapes(*(tensor.shape for tensor in call.tensors)).numel()
    return 0


def _has_pattern(where: Where | None) -> bool:
    return isinstance(where, Layout) and where.ids is None


def _find_kind(call: Call, reduction: str | None) -> Reduction:
    """How a call that reduces over the samples combines them."""
    name = get_op_name(call.func)
    if name in _PLAIN_SUMS:
        return "sum"
    if call.func not in ADDITIVE or name == "mean":
        return "mean" if name == "mean" else "sum"
    if call.kwargs.get("size_average") is not None or call.kwargs.get("reduce") is not None:  # legacy arguments
        return "sum" if call.kwargs.get("size_average") is False else "mean"
    reduction = reduction or call.kwargs.get("reduction", "mean")
    if reduction == "batchmean":  # divides by the size of dimension 0
        dims = {where.dim for where in call.where if isinstance(where, Layout)}
        return "mean" if dims == {0} else "sum"
    return "sum" if reduction == "sum" else "mean"


# ---- functions of a sum over the samples ----


def is_scaled_sum(call: Call) -> bool:
    """Whether a call multiplies or divides a sum over the samples; what was counted in the same pass decides then."""
    return call.func in BILINEAR and any(isinstance(where, Reduced) for where in call.where)


def find_motion_after_reduction(call: Call, results: Sequence[Tensor]) -> Motion:
    """The motion of a call with a sum over the samples among its arguments."""
    sums = [where for where in call.where if isinstance(where, Reduced)]
    has_samples = any(isinstance(where, Layout) and t.dim() for t, where in zip(call.tensors, call.where, strict=True))
    divides_by_sum = call.func in DIVISIONS and not isinstance(call.where[0], Reduced)
    multiplies_sums = call.func in BILINEAR and len(sums) > 1
    if has_samples or call.func not in LINEAR or multiplies_sums or divides_by_sum:
        cause = f"{sums[0].cause} (in {sums[0].place}), and {get_op_name(call.func)} is not linear in that sum"
        return make_uniform_motion(Lost(cause), results)
    found = _combine_sums(call, sums)
    if call.func in BILINEAR:
        return _scale_sum(call, found, results)
    if get_op_name(call.func) in ("sum", "mean"):
        is_sum = call.func in _SUMS_OF_ENTRIES and results[0].numel() > 0
        found = replace(found, entries=found.entries * call.tensors[0].numel() // results[0].numel() if is_sum else 0)
    return make_uniform_motion(found, results)


def _combine_sums(call: Call, sums: Sequence[Reduced]) -> Reduced:
    """What a linear function makes of sums over the samples. The loss of a single sample counts as a sum."""
    single = [Reduced("the loss of a single sample", kind="sum") for where in call.where if isinstance(where, Layout)]
    kinds = {where.kind: where for where in reversed([*sums, *single])}
    if "mixed" in kinds:
        return kinds["mixed"]
    if len(kinds) == 1:
        has_same_entries = not single and len({where.entries for where in sums}) == 1
        uneven = tuple({size: None for where in sums for size in where.uneven})
        return replace(sums[0], entries=sums[0].entries if has_same_entries else 0, uneven=uneven)
    one, other = kinds["sum"], kinds["mean"]
    cause = f"{get_op_name(call.func)} combines a sum over the samples ({one.cause}) with a mean ({other.cause})"
    return Reduced(cause, other.place or one.place, "mixed")


def _scale_sum(call: Call, found: Reduced, results: Sequence[Tensor]) -> Motion:
    """The motion of a product with a constant, or of a quotient.

    A sum that is divided by the batch size is a mean. Other factors that a size may explain are ambiguous: a sum
    divided by a multiple of the batch size, or a mean multiplied by the number of samples or entries. A size is an
    integer, so a float as a factor (`0.1 * kl.sum()`) is ambiguous only for a sum, if it is the inverse of a size.
    """
    factor, depends_on_values = _read_factor(call, found)
    if factor is None or call.batch < 2 or found.kind == "mixed":
        return make_uniform_motion(found, results)
    sizes = (call.batch, found.entries)
    if call.func in DIVISIONS and found.kind == "sum" and factor in sizes:
        mean = replace(found, cause=f"{found.cause}, and {get_op_name(call.func)} divides by {factor:g}", kind="mean")
        return Motion(tuple(mean for _ in results), depends_on_values=depends_on_values)
    divisor = factor if call.func in DIVISIONS else 1 / factor
    name = get_op_name(call.func)
    if _is_close_to_any(divisor, (*found.uneven, *call.counted.totals)) and found.kind == "sum" and divisor != 1:
        if call.func not in DIVISIONS and _is_short(factor):  # 0.1 may be a weight, or the inverse of 10 tokens
            return make_uniform_motion(_make_ambiguous(call, found, factor, "a number of all samples"), results)
        cause = f"{found.cause}, and {name} divides by {divisor:g}, which was counted over all samples, {_ADVICE}"
        return make_uniform_motion(Lost(cause), results)
    statistics = [total for total in call.counted.totals if not float(total).is_integer()]
    if _is_close_to_any(factor, statistics) or _is_close_to_any(divisor, statistics):
        cause = f"{found.cause}, and {name} scales that by {factor:g}, which was computed from all samples"
        return make_uniform_motion(Lost(cause), results)
    if found.kind == "mean":
        is_ambiguous = factor in sizes and isinstance(factor, int) and call.func not in DIVISIONS
    elif isinstance(factor, float) and call.func not in DIVISIONS:
        is_ambiguous = any(math.isclose(divisor, size, rel_tol=1e-6) for size in sizes)
    else:
        ratio = divisor / call.batch
        is_ambiguous = math.isfinite(ratio) and ratio > 0.5 and abs(ratio - round(ratio)) < 1e-6 * ratio
    if is_ambiguous:
        found = _make_ambiguous(call, found, factor, f"the batch size {call.batch}")
    return Motion(tuple(found for _ in results), depends_on_values=depends_on_values)


def _make_ambiguous(call: Call, found: Reduced, factor: float, meaning: str) -> Reduced:
    cause = (
        f"{found.cause}, and {get_op_name(call.func)} scales that {found.kind} by {factor:g}, which may stand for "
        f"{meaning} or be a factor of its own"
    )
    return replace(found, cause=cause, kind="mixed")


def _is_close_to_any(number: float, totals: Iterable[float]) -> bool:
    return any(math.isclose(number, total, rel_tol=1e-6) for total in totals)


def _is_short(factor: float) -> bool:
    """Whether a factor has one digit, as one that was written down (0.5), and not the inverse of a count (1 / 37)."""
    return factor == round(factor, 1)


def _read_factor(call: Call, found: Reduced) -> tuple[int | float | None, bool]:
    """The number by which a sum over the samples is multiplied or divided, and whether it was read from a tensor.

    A tensor is read only as the divisor of a sum: reading waits for the device, and a factor of a mean is rarely the
    batch size.
    """
    operands = [arg for arg in (*call.args, *call.kwargs.values()) if arg is not None]
    numbers = [arg for arg in operands if isinstance(arg, (int, float)) and not isinstance(arg, bool)]
    if numbers:
        return numbers[0] or None, False
    others = [t for t, where in zip(call.tensors, call.where, strict=True) if not isinstance(where, Reduced)]
    if call.func not in DIVISIONS or found.kind != "sum" or not others or others[0].numel() != 1:
        return None, False
    trace = tracing.get_trace()
    if trace is not None and trace.is_invented(others[0]):
        return None, False
    return float(others[0].detach().real) or None, True


# ---- divisors that depend on the batch ----

_FEW_TARGETS = 64  # so few are faster to read as a list than to compare by torch

_ADVICE = "so its divisor depends on the batch (use reduction='sum', or take the mean of each sample first)"


def is_mean_over_valid_targets(call: Call) -> bool:
    """Whether the divisor of a loss is the number of targets that are not ignored."""
    return call.func in _MEANS_OVER_VALID_TARGETS and call.kwargs.get("reduction", "mean") == "mean"


def make_mean(motion: Motion) -> Motion:
    """The motion of a mean, given that of the sum."""
    changed = [
        Reduced(where.cause, where.place, "mean") if isinstance(where, Reduced) else where for where in motion.results
    ]
    return Motion(tuple(changed), motion.aligned, motion.depends_on_values)


def normalise_divisor(call: Call) -> Call | Lost:
    """Replace a mean over valid targets by a sum, if some targets are ignored. `make_mean` undoes that.

    Returns the call itself if no target is ignored, and `Lost` if the samples have different numbers of valid targets.
    """
    found = _find_valid_targets(call)
    if found is None:
        return call
    is_valid, layout = found
    if layout.ids is None and bool(is_valid.all()):  # the usual case: each sample has the same number of rows
        return call
    owner = make_sample_ids(is_valid, layout, call.batch)
    counts = owner[is_valid & (owner >= 0)].bincount(minlength=call.batch)
    if bool((counts != counts[0]).any()):
        return Lost(
            f"{get_op_name(call.func)} is a mean over {counts.tolist()} targets of the samples, without the ignored "
            f"ones, {_ADVICE}"
        )
    return call if bool(is_valid.all()) else replace(call, kwargs={**call.kwargs, "reduction": "sum"})


def has_ignored_targets(call: Call) -> bool:
    """Whether the divisor of a mean over valid targets may differ from the number of all targets."""
    is_listed = isinstance(call.where[0], Layout) and call.where[0].ids is not None
    if is_listed or tracing.get_trace() is not None:  # values of a trace are not known
        return True
    target = _find_targets(call)
    if target is None:
        return False
    ignored = call.kwargs.get("ignore_index", -100)
    if target.device.type == "cpu" and target.numel() <= _FEW_TARGETS:
        return ignored in target.flatten().tolist()
    return bool((target == ignored).any())


def require_equal_divisors(call: Call, trace: tracing.Trace) -> None:
    """Have each run of a compiled step check that the samples have equal numbers of valid targets."""
    found = _find_valid_targets(call)
    if found is not None:
        is_valid, layout = found
        owner = make_sample_ids(is_valid, layout, call.batch)
        # Id -1 counts in an additional last row, which is dropped.
        counts = torch.zeros(call.batch + 1, dtype=torch.int64, device=is_valid.device).index_add(
            0, (owner % (call.batch + 1)).flatten().long(), is_valid.flatten().long()
        )[:-1]
        trace.require(
            (counts == counts[0]).all(),
            f"{get_op_name(call.func)} is a mean over different numbers of targets of the samples, without the ignored "
            f"ones, {_ADVICE}.",
        )


def _find_valid_targets(call: Call) -> tuple[Tensor, Layout] | None:
    """For a mean over valid targets: which targets are not ignored, and where the samples lie in them.

    None if the divisor cannot depend on the batch, or if the targets are probabilities, of which none is ignored.
    """
    target, where = _find_targets(call), call.where[0]
    if target is None or not isinstance(where, Layout):
        return None
    is_valid = target != call.kwargs.get("ignore_index", -100)
    return is_valid, replace(where, dim=max(0, where.dim - 1))


def _find_targets(call: Call) -> Tensor | None:
    """The targets of a mean over valid targets; None as in `_find_valid_targets`."""
    where = call.where[0]
    if len(call.args) > 2 or not isinstance(where, Layout):
        return None
    if (call.batch == 1 or where.ids is not None) and len(call.find_samples()) == 1:
        return None
    logits, target = call.tensors[:2]
    if target.is_floating_point() or target.dim() != logits.dim() - 1 or where.dim == 1:
        return None
    return target


def find_unequal_divisors(call: Call) -> Lost | None:
    """`Lost` if a call is a mean over rows of which the samples have different numbers."""
    name = get_op_name(call.func)
    reduction = call.kwargs.get("reduction", "mean")
    if call.func not in ADDITIVE or reduction not in ("mean", "batchmean") or name in _PLAIN_SUMS:
        return None
    if len(call.find_samples()) == 1:
        return None
    for tensor, where in zip(call.tensors, call.where, strict=True):
        if isinstance(where, Layout) and where.ids is not None and tensor.dim():
            if (name == "mean" and not _is_averaged(call, where.dim, tensor.dim())) or (
                reduction == "batchmean" and where.dim != 0
            ):
                continue
            counts = [where.ids.count(n) for n in range(call.batch)]
            if len(set(counts)) > 1:
                return Lost(f"{name} is a mean over {counts} rows of the samples, {_ADVICE}")
            if -1 in where.ids:
                constant = where.ids.count(-1)
                return Lost(
                    f"{name} is a mean over the samples and {constant} rows that belong to no sample, {_ADVICE}"
                )
    return None


def _is_averaged(call: Call, dim: int, dims: int) -> bool:
    """Whether a call of `mean`, for a tensor with `dims` dimensions, averages over this dimension."""
    given = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", call.kwargs.get("axis"))
    averaged = range(dims) if given in (None, (), []) else (given,) if isinstance(given, int) else given
    return any(d % dims == dim for d in averaged)
