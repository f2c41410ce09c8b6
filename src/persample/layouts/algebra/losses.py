"""Losses: the layout of their entries, and the reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from persample.layouts.algebra.arguments import name_arguments
from persample.layouts.algebra.engine import (
    DIFFERENT_ORDERS,
    declare,
    join,
    join_broadcast,
    lose,
    merge_rows,
    move,
)
from persample.layouts.call import Call
from persample.layouts.layout import Layout, Where
from persample.layouts.motion import Motion
from persample.layouts.reductions import make_reduced


def _get_layout(call: Call, tensor: Any) -> Where | None:
    return next((where for t, where in call.pairs if t is tensor), None)


def _reduce(call: Call, results: Sequence[Tensor], entries: Motion | None) -> Motion | None:
    """The motion of a loss, given that of its entries before the reduction."""
    if entries is None or not isinstance(entries.results[0], Layout):
        return entries
    arguments = name_arguments(call)
    if arguments.get("size_average") is not None or arguments.get("reduce") is not None:
        return None  # the legacy way to choose a reduction
    if arguments["reduction"] == "none":
        return entries
    return Motion((make_reduced(call, results, arguments["reduction"]),), entries.aligned)


_ENTRYWISE = {"is_additive": True, "has_entries": True}
_POINTWISE = {"is_pointwise_loss": True, **_ENTRYWISE}
_OF_PAIRS = {"combines_pairs": True, **_POINTWISE}


@declare(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, divides_by_weights=True, **_OF_PAIRS)
@declare(F.kl_div, **_OF_PAIRS)
@declare(F.soft_margin_loss, F.hinge_embedding_loss, F.margin_ranking_loss, F.poisson_nll_loss, **_POINTWISE)
@declare(F.binary_cross_entropy, **_POINTWISE)
@declare(F.binary_cross_entropy_with_logits, class_weights="pos_weight", **_POINTWISE)
def _pointwise_loss(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return _reduce(call, results, join_broadcast(call))


def _has_equal_patterns(call: Call) -> bool:
    """Two other patterns are in the same order at some sizes only."""
    layouts = [where for where in call.where if isinstance(where, Layout)]
    return len(layouts) == 2 and layouts[0] == layouts[1] and layouts[0].dim == 0


@declare(
    F.cross_entropy,
    F.nll_loss,
    averages_targets=True,
    class_weights="weight",
    is_size_free=True,
    size_free_if=_has_equal_patterns,
    **_ENTRYWISE,
)
def compare_classes(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """Logits `(N, C, ...)`, with classes `(N, ...)` or probabilities `(N, C, ...)`: no result for each class."""
    arguments = name_arguments(call)
    logits, target, weight = arguments["input"], arguments["target"], arguments["weight"]
    where, of_target = _get_layout(call, logits), _get_layout(call, target)
    if not isinstance(where, Layout) or logits.dim() < 2 or len(call.args) > 3 or _get_layout(call, weight):
        return None
    if where.dim == 1:
        return lose(call, results, "takes the samples for classes")
    layout = move(where, max(0, where.dim - 1))
    has_classes = target.dim() == logits.dim() - 1
    own = layout if has_classes else where
    if isinstance(of_target, Layout):
        merged = merge_rows(own, of_target, logits.shape[where.dim], call.batch) if own.dim == of_target.dim else None
        if merged is None:
            return lose(call, results, DIFFERENT_ORDERS)
        layout = move(merged, layout.dim)
    aligned = () if of_target is not None else tuple((i, own) for i, t in enumerate(call.tensors) if t is target)
    return _reduce(call, results, Motion((layout,), aligned))


@declare(F.cosine_embedding_loss, F.multilabel_margin_loss, **_ENTRYWISE)
@declare(F.multi_margin_loss, F.multilabel_soft_margin_loss, class_weights="weight", **_ENTRYWISE)
def _vector_loss(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """A loss of each row `(N, ...)`."""
    if call.tensors[0].dim() < 2:
        return None
    count = 3 if call.func is F.cosine_embedding_loss else 2
    letters = [["n", *[None] * (tensor.dim() - 1)] for tensor in call.tensors[:count]]
    return _reduce(call, results, join(call, letters, "n"))


@declare(F.triplet_margin_loss, **_ENTRYWISE)
def _triplet_loss(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """Distances along the last dimension."""
    entries, last = join_broadcast(call), max(tensor.dim() for tensor in call.tensors) - 1
    if entries is not None and isinstance(where := entries.results[0], Layout) and where.dim == last:
        return lose(call, results, f"combines samples along dimension {last}")
    return _reduce(call, results, entries)


@declare(F.ctc_loss, is_additive=True)
def _ctc_loss(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """`(T, N, C)`, with targets `(N, S)`; the mean is over the samples, each divided by the length of its target."""
    arguments = name_arguments(call)
    where = _get_layout(call, arguments["log_probs"])
    if not isinstance(where, Layout) or call.tensors[0].dim() != 3 or where.dim != 1:
        return None
    for name in ("targets", "input_lengths", "target_lengths"):
        own = _get_layout(call, arguments[name])
        if isinstance(own, Layout) and name == "targets" and arguments[name].dim() == 1:
            continue  # the targets of all samples, one after the other: the lengths say whose they are
        if isinstance(own, Layout) and (own.dim or not merge_rows(where, own, call.tensors[0].shape[1], call.batch)):
            return None
    return _reduce(call, results, Motion((move(where, 0),)))
