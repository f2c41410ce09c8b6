"""The loop oracle: per-sample gradients by a loop over the samples with plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from persample import _torch
from persample._internal.graph import preserve_grads
from persample._internal.precision import to_double
from persample.batches import Batch, BatchDim
from persample.losses import compute_loss, takes_outputs

# Per-sample gradients by the name of the parameter, each `(batch, *parameter.shape)`.
Gradients = dict[str, Tensor]


def loop_gradients(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., Any],
    *,
    batch_dim: BatchDim = 0,
    batch_size: int | None = None,
) -> Gradients:
    """Compute per-sample gradients by a loop over the samples, with plain autograd in float64.

    The arguments are those of `persample.check`: `loss_fn(model, batch)` returns the loss, or `loss_fn` is a loss of
    torch and `batch` is `(inputs, targets)`. The model runs once for each sample, as a batch of one. It runs on a copy,
    so that neither the model nor its `grad` attributes change.

    Returns:
        The gradients of each sample's loss, `{name: (batch, *shape)}`, for every parameter that a loss depends on.

    >>> model, x, y = nn.Linear(3, 2), torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    >>> loop_gradients(model, (x, y), nn.CrossEntropyLoss())["weight"].shape
    torch.Size([4, 2, 3])
    """
    model, loss_fn = copy.deepcopy(model), copy.deepcopy(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
    for module in (model, loss_fn):
        if isinstance(module, nn.Module):
            _torch.apply_to_tensors(module, to_double)
    samples = Batch(batch, batch_dim, batch_size, pair=takes_outputs(loss_fn))
    losses = (compute_loss(model, samples.take_samples(n, n + 1, to_double), loss_fn) for n in range(samples.size))
    return stack_gradients(losses, dict(model.named_parameters()))


def stack_gradients(losses: Iterable[Tensor], parameters: Mapping[str, Tensor]) -> Gradients:
    """Differentiate the loss of each sample on its own and stack the gradients.

    A parameter that some losses do not depend on has zeros there. A parameter that no loss depends on, or that does not
    require a gradient, is left out. The `grad` attributes of all tensors stay as they are.

    Args:
        losses: the loss of one sample after the other. A generator computes each loss only when it is needed.
        parameters: leaf tensors by name.
    """
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    own = {id(p) for p in trainable.values()}
    before = {name: p.grad for name, p in trainable.items()}
    rows: list[dict[str, Tensor]] = []
    try:
        for loss in losses:
            for p in trainable.values():
                p.grad = None
            with preserve_grads(loss, but=own):
                loss.backward()  # autograd.grad refuses reentrant checkpoints
            rows.append({name: p.grad.to_dense() for name, p in trainable.items() if p.grad is not None})
    finally:
        for name, p in trainable.items():
            p.grad = before[name]
    used = [name for name in trainable if any(name in row for row in rows)]
    zeros = {name: torch.zeros_like(trainable[name], requires_grad=False) for name in used}
    return {name: torch.stack([row.get(name, zeros[name]) for row in rows]) for name in used}


def compute_test_loss(outputs: Any, batch_dim: int = 0) -> Tensor:
    """A loss whose gradient differs for every entry of every output: fixed weights plus a quadratic term.

    It is a sum over the samples, which lie in `batch_dim` of the outputs: all samples have the same weights. Integer
    outputs are left out.
    """
    total: Any = 0
    for output in find_tensors(outputs):
        if not (output.is_floating_point() or output.is_complex()):
            continue
        shape = list(output.shape)
        if output.dim() > batch_dim:
            shape[batch_dim] = 1
        weights = torch.arange(1, 1 + max(1, torch.Size(shape).numel())).sin().view(shape)
        weights = weights.to(output.real.dtype)
        total = total + (output * weights).real.sum() + 0.5 * (output * output.conj()).real.sum()
    return total


def find_tensors(value: Any) -> list[Tensor]:
    """The tensors in the outputs of a model. A `PackedSequence` is padded, with the samples in dimension 0."""
    if isinstance(value, PackedSequence):
        value = pad_packed_sequence(value, batch_first=True)[0]
    return [leaf for leaf in _torch.pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def perturb(module: nn.Module) -> None:
    """Add positive noise to every parameter and floating-point buffer: an initial 0 or 1 can hide a missing factor."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]:
            noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 0.4 + 0.05
            tensor += noise.to(tensor.dtype)


def assert_rows_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-9) -> None:
    """Assert that per-sample gradients are equal, up to `tolerance` relative to the largest entry of each row.

    A row is the gradient of one sample for one parameter. Names, shapes and dtypes must be equal, too.

    >>> rows = {"weight": torch.ones(3, 2)}
    >>> assert_rows_close({"weight": rows["weight"] * 1.1}, rows)
    Traceback (most recent call last):
    AssertionError: weight: differs by 1.00e-01 of the scale of its row
    """
    assert actual.keys() == expected.keys(), f"parameters {list(actual)} instead of {list(expected)}"
    for name, want in expected.items():
        got = actual[name]
        assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)} instead of {tuple(want.shape)}"
        assert got.dtype == want.dtype, f"{name}: {got.dtype} instead of {want.dtype}"
        if not want.numel():
            continue
        difference, scale = (t.abs().reshape(len(want), -1).amax(1) for t in (got - want, want))
        error = (difference / scale.clamp(min=1e-3)).max()
        assert error < tolerance, f"{name}: differs by {float(error):.2e} of the scale of its row"
