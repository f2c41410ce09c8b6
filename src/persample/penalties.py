"""Norms of per-sample gradients that can be differentiated, for penalties on them.

They are computed by a loop over the samples. `torch.func.vmap` of `torch.func.grad` would be faster, but in torch 2.13
the gradient of such norms is wrong, without an error, for models with `layer_norm`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from persample.batches import Batch, BatchDim
from persample.errors import PerSampleError
from persample.losses import LossFunction, compute_loss, takes_outputs


def differentiable_norms(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    *,
    batch_dim: BatchDim = 0,
    batch_size: int | None = None,
) -> Tensor:
    """`(batch,)`: the norm of each sample's gradient, with a graph, so that it can be part of a loss.

    A recording refuses `create_graph=True`, because its weights are detached. Here the model runs once for each sample,
    with plain autograd, and the graphs of all samples are kept: time and memory are those of a loop. The gradient of
    the norm is zero where the norm is. The norms are functions of the parameters; the batch is copied.

    Args:
        model: the model. A layer that mixes the samples of a batch sees one sample at a time.
        batch: tensors, also in tuples, lists, dicts and dataclasses.
        loss_fn: `loss_fn(model, batch)`, or a loss of torch if the batch is `(inputs, targets)`, as in `check`. It is
            called with one sample at a time, as a batch of one.
        batch_dim: as in `record`.
        batch_size: as in `record`.

    >>> model, x, y = nn.Linear(3, 2), torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    >>> norms = differentiable_norms(model, (x, y), nn.functional.cross_entropy)
    >>> (nn.functional.cross_entropy(model(x), y) + 0.1 * norms.square().mean()).backward()
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise PerSampleError("differentiable_norms() needs a model with parameters that require grad.")
    samples = Batch(batch, batch_dim, batch_size, pair=takes_outputs(loss_fn))
    each = (samples.take_samples(n, n + 1, lambda tensor: tensor) for n in range(samples.size))
    norms = [_compute_norm(model, sample, loss_fn, parameters) for sample in each]
    return torch.stack(norms) if norms else parameters[0].new_zeros(0)


def _compute_norm(model: nn.Module, sample: Any, loss_fn: LossFunction, parameters: list[nn.Parameter]) -> Tensor:
    loss = torch.as_tensor(compute_loss(model, sample, loss_fn)).sum()
    grads = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    parts = [torch.linalg.vector_norm(grad) for grad in grads if grad is not None]
    return torch.linalg.vector_norm(torch.stack(parts))
