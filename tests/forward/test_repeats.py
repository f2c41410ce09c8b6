"""A call that repeats the last one at its place is not followed anew; one that differs is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import SamplesMixed, record
from persample.forward.program import Site
from persample.testing import assert_rows_close, loop_gradients

pytestmark = pytest.mark.quick

B, T, D = 3, 4, 5


class Model(nn.Module):
    """Runs a function of itself and of an activation that requires grad."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.weight, self.bias = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(D))
        self.eps, self.dim, self.shape = 1e-5, 2, (D,)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.first(x))


def normalise(model: Model, h: Tensor) -> Tensor:
    return F.layer_norm(h, model.shape, model.weight, model.bias, model.eps)


def use_linear(model: Model, h: Tensor) -> Tensor:
    return F.linear(h, model.second.weight, model.second.bias)


def use_softmax(model: Model, h: Tensor) -> Tensor:
    return torch.softmax(h, model.dim)


def divide(model: Model, h: Tensor) -> Tensor:
    return h / math.sqrt(D)  # another object in each pass


def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).sum(1).sum()


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each comparison of a call with the last one: whether they were alike."""
    found: list[bool] = []
    original = Site.matches

    def matches(self: Site, *args: Any) -> bool:
        found.append(original(self, *args))
        return found[-1]

    monkeypatch.setattr(Site, "matches", matches)
    return found


def check_rows(model: nn.Module, x: Tensor) -> None:
    with record(model) as grads:
        compute_loss(model, x).backward()
    expected, rows = loop_gradients(model, x, compute_loss), grads.dense()
    assert_rows_close({name: rows[name] for name in expected}, expected)
    assert not any(rows[name].any() for name in rows.keys() - expected.keys())


def make_model(function: Callable[[Any, Tensor], Tensor]) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    return Model(function).double(), torch.randn(B, T, D, dtype=torch.float64)


@pytest.mark.parametrize("function", [normalise, use_linear, use_softmax, divide])
def test_later_passes_repeat_the_calls(function: Callable[[Any, Tensor], Tensor], hits: list[bool]) -> None:
    model, x = make_model(function)
    for _ in range(3):
        check_rows(model, x)
    hits.clear()
    check_rows(model, x)
    assert hits and all(hits)
    hits.clear()
    check_rows(model, torch.randn(7, 6, D, dtype=torch.float64))  # sizes make no difference
    assert hits and all(hits)


def change_eps(model: Any, x: Tensor) -> Tensor:
    model.eps = 0.5
    return x


def swap_parameters(model: Any, x: Tensor) -> Tensor:
    model.weight, model.bias = model.bias, model.weight
    model.second, model.first = model.first, model.second
    return x


def replace_parameters(model: Any, x: Tensor) -> Tensor:
    for name in ("weight", "bias"):
        setattr(model, name, nn.Parameter(torch.randn(D, dtype=torch.float64)))
    model.second = nn.Linear(D, D).double()
    return x


def freeze_bias(model: Any, x: Tensor) -> Tensor:
    model.bias.requires_grad_(False)
    model.second.bias.requires_grad_(False)
    return x


def drop_dim(model: Any, x: Tensor) -> Tensor:
    model.dim = 1
    return x[:, 0].contiguous()


@pytest.mark.parametrize("change", [change_eps, swap_parameters, replace_parameters, freeze_bias, drop_dim])
@pytest.mark.parametrize("function", [normalise, use_linear, use_softmax])
def test_a_call_that_differs_is_followed(
    function: Callable[[Any, Tensor], Tensor], change: Callable[[Any, Tensor], Tensor]
) -> None:
    model, x = make_model(function)
    for _ in range(3):
        check_rows(model, x)
    changed = change(model, x)
    for _ in range(2):
        check_rows(model, changed)


def test_a_dim_that_mixes_samples_is_refused() -> None:
    model, x = make_model(use_softmax)
    for _ in range(3):
        check_rows(model, x)
    model.dim = 0
    with pytest.raises(SamplesMixed, match="softmax"):
        check_rows(model, x)
    model.dim = 2
    check_rows(model, x)


def test_samples_in_another_dim_are_followed() -> None:
    """The same functions, dimensions and parameters; the samples lie in dimension 1."""
    model, x = make_model(use_softmax)
    for _ in range(3):
        check_rows(model, x)
    model.dim = 1  # combines the samples of the next batch, which lie there
    with pytest.raises(SamplesMixed), record(model, batch_dim=1):
        model(x.transpose(0, 1).contiguous()).square().sum().backward()


def test_calls_that_keep_differing_are_not_compared(hits: list[bool]) -> None:
    model, x = make_model(lambda model, h: F.layer_norm(h, [D], model.weight, model.bias, float(torch.rand(()))))
    for _ in range(2):
        with record(model):
            compute_loss(model, x).backward()
    counts = []
    for _ in range(6):
        hits.clear()
        with record(model):
            compute_loss(model, x).backward()
        counts.append(len(hits))
    assert counts[-1] <= counts[0] and all(hits)
