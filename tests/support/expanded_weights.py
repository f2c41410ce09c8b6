"""Weights, inputs and losses for the tests of expanded weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from persample.expanded_weights import ExpandedWeight
from persample.testing.oracle import stack_gradients

BATCH = 5


def make_weight(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def make_rows(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def make_expanded(*shape: int, batch: int = BATCH, reduction: str = "sum") -> ExpandedWeight:
    return ExpandedWeight(make_weight(*shape), batch, reduction)


def compute_sample_loss(output: Tensor) -> Tensor:
    """A loss of one sample whose gradient differs for every entry."""
    return (output.sin() * torch.arange(1, 1 + output[0].numel()).view_as(output[0])).sum()


def compute_loss(output: Tensor, reduction: str, batch_dim: int = 0) -> Tensor:
    """The sum or mean of the losses of the samples."""
    total = torch.stack([compute_sample_loss(part) for part in output.split(1, batch_dim)]).sum()
    return total / output.shape[batch_dim] if reduction == "mean" else total


def loop_over_samples(
    function: Callable[..., Tensor], inputs: list[Tensor], weights: list[Tensor], batch_dim: int = 0
) -> list[Tensor]:
    """Per-sample gradients of the weights, by a loop over the samples with plain autograd."""
    samples = zip(*(x.detach().split(1, batch_dim) for x in inputs), strict=True)
    losses = (compute_sample_loss(function(*parts, *weights)) for parts in samples)
    return list(stack_gradients(losses, {str(i): weight for i, weight in enumerate(weights)}).values())
