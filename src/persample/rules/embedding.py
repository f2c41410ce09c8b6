"""Looking up rows of a table."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample._internal import tracing
from persample._internal.functions import find_bags
from persample.rules.registry import Owners, Terms, register_rule
from persample.terms import Dense, Rows


def _is_scaled(*args: Any, scale_grad_by_freq: bool = False, **kwargs: Any) -> bool:
    """Whether a call of `F.embedding` or `F.embedding_bag` has its gradients divided by frequencies."""
    return bool(args[5]) if len(args) > 5 else scale_grad_by_freq


def _is_not_scaled(*args: Any, **kwargs: Any) -> bool:
    return not _is_scaled(*args, **kwargs)


@register_rule(F.embedding, accepts=lambda input, dim: True, when=_is_not_scaled, reads_result=False, further=False)
def embedding(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Terms:
    ids, grad = input.flatten(1), grad.flatten(1, -2)
    count = weight.shape[0]
    if padding_idx is not None:
        grad = grad.masked_fill((ids == padding_idx % count).unsqueeze(-1), 0)
    return {"weight": Rows(ids, grad, count)}


@register_rule(F.embedding, when=_is_scaled, as_they_lie=True, reads_result=False)
def scaled_embedding(
    grad: Tensor,
    owners: Owners,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Terms:
    """Each row's gradient is divided by how often its own sample looks it up, so that no others may be counted."""
    ids, mine = input.reshape(-1), tracing.lift(owners.ids)[..., 0].reshape(-1).long()
    pairs = mine.clamp(min=0) * len(weight) + ids
    frequency = pairs.bincount(weights=(mine >= 0).to(grad.dtype))[pairs]
    grad = grad.flatten(0, -2) / frequency.unsqueeze(1)
    rows, own_ids = owners.group(mine, grad, ids)
    return embedding(rows, own_ids, weight, padding_idx)


def _is_scaled_here(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> bool:
    return scale_grad_by_freq


@register_rule(
    torch.embedding,
    accepts=lambda input, dim: True,
    batched=("indices",),
    when=lambda *args, **kwargs: not _is_scaled_here(*args, **kwargs),
    reads_result=False,
    further=False,
)
def embedding_with_the_weight_first(
    grad: Tensor,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Terms:
    return embedding(grad, indices, weight, None if padding_idx < 0 else padding_idx)


@register_rule(torch.embedding, when=_is_scaled_here, as_they_lie=True, reads_result=False)
def scaled_embedding_with_the_weight_first(
    grad: Tensor,
    owners: Owners,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Terms:
    return scaled_embedding(grad, owners, indices, weight, None if padding_idx < 0 else padding_idx)


# ---- bags ----


# Scaled by frequencies, torch 2.13 divides by wrong ones on a CPU; whatever it does, its own derivative does the same.
@register_rule(F.embedding_bag, when=_is_not_scaled, as_they_lie=True, reads_result=False)
def embedding_bag(
    grad: Tensor,
    owners: Owners,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Terms:
    with tracing.suspend():
        bag, count = find_bags(input, offsets, include_last_offset)
        mine = owners.ids[:, 0][bag].long()
    bag, own = tracing.lift(bag), tracing.lift(mine)
    ids = input.reshape(-1)
    valid = torch.ones_like(ids, dtype=torch.bool) if padding_idx is None else ids != padding_idx % len(weight)
    grads = grad[bag]  # of each row that was looked up
    looked_up = weight[ids]
    if mode == "max":
        grads = grads * _first_largest(looked_up, bag, valid, count)
    elif mode == "mean":
        sizes = torch.zeros(count, dtype=grad.dtype, device=grad.device).index_add_(0, bag, valid.to(grad.dtype))
        grads = grads / sizes[bag].clamp(min=1).unsqueeze(1)
    share = valid.to(grad.dtype) if per_sample_weights is None else per_sample_weights.reshape(-1) * valid
    rows, own_ids = owners.group(mine, grads * share.unsqueeze(1), ids)
    weighted = grad.new_zeros(owners.batch, len(ids))
    weighted[own.clamp(min=0), torch.arange(len(ids), device=ids.device)] = (looked_up * grads).sum(1) * valid
    return {
        "weight": Rows(own_ids, rows, len(weight)),
        "per_sample_weights": Dense(weighted.unflatten(1, input.shape)),
    }


def _first_largest(values: Tensor, bag: Tensor, valid: Tensor, count: int) -> Tensor:
    """A one where a row has the largest number of its bag, in each column once."""
    at = bag.unsqueeze(1).expand_as(values)
    values = values.masked_fill(~valid.unsqueeze(1), -torch.inf)
    largest = values.new_full((count, values.shape[1]), -torch.inf).scatter_reduce(0, at, values, "amax")
    place = torch.arange(len(values), device=values.device).unsqueeze(1).expand_as(values)
    place = place.masked_fill(values != largest[bag], len(values))
    first = place.new_full((count, values.shape[1]), len(values)).scatter_reduce(0, at, place, "amin")
    return ((place == first[bag]) & valid.unsqueeze(1)).to(values.dtype)
