"""A training run goes on as without the monitor where a step cannot be measured; it is skipped, and logged once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import persample
from persample import PerSampleError

STEPS = 5

# What trains one step: calls the model and backward, with the number of the step.
Step = Callable[[nn.Module, Tensor, Tensor], None]


class Body(nn.Module):
    """Two layers, with what `between` does to the hidden units."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor] = lambda model, h: h) -> None:
        super().__init__()
        self.first, self.norm, self.middle = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.last, self.dropout = nn.Linear(8, 3), nn.Dropout(0.2)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.first(x).tanh())
        return self.last(self.between(self, h).relu())


class Double(torch.autograd.Function):
    """An autograd.Function with a weight."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        return h @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        h, weight = ctx.saved_tensors
        return grad @ weight.T, h.T @ grad


def subtract_mean(model: Any, h: Tensor) -> Tensor:
    h = h * 1.5
    h -= h.mean(0)
    return model.middle(h)


def checkpoint_twice(model: Any, h: Tensor) -> Tensor:
    """Batch norm between two checkpoints: only the first one was recorded."""
    h = checkpoint(lambda h: model.middle(h.tanh()).relu(), h, use_reentrant=False)
    return checkpoint(lambda h: model.middle(h.tanh()), model.norm(h), use_reentrant=False)


def checkpoint_mixing(model: Any, h: Tensor) -> Tensor:
    """Batch norm in the middle of a checkpoint."""
    return checkpoint(lambda h: model.middle(model.norm(model.middle(h))), h, use_reentrant=False)


def checkpoint_layer(model: Any, h: Tensor) -> Tensor:
    return checkpoint(lambda h: model.middle(h.tanh()).relu(), h, use_reentrant=False)


def compute_plain_loss(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()


def add_penalty(model: Any, x: Tensor, y: Tensor) -> None:
    penalty = sum(p.square().sum() for p in model.parameters())
    (F.cross_entropy(model(x), y) + 0.1 * penalty).backward()


def add_penalty_in_its_own_pass(model: Any, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()
    (0.1 * model.last.weight.square().sum()).backward()


def back_propagate_twice(model: nn.Module, x: Tensor, y: Tensor) -> None:
    out = model(x)
    F.cross_entropy(out, y).backward(retain_graph=True)
    out.square().mean().backward()


def compare_samples(model: nn.Module, x: Tensor, y: Tensor) -> None:
    out = model(x)
    (out @ out.T).softmax(1).log().mean().backward()


def use_a_layer_as_function(model: Any, x: Tensor, y: Tensor) -> None:
    hidden = F.linear(x, model.first.weight)
    (F.cross_entropy(model(x), y) + hidden.square().mean()).backward()


def divide_by_a_count(model: nn.Module, x: Tensor, y: Tensor) -> None:
    loss = F.cross_entropy(model(x), y, reduction="none")
    (loss.sum() / (y == 1).sum()).backward()


def compute_gradients_twice(model: Any, x: Tensor, y: Tensor) -> None:
    out = model(x)
    losses = [F.cross_entropy(out, y), out.square().mean()]
    norms = [torch.autograd.grad(loss, model.first.weight, retain_graph=True)[0].norm().item() for loss in losses]
    (losses[0] * norms[0] + losses[1] * norms[1]).backward()


def compute_gradients_after_backward(model: Any, x: Tensor, y: Tensor) -> None:
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    parameters = list(model.parameters())
    for p, grad in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
        p.grad = None if grad is None else p.grad + 0.1 * grad


def mix_and_compute_gradients(model: Any, x: Tensor, y: Tensor) -> None:
    out = model(x)
    set_gradients(model, F.cross_entropy(out - out.mean(0), y))


def compute_gradients(model: Any, x: Tensor, y: Tensor) -> None:
    set_gradients(model, F.cross_entropy(model(x), y))


def set_gradients(model: Any, loss: Tensor) -> None:
    parameters = [p for name, p in model.named_parameters() if not name.startswith("norm")]
    for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = grad


def call_with_other_weights(model: Any, x: Tensor, y: Tensor) -> None:
    weights = {name: 0.5 * p for name, p in model.named_parameters()}
    F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y).backward()


def hook_parameters(model: Any, x: Tensor, y: Tensor) -> None:
    handle = model.last.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    F.cross_entropy(model(x), y).backward()
    handle.remove()


def call_without_samples(model: Any, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x[:0]), y[:0], reduction="sum").backward()


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Step]] = {
    "batch norm": (lambda model, h: model.norm(h), compute_plain_loss),
    "batch norm and weights behind it": (lambda model, h: model.middle(model.norm(h)), compute_plain_loss),
    "mean over samples, in place": (subtract_mean, compute_plain_loss),
    "reentrant checkpoint": (lambda m, h: checkpoint(m.middle, h, use_reentrant=True), compute_plain_loss),
    "batch norm between checkpoints": (checkpoint_twice, compute_plain_loss),
    "batch norm in a checkpoint": (checkpoint_mixing, compute_plain_loss),
    "checkpoint and two passes": (checkpoint_layer, back_propagate_twice),
    "checkpoint and contrastive loss": (checkpoint_layer, compare_samples),
    "hidden weight": (lambda model, h: Double.apply(h, model.middle.weight), compute_plain_loss),
    "vmap": (lambda model, h: torch.func.vmap(lambda v: model.middle(v))(h), compute_plain_loss),
    "two passes": (lambda model, h: model.middle(h), back_propagate_twice),
    "contrastive loss": (lambda model, h: model.middle(h), compare_samples),
    "autograd.grad twice": (lambda model, h: model.middle(h), compute_gradients_twice),
    "autograd.grad after backward": (lambda model, h: model.middle(h), compute_gradients_after_backward),
    "autograd.grad of mixed samples": (lambda model, h: model.middle(h), mix_and_compute_gradients),
    "functional_call": (lambda model, h: model.middle(h), call_with_other_weights),
    "parameter hook": (lambda model, h: model.middle(h), hook_parameters),
    "no samples": (lambda model, h: model.middle(h), call_without_samples),
    "layer as a function before the call": (lambda model, h: model.middle(h), use_a_layer_as_function),
    "checkpoint and layer as a function": (checkpoint_layer, use_a_layer_as_function),
}


def train(model: nn.Module, step: Step) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    torch.manual_seed(1)
    for _ in range(STEPS):
        x, y = torch.randn(6, 4).double(), torch.randint(3, (6,))
        y[0] = 1
        optimizer.zero_grad()
        step(model, x, y)
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def make_model(between: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return Body(between).double()


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_steps_that_cannot_be_measured_are_skipped(case: str, every: int, caplog: pytest.LogCaptureFixture) -> None:
    between, step = CASES[case]
    expected = train(make_model(between), step)
    model = make_model(between)
    with caplog.at_level(logging.WARNING), persample.monitor(model, every=every) as watching:
        found = train(model, step)
        assert not watching.history
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)
    (record,) = caplog.records
    assert record.name == "persample.monitoring" and "is not measured" in record.getMessage()
    assert not model._forward_pre_hooks and all(not p._backward_hooks for p in model.parameters())


@pytest.mark.parametrize("between", [lambda model, h: model.middle(h), checkpoint_layer])
@pytest.mark.parametrize("step", [add_penalty_in_its_own_pass, add_penalty, compute_gradients, divide_by_a_count])
def test_steps_that_can_be_measured(step: Step, between: Callable[[Any, Tensor], Tensor]) -> None:
    expected = train(make_model(between), step)
    model = make_model(between)
    with persample.monitor(model, every=1) as watching:
        found = train(model, step)
    assert len(watching.history) == STEPS
    torch.testing.assert_close(found, expected)


def test_second_derivatives_are_refused() -> None:
    model, x = make_model(lambda model, h: model.middle(h)), torch.randn(6, 4).double().requires_grad_()
    with persample.monitor(model, every=2):
        with pytest.raises(PerSampleError, match=r"A monitor measures this step: end it with its stop\(\)"):
            torch.autograd.grad(model(x).sum(), x, create_graph=True)
        torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().sum().backward()


def test_steps_are_measured_again_when_they_can_be(caplog: pytest.LogCaptureFixture) -> None:
    model, x, y = make_model(lambda model, h: model.norm(h)), torch.randn(6, 4).double(), torch.zeros(6).long()
    with persample.monitor(model, every=1) as watching:
        compute_plain_loss(model, x, y)
        model.norm.eval()
        compute_plain_loss(model, x, y)
        compute_plain_loss(model, x, y)
        assert [found.step for found in watching.history] == [1, 2]
