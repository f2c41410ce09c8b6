"""What a mean over the samples divides by: their rows, the targets that are not ignored, weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from persample._internal import tracing
from persample.errors import get_op_name
from persample.layouts.algebra.arguments import name_arguments
from persample.layouts.call import Call
from persample.layouts.divisors import Divisor, make_divisor, make_number_of_rows, make_sum_of_entries
from persample.layouts.ids import add_up_samples
from persample.layouts.layout import Layout, Lost, Reduced, Scattered, Where
from persample.layouts.reductions import find_uneven_rows
from persample.layouts.scales import ADVICE

_VALID_TARGETS = "targets of the samples, without the ignored ones"
_FEW_TARGETS = 64  # so few are faster to read as a list than to compare by torch


def is_mean_over_valid_targets(call: Call) -> bool:
    """Whether the divisor of a loss is the number of targets that are not ignored."""
    return call.facts.averages_targets and call.kwargs.get("reduction", "mean") == "mean"


def _has_ignored_targets(call: Call) -> bool:
    """Whether the divisor of a mean over valid targets may differ from the number of all targets."""
    is_listed = isinstance(call.where[0], Layout) and call.where[0].ids is not None
    if is_listed:
        return True
    found = _find_targets(call)
    if found is None or found[0].is_meta:  # without values
        return False
    target, ignored = found[0], call.kwargs.get("ignore_index", -100)
    if target.device.type == "cpu" and target.numel() <= _FEW_TARGETS:
        return ignored in target.flatten().tolist()
    return bool((target == ignored).any())


def require_equal_divisors(call: Call, trace: tracing.Trace) -> None:
    """Have each run of a compiled step check that the samples have equal numbers of valid targets."""
    counts = _count_valid_targets(call)
    if counts is not None:
        name = get_op_name(call.func)
        message = f"{name} is a mean over different numbers of {_VALID_TARGETS}, {ADVICE}."
        trace.require((counts == counts[0]).all(), message)


def _count_valid_targets(call: Call) -> Tensor | None:
    """How many targets of each sample are not ignored; None if the divisor cannot depend on the batch."""
    found = _find_targets(call)
    if found is None:
        return None
    target, where = found
    return add_up_samples((target != call.kwargs.get("ignore_index", -100)).long(), where, call.batch)


def _find_targets(call: Call) -> tuple[Tensor, Layout] | None:
    """The targets of a mean over valid targets, and where the samples lie in them.

    None if the divisor cannot depend on the batch, or if the targets are probabilities, of which none is ignored.
    """
    where = call.where[0]
    if len(call.args) > 3 or not isinstance(where, Layout) or where.dim == 1:
        return None
    if (call.batch == 1 or where.ids is not None) and len(call.find_samples()) == 1:
        return None
    logits, target = call.tensors[:2]
    if target.is_floating_point() or target.dim() != logits.dim() - 1:
        return None
    return target, replace(where, dim=max(0, where.dim - 1))  # they lack the dimension of the classes


def add_divisors(call: Call, reduced: Reduced) -> Reduced:
    """What a call makes by a reduction, with the numbers that it divides by, or that it counts."""
    divisor = _find_divisor(call, reduced) if call.counted.holds_divisors else None
    if divisor is None:
        return reduced
    return replace(reduced, divisors=(divisor,))


def _find_divisor(call: Call, reduced: Reduced) -> Divisor | None:
    """The number that a reduction counts or divides by; None if all samples have the same part of it."""
    first, where = call.tensors[0], call.where[0]
    if call.facts.averages_targets:
        return _count_targets(call)
    if reduced.counts and isinstance(where, (Layout, Scattered)):
        return make_sum_of_entries(first != 0 if call.facts.operator == "count_nonzero" else first, where)
    is_weighted = reduced.kind == "mean" and call.facts.divides_by_weights
    if is_weighted and (weight := name_arguments(call).get("weight")) is not None:
        return _count_weights(call, weight)
    if reduced.kind == "mean" and call.func is not F.ctc_loss and (reduced.uneven or isinstance(where, Scattered)):
        ids = [w for w in call.where if isinstance(w, Scattered) or (isinstance(w, Layout) and w.ids is not None)]
        return make_number_of_rows(ids[0], first.device) if ids else None  # else of a sum that is divided
    return None


def _count_targets(call: Call) -> Divisor | None:
    found = _find_targets(call)
    if found is None:
        return None
    target, where = found[0].detach(), found[1]
    weight, ignored = name_arguments(call)["weight"], call.kwargs.get("ignore_index", -100)
    if weight is None:
        return make_divisor("targets", lambda: target != ignored, where, [target])
    weight = weight.detach()

    def weigh_targets() -> Tensor:
        is_valid = target != ignored
        weights: Tensor = weight[target.where(is_valid, 0)] * is_valid
        return weights

    return make_divisor("weighted targets", weigh_targets, where, [target, weight])


def _count_weights(call: Call, weight: Tensor) -> Divisor | None:
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in call.tensors))
    (position,) = (i for i, tensor in enumerate(call.tensors) if tensor is weight)
    where, kept = call.where[position] or call.where[0], weight.detach()
    rank = call.tensors[position if call.where[position] else 0].dim()
    if not isinstance(where, Layout):
        return None
    where = replace(where, dim=where.dim + len(shape) - rank)
    return make_divisor("(sum of weights)", lambda: kept.expand(shape), where, [kept])


def find_refused_divisor(call: Call, reduced: Reduced, aligned: Sequence[tuple[int, Layout]]) -> Lost | None:
    """`Lost` if a mean divides by rows of no sample, too, or by a number of all samples that may not be held constant.

    `aligned` are the constants of the call that have a row for each sample.
    """
    if reduced.kind != "mean":
        return None
    averaged = call.where[:1] if call.func is F.ctc_loss else call.where  # its mean is over rows of the first argument
    constant = _count_rows_of_no_sample(averaged)
    if (call.counted.holds_divisors and not constant) or len(call.find_samples()) == 1:
        return None
    name = get_op_name(call.func)
    if constant:
        return Lost(f"{name} is a mean over the samples and {constant} rows that belong to no sample, {ADVICE}")
    if _has_weights_of_samples(call, aligned):
        return Lost(f"{name} divides by the sum of weights that differ between samples, {ADVICE}")
    if uneven := find_uneven_rows(call.pairs[: len(averaged)], call.batch):
        return Lost(f"{name} is a mean over {[*uneven[0]]} rows of the samples, {ADVICE}")
    where, counts, what = call.where[0], None, _VALID_TARGETS
    if is_mean_over_valid_targets(call) and tracing.get_trace() is None and _has_ignored_targets(call):
        counts = _count_valid_targets(call)
    elif isinstance(where, Scattered):
        counts, what = add_up_samples(torch.ones_like(where.ids), where, call.batch), "entries of the samples"
    if counts is None or counts.is_meta or bool((counts == counts[0]).all()):
        return None
    return Lost(f"{name} is a mean over {counts.tolist()} {what}, {ADVICE}")


def _count_rows_of_no_sample(where: Sequence[Where | None]) -> int:
    count = 0
    for own in where:
        if isinstance(own, Layout) and own.ids is not None:
            count += own.ids.count(-1)
        elif isinstance(own, Scattered):
            count += int((own.ids < 0).sum())
    return count


def _has_weights_of_samples(call: Call, aligned: Sequence[tuple[int, Layout]]) -> bool:
    """Whether a loss divides by the sum of weights of which the samples have different ones, as by class weights."""
    is_of_classes = call.facts.averages_targets and call.tensors[1].dim() == call.tensors[0].dim() - 1
    if not call.facts.divides_by_weights and not is_of_classes:
        return False
    weight = name_arguments(call).get("weight")
    positions = [i for i, tensor in enumerate(call.tensors) if tensor is weight]
    return any(is_of_classes or call.where[i] is not None or i in dict(aligned) for i in positions)
