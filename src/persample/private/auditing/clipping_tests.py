"""Tests of the clipping: how much one outlier, a sample or a unit, changes the released sum.

The outlier is in a batch with other samples, whose gradients are zero. No noise is added, so that the release is the
clipped gradient of the outlier itself, and its norm is compared with the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from persample._internal.rng import preserve_rng
from persample._internal.tree import iterate_tensors, map_tensors
from persample.losses import LossFunction, call_model, compute_loss
from persample.private.auditing.direct import (
    DirectTest,
    NotTested,
    get_parameters,
    get_unit,
    make_uncounted_steps,
    read_release,
)
from persample.private.units import UnitBatch

_SCALES = (1e3, 1e6, 1e9)  # of the outlier's loss
_REACHED = 0.99  # an outlier whose change is smaller was not clipped
_TOLERANCE = 1e-3  # rounding of a clipped gradient, relative to the bound
_SMALL, _LARGE = 7, 64  # samples in a batch: the arithmetic of small batches is another one
_PLACES = (1, 3, 4, 6)  # of the outlier's samples in the batch: all of them for a unit, or the first for a sample


def test_outlier(
    optimizer: Any,
    model: nn.Module,
    loss_fn: LossFunction | None,
    samples: Dataset[Any],
    collate: Callable[[list[Any]], Any],
) -> DirectTest:
    """Whether a sample, or a unit with several samples, with a very large loss changes the sum by the bound at most.

    The loss of the training says how the model is called. Without it, the model is called with the inputs of a pair.
    """
    units = getattr(optimizer, "units", None)
    if isinstance(units, int):
        raise NotTested(f"the training loop makes the {units} samples of each unit")
    places = _PLACES[:1] if units is None else _PLACES
    device = get_parameters(optimizer)[0].device
    move: Callable[[Tensor], Tensor] = lambda t: t.to(device)  # noqa: E731
    changes = []
    with preserve_rng(), make_uncounted_steps(optimizer):
        for size in {_SMALL, min(_LARGE, max(_SMALL, round(optimizer.expected_batch_size)))}:
            batch = map_tensors(move, collate([samples[int(i not in places)] for i in range(size)]))
            weights = move(torch.tensor([float(i in places) for i in range(size)]))
            ids = None if units is None else torch.tensor([size if i in places else i for i in range(size)])
            changes += [_measure(optimizer, model, loss_fn, batch, weights * scale, ids) for scale in _SCALES]
    change = max(changes)
    if change < _REACHED:
        raise NotTested(f"the gradient of the outlier is too small: {change:.3g} times the bound")
    finding = f"an outlier changes the sum by {change:.3f} times the bound"
    return DirectTest("clipping" if units is None else "clipping of units", finding, float(change <= 1 + _TOLERANCE))


def _measure(
    optimizer: Any,
    model: nn.Module,
    loss_fn: LossFunction | None,
    batch: Any,
    weights: Tensor,
    units: Tensor | None,
) -> float:
    """The norm of the sum of a batch in which each sample's loss has a weight, in units of the bound."""
    optimizer.zero_grad()
    optimizer.noise_multiplier = 0.0
    bound = float(optimizer.max_grad_norm)
    if hasattr(optimizer, "add_samples"):
        content = (batch, weights)
        optimizer.add_samples(content if units is None else UnitBatch(units, content))
    outputs = _call_model(model, loss_fn or _call_with_inputs, batch)
    rows = _find_rows(outputs, len(weights))
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(rows.shape[1:], generator=generator).to(rows)
    losses = (rows * direction).flatten(1).sum(1) * weights.to(rows)
    (losses.mean() if optimizer.loss_reduction == "mean" else losses.sum()).backward()
    unit = get_unit(optimizer)
    optimizer.step()
    optimizer.max_grad_norm = bound  # adaptive clipping has changed it
    return float(torch.stack([part.double().square().sum() for part in read_release(optimizer, unit)]).sum().sqrt())


class _Listener:
    """Calls a model for a loss, and adds what it returns to `outputs`."""

    def __init__(self, model: nn.Module, outputs: list[Any]) -> None:
        self._model, self._outputs = model, outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._outputs.append(self._model(*args, **kwargs))
        return self._outputs[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _call_model(model: nn.Module, loss_fn: LossFunction, batch: Any) -> Any:
    """What the model returns when the loss calls it."""
    outputs: list[Any] = []
    compute_loss(cast(nn.Module, _Listener(model, outputs)), batch, loss_fn)
    if len(outputs) != 1:
        raise NotTested(f"loss_fn calls the model {len(outputs)} times")
    return outputs[0]


def _call_with_inputs(model: nn.Module, batch: Any) -> Any:
    """Call the model with the first part of a batch, or with a dict of arguments, if there is no loss."""
    return call_model(model, batch[0] if isinstance(batch, (tuple, list)) else batch)


def _find_rows(outputs: Any, count: int) -> Tensor:
    """A tensor of the outputs with a row for each sample."""
    for t in iterate_tensors(outputs):
        if t.is_floating_point() and t.requires_grad and t.dim() and len(t) == count:
            return t
    raise NotTested(f"the model returns no tensor with {count} rows for {count} samples")
