"""Layers: convolutions, pooling, normalisation, embeddings; and losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from persample.layouts.algebra.engine import align, declare, get_argument, lose, make_motion, move
from persample.layouts.call import Call
from persample.layouts.layout import Layout
from persample.layouts.motion import Motion, make_uniform_motion
from persample.layouts.reductions import make_reduced


def _keep_leading(call: Call, results: Sequence[Tensor], leading: int) -> Motion | None:
    """The motion of a function that treats each index of the first `leading` dimensions by itself."""
    where = call.where[0]
    if not isinstance(where, Layout) or any(call.where[1:]) or where.dim >= leading:
        return None
    return make_motion(call, results, move(where, where.dim))


_CONVOLUTIONS = {
    torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3,
    F.conv_transpose1d: 1, F.conv_transpose2d: 2, F.conv_transpose3d: 3,
}  # fmt: skip


@declare(*_CONVOLUTIONS)
def _convolution(call: Call, results: Sequence[Tensor]) -> Motion | None:
    is_batched = call.tensors[0].dim() == _CONVOLUTIONS[call.func] + 2
    return _keep_leading(call, results, 1) if is_batched else None


def _declare_windows() -> None:
    for count in (1, 2, 3):
        names = f"max_pool{count}d avg_pool{count}d adaptive_max_pool{count}d adaptive_avg_pool{count}d lp_pool{count}d"
        functions = [getattr(owner, name, None) for owner in (F, torch) for name in names.split()]

        def pool(call: Call, results: Sequence[Tensor], count: int = count) -> Motion | None:
            return _keep_leading(call, results, call.tensors[0].dim() - count)

        declare(*[function for function in functions if function is not None])(pool)


_declare_windows()


@declare(F.interpolate, F.upsample, F.fold, F.channel_shuffle, F.group_norm, torch.group_norm, F.local_response_norm)
def _first_dim(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return _keep_leading(call, results, 1) if call.tensors[0].dim() > 2 else None


@declare(F.pixel_shuffle, F.pixel_unshuffle, torch.pixel_shuffle, torch.pixel_unshuffle)
def _shuffle_pixels(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return _keep_leading(call, results, call.tensors[0].dim() - 3)  # before channels, height and width


@declare(F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm)
def _layer_norm(call: Call, results: Sequence[Tensor]) -> Motion | None:
    tensor, where = call.tensors[0], call.where[0]
    shape = get_argument(call, 1, "normalized_shape")
    if not isinstance(where, Layout) or not isinstance(shape, (tuple, list, torch.Size)):
        return None
    if where.dim >= tensor.dim() - len(shape):
        return lose(call, results, f"of shape {tuple(tensor.shape)} normalises over the samples")
    return _keep_leading(call, results, tensor.dim() - len(shape))


@declare(F.batch_norm)
def _batch_norm(call: Call, results: Sequence[Tensor]) -> Motion | None:
    where = call.where[0]
    if not isinstance(where, Layout) or any(call.where[1:]) or where.dim == 1:
        return None
    if get_argument(call, 5, "training", default=False):
        return lose(call, results, "in training mode normalises over the samples")
    return make_motion(call, results, move(where, where.dim))


@declare(F.instance_norm)
def _instance_norm(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return _keep_leading(call, results, 1)


@declare(F.embedding)
def _embedding(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return _keep_leading(call, results, call.tensors[0].dim())


@declare(torch.embedding)
def _embedding_with_weight_first(call: Call, results: Sequence[Tensor]) -> Motion | None:
    where = call.where[1]
    if call.where[0] is not None or not isinstance(where, Layout):
        return None
    return make_motion(call, results, move(where, where.dim))


# ---- losses ----


_WEIGHTED_MEANS = {F.mse_loss, F.l1_loss, F.huber_loss, F.smooth_l1_loss}


def _has(call: Call, *names: str) -> bool:
    """Whether keyword arguments are given and not None."""
    return any(call.kwargs.get(name) is not None for name in names)


def _reduce(call: Call, results: Sequence[Tensor], entries: Motion | None) -> Motion | None:
    """The motion of a loss, given that of its entries before the reduction."""
    if entries is None or not isinstance(entries.results[0], Layout):
        return entries
    reduction = call.kwargs.get("reduction", "mean")
    if reduction == "none":
        return entries
    if reduction not in ("mean", "sum") or entries.results[0].ids is not None:
        return None
    return make_uniform_motion(make_reduced(call), results)


@declare(
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.poisson_nll_loss,
    F.soft_margin_loss,
)
@declare(F.binary_cross_entropy_with_logits, F.hinge_embedding_loss, F.margin_ranking_loss, F.kl_div)
def _pointwise_loss(call: Call, results: Sequence[Tensor]) -> Motion | None:
    if _has(call, "size_average", "reduce") or any(not isinstance(arg, Tensor) for arg in call.args):
        return None  # reductions that are given by position, or in the legacy way
    if call.func in _WEIGHTED_MEANS and _has(call, "weight"):  # divides by the sum of the weights
        return None
    if call.kwargs.get("reduction", "mean") == "none":
        rank, shaped = results[0].dim(), results
    else:
        try:
            shape = torch.broadcast_shapes(*(tensor.shape for tensor in call.tensors))
        except RuntimeError:
            return None
        rank, shaped = len(shape), [results[0].new_empty(()).expand(shape)]
    return _reduce(call, results, align(call, shaped, [rank - tensor.dim() for tensor in call.tensors]))


@declare(F.cross_entropy, F.nll_loss)
def _class_loss(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """Logits `(N, C, ...)` and classes `(N, ...)`: the result has no dimension for the classes."""
    if len(call.args) > 2 or len(call.tensors) != 2 or _has(call, "size_average", "reduce", "weight"):
        return None
    logits, target = call.tensors
    if target.is_floating_point() or target.dim() != logits.dim() - 1 or logits.dim() < 2:
        return None
    where, of_target = call.where
    if not isinstance(where, Layout) or where.dim == 1:
        return None
    layout = move(where, max(0, where.dim - 1))
    if isinstance(of_target, Layout) and (
        of_target.dim != layout.dim or of_target.inner != layout.inner or of_target.ids != layout.ids
    ):
        return None
    return _reduce(call, results, Motion((layout,)))
