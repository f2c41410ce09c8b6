"""All error messages of the interface of expanded weights, word for word."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from persample.expanded_weights import (
    ExpandedWeight,
    call_for_per_sample_grads,
    forward_helper,
    is_batch_first,
    set_grad_sample_if_exists,
    unpack_expanded_weight_or_tensor,
)
from tests.support.expanded_weights import (
    BATCH,
    make_expanded,
    make_rows,
    make_weight,
)

MIXTURE = "ExpandedWeights currently does not support a mixture of ExpandedWeight parameters and normal Parameters"
CONFLICTING_BATCH_FIRST = "Got conflicting batch_first arguments in the same layer"
INPUT_IS_EXPANDED = (
    "Expanded Weights do not support inputs that are also ExpandedWeights. Input must be a Tensor, got ..."
)
NO_BATCH_FOUND = (
    "Unable to find a tensor in the passed args and kwargs. They may not be pytree-able and so ExpandedWeights "
    "cannot compute the batch size from the inputs. Please specify it explicitly"
)
NOT_CLEARED = (
    "Current Expanded Weights accumulates the gradients, which will be incorrect for multiple calls without clearing "
    "gradients. Please clear out the grad_sample parameter of ..."
)


def describe_batch_size_mismatch(found: int, expected: int) -> str:
    return (
        f"Expected ExpandedWeights to have batch size matching input but got input batch size of {found} "
        f"with ExpandedWeight of batch size {expected}"
    )


def describe_disagreement(first: int, second: int) -> str:
    return (
        f"When computing batch size, found at least one input with batch size {first} and one with batch size "
        f"{second}. Please specify it explicitly using the batch size kwarg in call_for_per_sample_grads"
    )


def raises(message: str) -> Any:
    """Expect a RuntimeError that starts with the message; "..." at the end stands for more words."""
    fixed, dots, _ = message.partition("...")
    return pytest.raises(RuntimeError, match=f"^{re.escape(fixed)}" + (r"\S" if dots else r"(?!\w)"))


# ---- arguments of call_for_per_sample_grads ----


def make_used_linear() -> nn.Module:
    module = nn.Linear(4, 3)
    module.bias.grad_sample = torch.zeros(BATCH, 3)
    return module


@dataclass(frozen=True)
class Wrong:
    """A wrong argument of call_for_per_sample_grads, and the message."""

    message: str
    module: Callable[[], Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def combine(self, other: Wrong) -> Wrong:
        return Wrong(self.message, self.module or other.module, {**self.options, **other.options})

    def shares_an_argument_with(self, other: Wrong) -> bool:
        return bool(self.options.keys() & other.options.keys()) or (
            self.module is not None and other.module is not None
        )

    def build(self) -> None:
        call_for_per_sample_grads((self.module or (lambda: nn.Linear(4, 3)))(), **self.options)


IN_ORDER_OF_CHECKS = {
    "reduction": Wrong(
        "Expected loss_reduction argument to be sum or mean, got max", options={"loss_reduction": "max"}
    ),
    "module": Wrong("Module passed must be nn.Module, got str", module=lambda: "module"),
    "batch size type": Wrong("Batch size passed must be None or an integer, got str", options={"batch_size": "-1"}),
    "batch size sign": Wrong("Batch size must be positive, got -1", options={"batch_size": -1}),
    "grad_sample": Wrong(NOT_CLEARED, module=make_used_linear),
}
OTHER_VALUES = {
    "reduction None": Wrong(
        "Expected loss_reduction argument to be sum or mean, got None", None, {"loss_reduction": None}
    ),
    "module a function": Wrong("Module passed must be nn.Module, got function", lambda: make_used_linear),
    "module a tensor": Wrong("Module passed must be nn.Module, got Tensor", lambda: torch.ones(2)),
    "batch size a float": Wrong("Batch size passed must be None or an integer, got float", None, {"batch_size": 5.0}),
    "batch size zero": Wrong("Batch size must be positive, got 0", None, {"batch_size": 0}),
    "batch size neither integer nor positive": Wrong(
        "Batch size passed must be None or an integer, got float", None, {"batch_size": -1.5}
    ),
}
WRONG_TWICE = {
    f"{first}, {second}": IN_ORDER_OF_CHECKS[first].combine(IN_ORDER_OF_CHECKS[second])
    for first, second in itertools.combinations(IN_ORDER_OF_CHECKS, 2)
    if not IN_ORDER_OF_CHECKS[first].shares_an_argument_with(IN_ORDER_OF_CHECKS[second])
}


@pytest.mark.parametrize(
    "wrong", [*IN_ORDER_OF_CHECKS.values(), *OTHER_VALUES.values()], ids=[*IN_ORDER_OF_CHECKS, *OTHER_VALUES]
)
def test_wrong_argument(wrong: Wrong) -> None:
    with raises(wrong.message):
        wrong.build()


@pytest.mark.parametrize("wrong", WRONG_TWICE.values(), ids=WRONG_TWICE)
def test_first_of_two_wrong_arguments_is_reported(wrong: Wrong) -> None:
    with raises(wrong.message):
        wrong.build()


def test_second_call_needs_cleared_grad_samples() -> None:
    module, x = nn.Linear(4, 3), torch.ones(BATCH, 4)
    call = call_for_per_sample_grads(module)
    call(x).sum().backward()
    with raises(NOT_CLEARED):
        call(x)
    del module.weight.grad_sample
    module.bias.grad_sample = None
    call(x)


# ---- the batch size in the arguments ----


class TakesAnything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.linear(args[0])


@dataclass
class NoPytree:
    x: Tensor


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        pytest.param((make_rows(3, 4), make_rows(BATCH, 4)), {}, id="args"),
        pytest.param((make_rows(3, 4),), {"y": make_rows(BATCH, 4)}, id="args and kwargs"),
        pytest.param((), {"x": make_rows(3, 4), "y": make_rows(BATCH, 4)}, id="kwargs"),
        pytest.param(([make_rows(3, 4), {"y": (1, make_rows(BATCH, 4))}],), {}, id="nested in args"),
        pytest.param((make_rows(3, 4),), {"y": {"z": [None, make_rows(BATCH, 4)]}}, id="nested in kwargs"),
        pytest.param((make_rows(3, 4), make_rows(3, 4), make_rows(BATCH, 4)), {}, id="only the last"),
        pytest.param((NoPytree(make_rows(7, 4)), make_rows(3, 4), make_rows(BATCH, 4)), {}, id="next to a dataclass"),
    ],
)
@pytest.mark.parametrize("batch_first", [True, False])
def test_tensors_with_different_batch_sizes(args: tuple[Any, ...], kwargs: dict[str, Any], batch_first: bool) -> None:
    if not batch_first:
        args, kwargs = torch.utils._pytree.tree_map_only(Tensor, Tensor.t, (args, kwargs))
    with raises(describe_disagreement(3, BATCH)):
        call_for_per_sample_grads(TakesAnything(), batch_first=batch_first)(*args, **kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        pytest.param((), {}, id="nothing"),
        pytest.param((3, "text", None), {"y": 2.0}, id="no tensors"),
        pytest.param(([], {"y": ()}), {}, id="empty pytrees"),
        pytest.param((NoPytree(make_rows(BATCH, 4)),), {}, id="dataclass"),
        pytest.param((), {"x": [NoPytree(make_rows(BATCH, 4))]}, id="nested dataclass in kwargs"),
    ],
)
@pytest.mark.parametrize("batch_first", [True, False])
def test_no_tensor_with_a_batch_size(args: tuple[Any, ...], kwargs: dict[str, Any], batch_first: bool) -> None:
    with raises(NO_BATCH_FOUND):
        call_for_per_sample_grads(TakesAnything(), batch_first=batch_first)(*args, **kwargs)


@pytest.mark.parametrize(
    ("args", "options"),
    [
        pytest.param((make_rows(BATCH, 4), [make_rows(BATCH, 2)]), {}, id="agreeing in dim 0"),
        pytest.param((make_rows(2, BATCH, 4), make_rows(7, BATCH)), {"batch_first": False}, id="agreeing in dim 1"),
        pytest.param((make_rows(BATCH, 4), make_rows(3, 4)), {"batch_size": BATCH}, id="disagreeing but given"),
    ],
)
def test_batch_size_that_is_found_or_given(args: tuple[Any, ...], options: dict[str, Any]) -> None:
    module = TakesAnything()
    call_for_per_sample_grads(module, **options)(*args).sum().backward()
    assert module.linear.weight.grad_sample.shape == (BATCH, 3, 4)


def test_empty_batch() -> None:
    with raises("0 is not a valid batch size for Expanded Weights but got input tensor of ..."):
        call_for_per_sample_grads(TakesAnything())(make_rows(0, 4))


def test_given_batch_size_differs_from_the_input() -> None:
    with raises(describe_batch_size_mismatch(3, BATCH)):
        call_for_per_sample_grads(TakesAnything(), batch_size=BATCH)(make_rows(3, 4)).sum().backward()


def test_given_batch_size_differs_from_a_packed_sequence() -> None:
    packed = pack_sequence([torch.ones(3, 4), torch.ones(2, 4), torch.ones(2, 4)])
    with raises(describe_batch_size_mismatch(3, BATCH)):
        call_for_per_sample_grads(nn.GRU(4, 2), batch_size=BATCH)(packed)[0].data.sum().backward()


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        pytest.param(nn.Linear(4, 3), (4,), id="linear of one row"),
        pytest.param(nn.Conv2d(3, 2, 3), (3, 6, 6), id="convolution of one image"),
        pytest.param(nn.LayerNorm((BATCH, 4)), (BATCH, 4), id="layer norm over the batch"),
    ],
)
def test_input_without_a_batch_dimension_of_a_wrapped_module(module: nn.Module, shape: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError):
        call_for_per_sample_grads(module)(torch.randn(shape)).sum().backward()


# ---- the tensor ----


@pytest.mark.parametrize(("value", "name"), [([1.0], "list"), (None, "NoneType"), (nn.Linear(1, 1), "Linear")])
def test_expanded_weight_of_another_type(value: Any, name: str) -> None:
    with raises(f"Can only make Expanded Weights of Tensors, got {name}"):
        ExpandedWeight(value, BATCH, "sum")


@pytest.mark.parametrize(
    "tensor", [torch.ones(2), nn.Parameter(torch.ones(2), requires_grad=False), torch.ones(2).long()]
)
def test_expanded_weight_of_a_tensor_without_grad(tensor: Tensor) -> None:
    with raises("Can only build ExpandedWeights objects of tensors that require_grad"):
        ExpandedWeight(tensor, BATCH, "sum")


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("exp", torch.exp),
        ("t", Tensor.t),
        ("relu", F.relu),
        ("cumsum", lambda w: torch.cumsum(w, 0)),
        ("matmul", lambda w: torch.matmul(make_rows(BATCH, 4), w)),
        ("bilinear", lambda w: F.bilinear(make_rows(BATCH, 4), make_rows(BATCH, 4), w)),
        ("cat", lambda w: torch.cat([make_rows(4, 4), w])),
        ("__getitem__", lambda w: w[0]),
    ],
)
def test_function_without_a_rule(name: str, function: Callable[[Tensor], Any]) -> None:
    with raises(f"Expanded Weights encountered but cannot handle function {name}") as caught:
        function(make_expanded(4, 4))
    assert "call_for_per_sample_grads" in str(caught.value)


# ---- checks of all rules ----


def directly(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    return func(*args, **kwargs)


def by_helper(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    return forward_helper(func, args, kwargs)


@dataclass(frozen=True)
class Call:
    """A function with a rule; `call(way, input, weight, bias)` calls it."""

    name: str
    weight: tuple[int, ...]
    sample: tuple[int, ...]
    call: Callable[..., Tensor]
    has_bias: bool = True
    parses_input: bool = False  # torch itself raises if the input is no tensor
    requires_rank: bool = False  # the rule itself raises for an input without dimensions

    def input(self, batch: int = BATCH) -> Tensor:
        return torch.zeros(batch, *self.sample).long() if self.name == "embedding" else make_rows(batch, *self.sample)

    def expanded(self, **options: Any) -> ExpandedWeight:
        return make_expanded(*self.weight, **options)

    def expanded_bias(self, **options: Any) -> ExpandedWeight:
        return make_expanded(self.weight[0], **options)

    def __str__(self) -> str:
        return self.name


CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def make_conv_call(dims: int) -> Call:
    func = CONVOLUTIONS[dims]
    return Call(
        f"conv{dims}d",
        (2, 3) + (2,) * dims,
        (3,) + (4,) * dims,
        lambda way, x, w, b: way(func, x, w, b),
        True,
        True,
        True,
    )


CALLS = [
    Call("linear", (3, 4), (4,), lambda way, x, w, b: way(F.linear, x, w, b), True, True, True),
    Call("linear, keywords", (3, 4), (4,), lambda way, x, w, b: way(F.linear, x, weight=w, bias=b), True, True, True),
    *map(make_conv_call, CONVOLUTIONS),
    Call("embedding", (7, 3), (2,), lambda way, x, w, b: way(F.embedding, x, w), False, False, True),
    Call("layer_norm", (4,), (3, 4), lambda way, x, w, b: way(F.layer_norm, x, (4,), w, b), True, False, True),
    Call("group_norm", (4,), (4, 3), lambda way, x, w, b: way(F.group_norm, x, 2, w, b)),
    Call("instance_norm", (4,), (4, 3), lambda way, x, w, b: way(F.instance_norm, x, weight=w, bias=b)),
]
WITH_BIAS = [call for call in CALLS if call.has_bias]

every_way = pytest.mark.parametrize("way", [directly, by_helper])
every_call = pytest.mark.parametrize("call", CALLS, ids=str)
every_call_with_bias = pytest.mark.parametrize("call", WITH_BIAS, ids=str)


def exclude_direct_calls(excluded: Callable[[Call], bool]) -> Any:
    by_call = [pytest.param(directly, call, id=f"{call}-directly") for call in CALLS if not excluded(call)]
    by_helpers = [pytest.param(by_helper, call, id=f"{call}-by_helper") for call in CALLS]
    return pytest.mark.parametrize(("way", "call"), by_call + by_helpers)


@every_way
@every_call
def test_input_that_is_an_expanded_weight(way: Any, call: Call) -> None:
    with raises(INPUT_IS_EXPANDED):
        call.call(way, make_expanded(BATCH, *call.sample), call.expanded(), None)


@pytest.mark.parametrize("input", [3, None, [torch.ones(BATCH, 4)]])
@exclude_direct_calls(lambda call: call.parses_input)
def test_input_of_another_type(way: Any, call: Call, input: Any) -> None:
    with raises("Expanded Weights requires a Tensor as the first input to get the batch dimension, got ..."):
        call.call(way, input, call.expanded(), None)


@exclude_direct_calls(lambda call: call.requires_rank)
def test_input_without_dimensions(way: Any, call: Call) -> None:
    with raises("Expanded Weights requires a batch dimension but got an input of size 0 in function ..."):
        call.call(way, torch.tensor(1.0), call.expanded(), None)


@every_way
@every_call
def test_input_without_samples(way: Any, call: Call) -> None:
    with raises("0 is not a valid batch size for Expanded Weights but got input tensor of ..."):
        call.call(way, call.input(0), call.expanded(), None)


@pytest.mark.parametrize(
    ("found", "smaller_allowed"), [(BATCH - 1, False), (1, False), (BATCH + 1, False), (BATCH + 1, True)]
)
@every_way
@every_call
def test_input_of_another_batch_size(way: Any, call: Call, found: int, smaller_allowed: bool) -> None:
    weight = call.expanded()
    weight.set_allow_smaller_batches(smaller_allowed)
    with raises(describe_batch_size_mismatch(found, BATCH)):
        call.call(way, call.input(found), weight, None)


@every_way
@every_call_with_bias
def test_bias_of_another_batch_size(way: Any, call: Call) -> None:
    with raises(describe_batch_size_mismatch(BATCH, BATCH + 1)):
        call.call(way, call.input(), call.expanded(), call.expanded_bias(batch=BATCH + 1))


@every_way
@every_call
def test_input_of_a_smaller_batch_size_if_allowed(way: Any, call: Call) -> None:
    weight, input = call.expanded(), call.input(BATCH - 2)
    weight.set_allow_smaller_batches(True)
    plain = call.call(directly, input, weight.orig_weight, None)
    torch.testing.assert_close(call.call(way, input, weight, None), plain, rtol=0, atol=0, check_stride=False)


@every_call
def test_smaller_batch_is_padded_with_zeros(call: Call) -> None:
    weight, input = call.expanded(), call.input(BATCH - 2)
    weight.set_allow_smaller_batches(True)
    call.call(directly, input, weight, None).square().sum().backward()
    grad_sample = weight.orig_weight.grad_sample
    plain = torch.autograd.grad(
        call.call(directly, input, weight.orig_weight, None).square().sum(), weight.orig_weight
    )[0]
    assert grad_sample.shape == (BATCH, *call.weight)
    assert not grad_sample[BATCH - 2 :].any()
    torch.testing.assert_close(grad_sample.sum(0), plain)


@pytest.mark.parametrize(("first", "second"), [("sum", "mean"), ("mean", "sum")])
@every_way
@every_call_with_bias
def test_conflicting_loss_reductions(way: Any, call: Call, first: str, second: str) -> None:
    with raises(
        "Expected ExpandedWeights to all have the same loss_reduction argument but got one with "
        f"{first} and one with {second}"
    ):
        call.call(way, call.input(), call.expanded(reduction=first), call.expanded_bias(reduction=second))


@every_call_with_bias
@pytest.mark.parametrize("plain", ["weight", "bias"])
def test_mixture_with_a_plain_parameter(call: Call, plain: str) -> None:
    weight, bias = call.expanded(), call.expanded_bias()
    chosen = (weight.orig_weight, bias) if plain == "weight" else (weight, bias.orig_weight)
    with raises(MIXTURE):
        call.call(directly, call.input(), *chosen).sum().backward()


@pytest.mark.parametrize("helper", [set_grad_sample_if_exists, unpack_expanded_weight_or_tensor])
def test_mixture_in_helpers(helper: Callable[..., Any]) -> None:
    with raises(MIXTURE):
        helper(make_weight(3), lambda original: original)


def test_batch_size_in_dimension_1() -> None:
    weight = make_expanded(3, 4)
    weight.set_batch_first(False)
    for way in (directly, by_helper):
        with raises(describe_batch_size_mismatch(7, BATCH)):
            way(F.linear, make_rows(BATCH, 7, 4), weight)
        way(F.linear, make_rows(7, BATCH, 4), weight)


@pytest.mark.parametrize("flags", [(True, False), (False, True)])
def test_conflicting_batch_first(flags: tuple[bool, bool]) -> None:
    weights = make_expanded(3, 4), make_expanded(3)
    for weight, flag in zip(weights, flags, strict=True):
        weight.set_batch_first(flag)
    x = make_rows(BATCH, BATCH, 4)
    with raises(CONFLICTING_BATCH_FIRST):
        is_batch_first([x, *weights])
    with raises(CONFLICTING_BATCH_FIRST):
        F.linear(x, *weights)
    with raises(CONFLICTING_BATCH_FIRST):
        F.linear(x, weights[0], bias=weights[1])


# ---- checks of single rules ----


@pytest.mark.parametrize("rank", [0, 1])
def test_linear_of_too_low_a_rank(rank: int) -> None:
    with raises(
        f"Input does not have a batch dimension. Expanded Weights expected input of at least rank 2, got of rank {rank}"
    ):
        F.linear(make_rows(*(4,) * rank), make_expanded(3, 4))


@pytest.mark.parametrize("dims", CONVOLUTIONS)
def test_convolution_without_a_batch(dims: int) -> None:
    call = make_conv_call(dims)
    with raises("Expanded Weights only support convolution with batched input, got ..."):
        call.call(directly, make_rows(*call.sample), call.expanded(), None)


@pytest.mark.parametrize("dims", CONVOLUTIONS)
@pytest.mark.parametrize("padding", ["full", "SAME", ""])
@pytest.mark.parametrize("by_keyword", [True, False])
def test_convolution_with_an_unknown_padding(dims: int, padding: str, by_keyword: bool) -> None:
    call, func = make_conv_call(dims), CONVOLUTIONS[dims]
    with raises(f"got padding type of {padding}, only accept 'same' or 'valid'"):
        if by_keyword:
            func(call.input(), call.expanded(), padding=padding)
        else:
            func(call.input(), call.expanded(), None, 1, padding)


def test_embedding_of_ids_in_one_dimension() -> None:
    with raises("Expanded Weights needs an input with a batch size, got a 1D tensor, ..."):
        F.embedding(torch.arange(BATCH), make_expanded(7, 3))


@pytest.mark.parametrize("shape", [(4,), (BATCH, 4), (BATCH, 2, 4)])
def test_layer_norm_over_the_batch(shape: tuple[int, ...]) -> None:
    with raises(
        "Expanded Weights: Layer norm should not normalize over batch dimension for per sample gradient computations "
        "but got ..."
    ):
        F.layer_norm(make_rows(*shape), shape, make_expanded(*shape))


# ---- recurrent functions ----

GATES = {torch.lstm: 4, torch.gru: 3, torch.rnn_tanh: 1, torch.rnn_relu: 1}
every_recurrent = pytest.mark.parametrize("func", GATES, ids=lambda func: func.__name__)


def make_recurrent_weights(func: Callable[..., Any]) -> list[Any]:
    """Expanded weights of one layer, from width 4 to width 3."""
    gates = 3 * GATES[func]
    return [make_expanded(gates, 4), make_expanded(gates, 3), make_expanded(gates), make_expanded(gates)]


def run_recurrent(func: Callable[..., Any], weights: list[Any], input: Tensor, batch: int, batch_first: bool) -> Any:
    state = make_rows(1, batch, 3)
    return func(input, (state, state) if func is torch.lstm else state, weights, True, 1, 0.0, True, False, batch_first)


@every_recurrent
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("found", [BATCH - 1, BATCH + 1])
def test_recurrent_input_of_another_batch_size(func: Callable[..., Any], batch_first: bool, found: int) -> None:
    input = make_rows(found, BATCH, 4) if batch_first else make_rows(BATCH, found, 4)
    with raises(describe_batch_size_mismatch(found, BATCH)):
        run_recurrent(func, make_recurrent_weights(func), input, found, batch_first)


@every_recurrent
def test_recurrent_input_that_is_an_expanded_weight(func: Callable[..., Any]) -> None:
    with raises(INPUT_IS_EXPANDED):
        run_recurrent(func, make_recurrent_weights(func), make_expanded(2, BATCH, 4), BATCH, False)


@every_recurrent
def test_recurrent_weights_with_conflicting_loss_reductions(func: Callable[..., Any]) -> None:
    weights = make_recurrent_weights(func)
    weights[3] = ExpandedWeight(weights[3].orig_weight, BATCH, "mean")
    with raises(
        "Expected ExpandedWeights to all have the same loss_reduction argument but got one with sum and one with mean"
    ):
        run_recurrent(func, weights, make_rows(2, BATCH, 4), BATCH, False)


@every_recurrent
@pytest.mark.parametrize("plain", range(4))
def test_recurrent_mixture_with_a_plain_parameter(func: Callable[..., Any], plain: int) -> None:
    weights = make_recurrent_weights(func)
    weights[plain] = weights[plain].orig_weight
    with raises(MIXTURE):
        run_recurrent(func, weights, make_rows(2, BATCH, 4), BATCH, False)[0].sum().backward()
