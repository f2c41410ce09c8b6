"""Which tokens of an example are behind its gradient, for pages that mark them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from persample.losses import LossFunction, compute_loss
from persample.recording import record


def measure_tokens(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    positions: int,
    direction: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> Tensor:
    """`(batch, positions)`: the norm of each token's part of the gradient, or its inner product with a direction.

    Parameters that are used without positions (after a pooling) do not count; see `grads.by_position()`.

    Args:
        model: the model.
        loss_fn: `loss_fn(model, batch)`, or a loss of torch if the batch is `(inputs, targets)`, as in `scan`.
        batch: a batch of sequences of one length.
        positions: the number of positions of each sequence.
        direction: `{name: shape}`, such as the gradient of a test example.
        options: further options of `record`.

    >>> model, x = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)), torch.randint(7, (2, 5))
    >>> measure_tokens(model, lambda model, x: model(x).square().sum(), x, 5).shape
    torch.Size([2, 5])
    """
    with record(model, positions=positions, **options) as grads:
        loss = compute_loss(model, batch, loss_fn)
        torch.as_tensor(loss).sum().backward()
    parts = grads.by_position(allow_rest=True)
    return parts.norms() if direction is None else parts.dot(direction)
