"""Looking up rows of a table."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample import tracing
from persample.layout import Layout, Lost, Owners, from_ids, regular, sample_ids, samples
from persample.motion import Motion, Op, motion
from persample.rules.registry import Terms, rule
from persample.terms import Dense, Rows


def _is_scaled(*args: Any, scale_grad_by_freq: bool = False, **kwargs: Any) -> bool:
    """Whether a call of `F.embedding` or `F.embedding_bag` has its gradients divided by frequencies."""
    return bool(args[5]) if len(args) > 5 else scale_grad_by_freq


def _is_not_scaled(*args: Any, **kwargs: Any) -> bool:
    return not _is_scaled(*args, **kwargs)


@rule(F.embedding, accepts=lambda input, dim: True, when=_is_not_scaled, reads_result=False, further=False)
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


@rule(F.embedding, when=_is_scaled, as_they_lie=True, reads_result=False)
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
    ids, mine = input.reshape(-1), tracing.constant(owners.ids)[..., 0].reshape(-1).long()
    pairs = mine.clamp(min=0) * len(weight) + ids
    frequency = pairs.bincount(weights=(mine >= 0).to(grad.dtype))[pairs]
    grad = grad.flatten(0, -2) / frequency.unsqueeze(1)
    layout = regular(0, tuple(mine.tolist()), owners.batch)
    rows, own_ids = (samples(t, layout, owners.batch) for t in (grad, ids))
    return embedding(rows, own_ids, weight, padding_idx)


def _is_scaled_here(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> bool:
    return scale_grad_by_freq


@rule(
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


@rule(torch.embedding, when=_is_scaled_here, as_they_lie=True, reads_result=False)
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


def _bags(input: Tensor, offsets: Tensor | None, include_last_offset: bool) -> tuple[Tensor, int]:
    """The bag of each looked-up row, and how many bags there are."""
    if input.dim() == 2:
        return torch.arange(len(input), device=input.device).repeat_interleave(input.shape[1]), len(input)
    assert offsets is not None  # or torch would have refused
    starts = offsets[:-1] if include_last_offset else offsets
    places = torch.arange(len(input), device=input.device)
    return torch.searchsorted(starts.contiguous(), places.to(starts.dtype), right=True) - 1, len(starts)


_BAG_ARGUMENTS = ("input", "weight", "offsets")


@motion(F.embedding_bag)
def _motion_of_bags(op: Op) -> Motion:
    """A bag belongs to the sample whose rows are looked up in it, or whose offset says where it begins."""
    where = {id(t): w for t, w in zip(op.tensors, op.where, strict=True)}
    call = {**dict(zip(_BAG_ARGUMENTS, op.args, strict=False)), **op.kwargs}
    input, offsets = call["input"], call.get("offsets")
    if isinstance(where[id(call["weight"])], Layout):
        return Motion((Lost("embedding_bag looks up rows of samples"),))
    bag, count = _bags(input, offsets, call.get("include_last_offset", False))
    owner = torch.full((count,), -1, dtype=torch.int32, device=input.device)
    lookers = [t for t in (input, call.get("per_sample_weights")) if t is not None]
    claims = [(bag, sample_ids(t, where.get(id(t)), op.batch).reshape(-1)) for t in lookers]
    if offsets is not None:
        claims.append((torch.arange(count), sample_ids(offsets, where.get(id(offsets)), op.batch)[:count]))
    for bags, samples_of in claims:
        there = samples_of >= 0
        bags, samples_of = bags[there], samples_of[there]
        taken = owner[bags]
        if bool(((taken >= 0) & (taken != samples_of)).any()):
            return Motion((Lost("embedding_bag puts rows of several samples into one bag"),))
        owner[bags] = samples_of
        if not torch.equal(owner[bags], samples_of):
            return Motion((Lost("embedding_bag puts rows of several samples into one bag"),))
    return Motion((from_ids(owner, op.batch),))


# Scaled by frequencies, torch 2.13 divides by wrong ones on a CPU; whatever it does, its own derivative does the same.
@rule(F.embedding_bag, when=_is_not_scaled, as_they_lie=True, reads_result=False)
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
    with tracing.left():
        bag, count = _bags(input, offsets, include_last_offset)
        mine = owners.ids[:, 0][bag].long()
        layout = regular(0, tuple(mine.tolist()), owners.batch)
    bag, mine = tracing.constant(bag), tracing.constant(mine)
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
    rows = samples(grads * share.unsqueeze(1), layout, owners.batch)
    weighted = grad.new_zeros(owners.batch, len(ids))
    weighted[mine.clamp(min=0), torch.arange(len(ids), device=ids.device)] = (looked_up * grads).sum(1) * valid
    return {
        "weight": Rows(samples(ids, layout, owners.batch), rows, len(weight)),
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
