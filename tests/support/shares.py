"""The definition of a share: what the gradient of a batch receives through one sample's outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def share_gradients(
    model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor], size: int, dim: int = 0
) -> dict[str, Tensor]:
    """`{name: (size, *shape)}`: row n is `size` times the gradient of the loss of the batch, in which the outputs of
    all other samples are constants. `dim` is the batch dimension of the outputs, which must be one tensor."""
    parameters = dict(model.named_parameters())
    rows = []
    for sample in range(size):

        def call(*args: Any, sample: int = sample) -> Tensor:
            output = model(*args)
            own = (torch.arange(size) == sample).view(-1, *[1] * (output.dim() - dim - 1))
            return torch.where(own, output, output.detach())

        total = loss(call, batch)
        rows.append(torch.autograd.grad(size * total, list(parameters.values()), allow_unused=True))
    found = {}
    for i, (name, p) in enumerate(parameters.items()):
        found[name] = torch.stack([torch.zeros_like(p) if row[i] is None else row[i] for row in rows])
    return found
