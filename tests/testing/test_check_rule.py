"""The battery for rules accepts right rules, and names the form of the call and the answer that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from persample import register_rule
from persample.rules.registry import FURTHER_RULES
from persample.terms import Dense, Outer
from persample.testing import check_rule

EXAMPLES: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "linear": (F.linear, {"weight": torch.randn(4, 3), "bias": torch.randn(4), "input": torch.randn(5, 3)}),
    "complex linear": (
        F.linear,
        {"weight": torch.randn(4, 3, dtype=torch.complex64), "input": torch.randn(3, 3, dtype=torch.complex64)},
    ),
    "bilinear": (
        F.bilinear, {"weight": torch.randn(4, 3, 2), "input1": torch.randn(5, 3), "input2": torch.randn(5, 2)},
    ),
    "matmul": (torch.matmul, {"input": torch.randn(5, 3), "other": torch.randn(3, 4, requires_grad=True)}),
    "embedding": (F.embedding, {"weight": torch.randn(7, 3), "input": torch.arange(10).view(5, 2) % 7}),
    "convolution": (F.conv2d, {"weight": torch.randn(4, 3, 2, 2), "input": torch.randn(3, 3, 6, 5), "padding": 1}),
    "layer norm": (
        F.layer_norm,
        {"weight": torch.randn(3), "bias": torch.randn(3), "input": torch.randn(5, 2, 3), "normalized_shape": (3,)},
    ),
    "group norm": (F.group_norm, {"weight": torch.randn(4), "input": torch.randn(5, 4, 3), "num_groups": 2}),
    "product": (torch.mul, {"other": torch.randn(3), "input": torch.randn(5, 3)}),
}  # fmt: skip


def scale(input: Tensor, weight: Tensor) -> Tensor:
    """A torch function without a rule."""
    if has_torch_function((input, weight)):
        return handle_torch_function(scale, (input, weight), input, weight)
    return input * weight


def sum_positions(rows: Tensor) -> Tensor:
    return rows.flatten(1, -2).sum(1)


def check_scale(compute: Callable[[Tensor, Tensor], Any], dims: int = 2, **options: Any) -> list[str]:
    """Register a rule for `scale` and check it; the rule's term is computed from `grad` and `input`."""
    options = {"accepts": lambda input, dim: dim < input.dim() - 1, **options}

    @register_rule(scale, **options)
    def compute_terms(grad: Tensor, input: Tensor, weight: Tensor) -> dict[str, Any]:
        return {"weight": compute(grad, input)}

    return check_rule(scale, weight=torch.randn(4), input=torch.randn(5, 2, 4)[:, : dims - 1].squeeze(1))


@pytest.mark.parametrize("name", EXAMPLES)
def test_rules_of_torch_functions(name: str) -> None:
    function, arguments = EXAMPLES[name]
    forms = check_rule(function, **arguments)
    assert {"3 samples", "1 sample", "a mean over the samples", "two calls with the same weights"} <= set(forms)


def test_forms_that_the_function_supports() -> None:
    forms = check_scale(lambda grad, input: Dense(sum_positions(grad * input)))
    assert len(forms) == 13 and "samples in dimension 1 of sequences of length 4" in forms
    function, arguments = EXAMPLES["convolution"]
    assert not any("sequences" in form for form in check_rule(function, **arguments))


class WrongNorms(Dense):
    def squared_norms(self) -> Tensor:
        return super().squared_norms() * 1.1


class WrongSum(Dense):
    def sum(self, weights: Tensor) -> Tensor:
        return super().sum(weights.abs())


class WrongCompactNorms(Dense):
    def compute_norms_and_compact(self) -> Any:
        return super().squared_norms() * 1.1, self


def swap_if_square(grad: Tensor, input: Tensor) -> Dense:
    rows = grad * input
    if rows.dim() > 3 and rows.shape[0] == rows.shape[2] > 1:  # confuses the batch with the sequence
        rows = rows.transpose(0, 2)
    return Dense(sum_positions(rows))


# What the rule computes from grad and input; the form and the answer in the message.
WRONG: dict[str, tuple[Callable[[Tensor, Tensor], Any], str, str]] = {
    "factor": (lambda grad, input: Dense(2 * sum_positions(grad * input)), "3 samples", r"dense\(\)\['weight'\]"),
    "order of samples": (lambda grad, input: Dense(sum_positions(grad * input).flip(0)), "3 samples", "dense"),
    "missing conjugate or input": (lambda grad, input: Dense(sum_positions(grad)), "3 samples", "dense"),
    "last position only": (
        lambda grad, input: Dense((grad * input).flatten(1, -2)[:, -1]), "sequences of length 4", "dense",
    ),
    "batch dimension": (
        lambda grad, input: Dense(sum_positions((grad * input)[:, :1])),
        "samples in dimension 1 of sequences of length 4",
        "dense",
    ),
    "as many positions as samples": (swap_if_square, "sequences of length 3, which is the number", "dense"),
    "norms of the term": (lambda grad, input: WrongNorms(sum_positions(grad * input)), "3 samples", r"norms\(\)"),
    "sum of the term": (lambda grad, input: WrongSum(sum_positions(grad * input)), "3 samples", r"sum\(weights\)"),
    "compact norms of the term": (
        lambda grad, input: WrongCompactNorms(sum_positions(grad * input)), "3 samples", r"norms\(\)",
    ),
    "shape": (lambda grad, input: Outer(grad.flatten(1, -2), input.flatten(1, -2)), "3 samples", "shape"),
    "float32": (
        lambda grad, input: Dense(sum_positions(grad * input) * (1 if grad.dtype == torch.float64 else 1.1)),
        "float32",
        "dense",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rule_is_reported(name: str) -> None:
    compute, form, answer = WRONG[name]
    with pytest.raises(AssertionError, match=answer) as caught:
        check_scale(compute)
    assert f"The rule of scale is wrong for {form}" in str(caught.value)


def test_message_tells_the_difference() -> None:
    with pytest.raises(
        AssertionError, match=r"differs by 1\.0e\+00 of the largest expected entry, 1\.0e-06 is allowed"
    ):
        check_scale(lambda grad, input: Dense(2 * sum_positions(grad * input)))


def test_rule_that_fails_when_the_weight_is_used_twice() -> None:
    calls = []

    def compute(grad: Tensor, input: Tensor) -> Dense:
        calls.append(input.shape)
        kept = compute.__dict__.setdefault("kept", {})  # reuses the result of the first call of the same shape
        return kept.setdefault((input.shape, grad.dtype, len(calls) % 2), Dense(sum_positions(grad * input)))

    with pytest.raises(AssertionError, match="is wrong for"):
        check_scale(compute)


def test_rule_that_declines_the_example() -> None:
    with pytest.raises(AssertionError, match=r"not used for 'weight', but generic \(scale\)"):
        check_scale(lambda grad, input: Dense(sum_positions(grad * input)), accepts=lambda input, dim: False)
    with pytest.raises(ValueError, match="No rule of scale holds for a call with the arguments"):
        check_scale_of_no_call()


def check_scale_of_no_call() -> None:
    FURTHER_RULES.pop(scale)
    check_scale(lambda grad, input: Dense(sum_positions(grad * input)), when=lambda input, weight: False)


def test_rule_that_raises() -> None:
    def compute(grad: Tensor, input: Tensor) -> Dense:
        raise ZeroDivisionError

    with pytest.raises(AssertionError, match=r"wrong for 3 samples\. ZeroDivisionError"):
        check_scale(compute)


def test_function_without_a_rule() -> None:
    with pytest.raises(ValueError, match=r"scale has no rule: register one with persample\.register_rule"):
        check_rule(scale, weight=torch.randn(3), input=torch.randn(5, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": torch.randn(4, 3), "input": torch.randn(2, 3)}, "at least 3"),
        ({"weight": torch.randn(4, 3), "input": torch.randn(3)}, "at least 3|not usable"),
        ({"weight": torch.ones(4, 3).long(), "input": torch.ones(5, 3).long()}, "has no weight"),
    ],
)
def test_arguments_that_are_no_example(arguments: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rule(F.linear, **arguments)


def center(input: Tensor, weight: Tensor) -> Tensor:
    if has_torch_function((input, weight)):
        return handle_torch_function(center, (input, weight), input, weight)
    return (input - input.mean(0)) * weight


def test_function_that_mixes_samples() -> None:
    register_rule(center)(lambda grad, input, weight: {"weight": Dense((grad * input).sum(1))})
    with pytest.raises(
        ValueError, match=r"The example of center is not usable \(3 samples\): the result mixes samples"
    ):
        check_rule(center, weight=torch.randn(3), input=torch.randn(5, 3))
