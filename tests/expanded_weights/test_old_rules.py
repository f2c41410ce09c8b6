"""The ExpandedWeight tensor, the helpers, and rules that somebody else wrote in the old convention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import persample
import persample.expanded_weights
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
from persample.testing.oracle import stack_gradients

BATCH = 3
every_reduction = pytest.mark.parametrize("reduction", ["sum", "mean"])


@pytest.fixture(autouse=True)
def registry_as_before() -> Iterator[None]:
    before = dict(HANDLED_FUNCTIONS)
    yield
    HANDLED_FUNCTIONS.clear()
    HANDLED_FUNCTIONS.update(before)


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(0)


def weight(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def expanded(*shape: int, reduction: str = "sum") -> ExpandedWeight:
    return ExpandedWeight(weight(*shape), BATCH, reduction)


def sample_loss(output: Tensor) -> Tensor:
    """A loss whose gradient differs everywhere."""
    return (output.sin() * torch.arange(1, 1 + output[0].numel()).view_as(output[0])).sum()


def loss_of(output: Tensor, reduction: str, batch_dim: int = 0) -> Tensor:
    """The sum or mean of the samples' losses."""
    total = torch.stack([sample_loss(part) for part in output.split(1, batch_dim)]).sum()
    return total / output.shape[batch_dim] if reduction == "mean" else total


def loop(
    function: Callable[..., Tensor], inputs: list[Tensor], weights: list[Tensor], batch_dim: int = 0
) -> list[Tensor]:
    """The weights' per-sample gradients by plain autograd, sample after sample."""
    samples = zip(*(x.detach().split(1, batch_dim) for x in inputs), strict=True)
    losses = (sample_loss(function(*parts, *weights)) for parts in samples)
    return list(stack_gradients(losses, {str(i): weight for i, weight in enumerate(weights)}).values())


# ---- names ----


@pytest.mark.parametrize(
    "name",
    [
        "ExpandedWeight",
        "HANDLED_FUNCTIONS",
        "call_for_per_sample_grads",
        "forward_helper",
        "implements_per_sample_grads",
        "is_batch_first",
        "set_grad_sample_if_exists",
        "standard_kwargs",
        "sum_over_all_but_batch_and_last_n",
        "unpack_expanded_weight_or_tensor",
    ],
)
def test_name_is_exported(name: str) -> None:
    assert name in persample.expanded_weights.__all__
    assert hasattr(persample.expanded_weights, name)


@pytest.mark.parametrize("name", ["ExpandedWeight", "call_for_per_sample_grads", "implements_per_sample_grads"])
def test_name_is_exported_from_the_package_too(name: str) -> None:
    assert name in persample.__all__
    assert getattr(persample, name) is getattr(persample.expanded_weights, name)


def test_the_registry_is_the_tensors_own() -> None:
    assert ExpandedWeight.handled_functions is HANDLED_FUNCTIONS


@pytest.mark.parametrize(
    "func",
    [
        F.linear,
        F.conv1d,
        F.conv2d,
        F.conv3d,
        F.embedding,
        F.layer_norm,
        F.group_norm,
        F.instance_norm,
        torch.rnn_tanh,
        torch.rnn_relu,
        torch.lstm,
        torch.gru,
    ],
    ids=lambda func: func.__name__,
)
def test_function_has_a_rule(func: Callable[..., Any]) -> None:
    assert HANDLED_FUNCTIONS[func] is not None


# ---- the tensor ----


def test_it_is_a_tensor_on_the_storage_of_its_original() -> None:
    w = weight(2, 3)
    e = ExpandedWeight(w, BATCH, "sum")
    assert isinstance(e, Tensor)
    with torch._C.DisableTorchFunctionSubclass():
        assert Tensor.data_ptr(e) == w.data_ptr()


def test_a_change_of_the_original_is_seen() -> None:
    w, x = weight(2, 3), rows(BATCH, 3)
    e = ExpandedWeight(w, BATCH, "sum")
    with torch.no_grad():
        w.fill_(2.0)
    assert torch.equal(e.data, torch.full((2, 3), 2.0, dtype=torch.float64))
    assert torch.equal(F.linear(x, e), F.linear(x, w))


@every_reduction
def test_what_it_is_built_of(reduction: str) -> None:
    w = nn.Parameter(torch.ones(2, 3))
    e = ExpandedWeight(w, 7, reduction)
    assert e.orig_weight is w
    assert (e.batch_size, e.loss_reduction) == (7, reduction)
    assert e.batch_first is True
    assert e.allow_smaller_batches is False


def test_setters() -> None:
    e = expanded(2, 3)
    e.set_batch_first(False)
    e.set_allow_smaller_batches(True)
    assert (e.batch_first, e.allow_smaller_batches) == (False, True)
    e.set_batch_first()
    e.set_allow_smaller_batches(False)
    assert (e.batch_first, e.allow_smaller_batches) == (True, False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.half, torch.complex128])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_answers_for_the_original(dtype: torch.dtype, device: str) -> None:
    w = torch.ones(2, 3, 4, dtype=dtype, device=device, requires_grad=True).transpose(0, 1)
    e = ExpandedWeight(w, BATCH, "sum")
    assert e.shape == torch.Size([3, 2, 4])
    assert (e.dtype, e.device, e.is_cuda) == (dtype, torch.device(device), False)
    assert (e.size(), e.size(1), e.dim()) == (torch.Size([3, 2, 4]), 2, 3)
    assert (e.data_ptr(), e.get_device()) == (w.data_ptr(), w.get_device())


def test_data_is_that_of_the_original() -> None:
    w = weight(2, 3)
    data = ExpandedWeight(w, BATCH, "sum").data
    assert type(data) is Tensor
    assert not data.requires_grad
    assert torch.equal(data, w)
    assert data.data_ptr() == w.data_ptr()


@pytest.mark.parametrize("text_of", [repr, str, "{}".format])
def test_text_shows_the_values(text_of: Callable[[Tensor], str]) -> None:
    text = text_of(ExpandedWeight(torch.tensor([12.5, -0.25], requires_grad=True), BATCH, "sum"))
    assert "ExpandedWeight" in text
    assert "12.5" in text and "-0.25" in text


def test_flattening_for_cudnn_answers_none() -> None:
    assert torch._cudnn_rnn_flatten_weight([expanded(4, 3)], 4, 3, 2, 4, 0, 1, False, False) is None


def test_recurrent_function_of_weights_with_the_batch_in_dim_1() -> None:
    weights, x, state = [weight(9, 4), weight(9, 3)], rows(2, BATCH, 4), rows(1, BATCH, 3)

    def gru(x: Tensor, state: Tensor, *weights: Tensor) -> Tensor:
        return torch.gru(x, state, weights, False, 1, 0.0, True, False, False)[0]

    expanded_weights = [ExpandedWeight(w, BATCH, "sum") for w in weights]
    for e in expanded_weights:
        e.set_batch_first(False)
    loss_of(gru(x, state, *expanded_weights), "sum", batch_dim=1).backward()
    torch.testing.assert_close([w.grad_sample for w in weights], loop(gru, [x, state], weights, batch_dim=1))


# ---- the helpers ----


@pytest.mark.parametrize(
    ("names", "flat", "args", "kwargs"),
    [
        ((), (1, 2), (1, 2), {}),
        (("bias",), (1, 2, 3), (1, 2), {"bias": 3}),
        (["weight", "bias"], [1, None, 3], (1,), {"weight": None, "bias": 3}),
        (("input", "weight"), (1, 2), (), {"input": 1, "weight": 2}),
        ((), (), (), {}),
    ],
)
def test_standard_kwargs_splits_a_flattened_call(names: Any, flat: Any, args: Any, kwargs: dict[str, Any]) -> None:
    found_args, found_kwargs = standard_kwargs(names, flat)
    assert tuple(found_args) == args
    assert found_kwargs == kwargs


def test_forward_helper_runs_on_the_originals() -> None:
    w, b, x = expanded(4, 3), expanded(4), rows(BATCH, 3)
    plain = F.linear(x, w.orig_weight, b.orig_weight)
    for result in (forward_helper(F.linear, (x, w, b), {}), forward_helper(F.linear, [x, w], {"bias": b})):
        assert type(result) is Tensor
        assert torch.equal(result, plain)


def test_forward_helper_hands_the_originals_themselves_over() -> None:
    w, x = expanded(4, 3), rows(BATCH, 3)
    received: list[Any] = []
    forward_helper(lambda *args, **kwargs: received.extend([*args, *kwargs.values()]), (x, w, 2), {"again": w})
    assert [id(value) for value in received] == [id(value) for value in (x, w.orig_weight, 2, w.orig_weight)]


@pytest.mark.parametrize("flag", [True, False])
def test_is_batch_first_asks_the_expanded_weights(flag: bool) -> None:
    weights = [expanded(2), expanded(3)]
    for w in weights:
        w.set_batch_first(flag)
    assert is_batch_first(weights) is flag
    assert is_batch_first((rows(2), weights[0], None, 3)) is flag


@pytest.mark.parametrize("args", [[], (rows(2), 3, None), [weight(2)]])
def test_is_batch_first_without_expanded_weights(args: Any) -> None:
    assert is_batch_first(args) is None


@every_reduction
def test_set_grad_sample_scales_by_the_batch_size_and_adds(reduction: str) -> None:
    e = expanded(2, reduction=reduction)
    first, second = rows(BATCH, 2), rows(BATCH, 2)
    scale = BATCH if reduction == "mean" else 1
    set_grad_sample_if_exists(e, lambda original: first)
    torch.testing.assert_close(e.orig_weight.grad_sample, scale * first, rtol=0, atol=0)
    set_grad_sample_if_exists(ExpandedWeight(e.orig_weight, BATCH, reduction), lambda original: second)
    torch.testing.assert_close(e.orig_weight.grad_sample, scale * (first + second))


def test_set_grad_sample_asks_for_a_function_of_the_original() -> None:
    e = expanded(2)
    asked: list[Any] = []

    def gradient(original: Tensor) -> Tensor:
        asked.append(original)
        return torch.zeros(BATCH, 2)

    set_grad_sample_if_exists(e, gradient)
    assert len(asked) == 1 and asked[0] is e.orig_weight


@pytest.mark.parametrize("value", [None, 3, "text", torch.ones(2), (1, 2)])
def test_set_grad_sample_does_nothing_for_what_has_none(value: Any) -> None:
    set_grad_sample_if_exists(value, lambda original: pytest.fail("asked for a gradient"))
    assert not hasattr(value, "grad_sample")


@every_reduction
def test_set_grad_sample_of_a_smaller_batch_has_zeros_for_the_rest(reduction: str) -> None:
    e = expanded(2, reduction=reduction)
    e.set_allow_smaller_batches(True)
    contribution = rows(BATCH - 1, 2)
    set_grad_sample_if_exists(e, lambda original: contribution)
    scale = BATCH if reduction == "mean" else 1
    expected = torch.cat([scale * contribution, torch.zeros(1, 2, dtype=torch.float64)])
    torch.testing.assert_close(e.orig_weight.grad_sample, expected, rtol=0, atol=0)


def test_unpack_gives_the_original_or_a_plain_tensor_without_grad() -> None:
    e, plain = expanded(2), rows(2)
    assert unpack_expanded_weight_or_tensor(e) is e.orig_weight
    assert unpack_expanded_weight_or_tensor(plain) is plain
    assert torch.equal(unpack_expanded_weight_or_tensor(e, torch.neg), -e.orig_weight)
    assert torch.equal(unpack_expanded_weight_or_tensor(plain, func=torch.neg), -plain)


@pytest.mark.parametrize("value", [None, 3, (1, 2)])
def test_unpack_gives_none_for_what_is_no_tensor(value: Any) -> None:
    assert unpack_expanded_weight_or_tensor(value) is None
    assert unpack_expanded_weight_or_tensor(value, lambda original: pytest.fail("called")) is None


@pytest.mark.parametrize(
    ("shape", "kept", "letters"),
    [
        ((3, 4), 1, "bi->bi"),
        ((3, 4, 5), 1, "bti->bi"),
        ((3, 2, 4, 5), 1, "bsti->bi"),
        ((3, 2, 4, 5), 2, "bsij->bij"),
        ((3, 4, 5), 2, "bij->bij"),
        ((3, 4, 5), 0, "bij->b"),
        ((3,), 0, "b->b"),
    ],
)
def test_sum_over_all_but_batch_and_last_n(shape: tuple[int, ...], kept: int, letters: str) -> None:
    tensor = rows(*shape)
    torch.testing.assert_close(sum_over_all_but_batch_and_last_n(tensor, kept), torch.einsum(letters, tensor))


# ---- rules in the old convention ----


def no_gradients(ctx: Any) -> list[Tensor | None]:
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
        results = no_gradients(ctx)
        if input.requires_grad:
            results[2] = grad @ unpack_expanded_weight_or_tensor(ctx.call["weight"])
        if not ctx.batch_first:
            input, grad = input.transpose(0, 1), grad.transpose(0, 1)
        set_grad_sample_if_exists(ctx.call["weight"], lambda original: torch.einsum("n...i,n...j->nij", grad, input))
        set_grad_sample_if_exists(bias, lambda original: sum_over_all_but_batch_and_last_n(grad, 1))
        return tuple(results)


class OldMul(torch.autograd.Function):
    """y = x g, where g runs along the last dims of x."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, kwarg_names: Any, func: Any, *args_and_kwargs: Any) -> Tensor:
        args, kwargs = standard_kwargs(kwarg_names, args_and_kwargs)
        ctx.input, ctx.other = args
        OldMul.calls += 1
        return forward_helper(func, args, kwargs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        results = no_gradients(ctx)
        results[2] = grad * unpack_expanded_weight_or_tensor(ctx.other)
        set_grad_sample_if_exists(
            ctx.other, lambda g: sum_over_all_but_batch_and_last_n(grad * ctx.input, ctx.other.dim())
        )
        return tuple(results)


class OldBilinear(torch.autograd.Function):
    """y_k = x W_k z + b_k. It keeps its tensors with save_for_backward."""

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
        results = no_gradients(ctx)
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
    """A function of its arguments and of these weights."""

    def __init__(self, function: Callable[..., Tensor], *weights: Tensor) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(weights)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs, *self.weights)


def input_gradients(
    function: Callable[..., Tensor], inputs: list[Tensor], weights: list[Tensor], reduction: str
) -> Any:
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(loss_of(function(*leaves, *weights), reduction), leaves)


def run(
    way: str, function: Callable[..., Tensor], inputs: list[Tensor], weights: list[Tensor], reduction: str
) -> tuple[Tensor, list[Tensor]]:
    """Calls the function with bare expanded weights or in a wrapped module, and back; the parameters are last."""
    if way == "bare":
        output = function(*inputs, *(ExpandedWeight(w, BATCH, reduction) for w in weights))
        parameters = weights
    else:
        module = Applied(function, *weights)
        output = call_for_per_sample_grads(module, loss_reduction=reduction)(*inputs)
        parameters = list(module.weights)
    loss_of(output, reduction).backward()
    return output, parameters


def check_against_loop(
    way: str, function: Callable[..., Tensor], inputs: list[Tensor], weights: list[Tensor], reduction: str
) -> None:
    """Output, per-sample gradients and input gradients are those of plain autograd."""
    inputs = [x.requires_grad_() for x in inputs]
    output, parameters = run(way, function, inputs, weights, reduction)
    torch.testing.assert_close(output, function(*inputs, *weights))
    for parameter, expected in zip(parameters, loop(function, inputs, weights), strict=True):
        torch.testing.assert_close(parameter.grad_sample, expected)
        assert parameter.grad is None
    for x, expected in zip(inputs, input_gradients(function, inputs, weights, reduction), strict=True):
        torch.testing.assert_close(x.grad, expected)


every_way = pytest.mark.parametrize("way", ["bare", "wrapped"])


def test_registering_gives_the_class_back(old_linear: type[OldLinear]) -> None:
    assert old_linear is OldLinear
    assert HANDLED_FUNCTIONS[F.linear] is OldLinear


def linear_with_keywords(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, bias=b, weight=w)


def linear_of_itself(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.linear(x, w, b).sin(), w, b)


@every_way
@every_reduction
@pytest.mark.parametrize(
    ("function", "calls"),
    [(F.linear, 1), (linear_with_keywords, 1), (linear_of_itself, 2)],
    ids=["linear", "with keywords", "of itself"],
)
@pytest.mark.parametrize("between", [(), (5,), (2, 5)])
def test_rule_takes_the_place_of_ours(
    old_linear: type[OldLinear], way: str, reduction: str, function: Any, calls: int, between: tuple[int, ...]
) -> None:
    check_against_loop(way, function, [rows(BATCH, *between, 4)], [weight(4, 4), weight(4)], reduction)
    assert old_linear.seen == [True] * calls


@every_way
@every_reduction
def test_rule_of_a_function_that_had_none(old_mul: type[OldMul], way: str, reduction: str) -> None:
    check_against_loop(way, torch.mul, [rows(BATCH, 2, 4)], [weight(4)], reduction)
    assert old_mul.calls == 1


@every_way
@every_reduction
@pytest.mark.parametrize("by_keyword", [True, False])
def test_rule_of_a_function_of_two_inputs(
    old_bilinear: type[OldBilinear], way: str, reduction: str, by_keyword: bool
) -> None:
    def function(x: Tensor, z: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.bilinear(x, z, w, bias=b) if by_keyword else F.bilinear(x, z, w, b)

    check_against_loop(way, function, [rows(BATCH, 2), rows(BATCH, 5)], [weight(4, 2, 5), weight(4)], reduction)
    assert old_bilinear.calls == 1


@every_reduction
def test_module_whose_layers_have_old_and_our_rules(
    old_linear: type[OldLinear], old_bilinear: type[OldBilinear], reduction: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 2)).double()
    x, names = rows(BATCH, 4), [name for name, _ in model.named_parameters()]

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, weights, strict=True)), x)

    expected = loop(function, [x], list(model.parameters()))
    loss_of(call_for_per_sample_grads(model, loss_reduction=reduction)(x), reduction).backward()
    for parameter, rows_expected in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad_sample, rows_expected)
    assert (old_linear.seen, old_bilinear.calls) == ([True, True], 0)


@every_reduction
def test_bare_weight_used_by_an_old_rule_and_by_ours(old_linear: type[OldLinear], reduction: str) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(F.linear(x, w), (4, 4), w)

    check_against_loop("bare", function, [rows(BATCH, 4, 4)], [weight(4, 4)], reduction)
    assert old_linear.seen == [True]


@every_way
def test_frozen_weight_is_left_alone(old_linear: type[OldLinear], way: str) -> None:
    x, w, frozen = rows(BATCH, 4), weight(3, 4), rows(3)
    if way == "bare":
        output = F.linear(x, ExpandedWeight(w, BATCH, "sum"), frozen)
    else:
        module = nn.Linear(4, 3).double()
        module.weight, module.bias = nn.Parameter(w), nn.Parameter(frozen, requires_grad=False)
        w, frozen = module.weight, module.bias
        output = call_for_per_sample_grads(module)(x)
    loss_of(output, "sum").backward()
    torch.testing.assert_close(w.grad_sample, loop(lambda x, w: F.linear(x, w, frozen), [x], [w])[0])
    assert not hasattr(frozen, "grad_sample")
    assert old_linear.seen == [True]


@every_reduction
@pytest.mark.parametrize("shape", [(BATCH, BATCH, 4), (5, BATCH, 4), (5, 1, 4)])
def test_batch_in_dim_1_of_a_wrapped_call(old_linear: type[OldLinear], reduction: str, shape: tuple[int, ...]) -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(x.tanh(), w, b)

    module, x = Applied(function, weight(3, 4), weight(3)), rows(*shape)
    expected = loop(function, [x], list(module.weights), batch_dim=1)
    output = call_for_per_sample_grads(module, loss_reduction=reduction, batch_first=False)(x)
    loss_of(output, reduction, batch_dim=1).backward()
    torch.testing.assert_close([p.grad_sample for p in module.weights], expected)
    assert old_linear.seen == [False]


@every_reduction
def test_bare_weights_with_the_batch_in_dim_1(old_linear: type[OldLinear], reduction: str) -> None:
    w, b, x = weight(3, 4), weight(3), rows(5, BATCH, 4)
    expanded_weights = [ExpandedWeight(p, BATCH, reduction) for p in (w, b)]
    for e in expanded_weights:
        e.set_batch_first(False)
    loss_of(F.linear(x, *expanded_weights), reduction, batch_dim=1).backward()
    torch.testing.assert_close([w.grad_sample, b.grad_sample], loop(F.linear, [x], [w, b], batch_dim=1))
    assert old_linear.seen == [False]


@every_reduction
@pytest.mark.parametrize("batch", [BATCH, 1])
def test_a_layer_that_sees_time_first_is_told_so(old_linear: type[OldLinear], reduction: str, batch: int) -> None:
    def time_first(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(x.transpose(0, 1), w, b).transpose(0, 1)

    check_against_loop("wrapped", time_first, [rows(batch, BATCH, 4)], [weight(3, 4), weight(3)], reduction)
    assert old_linear.seen == [False]


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.exp() * 2


@every_reduction
def test_rule_for_a_weight_that_is_computed_from_a_parameter(old_linear: type[OldLinear], reduction: str) -> None:
    module, x = nn.Linear(4, 3, bias=False).double(), rows(BATCH, 4)
    parametrize.register_parametrization(module, "weight", Doubled())
    parameter = module.parametrizations.weight.original
    expected = loop(lambda x, w: F.linear(x, w.exp() * 2), [x], [parameter])
    loss_of(call_for_per_sample_grads(module, loss_reduction=reduction)(x), reduction).backward()
    torch.testing.assert_close(parameter.grad_sample, expected[0])
    assert old_linear.seen == [True]


def test_checks_of_the_helper_reach_the_user(old_linear: type[OldLinear]) -> None:
    with pytest.raises(RuntimeError, match=f"batch size of {BATCH + 1} with ExpandedWeight of batch size {BATCH}"):
        F.linear(rows(BATCH + 1, 4), expanded(3, 4))


@every_way
def test_without_the_rule_ours_is_back(way: str) -> None:
    OldLinear.seen = []
    check_against_loop(way, F.linear, [rows(BATCH, 4)], [weight(3, 4), weight(3)], "sum")
    assert OldLinear.seen == []
