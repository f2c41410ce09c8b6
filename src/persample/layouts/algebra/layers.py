"""Layers: convolutions, pooling, normalisation, embeddings, cells of recurrent layers, attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample._internal import tracing
from persample._internal.functions import find_bags
from persample.layouts.algebra.engine import (
    DIFFERENT_ORDERS,
    broadcast,
    declare,
    follow,
    get_argument,
    keep,
    keep_leading,
    lose,
    merge_rows,
    move,
)
from persample.layouts.call import Call
from persample.layouts.ids import find_layout_of_ids, make_layout, make_sample_ids
from persample.layouts.layout import Layout, Lost
from persample.layouts.motion import Motion

_CONVOLUTIONS = {
    torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3,
    F.conv_transpose1d: 1, F.conv_transpose2d: 2, F.conv_transpose3d: 3,
}  # fmt: skip


@declare(torch.convolution)
def _convolve_any(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return keep_leading(call, results, 1) if call.tensors[0].dim() == call.tensors[1].dim() else None


def is_batched_convolution(call: Call) -> bool:
    """Whether the first dimension of the input of a convolution is the batch, and not the channels."""
    return call.tensors[0].dim() == _CONVOLUTIONS[call.func] + 2


def _is_by_sample(call: Call) -> bool:
    """Not so if groups of channels may belong to samples."""
    return is_batched_convolution(call) and all(where is None or where.dim == 0 for where in call.where)  # type: ignore[union-attr]


@declare(*_CONVOLUTIONS, is_size_free=True, size_free_if=_is_by_sample, shares_weights=True)
def _convolve(call: Call, results: Sequence[Tensor]) -> Motion | None:
    where = call.where[0]
    is_batched = is_batched_convolution(call)
    channels = 1 if is_batched else 0
    if isinstance(where, Layout) and where.dim == channels:
        return _convolve_groups(call, results, where)
    return keep_leading(call, results, 1) if is_batched else None


def _convolve_groups(call: Call, results: Sequence[Tensor], where: Layout) -> Motion | None:
    """The samples lie in the channels: they stay separate if each group of channels belongs to one sample."""
    if call.func not in (torch.conv1d, torch.conv2d, torch.conv3d) or where.loose:
        return None
    groups = get_argument(call, 6, "groups", default=1)
    ids = where.get_ids(call.tensors[0].shape[where.dim], call.batch)
    size, channels = len(ids) // groups, results[0].shape[where.dim]
    of_groups = [set(ids[i * size : (i + 1) * size]) for i in range(groups)]
    if any(len(samples) > 1 for samples in of_groups):
        return lose(call, results, f"combines samples along dimension {where.dim}, the channels")
    of_channels = tuple(n for (n,) in of_groups for _ in range(channels // groups))
    layout = make_layout(where.dim, of_channels, call.batch)
    aligned = []
    for i, own in list(enumerate(call.where))[1:]:  # weight and bias have a row for each channel of the result
        if own is None:
            aligned.append((i, move(layout, 0)))
        elif not isinstance(own, Layout) or own.dim or own.get_ids(channels, call.batch) != of_channels:
            return lose(call, results, DIFFERENT_ORDERS)
    return Motion((layout,), tuple(aligned))


# ---- functions that treat each index of the first dimensions separately ----


def _declare_leading(leading: int, *functions: Any, count: int = 1, least: int = 0, **known: Any) -> None:
    """Declare functions of which the first `count` tensors and the results share the first `leading` dimensions.

    If `leading` is not positive, all dimensions of the input but the last ones are shared. An input with fewer than
    `least` dimensions has no batch.
    """

    @declare(*functions, **known)
    def treat_separately(call: Call, results: Sequence[Tensor]) -> Motion | None:
        rank = call.tensors[0].dim()
        return keep_leading(call, results, leading if leading > 0 else rank + leading, count) if rank >= least else None


for _size in (1, 2, 3):
    _names = f"""
        max_pool{_size}d avg_pool{_size}d adaptive_max_pool{_size}d adaptive_avg_pool{_size}d lp_pool{_size}d
        max_pool{_size}d_with_indices adaptive_max_pool{_size}d_with_indices fractional_max_pool{_size}d
        fractional_max_pool{_size}d_with_indices
    """.split()
    _declare_leading(-_size, *(getattr(owner, name) for owner in (F, torch) for name in _names if hasattr(owner, name)))
    _declare_leading(-_size, getattr(F, f"max_unpool{_size}d"), count=2)

_declare_leading(2, F.interpolate, F.upsample, F.upsample_nearest, F.upsample_bilinear)
_declare_leading(1, F.fold, F.local_response_norm, least=3)
_declare_leading(1, "channel_shuffle", "native_channel_shuffle", least=3, moves_entries=True)
_declare_leading(1, F.unfold, least=4)
_declare_leading(-3, "pixel_shuffle", "pixel_unshuffle", moves_entries=True)  # channels, height and width
_declare_leading(1, F.affine_grid, is_size_free=True)
_declare_leading(1, F.grid_sample, torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d, count=2)
_declare_leading(1, "group_norm", is_size_free=True, shares_weights=True)
_declare_leading(1, F.instance_norm, shares_weights=True, statistics_at=1)
_declare_leading(1, torch.instance_norm, shares_weights=True, statistics_at=3)
_declare_leading(1, torch.lstm_cell, count=3)
_declare_leading(1, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell, count=2)
_declare_leading(0, F.embedding, is_size_free=True, shares_weights=True)

# ---- other layers ----


@declare(torch.conv_tbc)
def _convolve_time_first(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return follow(call, results, [[None, "n", None]], ["t", "n", "c"])


@declare("layer_norm", "rms_norm", is_size_free=True, shares_weights=True)
def _normalise_layer(call: Call, results: Sequence[Tensor]) -> Motion | None:
    tensor, where = call.tensors[0], call.where[0]
    shape = get_argument(call, 1, "normalized_shape")
    if not isinstance(where, Layout) or not isinstance(shape, (tuple, list, torch.Size)):
        return None
    if where.dim >= tensor.dim() - len(shape):
        return lose(call, results, f"of shape {tuple(tensor.shape)} normalises over the samples")
    return keep_leading(call, results, tensor.dim() - len(shape))


@declare(F.batch_norm, is_size_free=True, shares_weights=True, statistics_at=1)
def _normalise_batch(call: Call, results: Sequence[Tensor]) -> Motion | None:
    where = call.where[0]
    if not isinstance(where, Layout) or any(call.where[1:]) or where.dim == 1:
        return None
    is_training = get_argument(call, 5, "training", default=False)
    return lose(call, results, "in training mode normalises over the samples") if is_training else keep(call, results)


@declare(torch.embedding, is_size_free=True, shares_weights=True)
def _look_up_with_weight_first(call: Call, results: Sequence[Tensor]) -> Motion | None:
    dims = range(call.tensors[1].dim())
    return follow(call, results, [[None, None], dims], dims)


@declare(F.embedding_bag)
def _embedding_bag(call: Call, results: Sequence[Tensor]) -> Motion:
    """A bag belongs to the sample of its indices and weights, and of the offset at which it begins."""
    where = {id(t): w for t, w in call.pairs}
    input, weight, offsets = call.args[0], get_argument(call, 1, "weight"), get_argument(call, 2, "offsets")
    weights = get_argument(call, 8, "per_sample_weights")
    reads_values = offsets is not None
    if isinstance(where[id(weight)], Layout):
        return Motion((Lost("embedding_bag has samples in its weight"),))
    bag, count = find_bags(input, offsets, get_argument(call, 9, "include_last_offset", default=False))
    # Pairs of tensors: bags, and samples that they belong to.
    claims = [
        (bag, make_sample_ids(t, where.get(id(t)), call.batch).reshape(-1)) for t in (input, weights) if t is not None
    ]
    if offsets is not None:
        claims.append((torch.arange(count), make_sample_ids(offsets, where.get(id(offsets)), call.batch)[:count]))
    owner = torch.full((count,), -1, dtype=torch.int32, device=input.device)
    for bags, samples in claims:
        is_claim = samples >= 0
        bags, samples = bags[is_claim], samples[is_claim]
        before = owner[bags]
        has_conflict = bool(((before >= 0) & (before != samples)).any())
        owner[bags] = samples
        if has_conflict or not torch.equal(owner[bags], samples):
            lost = Lost("embedding_bag puts rows of several samples into one bag")
            return Motion((lost,), depends_on_values=reads_values)
    return Motion((find_layout_of_ids(owner, call.batch),), depends_on_values=reads_values)


# ---- attention: each query combines all keys and values of its matrix ----

# Scores that are lower by so much get a weight of exactly zero in a softmax.
_EXCLUDED = -1e9


def _has_separate_matrices(call: Call) -> bool:
    """Rows of queries may belong to samples, too."""
    return all(where is None or where.dim < tensor.dim() - 2 for tensor, where in call.pairs)  # type: ignore[union-attr]


@declare(F.scaled_dot_product_attention, is_size_free=True, size_free_if=_has_separate_matrices)
def _attend(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """Queries, keys and values are matrices; the dimensions before them are independent."""
    in_matrices = [isinstance(where, Layout) and where.dim >= tensor.dim() - 2 for tensor, where in call.pairs]
    if any(in_matrices[1:3]):
        return _attend_to_rows(call, results)
    if any(in_matrices):
        return _attend_from_rows(call, results)
    if get_argument(call, 8, "enable_gqa", default=False) and any(
        isinstance(where, Layout) and where.dim == tensor.dim() - 3 for tensor, where in call.pairs
    ):
        return None  # the samples lie in the dimension of the heads, in which keys are repeated
    return broadcast(call, results)


def _attend_from_rows(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """Queries of samples attend to keys and values without samples: each query is computed by itself."""
    query, where = call.tensors[0], call.where[0]
    is_causal = get_argument(call, 5, "is_causal", default=False)
    if len(call.tensors) > 3 or any(call.where[1:]) or is_causal or not isinstance(where, Layout):
        return None
    return lose(call, results, "sums over the samples") if where.dim == query.dim() - 1 else keep(call, results)


def _attend_to_rows(call: Call, results: Sequence[Tensor]) -> Motion:
    """Several samples in one sequence: a mask must keep each query to the keys of its own sample."""
    lost = lose(call, results, "attends from each sample to the others")
    if len(call.tensors) != 4 or call.where[3] is not None or tracing.get_trace() is not None:
        return lost
    query, key, _, mask = call.tensors
    where, of_keys, of_values, _ = call.where
    rank = query.dim()
    if any(not isinstance(w, Layout) or t.dim() != rank for t, w in zip(call.tensors[:3], call.where[:3], strict=True)):
        return lost
    assert isinstance(where, Layout) and isinstance(of_keys, Layout) and isinstance(of_values, Layout)
    rows, columns = query.shape[-2], key.shape[-2]
    if {where.dim, of_keys.dim, of_values.dim} != {rank - 2} or where.loose or of_keys.loose or mask.dim() < 2:
        return lost
    if merge_rows(of_keys, of_values, columns, call.batch) is None or mask.shape[-2:] != (rows, columns):
        return lost
    of_query = torch.tensor(where.get_ids(rows, call.batch), device=mask.device)
    of_key = torch.tensor(of_keys.get_ids(columns, call.batch), device=mask.device)
    is_own = of_query[:, None] == of_key
    is_allowed = mask if mask.dtype == torch.bool else mask > _EXCLUDED
    # A query without an allowed key of its own may weigh all keys alike.
    if bool((is_allowed & ~is_own).any()) or not bool((is_allowed & is_own).any(-1).all()):
        return lost
    return Motion((move(where, where.dim),) * len(results), depends_on_values=True)
