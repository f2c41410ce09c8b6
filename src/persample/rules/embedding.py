"""Embeddings: y = W[ids], rows of a table; and bags, sums of such rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample._internal import tracing
from persample._internal.functions import find_bags
from persample.rules.registry import EntryOwners, Terms, register_rule
from persample.terms import Dense, Rows


def _is_scaled(*args: Any, scale_grad_by_freq: bool = False, **kwargs: Any) -> bool:
    """Whether a call of `F.embedding` or `F.embedding_bag` divides the gradient of a row by its frequency."""
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
    owners: EntryOwners,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Terms:
    """The gradient of a row is divided by the number of lookups of this row by the same sample."""
    ids, owner = input.reshape(-1), tracing.lift(owners.ids)[..., 0].reshape(-1).long()
    pairs = owner.clamp(min=0) * len(weight) + ids
    frequency = pairs.bincount(weights=(owner >= 0).to(grad.dtype))[pairs]
    grad = grad.flatten(0, -2) / frequency.unsqueeze(1)
    sample_grads, sample_ids = owners.group(owner, grad, ids)
    return embedding(sample_grads, sample_ids, weight, padding_idx)


def _is_scaled_weight_first(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> bool:
    return scale_grad_by_freq


@register_rule(
    torch.embedding,
    accepts=lambda input, dim: True,
    batched=("indices",),
    when=lambda *args, **kwargs: not _is_scaled_weight_first(*args, **kwargs),
    reads_result=False,
    further=False,
)
def embedding_weight_first(
    grad: Tensor,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Terms:
    return embedding(grad, indices, weight, None if padding_idx < 0 else padding_idx)


@register_rule(torch.embedding, when=_is_scaled_weight_first, as_they_lie=True, reads_result=False)
def scaled_embedding_weight_first(
    grad: Tensor,
    owners: EntryOwners,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Terms:
    return scaled_embedding(grad, owners, indices, weight, None if padding_idx < 0 else padding_idx)


# ---- bags ----


# Bags scaled by frequency use the generic rule: torch 2.13 divides by wrong frequencies on a CPU, and the derivative of
# the function itself stays consistent with that.
@register_rule(F.embedding_bag, when=_is_not_scaled, as_they_lie=True, reads_result=False)
def embedding_bag(
    grad: Tensor,
    owners: EntryOwners,
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
        owner = owners.ids[:, 0][bag].long()
    bag, lifted_owner = tracing.lift(bag), tracing.lift(owner)
    ids = input.reshape(-1)
    valid = torch.ones_like(ids, dtype=torch.bool) if padding_idx is None else ids != padding_idx % len(weight)
    grads = grad[bag]  # of each row that was looked up
    looked_up = weight[ids]
    if mode == "max":
        grads = grads * _mark_maxima(looked_up, bag, valid, count)
    elif mode == "mean":
        sizes = torch.zeros(count, dtype=grad.dtype, device=grad.device).index_add_(0, bag, valid.to(grad.dtype))
        grads = grads / sizes[bag].clamp(min=1).unsqueeze(1)
    factors = valid.to(grad.dtype) if per_sample_weights is None else per_sample_weights.reshape(-1) * valid
    sample_grads, sample_ids = owners.group(owner, grads * factors.unsqueeze(1), ids)
    factor_grads = grad.new_zeros(owners.batch, len(ids))
    factor_grads[lifted_owner.clamp(min=0), torch.arange(len(ids), device=ids.device)] = (looked_up * grads).sum(
        1
    ) * valid
    return {
        "weight": Rows(sample_ids, sample_grads, len(weight)),
        "per_sample_weights": Dense(factor_grads.unflatten(1, input.shape)),
    }


def _mark_maxima(values: Tensor, bag: Tensor, valid: Tensor, count: int) -> Tensor:
    """1 for the largest valid number of each bag in each column, the first one if several are equal; else 0."""
    bags = bag.unsqueeze(1).expand_as(values)
    values = values.masked_fill(~valid.unsqueeze(1), -torch.inf)
    largest = values.new_full((count, values.shape[1]), -torch.inf).scatter_reduce(0, bags, values, "amax")
    position = torch.arange(len(values), device=values.device).unsqueeze(1).expand_as(values)
    position = position.masked_fill(values != largest[bag], len(values))
    first = position.new_full((count, values.shape[1]), len(values)).scatter_reduce(0, bags, position, "amin")
    return ((position == first[bag]) & valid.unsqueeze(1)).to(values.dtype)
