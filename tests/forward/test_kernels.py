"""Large linear layers: the same outputs to the bit, and the gradients of their inputs by another library."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from persample import PerSampleError, record
from persample._torch import find_onednn_product
from persample.forward import kernels
from persample.terms import use_library
from persample.testing import assert_rows_close, loop_gradients
from tests.support.cases import Calls

pytestmark = pytest.mark.skipif(find_onednn_product() is None, reason="this torch has no oneDNN for this processor")
B, T, D = 40, 30, 256


@pytest.fixture(autouse=True)
def products_by_onednn() -> Iterator[None]:
    """On each processor."""
    with use_library("onednn"):
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the products by which a test computes the gradients of inputs."""
    made: list[tuple[int, ...]] = []
    original = kernels.multiply
    monkeypatch.setattr(kernels, "multiply", lambda a, b: (made.append((*a.shape, b.shape[1])), original(a, b))[1])
    return made


def make_model(forward: Callable[[Any, Tensor], Tensor] = lambda m, h: h, bias: bool = True) -> nn.Module:
    layers = {name: nn.Linear(D, D, bias=bias) for name in "ab"}
    return Calls(lambda m, x: m.b(forward(m, m.a(x).sin())), **layers)


def sum_losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sin().flatten(1).sum(1).sum()


def check(model: nn.Module, x: Tensor, tolerance: float = 1e-4) -> None:
    """Compare outputs with plain ones, to the bit, and rows with a loop in float64: at first, and on the hot path."""
    expected = loop_gradients(copy.deepcopy(model).double(), x.double(), sum_losses)
    plain = model(x)
    for _ in range(2):
        with record(model) as grads:
            out = model(x)
            out.sin().flatten(1).sum(1).sum().backward()
        assert torch.equal(out, plain)
        rows = {name: rows.double() for name, rows in grads.dense().items()}
        assert not any(rows[name].any() for name in rows.keys() - expected.keys())  # of parameters that are not used
        assert_rows_close({name: rows[name] for name in expected}, expected, tolerance)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(B, D), (B, 7, D), (B, 2, 3, D)])
def test_outputs_to_the_bit_and_gradients_of_inputs(
    shape: tuple[int, ...], bias: bool, calls: list[tuple[int, ...]]
) -> None:
    model, x = make_model(bias=bias), torch.randn(shape, requires_grad=True)
    plain = model(x)
    plain.sin().sum().backward()
    expected, x.grad = x.grad, None
    assert expected is not None
    for _ in range(2):  # the first time, and on the hot path
        with record(model) as grads:
            out = model(x)
            out.sin().flatten(1).sum(1).sum().backward()
        assert torch.equal(out, plain)
        torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-5)
        x.grad = None
        rows = {name: rows.double() for name, rows in grads.dense().items()}
        assert_rows_close(rows, loop_gradients(model.double(), x.detach().double(), sum_losses), tolerance=1e-4)
        model.float()
    assert calls


@pytest.mark.parametrize("name", ["addmm", "a computed weight"])
def test_which_products_are_computed_by_onednn(name: str, calls: list[tuple[int, ...]]) -> None:
    model = Further(FURTHER[name])
    for _ in range(2):
        with record(model):
            sum_losses(model, torch.randn(B, T, D)).backward()
    assert len(calls) == 2


def test_small_products_are_left_to_torch(calls: list[tuple[int, ...]]) -> None:
    with record(model := make_model()):
        sum_losses(model, torch.randn(3, D)).backward()
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_to_torch(dtype: torch.dtype, calls: list[tuple[int, ...]]) -> None:
    with record(model := make_model().to(dtype)):
        sum_losses(model, torch.randn(B, D, dtype=dtype)).backward()
    assert not calls


def test_autocast_is_left_to_torch(calls: list[tuple[int, ...]]) -> None:
    model, x = make_model(), torch.randn(B, D)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
        with record(model, loss_reduction="sum"):
            out = model(x)
            out.float().sin().sum().backward()
    assert torch.equal(out, plain) and not calls


INSIDE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "checkpoint": lambda m, h: checkpoint(lambda h: m.b(h).sin(), h, use_reentrant=False),
    "reentrant checkpoint": lambda m, h: checkpoint(lambda h: m.b(h).sin(), h, use_reentrant=True),
    "in place": lambda m, h: m.b(h).mul_(2).sin(),
    "a view in place": lambda m, h: (r := m.b(h), r[:, :2].mul_(2))[0].sin(),
    "saved elsewhere": lambda m, h: save_elsewhere(lambda: m.b(h).sin()),
    "used twice": lambda m, h: m.b(m.b(h).sin()),
    "without grad": lambda m, h: h + torch.no_grad()(lambda: m.b(h))(),
    "transposed": lambda m, h: m.b(h.t().contiguous().t()).sin(),
}


OUTSIDE = torch.randn(D)


class Further(nn.Module):
    """Weights and biases of large linear layers that are not the parameters of a layer."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(D, D), nn.Linear(D, D), forward
        self.vector = nn.Parameter(torch.randn(D) / D**0.5)
        self.number, self.rows = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(T, D))
        self.register_buffer("frozen", torch.randn(D, D) / D**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.a(x).sin())


FURTHER: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a bias of samples": lambda m, h: F.linear(h, m.b.weight, m.b(h.cos())),
    "a bias of samples alone": lambda m, h: F.linear(h.detach(), m.b.weight, m.a(h.cos())),
    "a computed bias": lambda m, h: F.linear(h, m.b.weight, 2 * m.b.bias),
    "a bias with a frozen weight": lambda m, h: F.linear(h, m.frozen.to(h.dtype), m.b.bias),
    "a frozen bias": lambda m, h: F.linear(h, m.b.weight, OUTSIDE.to(h.dtype)),
    "a computed weight": lambda m, h: F.linear(h, m.b.weight.t() + m.a.weight, m.b.bias),
    "an expanded weight": lambda m, h: F.linear(h, m.vector.expand(D, D), m.b.bias),
    "addmm": lambda m, h: torch.addmm(m.b.bias, h.flatten(0, 1), m.b.weight).view(h.shape),
    "addmm of rows": lambda m, h: torch.addmm(m.b(h[:, 0]), h[:, 1], m.b.weight),
    "addmm with factors": lambda m, h: torch.addmm(m.b.bias, h[:, 0], m.b.weight, beta=0.5, alpha=2),
    "addmm by names": lambda m, h: torch.addmm(input=m.b.bias, mat1=h[:, 0], mat2=m.b.weight),
    "addmm by some names": lambda m, h: torch.addmm(m.b.bias, mat1=h[:, 0], mat2=m.b.weight, beta=1, alpha=1),
    "addmm of a number": lambda m, h: torch.addmm(m.number, h[:, 0], m.b.weight),
    "a vector": lambda m, h: F.linear(h, m.vector)[..., None],
    "a number as the bias": lambda m, h: F.linear(F.linear(h, m.b.weight, m.b.bias).sin(), m.a.weight, m.number),
    "a bias for each position": lambda m, h: F.linear(F.linear(h, m.b.weight, m.b.bias).sin(), m.a.weight, m.rows),
}


@pytest.mark.parametrize("name", FURTHER)
def test_other_weights_and_biases(name: str) -> None:
    rows = 300 if name == "a vector" else B
    check(Further(FURTHER[name]), torch.randn(rows, T, D), tolerance=1e-3)


def test_a_bias_of_another_model_gets_its_gradient() -> None:
    bias = torch.zeros(D, requires_grad=True)
    model, x = Further(lambda m, h: F.linear(h, m.b.weight, bias)), torch.randn(B, D)
    for _ in range(2):
        model(x).sin().sum().backward()
        expected, bias.grad = bias.grad, None
        with record(model, loss_reduction="sum"):
            model(x).sin().sum().backward()
        torch.testing.assert_close(bias.grad, expected)
        bias.grad = None


def save_elsewhere(function: Callable[[], Tensor]) -> Tensor:
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return function()


@pytest.mark.parametrize("name", INSIDE)
def test_large_layers_in_all_kinds_of_models(name: str) -> None:
    check(make_model(INSIDE[name]), torch.randn(B, D))


def test_forward_mode_and_transforms_are_left_to_torch() -> None:
    weight, x = torch.randn(D, D), torch.randn(B, D, requires_grad=True)
    assert kernels._can_use_onednn(x, weight, None)
    with forward_ad.dual_level():
        assert not kernels._can_use_onednn(x, weight, None)
    found: list[bool] = []
    torch.vmap(lambda row: (row, found.append(kernels._can_use_onednn(x, weight, None)))[0])(x)
    assert found == [False]


def test_second_derivatives_are_refused_in_words() -> None:
    model, x = make_model(), torch.randn(B, D, requires_grad=True)
    for _ in range(2):
        with record(model), pytest.raises(PerSampleError, match="create_graph=True"):
            torch.autograd.grad(sum_losses(model, x), x, create_graph=True)


def test_a_weight_that_is_changed_before_the_backward_pass_is_refused() -> None:
    model, x = make_model(), torch.randn(B, D)
    for _ in range(2):
        with record(model), pytest.raises((RuntimeError, PerSampleError), match=r"in place|inplace"):
            loss = sum_losses(model, x)
            with torch.no_grad():
                model.b.weight.add_(1)
            loss.backward()
