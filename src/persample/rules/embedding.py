"""Looking up rows of a table."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from persample.rules.registry import Terms, rule
from persample.terms import Rows


@rule(F.embedding, accepts=lambda input, dim: True)
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
    if scale_grad_by_freq:
        uses = torch.zeros(len(ids), count, dtype=grad.dtype, device=grad.device)
        uses.scatter_add_(1, ids, torch.ones_like(ids, dtype=grad.dtype))
        grad = grad / uses.gather(1, ids).unsqueeze(-1)
    if padding_idx is not None:
        grad = grad.masked_fill((ids == padding_idx % count).unsqueeze(-1), 0)
    return {"weight": Rows(ids, grad, count)}


@rule(torch.embedding, accepts=lambda input, dim: True, batched=("indices",))
def embedding_with_the_weight_first(
    grad: Tensor,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Terms:
    pad = None if padding_idx < 0 else padding_idx
    return embedding(grad, indices, weight, pad, scale_grad_by_freq=scale_grad_by_freq)
