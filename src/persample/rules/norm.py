"""y = x̂ w + b, where x̂ is x normalised within each sample or by fixed statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample._internal import tracing
from persample.errors import SamplesMixed
from persample.rules.registry import EntryOwners, Terms, register_rule
from persample.terms import Dense

# Entries of the samples that are normalised at a time: 4 MB. With fewer, the loop costs more than the caches save.
_BLOCK_SIZE = 2**20


def _normalise_in_blocks(
    normalise: Callable[[Tensor], Tensor], grad: Tensor, input: Tensor, keep: Sequence[int]
) -> Terms:
    """The terms of w and b, computed for some samples at a time, so that the normalised input takes little memory."""
    step = max(1, _BLOCK_SIZE // max(1, input[:1].numel()))
    if step >= len(input) or tracing.get_trace() is not None:
        return _compute_affine_terms(grad, normalise(input), keep)
    blocks = [
        _compute_affine_terms(some_grads, normalise(some), keep)
        for some_grads, some in zip(grad.split(step), input.split(step), strict=True)
    ]
    return {name: Dense(torch.cat([block[name].values for block in blocks])) for name in blocks[0]}


def _compute_affine_terms(grad: Tensor, normalised: Tensor, keep: Sequence[int]) -> dict[str, Dense]:
    """The terms of w and b, which have the dimensions `keep` and are broadcast along the rest of a sample.

    `normalised` is overwritten.
    """
    rest = [dim for dim in range(1, grad.dim()) if dim not in keep]
    product = normalised.mul_(grad) if normalised.dtype == grad.dtype else normalised * grad
    if not rest:
        return {"weight": Dense(product), "bias": Dense(grad)}
    return {"weight": Dense(product.sum(rest)), "bias": Dense(grad.sum(rest))}


@register_rule(
    F.layer_norm,
    torch.layer_norm,
    accepts=lambda input, dim: True,
    reads_result=False,
    stacks=True,
    further=False,
)
def layer_norm(
    grad: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Terms:
    last = range(grad.dim() - len(normalized_shape), grad.dim())
    return _compute_affine_terms(grad, F.layer_norm(input, normalized_shape, eps=eps), last)


@register_rule(F.rms_norm, torch.rms_norm, accepts=lambda input, dim: True, reads_result=False, stacks=True)
def rms_norm(
    grad: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Terms:
    last = range(grad.dim() - len(normalized_shape), grad.dim())
    return {"weight": _compute_affine_terms(grad, F.rms_norm(input, normalized_shape, eps=eps), last)["weight"]}


@register_rule(F.group_norm, torch.group_norm, reads_result=False, stacks=True, further=False)
def group_norm(
    grad: Tensor,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Terms:

    def normalise(some: Tensor) -> Tensor:
        return F.group_norm(some.flatten(0, 1), num_groups, eps=eps).view(some.shape)

    return _normalise_in_blocks(normalise, grad, input, keep=[2])


def _broadcast_channels(statistic: Tensor, like: Tensor) -> Tensor:
    """Shape a number per channel to broadcast over `(batch, images, channel, *size)`."""
    return statistic.view(-1, *[1] * (like.dim() - 3))


@register_rule(F.instance_norm, reads_result=False, further=False)
def instance_norm(
    grad: Tensor,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Terms:
    if use_input_stats:
        normalised = F.instance_norm(input.flatten(0, 1).contiguous(), eps=eps).view(input.shape)
    else:
        assert running_mean is not None and running_var is not None
        centred = input - _broadcast_channels(running_mean, input)
        normalised = centred * _broadcast_channels(running_var + eps, input).rsqrt()
    return _compute_affine_terms(grad, normalised, keep=[2])


@register_rule(torch.instance_norm, reads_result=False, further=False)
def instance_norm_weight_first(
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Terms:
    return instance_norm(grad, input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


@register_rule(F.batch_norm, reads_result=False, further=False)
def batch_norm(
    grad: Tensor,
    input: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Terms:
    if training:  # a batch of one: the forward pass could not detect that samples are mixed
        raise SamplesMixed(
            "batch_norm in training mode combines samples: its statistics are computed over the batch. Call eval() on "
            "the module, use GroupNorm or LayerNorm instead, or record with coupled='contributions'."
        )
    return instance_norm(grad, input, running_mean, running_var, weight, bias, use_input_stats=False, eps=eps)


@wraps(F.batch_norm)
def batch_norm_of_batch(*args: Any, **kwargs: Any) -> Tensor:
    """`F.batch_norm` in training mode, in a recording of coupled samples."""
    return F.batch_norm(*args, **kwargs)


@register_rule(batch_norm_of_batch, as_they_lie=True, reads_result=False, further=False)
def normalise_by_batch(
    grad: Tensor,
    owners: EntryOwners,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Terms:
    normalised = F.batch_norm(input, None, None, training=True, eps=eps)
    return {
        "weight": Dense(_add_up_by_owner(normalised * grad, owners)),
        "bias": Dense(_add_up_by_owner(grad, owners)),
    }


def _add_up_by_owner(values: Tensor, owners: EntryOwners) -> Tensor:
    """`(B, C)`: the sum of the values of each sample in each channel."""
    ids, channels = owners.ids, values.shape[1]
    total = values.new_zeros(owners.batch, channels)
    if not any(ids.stride()[1:]):  # the samples lie along dimension 0
        ids = ids.flatten(1)[:, 0].long()
        rows = values.flatten(2).sum(2) if values.dim() > 2 else values
        return total.index_add_(0, ids.clamp(min=0), rows * (ids >= 0).unsqueeze(1))
    channel = torch.arange(channels, device=ids.device).view(-1, *[1] * (ids.dim() - 2))
    index = ids.long().clamp(min=0) * channels + channel
    total.view(-1).index_add_(0, index.flatten(), (values * (ids >= 0)).flatten())
    return total
