"""Rules in the convention of torch's expanded weights: an autograd.Function for each torch function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from persample.expanded_weights import (
    HANDLED_FUNCTIONS,
    ExpandedWeight,
    call_for_per_sample_grads,
    forward_helper,
    implements_per_sample_grads,
    is_batch_first,
    set_grad_sample_if_exists,
    standard_kwargs,
    sum_over_all_but_batch_and_last_n,
    unpack_expanded_weight_or_tensor,
)
from tests.support.expanded_weights import (
    BATCH,
    compute_loss,
    loop_over_samples,
    make_expanded,
    make_rows,
    make_weight,
)

every_reduction = pytest.mark.parametrize("reduction", ["sum", "mean"])


def make_no_gradients(ctx: Any) -> list[Tensor | None]:
    return [None] * len(ctx.needs_input_grad)


class OldLinear(torch.autograd.Function):
    """y = x Wᵀ + b. Arguments of `apply`: the names, the function, x, W, b."""

    seen: list[bool | None]

    @staticmethod
    def forward(ctx: Any, kwarg_names: Any, func: Any, *args_and_kwargs: Any) -> Tensor:
        args, kwargs = standard_kwargs(kwarg_names, args_and_kwargs)
        output = forward_helper(func, args, kwargs)
        ctx.call = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
        ctx.batch_first = is_batch_first(args_and_kwargs)
        OldLinear.seen.append(ctx.batch_first)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, bias = ctx.call["input"], ctx.call.get("bias")
        results = make_no_gradients(ctx)
        if input.requires_grad:
            results[2] = grad @ unpack_expanded_weight_or_tensor(ctx.call["weight"])
        if not ctx.batch_first:
            input, grad = input.transpose(0, 1), grad.transpose(0, 1)
        set_grad_sample_if_exists(ctx.call["weight"], lambda original: torch.einsum("n...i,n...j->nij", grad, input))
        set_grad_sample_if_exists(bias, lambda original: sum_over_all_but_batch_and_last_n(grad, 1))
        return tuple(results)


class OldMul(torch.autograd.Function):
    """y = x g, where g has the last dimensions of x."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, kwarg_names: Any, func: Any, *args_and_kwargs: Any) -> Tensor:
        args, kwargs = standard_kwargs(kwarg_names, args_and_kwargs)
        ctx.input, ctx.other = args
        OldMul.calls += 1
        return forward_helper(func, args, kwargs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        results = make_no_gradients(ctx)
        results[2] = grad * unpack_expanded_weight_or_tensor(ctx.other)
        set_grad_sample_if_exists(
            ctx.other, lambda g: sum_over_all_but_batch_and_last_n(grad * ctx.input, ctx.other.dim())
        )
        return tuple(results)


class OldBilinear(torch.autograd.Function):
    """y_k = x W_k z + b_k. The tensors are kept with save_for_backward."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, kwarg_names: Any, func: Any, *args_and_kwargs: Any) -> Tensor:
        args, kwargs = standard_kwargs(kwarg_names, args_and_kwargs)
        OldBilinear.calls += 1
        ctx.save_for_backward(args[0], args[1])
        ctx.weight, ctx.bias = args[2], kwargs["bias"] if "bias" in kwargs else args[3]
        return forward_helper(func, args, kwargs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, z = ctx.saved_tensors
        results = make_no_gradients(ctx)
        w = unpack_expanded_weight_or_tensor(ctx.weight)
        results[2] = torch.einsum("nk,kij,nj->ni", grad, w, z)
        results[3] = torch.einsum("nk,kij,ni->nj", grad, w, x)
        set_grad_sample_if_exists(ctx.weight, lambda original: torch.einsum("nk,ni,nj->nkij", grad, x, z))
        set_grad_sample_if_exists(ctx.bias, lambda original: grad)
        return tuple(results)


@pytest.fixture
def old_linear() -> type[OldLinear]:
    OldLinear.seen = []
    return implements_per_sample_grads(F.linear)(OldLinear)


@pytest.fixture
def old_mul() -> type[OldMul]:
    OldMul.calls = 0
    return implements_per_sample_grads(torch.mul)(OldMul)


@pytest.fixture
def old_bilinear() -> type[OldBilinear]:
    OldBilinear.calls = 0
    return implements_per_sample_grads(F.bilinear)(OldBilinear)


class Applied(nn.Module):
    """A module that calls a function with its arguments and some weights."""

    def __init__(self, function: Callable[..., Tensor], *weights: Tensor) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(weights)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs, *self.weights)


def compute_input_gradients(
    function: Callable[..., Tensor], inputs: list[Tensor], weights: list[Tensor], reduction: str
) -> Any:
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(compute_loss(function(*leaves, *weights), reduction), leaves)


def run(
    way: str, function: Callable[..., Tensor], inputs: list[Tensor], weights: list[Tensor], reduction: str
) -> tuple[Tensor, list[Tensor]]:
    """Call the function with bare expanded weights or in a wrapped module, and run backward. Parameters come last."""
    if way == "bare":
        output = function(*inputs, *(ExpandedWeight(w, BATCH, reduction) for w in weights))
        parameters = weights
    else:
        module = Applied(function, *weights)
        output = call_for_per_sample_grads(module, loss_reduction=reduction)(*inputs)
        parameters = list(module.weights)
    compute_loss(output, reduction).backward()
    return output, parameters


def check_against_loop(
    way: str, function: Callable[..., Tensor], inputs: list[Tensor], weights: list[Tensor], reduction: str
) -> None:
    """Check that output, per-sample gradients and input gradients equal plain autograd."""
    inputs = [x.requires_grad_() for x in inputs]
    output, parameters = run(way, function, inputs, weights, reduction)
    torch.testing.assert_close(output, function(*inputs, *weights))
    for parameter, expected in zip(parameters, loop_over_samples(function, inputs, weights), strict=True):
        torch.testing.assert_close(parameter.grad_sample, expected)
        assert parameter.grad is None
    for x, expected in zip(inputs, compute_input_gradients(function, inputs, weights, reduction), strict=True):
        torch.testing.assert_close(x.grad, expected)


every_way = pytest.mark.parametrize("way", ["bare", "wrapped"])


def test_registering_returns_the_class(old_linear: type[OldLinear]) -> None:
    assert old_linear is OldLinear
    assert HANDLED_FUNCTIONS[F.linear] is OldLinear


def linear_with_keywords(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, bias=b, weight=w)


def apply_linear_twice(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.linear(x, w, b).sin(), w, b)


@every_way
@every_reduction
@pytest.mark.parametrize(
    ("function", "calls"),
    [(F.linear, 1), (linear_with_keywords, 1), (apply_linear_twice, 2)],
    ids=["linear", "with keywords", "of itself"],
)
@pytest.mark.parametrize("between", [(), (5,), (2, 5)])
def test_rule_replaces_the_built_in_rule(
    old_linear: type[OldLinear], way: str, reduction: str, function: Any, calls: int, between: tuple[int, ...]
) -> None:
    check_against_loop(way, function, [make_rows(BATCH, *between, 4)], [make_weight(4, 4), make_weight(4)], reduction)
    assert old_linear.seen == [True] * calls


@every_way
@every_reduction
def test_rule_for_a_function_without_one(old_mul: type[OldMul], way: str, reduction: str) -> None:
    check_against_loop(way, torch.mul, [make_rows(BATCH, 2, 4)], [make_weight(4)], reduction)
    assert old_mul.calls == 1


@every_way
@every_reduction
@pytest.mark.parametrize("by_keyword", [True, False])
def test_rule_for_a_function_of_two_inputs(
    old_bilinear: type[OldBilinear], way: str, reduction: str, by_keyword: bool
) -> None:
    def function(x: Tensor, z: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.bilinear(x, z, w, bias=b) if by_keyword else F.bilinear(x, z, w, b)

    check_against_loop(
        way, function, [make_rows(BATCH, 2), make_rows(BATCH, 5)], [make_weight(4, 2, 5), make_weight(4)], reduction
    )
    assert old_bilinear.calls == 1


@every_reduction
def test_module_with_old_and_built_in_rules(
    old_linear: type[OldLinear], old_bilinear: type[OldBilinear], reduction: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 2)).double()
    x, names = make_rows(BATCH, 4), [name for name, _ in model.named_parameters()]

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, weights, strict=True)), x)

    expected = loop_over_samples(function, [x], list(model.parameters()))
    compute_loss(call_for_per_sample_grads(model, loss_reduction=reduction)(x), reduction).backward()
    for parameter, rows_expected in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad_sample, rows_expected)
    assert (old_linear.seen, old_bilinear.calls) == ([True, True], 0)


@every_reduction
def test_bare_weight_used_by_an_old_and_a_built_in_rule(old_linear: type[OldLinear], reduction: str) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(F.linear(x, w), (4, 4), w)

    check_against_loop("bare", function, [make_rows(BATCH, 4, 4)], [make_weight(4, 4)], reduction)
    assert old_linear.seen == [True]


@every_way
def test_frozen_weight_has_no_grad_sample(old_linear: type[OldLinear], way: str) -> None:
    x, w, frozen = make_rows(BATCH, 4), make_weight(3, 4), make_rows(3)
    if way == "bare":
        output = F.linear(x, ExpandedWeight(w, BATCH, "sum"), frozen)
    else:
        module = nn.Linear(4, 3).double()
        module.weight, module.bias = nn.Parameter(w), nn.Parameter(frozen, requires_grad=False)
        w, frozen = module.weight, module.bias
        output = call_for_per_sample_grads(module)(x)
    compute_loss(output, "sum").backward()
    torch.testing.assert_close(w.grad_sample, loop_over_samples(lambda x, w: F.linear(x, w, frozen), [x], [w])[0])
    assert not hasattr(frozen, "grad_sample")
    assert old_linear.seen == [True]


@every_reduction
@pytest.mark.parametrize("shape", [(BATCH, BATCH, 4), (5, BATCH, 4), (5, 1, 4)])
def test_samples_in_dimension_1_of_a_wrapped_call(
    old_linear: type[OldLinear], reduction: str, shape: tuple[int, ...]
) -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(x.tanh(), w, b)

    module, x = Applied(function, make_weight(3, 4), make_weight(3)), make_rows(*shape)
    expected = loop_over_samples(function, [x], list(module.weights), batch_dim=1)
    output = call_for_per_sample_grads(module, loss_reduction=reduction, batch_first=False)(x)
    compute_loss(output, reduction, batch_dim=1).backward()
    torch.testing.assert_close([p.grad_sample for p in module.weights], expected)
    assert old_linear.seen == [False]


@every_reduction
def test_samples_in_dimension_1_with_bare_weights(old_linear: type[OldLinear], reduction: str) -> None:
    w, b, x = make_weight(3, 4), make_weight(3), make_rows(5, BATCH, 4)
    expanded_weights = [ExpandedWeight(p, BATCH, reduction) for p in (w, b)]
    for e in expanded_weights:
        e.set_batch_first(False)
    compute_loss(F.linear(x, *expanded_weights), reduction, batch_dim=1).backward()
    torch.testing.assert_close([w.grad_sample, b.grad_sample], loop_over_samples(F.linear, [x], [w, b], batch_dim=1))
    assert old_linear.seen == [False]


@every_reduction
@pytest.mark.parametrize("batch", [BATCH, 1])
def test_batch_first_is_false_for_a_layer_with_time_first_input(
    old_linear: type[OldLinear], reduction: str, batch: int
) -> None:
    def time_first(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(x.transpose(0, 1), w, b).transpose(0, 1)

    check_against_loop(
        "wrapped", time_first, [make_rows(batch, BATCH, 4)], [make_weight(3, 4), make_weight(3)], reduction
    )
    assert old_linear.seen == [False]


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.exp() * 2


@every_reduction
def test_rule_for_a_derived_weight(old_linear: type[OldLinear], reduction: str) -> None:
    module, x = nn.Linear(4, 3, bias=False).double(), make_rows(BATCH, 4)
    parametrize.register_parametrization(module, "weight", Doubled())
    parameter = module.parametrizations.weight.original
    expected = loop_over_samples(lambda x, w: F.linear(x, w.exp() * 2), [x], [parameter])
    compute_loss(call_for_per_sample_grads(module, loss_reduction=reduction)(x), reduction).backward()
    torch.testing.assert_close(parameter.grad_sample, expected[0])
    assert old_linear.seen == [True]


def test_errors_of_the_helper_are_raised(old_linear: type[OldLinear]) -> None:
    with pytest.raises(RuntimeError, match=f"batch size of {BATCH + 1} with ExpandedWeight of batch size {BATCH}"):
        F.linear(make_rows(BATCH + 1, 4), make_expanded(3, 4))


@every_way
def test_built_in_rule_is_used_after_the_rule_is_removed(way: str) -> None:
    OldLinear.seen = []
    check_against_loop(way, F.linear, [make_rows(BATCH, 4)], [make_weight(3, 4), make_weight(3)], "sum")
    assert OldLinear.seen == []
