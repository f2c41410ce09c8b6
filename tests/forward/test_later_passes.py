"""Later passes of a model, which repeat the plans of the first one, equal the loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from persample import call_for_per_sample_grads, record
from persample.testing.oracle import assert_rows_close, compute_test_loss, stack_gradients


def check_three_passes(model: nn.Module, x: Tensor) -> None:
    """Both front ends equal the loop in the first pass, and in later ones, which repeat the plans of the first."""
    parameters = dict(model.named_parameters())
    expected = stack_gradients((compute_test_loss(model(x[n : n + 1])) for n in range(len(x))), parameters)
    for _ in range(3):
        with record(model, loss_reduction="sum") as grads:
            compute_test_loss(model(x)).backward()
        assert_rows_close(grads.dense(expected), expected)
        compute_test_loss(call_for_per_sample_grads(model)(x)).backward()
        assert_rows_close({name: parameters[name].grad_sample for name in expected}, expected)
        for parameter in parameters.values():
            parameter.__dict__.pop("grad_sample", None)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, partial(nn.GroupNorm, 2)])
def test_numbers_are_part_of_a_plan(norm: Callable[..., nn.Module]) -> None:
    """The rows of a norm's weight depend on its eps, which differs between the norms of a model and between models."""
    for eps in (1e-12, 1e-2, 1.0):
        model = nn.Sequential(nn.Linear(4, 4), norm(4, eps=eps), nn.Linear(4, 4), norm(4, eps=3 * eps))
        check_three_passes(model.double(), 0.1 * torch.randn(3, 4, dtype=torch.float64))


def set_on_input(x: Tensor) -> Tensor:
    x = x[:]
    x.requires_grad = True
    return x


# Activations that require grad without a weight behind them, as the feature encoders of speech models make them.
REQUIRING: dict[str, Callable[[Tensor], Tensor]] = {
    "attribute": set_on_input,
    "method": lambda x: x[:].requires_grad_() * 2,
    "zeros_like": lambda x: x + torch.zeros_like(x, requires_grad=True),
    "new_zeros": lambda x: x + x.new_zeros(x.shape, requires_grad=True),
    "detached": lambda x: (x * 2).detach().requires_grad_(),
}


@pytest.mark.parametrize("name", REQUIRING)
def test_activations_that_require_grad_without_a_weight(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(REQUIRING[name](x)).relu())

    check_three_passes(Model().double(), torch.randn(3, 4, dtype=torch.float64))
