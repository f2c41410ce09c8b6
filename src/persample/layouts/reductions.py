"""Reductions over the samples: which functions return a sum over the samples, and which divisors depend on the batch.

A loss is a sum over the samples of one term for each. A mean is one too, if its divisor is the same for each sample.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample._internal import tracing
from persample.errors import get_op_name
from persample.layouts.call import Call
from persample.layouts.functions import MOVES, T
from persample.layouts.layout import Layout, Lost, Reduced, make_sample_ids

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

# Of a sum over the samples, these return such a sum again, if all other arguments are constants or other sums.
LINEAR: set[Any] = {
    torch.add, torch.sub, torch.mul, torch.div, torch.neg, T.add, T.sub, T.mul, T.div, T.neg, T.add_, T.sub_, T.mul_,
    T.div_, T.__add__, T.__radd__, T.__iadd__, T.__sub__, T.__rsub__, T.__isub__, T.__mul__, T.__rmul__, T.__imul__,
    T.__truediv__, T.__itruediv__, T.__neg__, torch.sum, T.sum, torch.mean, T.mean, torch.stack, T.to, T.float,
    T.double, *MOVES,
}  # fmt: skip

# Divide: not linear in the second argument.
DIVISIONS: set[Any] = {torch.div, T.div, T.div_, T.__truediv__, T.__itruediv__}

# Linear in one argument at a time: not linear in two sums over the samples.
BILINEAR: set[Any] = {torch.mul, T.mul, T.mul_, T.__mul__, T.__rmul__, T.__imul__, *DIVISIONS}

# Linear in all arguments at once.
SUMS: set[Any] = LINEAR - BILINEAR - MOVES


def make_reduced(call: Call) -> Reduced:
    """The layout of a result that is a sum over the samples."""
    return Reduced(f"{get_op_name(call.func)} adds up the samples")


def find_layout_after_reduction(call: Call) -> Reduced | Lost:
    """The layout of the results of a call with a sum over the samples among its arguments."""
    sums = [where for where in call.where if isinstance(where, Reduced)]
    has_samples = any(isinstance(where, Layout) and t.dim() for t, where in zip(call.tensors, call.where, strict=True))
    divides_by_sum = call.func in DIVISIONS and not isinstance(call.where[0], Reduced)
    multiplies_sums = call.func in BILINEAR and len(sums) > 1
    if has_samples or call.func not in LINEAR or multiplies_sums or divides_by_sum:
        return Lost(f"{sums[0].cause} (in {sums[0].place}), and {get_op_name(call.func)} is not linear in that sum")
    return sums[0]


# ---- divisors that depend on the batch ----

_ADVICE = "so its divisor depends on the batch (use reduction='sum', or take the mean of each sample first)"

# Losses whose mean is taken over the targets that are not `ignore_index`.
_MEANS_OVER_VALID_TARGETS = {F.cross_entropy, F.nll_loss}

# Functions of ADDITIVE, by name, that do not divide by a number of rows.
_PLAIN_SUMS = {"sum", "nansum", "dot", "vdot", "inner", "einsum", "matmul", "__matmul__"}


def is_mean_over_valid_targets(call: Call) -> bool:
    """Whether the divisor of a loss is the number of targets that are not ignored."""
    return call.func in _MEANS_OVER_VALID_TARGETS and call.kwargs.get("reduction", "mean") == "mean"


def normalise_divisor(call: Call) -> Call | Lost:
    """Replace a mean over valid targets by a sum, if some targets are ignored.

    Returns the call itself if no target is ignored, and `Lost` if the samples have different numbers of valid targets.
    """
    found = _find_valid_targets(call)
    if found is None:
        return call
    is_valid, owner = found
    counts = owner[is_valid & (owner >= 0)].bincount(minlength=call.batch)
    if bool((counts != counts[0]).any()):
        return Lost(
            f"{get_op_name(call.func)} is a mean over {counts.tolist()} targets of the samples, without the ignored "
            f"ones, {_ADVICE}"
        )
    return call if bool(is_valid.all()) else replace(call, kwargs={**call.kwargs, "reduction": "sum"})


def require_equal_divisors(call: Call, trace: tracing.Trace) -> None:
    """Have each run of a compiled step check that the samples have equal numbers of valid targets."""
    found = _find_valid_targets(call)
    if found is not None:
        is_valid, owner = found
        # Id -1 counts in an additional last row, which is dropped.
        counts = torch.zeros(call.batch + 1, dtype=torch.int64, device=is_valid.device).index_add(
            0, (owner % (call.batch + 1)).flatten().long(), is_valid.flatten().long()
        )[:-1]
        trace.require(
            (counts == counts[0]).all(),
            f"{get_op_name(call.func)} is a mean over different numbers of targets of the samples, without the ignored "
            f"ones, {_ADVICE}.",
        )


def _find_valid_targets(call: Call) -> tuple[Tensor, Tensor] | None:
    """For a mean over valid targets: which targets are not ignored, and the sample of each.

    None if the divisor cannot depend on the batch, or if the targets are probabilities, of which none is ignored.
    """
    where = call.where[0]
    if len(call.args) > 2 or not isinstance(where, Layout):
        return None
    if len(call.find_samples()) == 1:
        return None
    logits, target = call.tensors[:2]
    if target.is_floating_point() or target.dim() != logits.dim() - 1 or where.dim == 1:
        return None
    is_valid = target != call.kwargs.get("ignore_index", -100)
    return is_valid, make_sample_ids(target, replace(where, dim=max(0, where.dim - 1)), call.batch)


def find_unequal_divisors(call: Call) -> Lost | None:
    """`Lost` if a call is a mean over rows of which the samples have different numbers."""
    name = get_op_name(call.func)
    if call.func not in ADDITIVE or call.kwargs.get("reduction", "mean") != "mean" or name in _PLAIN_SUMS:
        return None
    if len(call.find_samples()) == 1:
        return None
    for tensor, where in zip(call.tensors, call.where, strict=True):
        if isinstance(where, Layout) and where.ids is not None and tensor.dim():
            counts = [where.ids.count(n) for n in range(call.batch)]
            is_averaged = name != "mean" or _is_averaged(call, where.dim, tensor.dim())
            if len(set(counts)) > 1 and is_averaged:
                return Lost(f"{name} is a mean over {counts} rows of the samples, {_ADVICE}")
    return None


def _is_averaged(call: Call, dim: int, dims: int) -> bool:
    """Whether a call of `mean`, for a tensor with `dims` dimensions, averages over this dimension."""
    given = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", call.kwargs.get("axis"))
    averaged = range(dims) if given in (None, (), []) else (given,) if isinstance(given, int) else given
    return any(d % dims == dim for d in averaged)
