"""Backward passes: repeated, failed, of parts of the graph, and what they free."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from persample import PerSampleError, call_for_per_sample_grads, record
from persample.testing.oracle import assert_rows_close, compute_test_loss, find_tensors
from tests.support.case import Case, loop_gradients
from tests.support.cases import CASES, B, Calls, D, T, param
from tests.support.modules import get_grad_samples

pytestmark = pytest.mark.quick


def test_second_backward_raises() -> None:
    loss = call_for_per_sample_grads(nn.Linear(D, D))(torch.randn(B, D)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_second_backward_over_a_retained_graph_accumulates() -> None:
    module, x = nn.Linear(D, D).double(), torch.randn(B, D).double()
    loss = compute_test_loss(call_for_per_sample_grads(module)(x), 0)
    loss.backward(retain_graph=True)
    loss.backward()
    assert_rows_close(get_grad_samples(module), {name: 2 * rows for name, rows in loop_gradients(module, x).items()})


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(D, D), (B, D)),
        (nn.Conv1d(D, D, 2), (B, D, T)),
        (nn.LayerNorm(D), (B, D)),
        (nn.GroupNorm(2, D), (B, D, T)),
        (nn.LSTM(D, D, batch_first=True), (B, T, D)),
        (Calls(lambda m, h: h * m.g, g=param(D)), (B, D)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_input_changed_in_place_raises(module: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    output = call_for_per_sample_grads(module)(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (output[0] if isinstance(output, tuple) else output).sum().backward()


def add_and_remove(h: Tensor) -> None:
    handle = h.register_hook(lambda grad: grad * 2)
    h.register_hook(lambda grad: grad * 3)
    handle.remove()


HOOKS: dict[str, Any] = {
    "two": lambda h: (h.register_hook(lambda grad: grad * 2), h.register_hook(lambda grad: grad + 1)),
    "three": lambda h: [h.register_hook(lambda grad, i=i: grad * i + 1) for i in range(3)],
    "one is removed": add_and_remove,
    "beside retain_grad": lambda h: (h.retain_grad(), h.register_hook(lambda grad: grad * 2), h.retain_grad()),
    "before and after a change": lambda h: (
        h.register_hook(lambda grad: grad * 2), h.add_(1), h.register_hook(lambda grad: grad + 1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_one_result(name: str) -> None:
    """Each changes the gradient that the weights before it get."""

    def forward(module: Any, x: Tensor) -> Tensor:
        h = module.b(module.a(x).tanh())
        HOOKS[name](h)
        return module.c(h.tanh())  # type: ignore[no-any-return]

    layers = {"a": nn.Linear(D, D), "b": nn.Linear(D, D), "c": nn.Linear(D, 2)}
    module, x = Calls(forward, **layers).double(), torch.randn(B, D).double()
    for _ in range(3):
        with record(module) as grads:
            compute_test_loss(module(x), 0).backward()
        assert_rows_close(grads.dense(), loop_gradients(module, x))


def test_gradient_penalty_is_refused() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 1))
    x = torch.randn(B, D, requires_grad=True)
    output = call_for_per_sample_grads(module)(x)
    with pytest.raises(PerSampleError, match="create_graph"):
        torch.autograd.grad(output.sum(), x, create_graph=True)


def test_gradient_of_the_input_only_sets_no_grad_sample() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 1)).double()
    x = torch.randn(B, D, requires_grad=True, dtype=torch.float64)
    loss = compute_test_loss(call_for_per_sample_grads(module)(x), 0)
    torch.autograd.grad(loss, x, retain_graph=True)
    assert not get_grad_samples(module)
    loss.backward()
    assert_rows_close(get_grad_samples(module), loop_gradients(module, x.detach()))


def test_failed_backward_delivers_nothing() -> None:
    module, x = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)).double(), torch.randn(B, D).double()
    failing = [True]

    def fail(grad: Tensor) -> None:
        if failing.pop():
            raise ValueError("for this test")
        failing.append(False)

    middle: list[Tensor] = []
    hook = module[1].register_forward_hook(lambda m, args, output: middle.append(output))
    loss = compute_test_loss(call_for_per_sample_grads(module)(x), 0)
    hook.remove()
    middle[0].register_hook(fail)
    with pytest.raises(ValueError, match="for this test"):
        loss.backward(retain_graph=True)
    assert not get_grad_samples(module)
    failing.append(False)
    loss.backward()
    assert_rows_close(get_grad_samples(module), loop_gradients(module, x))


FREED = ("mlp", "tied weights", "cnn", "language model, tied head", "lstm", "encoder layer", "checkpoint")


@pytest.mark.parametrize("case", [c for c in CASES if c.name in FREED], ids=str)
def test_activations_are_freed_after_backward(case: Case) -> None:
    module, args, kwargs = case.build()
    made: list[weakref.ref[Tensor]] = []

    def remember(m: nn.Module, inputs: Any, output: Any) -> None:
        if (
            not isinstance(m, nn.Embedding) or output.shape[0] == B
        ):  # a position embedding is a weight, not an activation
            made.extend(map(weakref.ref, find_tensors(output)))

    hooks = [m.register_forward_hook(remember) for m in module.modules()]
    loss = compute_test_loss(call_for_per_sample_grads(module, **case.options)(*args, **kwargs), case.out_dim)
    loss.backward()
    for hook in hooks:
        hook.remove()
    gc.collect()
    assert loss.grad_fn is not None  # the graph exists, but its saved tensors must be freed
    assert len(made) > 1
    assert all(ref() is None for ref in made)


def test_gradient_that_is_not_contiguous() -> None:
    module = nn.Conv2d(3, 4, 2)
    x, weights = torch.randn(B, 3, 5, 5), torch.randn(4, 4, 4, B)
    (call_for_per_sample_grads(module)(x) * weights.permute(3, 0, 1, 2)).sum().backward()
    for n in range(B):
        (expected,) = torch.autograd.grad((module(x[n : n + 1])[0] * weights[..., n]).sum(), module.weight)
        torch.testing.assert_close(module.weight.grad_sample[n], expected)


def test_gradient_that_is_expanded() -> None:
    module = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    x = torch.randn(B, 3, 5, 5).to(memory_format=torch.channels_last)
    call_for_per_sample_grads(module)(x).sum().backward()
    (expected,) = torch.autograd.grad(module(x[1:2]).sum(), module.weight)
    torch.testing.assert_close(module.weight.grad_sample[1], expected)


def test_layer_that_no_sample_uses() -> None:
    """A layer that is called with no rows has zero gradients for every sample."""

    def forward(m: Any, h: Tensor, there: Tensor) -> Tensor:
        out = m.a(h)
        out[there] = m.b(h[there])
        return out

    module, h = Calls(forward, a=nn.Linear(D, D), b=nn.Linear(D, D)), torch.randn(B, D)
    with record(module) as grads:
        module(h, torch.zeros(B, dtype=torch.bool)).square().mean().backward()
    for rows in (grads.dense()["b.weight"], grads.dense()["b.bias"]):
        assert rows.shape[0] == B and not rows.any()
    for answer in (grads.clip(1.0), grads.second_moment(), grads.variance(), grads.mean()):
        for name, p in module.named_parameters():
            assert answer[name].shape == p.shape
            assert bool(answer[name].any()) == (name[0] == "a")
    with record(module, parameters=["b.weight", "b.bias"]) as none:
        module(h, torch.zeros(B, dtype=torch.bool)).square().mean().backward()
    assert not none.gram().any() and not none.norms().any() and not none.project(4).any()


def test_gradients_of_position_embeddings_are_not_made_dense() -> None:
    def multiply(m: Any, h: Tensor) -> Tensor:
        index = torch.arange(h.shape[1])
        return h * m.first(index).unsqueeze(0) * m.second.weight.index_select(0, index)

    model = Calls(multiply, first=nn.Embedding(1000, D), second=nn.Embedding(1000, D))
    with record(model) as grads:
        model(torch.randn(B, T, D)).square().sum().backward()
    assert grads.explain().parameters == {"first.weight": "Rows", "second.weight": "Rows"}
