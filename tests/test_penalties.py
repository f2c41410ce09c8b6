"""Norms that can be differentiated, and the gradient of a penalty, against a loop with a double backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import PerSampleError, differentiable_norms, record
from persample.testing.oracle import perturb

B, D = 4, 3


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.qkv = nn.Embedding(7, D), nn.LayerNorm(D), nn.Linear(D, 3 * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(self.words(x))).chunk(3, -1)
        return ((q @ k.mT).softmax(-1) @ v) @ self.words.weight.T


def compute_text_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().flatten(1).sum(1).mean()


def make_images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, D))


CASES: dict[str, Any] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, D)),
        lambda: (torch.randn(B, D, dtype=torch.float64), torch.arange(B) % D),
        nn.CrossEntropyLoss(),
    ),
    "images": (
        make_images,
        lambda: (torch.randn(B, 2, 4, 4, dtype=torch.float64), torch.arange(B) % D),
        F.cross_entropy,
    ),
    "text": (Text, lambda: {"x": torch.randint(0, 7, (B, 5))}, compute_text_loss),
}


def take(batch: Any, n: int) -> Any:
    if isinstance(batch, dict):
        return {name: value[n : n + 1] for name, value in batch.items()}
    return tuple(value[n : n + 1] for value in batch)


def compute_one(model: nn.Module, sample: Any, loss_fn: Any) -> Tensor:
    return loss_fn(model, sample) if isinstance(sample, dict) else loss_fn(model(sample[0]), sample[1])


@pytest.mark.parametrize("name", CASES)
def test_norms_and_their_gradient(name: str) -> None:
    torch.manual_seed(0)
    make_model, make_batch, loss_fn = CASES[name]
    model, batch = make_model().double(), make_batch()
    perturb(model)
    weights = torch.linspace(0.5, 2, B, dtype=torch.float64)
    parameters = list(model.parameters())
    expected = []
    for n in range(B):
        grads = torch.autograd.grad(compute_one(model, take(batch, n), loss_fn), parameters, create_graph=True)
        expected.append(torch.cat([grad.flatten() for grad in grads]).norm())
    norms = differentiable_norms(model, batch, loss_fn)
    torch.testing.assert_close(norms, torch.stack(expected))
    found = torch.autograd.grad(weights @ norms, parameters)
    for actual, wanted in zip(found, torch.autograd.grad(weights @ torch.stack(expected), parameters), strict=True):
        torch.testing.assert_close(actual, wanted)
    if not isinstance(batch, dict):
        with record(model) as recorded:
            loss_fn(model(batch[0]), batch[1]).backward()
        torch.testing.assert_close(norms.detach(), recorded.norms())


def test_gradient_of_zero_rows_is_finite() -> None:
    model, x = nn.Linear(D, 1).double(), torch.zeros(2, D, dtype=torch.float64)
    norms = differentiable_norms(model, x, lambda model, x: (model(x) - model(x).detach()).square().sum())
    norms.sum().backward()
    assert norms.tolist() == [0, 0] and bool(torch.isfinite(model.weight.grad).all())


@pytest.mark.parametrize("index", [(0, 0), (3, 1)])
def test_gradient_equals_differences(index: tuple[int, int]) -> None:
    """The loop of the other test is plain autograd; this one is not."""
    torch.manual_seed(0)
    model, batch = Text().double(), {"x": torch.randint(0, 7, (B, 5))}
    weight, step = model.words.weight, 1e-6
    norms = differentiable_norms(model, batch, compute_text_loss)
    (grad,) = torch.autograd.grad(norms.sum(), weight)
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight[index] += sign * step
        values.append(float(differentiable_norms(model, batch, compute_text_loss).sum().detach()))
        with torch.no_grad():
            weight[index] -= sign * step
    assert float(grad[index]) == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5, abs=1e-6)


def test_batch_dimension_and_empty_batch() -> None:
    model, x = nn.Linear(D, 2).double(), torch.randn(5, B, D, dtype=torch.float64)
    norms = differentiable_norms(model, x, lambda model, x: model(x).square().sum(), batch_dim=1)
    same = differentiable_norms(model, x.transpose(0, 1), lambda model, x: model(x).square().sum())
    torch.testing.assert_close(norms, same)
    assert differentiable_norms(model, x[:, :0], lambda model, x: model(x).sum(), batch_dim=1).shape == (0,)


def test_frozen_model_is_refused() -> None:
    with pytest.raises(PerSampleError, match="require grad"):
        differentiable_norms(nn.Linear(D, 1).requires_grad_(False), torch.ones(2, D), lambda model, x: model(x).sum())


@pytest.mark.parametrize("ask", ["backward", "inputs"])
def test_recordings_refuse_second_derivatives_and_say_what_to_do(ask: str) -> None:
    model, x = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 1)), torch.randn(B, D, requires_grad=True)
    with pytest.raises(PerSampleError, match="differentiable_norms"), record(model):
        loss = model(x).square().sum()
        if ask == "backward":
            loss.backward(create_graph=True)
        else:  # the penalty of WGAN-GP
            torch.autograd.grad(loss, x, create_graph=True)
