"""Code of the user in the backward pass: it may change gradients, but not mix the samples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from persample import SamplesMixed, record
from persample.testing import assert_rows_close, loop_gradients
from tests.support.cases import Calls

B, D = 5, 3


def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def make_input() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(B, D).double()


def check(model: nn.Module) -> None:
    """Three passes, with rows equal to those of a loop."""
    for _ in range(3):
        x = make_input()
        with record(model) as grads:
            compute_loss(model, x).backward()
        assert_rows_close(grads.dense(), loop_gradients(copy.deepcopy(model), x, compute_loss))


def refuse(model: nn.Module, message: str) -> None:
    for verify in (None, False, None):
        with pytest.raises(SamplesMixed, match=message), record(model, verify=verify):
            compute_loss(model, make_input()).backward()


# ---- hooks ----

Change = Callable[[Tensor], Tensor | None]


def subtract_in_place(gradient: Tensor) -> None:
    gradient.sub_(gradient.mean(0))


def clip_if_large(gradient: Tensor) -> Tensor:
    return gradient / 10 if gradient.norm() > 1e-6 else gradient


SEPARATE: dict[str, Change] = {
    "scaled": lambda g: 0.5 * g,
    "own norms": lambda g: g / g.norm(dim=1, keepdim=True),
    "clamped": lambda g: g.clamp(-1, 1),
    "zeros": torch.zeros_like,
    "constants": lambda g: g * torch.arange(1.0, D + 1),
    "only read": lambda g: print(end=str(g.norm().item())[:0]),
    "only read by numpy": lambda g: print(end=str(g.numpy())[:0]),
}

MIXING: dict[str, Change] = {
    "centred": lambda g: g - g.mean(0),
    "centred in place": subtract_in_place,
    "norm": lambda g: g / g.norm(),
    "norm as a number": lambda g: g / g.norm().item(),
    "numpy": lambda g: g / float(np.linalg.norm(g.numpy())),
    "a list": lambda g: g / max(map(max, g.tolist())),
    "a decision": clip_if_large,
    "another order": lambda g: g.flip(0),
}


def make_model_with_tensor_hook(change: Change, layers: int) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).tanh()
        if h.requires_grad:
            h.register_hook(change)
        return m.a(h) if layers > 1 else h * 1

    return Calls(forward, a=nn.Linear(D, D)).double()


def make_model_with_module_hook(change: Change, is_first: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)).double()
    if is_first:
        model[1].register_full_backward_pre_hook(lambda m, after: None if (g := change(after[0])) is None else (g,))
    else:
        model[2].register_full_backward_hook(lambda m, before, _: None if (g := change(before[0])) is None else (g,))
    return model


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", SEPARATE)
def test_hooks_of_tensors(name: str, layers: int) -> None:
    check(make_model_with_tensor_hook(SEPARATE[name], layers))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", MIXING)
def test_hooks_of_tensors_that_mix_samples_are_refused(name: str, layers: int) -> None:
    refuse(make_model_with_tensor_hook(MIXING[name], layers), "The hook .* on a gradient, of Calls, mixes the samples")


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("name", SEPARATE)
def test_hooks_of_modules(name: str, is_first: bool) -> None:
    check(make_model_with_module_hook(SEPARATE[name], is_first))


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("name", [name for name in MIXING if "in place" not in name])  # torch refuses that
def test_hooks_of_modules_that_mix_samples_are_refused(name: str, is_first: bool) -> None:
    message = f"of a module {'Tanh' if is_first else 'Linear'}, mixes the samples"
    refuse(make_model_with_module_hook(MIXING[name], is_first), message)


def test_hooks_of_modules_are_restored() -> None:
    model = make_model_with_module_hook(SEPARATE["scaled"], is_first=False)
    (before,) = model[2]._backward_hooks.values()
    check(model)
    assert list(model[2]._backward_hooks.values()) == [before]


# ---- autograd.Function ----


class Straight(torch.autograd.Function):
    """Rounds, and passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round(decimals=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


class Reverse(torch.autograd.Function):
    """Returns a view, and reverses the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -0.5 * gradient


class Widen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x[:, None].expand(-1, 2, -1) * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 2 * gradient.sum(1)


class Norm(Straight):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / gradient.norm()


class NormOfView(Reverse):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * min(1.0, 1e-6 / float(gradient.norm()))


class CentredAndWidened(Widen):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (gradient - gradient.mean(0)).sum(1)


class Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, of_product: Tensor, of_sum: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return of_product * y + of_sum, of_product * x + of_sum


class MixedProducts(Products):
    @staticmethod
    def backward(ctx: Any, of_product: Tensor, of_sum: Tensor) -> Any:
        return of_product - of_product.mean(0), of_sum


SEPARATE_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "straight": Straight.apply,
    "a view": lambda h: Reverse.apply(h).sin(),
    "more rows": Widen.apply,
    "two outputs": lambda h: sum(Products.apply(h, h.sin())),  # type: ignore[arg-type, return-value]
}

MIXING_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": Norm.apply,
    "norm of a view": lambda h: NormOfView.apply(h).sin(),
    "more rows": CentredAndWidened.apply,
    "two outputs": lambda h: sum(MixedProducts.apply(h, h.sin())),  # type: ignore[arg-type, return-value]
}


@pytest.mark.parametrize("name", SEPARATE_FUNCTIONS)
def test_the_backward_of_custom_functions(name: str) -> None:
    check(Calls(lambda m, x: m.a(SEPARATE_FUNCTIONS[name](m.a(x))), a=nn.Linear(D, D)).double())


@pytest.mark.parametrize("name", MIXING_FUNCTIONS)
def test_a_backward_of_custom_functions_that_mixes_samples_is_refused(name: str) -> None:
    model = Calls(lambda m, x: m.a(MIXING_FUNCTIONS[name](m.a(x))), a=nn.Linear(D, D)).double()
    refuse(model, "The backward of .*, an autograd.Function called in .*, mixes the samples")


class CentredLater(torch.autograd.Function):
    """Centres the gradient if it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, centres: bool) -> Tensor:
        ctx.centres = centres
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 2 * (gradient - gradient.mean(0) if ctx.centres else gradient), None


def test_a_custom_function_with_other_settings_in_a_later_pass() -> None:
    model = Calls(lambda m, x: m.a(CentredLater.apply(m.a(x), m.centres)), a=nn.Linear(D, D)).double()
    model.centres = False
    for _ in range(3):
        check(model)
    model.centres = True
    for _ in range(12):
        refuse(model, "The backward of .*, an autograd.Function called in .*, mixes the samples")
