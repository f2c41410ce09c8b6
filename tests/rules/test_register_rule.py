"""Rules that users register, as shown in docs/rules.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

import persample
from persample.terms import Dense
from persample.testing.oracle import assert_rows_close, compute_test_loss
from tests.support.case import Case
from tests.support.cases import Calls, param

pytestmark = pytest.mark.quick

B, T, D = 3, 5, 4


def shift(input: Tensor, weight: Tensor, steps: int = 1) -> Tensor:
    """A torch function: the input shifted by some steps in time, times a weight for each channel."""
    if has_torch_function((input, weight)):
        return handle_torch_function(shift, (input, weight), input, weight, steps=steps)
    return input.roll(steps, 1) * weight


@torch.library.custom_op("persample_tests::scale", mutates_args=())
def scale(input: Tensor, weight: Tensor) -> Tensor:
    return input * weight


scale.register_fake(lambda input, weight: torch.empty_like(input))
scale.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[1], (grad * ctx.saved_tensors[0]).sum((0, 1))),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def record(module: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    with persample.record(module, loss_reduction="sum") as grads:
        compute_test_loss(module(*inputs), 0).backward()
    return grads.dense()


def make_case(function: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Tensor]]:
    case = Case("", lambda: Calls(lambda m, h: function(h.sin(), m.w), w=param(D)), lambda: [torch.randn(B, T, D)])
    module, args, kwargs = case.build()
    return module, args, case.loop_gradients(module, args, kwargs, B)


@pytest.mark.parametrize("function", [shift, scale], ids=["torch function", "library operator"])
def test_a_registered_rule_is_used(function: Any) -> None:
    module, args, expected = make_case(function)
    assert_rows_close(record(module, *args), expected)  # with the generic rule
    calls = []

    @persample.register_rule(shift)
    def compute_shift_terms(grad: Tensor, input: Tensor, weight: Tensor, steps: int = 1) -> dict[str, Dense]:
        calls.append(input.shape)
        return {"weight": Dense((grad * input.roll(steps, 2)).sum((1, 2)))}

    @persample.register_rule("persample_tests::scale")
    def compute_scale_terms(grad: Tensor, input: Tensor, weight: Tensor) -> dict[str, Dense]:
        calls.append(input.shape)
        return {"weight": Dense((grad * input).sum((1, 2)))}

    assert_rows_close(record(module, *args), expected)
    assert calls == [(B, 1, T, D)]  # a sample is a batch of one


def test_the_last_rule_is_asked_first_and_may_decline_a_call() -> None:
    module, args, expected = make_case(shift)

    @persample.register_rule(shift)
    def compute_shift_terms(grad: Tensor, input: Tensor, weight: Tensor, steps: int = 1) -> dict[str, Dense]:
        return {"weight": Dense((grad * input.roll(steps, 2)).sum((1, 2)))}

    @persample.register_rule(shift, when=lambda input, weight, steps=1: steps == 2)
    def fail(grad: Tensor, input: Tensor, weight: Tensor, steps: int = 1) -> dict[str, Dense]:
        raise AssertionError

    assert_rows_close(record(module, *args), expected)


def test_a_rule_that_is_registered_after_a_recording_is_used() -> None:
    def scale_channels(input: Tensor, weight: Tensor) -> Tensor:  # no other test has asked for its rules
        if has_torch_function((input, weight)):
            return handle_torch_function(scale_channels, (input, weight), input, weight)
        return input * weight

    module, args, expected = make_case(scale_channels)
    calls = []
    for i in range(2):

        @persample.register_rule(scale_channels)
        def compute_terms(grad: Tensor, input: Tensor, weight: Tensor, number: int = i) -> dict[str, Dense]:
            calls.append(number)
            return {"weight": Dense((grad * input).sum((1, 2)))}

        assert_rows_close(record(module, *args), expected)
    assert calls == [0, 1]


def test_a_rule_without_a_term_for_a_weight_raises() -> None:
    module, args, _ = make_case(shift)
    persample.register_rule(shift)(lambda grad, input, weight, steps=1: {})
    with pytest.raises(persample.PerSampleError, match=r"rule of shift returns no term for \['weight'\]"):
        record(module, *args)


def test_the_generic_rule_is_used_if_an_unexpected_argument_has_samples() -> None:
    """The second argument is a weight to the rule, but here it depends on the samples."""
    case = Case("", lambda: Calls(lambda m, h: shift(m.w.expand(len(h), T, D), h[:, 0, :1].unsqueeze(1)), w=param(D)), lambda: [torch.randn(B, T, D)])  # fmt: skip # noqa: E501
    module, args, kwargs = case.build()
    expected = case.loop_gradients(module, args, kwargs, B)
    persample.register_rule(shift)(lambda grad, input, weight, steps=1: {"weight": Dense(weight)})
    assert_rows_close(record(module, *args), expected)
