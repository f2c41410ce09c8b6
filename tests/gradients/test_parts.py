"""Gradients of some parameters, and gradients multiplied entry by entry, against a loop over samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample
from persample.testing.oracle import stack_gradients

NAMES = ["0.weight", "2.bias"]


def make_case() -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Conv1d(3, 2, 2)).double()
    x = torch.randn(3, 2, 6, dtype=torch.float64)
    losses = (model(row[None]).square().sum() for row in x)
    return model, x, stack_gradients(losses, dict(model.named_parameters()))


def record(model: nn.Module, x: Tensor, reduction: str) -> Any:
    with persample.record(model, verify=False) as grads:
        losses = model(x).square().sum((1, 2))
        getattr(losses, reduction)().backward()
    return grads


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_selected_gradients(reduction: str) -> None:
    model, x, expected = make_case()
    chosen = record(model, x, reduction).select(NAMES)
    for name, rows in chosen.dense().items():
        torch.testing.assert_close(rows, expected[name] if name in NAMES else torch.zeros_like(expected[name]))
    squares = torch.stack([expected[name].flatten(1).square().sum(1) for name in NAMES]).sum(0)
    torch.testing.assert_close(chosen.norms(), squares.sqrt())


@pytest.mark.parametrize("method", ["tensor", "sparse"])
def test_projections_of_parts_add_up(method: Any) -> None:
    model, x, expected = make_case()
    grads = record(model, x, "sum")
    rest = [name for name in expected if name not in NAMES]
    parts = grads.select(NAMES).project(16, 0, method) + grads.select(rest).project(16, 0, method)
    torch.testing.assert_close(parts, grads.project(16, 0, method))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_scaled_gradients(reduction: str) -> None:
    model, x, expected = make_case()
    factors = {name: torch.rand_like(p) for name, p in model.named_parameters() if name in NAMES}
    scaled = record(model, x, reduction).scale(factors)
    for name, rows in scaled.dense().items():
        torch.testing.assert_close(rows, expected[name] * factors.get(name, 1.0))
    assert scaled.batch_size == 3


def test_unknown_parameter() -> None:
    model, x, _ = make_case()
    with pytest.raises(persample.PerSampleError, match="'magic' is not a parameter"):
        record(model, x, "sum").select(["magic"])
