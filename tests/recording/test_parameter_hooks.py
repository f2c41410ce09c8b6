"""Hooks on the gradients of parameters are refused by name: they would not run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from persample import PerSampleError, call_for_per_sample_grads, record, watch
from persample import compile as compile_step
from tests.support.cases import Calls, param
from tests.support.modules import make_mlp

B, D = 4, 3


def mask_gradient(grad: Tensor) -> Tensor:
    return grad * 0


def add_hook(p: Tensor) -> Any:
    return p.register_hook(mask_gradient)


def add_object(p: Tensor) -> Any:
    class Mask:
        def __call__(self, grad: Tensor) -> Tensor:
            return grad * 0

    return p.register_hook(Mask())


def add_hook_after_accumulation(p: Tensor) -> Any:
    return p.register_post_accumulate_grad_hook(lambda p: p.grad.zero_())


def add_multi_hook(p: Tensor) -> Any:
    return register_multi_grad_hook([p], lambda grads: None)


HOOKS = [add_hook, add_object, add_hook_after_accumulation, add_multi_hook]


def make_model() -> tuple[nn.Module, Tensor]:
    return make_mlp(D, D, 2, seed=None, dtype=torch.float32), torch.randn(B, D)


@pytest.mark.parametrize("add", HOOKS)
def test_record_refuses_hooks_by_name(add: Any) -> None:
    model, x = make_model()
    handle = add(model[2].weight)
    with pytest.raises(PerSampleError, match=r"'2\.weight' has a hook on its gradient"), record(model):
        model(x)
    handle.remove()
    with record(model) as grads:
        model(x).sum().backward()
    assert grads.norms().all()


@pytest.mark.parametrize("add", HOOKS)
def test_watch_refuses_hooks_by_name(add: Any) -> None:
    model, x = make_model()
    with watch(model, lambda grads: None, {"keep": "norms"}):
        model(x).sum().backward()
        handle = add(model[0].bias)
        with pytest.raises(PerSampleError, match=r"'0\.bias' has a hook on its gradient"):
            model(x)
        handle.remove()
        model(x).sum().backward()


@pytest.mark.parametrize("add", HOOKS)
def test_other_front_ends_refuse_hooks_by_name(add: Any) -> None:
    model, x = make_model()
    step = compile_step(model, lambda model, x: model(x).sum(), lambda grads: grads.norms(), backend="eager")
    step(x)
    handle = add(model[2].weight)
    with pytest.raises(PerSampleError, match=r"'2\.weight' has a hook on its gradient"):
        call_for_per_sample_grads(model)(x)
    with pytest.raises(PerSampleError, match=r"'2\.weight' has a hook on its gradient"):
        step(x)
    handle.remove()
    step(x)


def test_hooks_on_parameters_that_are_not_recorded() -> None:
    model, x = make_model()
    model[0].weight.register_hook(mask_gradient)
    with record(model, parameters=["2.weight"]) as grads:
        model(x).sum().backward()
    assert grads.norms().all()
    with (
        pytest.raises(PerSampleError, match=r"'0\.weight' has a hook"),
        record(model, parameters=["2.weight"], keep_grad=True),
    ):
        model(x)  # p.grad would lack the mask
    model[0].weight.requires_grad_(False)
    with record(model) as grads:
        model(x).sum().backward()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_forward_registers_is_refused(register: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        getattr(m.w, register)(lambda grad: None)
        return m.a(x) * m.w

    model = Calls(forward, a=nn.Linear(D, D), w=param(D))
    with pytest.raises(PerSampleError, match=f"{register} of a weight is called in Calls"), record(model):
        model(torch.randn(B, D))
    assert not model.w._backward_hooks and not model.w._post_accumulate_grad_hooks


def test_a_hook_on_a_derived_weight_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        weight = m.w.t()
        weight.register_hook(mask_gradient)
        return x @ weight

    model = Calls(forward, w=param(2, D))
    with pytest.raises(PerSampleError, match="register_hook of a weight"), record(model):
        model(torch.randn(B, D))


def test_hooks_on_activations_run() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        h.register_hook(lambda grad: 2 * grad)
        return h

    model, x = Calls(forward, a=nn.Linear(D, D)), torch.randn(B, D)
    with record(model, loss_reduction="sum") as grads:
        model(x).sum().backward()
    torch.testing.assert_close(grads.dense()["a.bias"], torch.full((B, D), 2.0))
