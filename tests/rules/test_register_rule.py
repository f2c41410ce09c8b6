"""Rules that users add: docs/rules.md shows how."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

import persample
from persample.rules.registry import FURTHER_RULES
from persample.terms import Dense
from tests.support.cases import Calls, param
from tests.support.oracle import Case, assert_rows_close, loss_of, oracle

B, T, D = 3, 5, 4


@pytest.fixture(autouse=True)
def no_rule_is_left() -> Iterator[None]:
    before = {func: list(rules) for func, rules in FURTHER_RULES.items()}
    yield
    FURTHER_RULES.clear()
    FURTHER_RULES.update(before)


def shifted(input: Tensor, weight: Tensor, steps: int = 1) -> Tensor:
    """Each channel of what was there some steps before, times its weight; a torch function of our own."""
    if has_torch_function((input, weight)):
        return handle_torch_function(shifted, (input, weight), input, weight, steps=steps)
    return input.roll(steps, 1) * weight


@torch.library.custom_op("persample_tests::scaled", mutates_args=())
def scaled(input: Tensor, weight: Tensor) -> Tensor:
    return input * weight


scaled.register_fake(lambda input, weight: torch.empty_like(input))
scaled.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[1], (grad * ctx.saved_tensors[0]).sum((0, 1))),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def recorded(module: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    with persample.record(module, loss_reduction="sum") as grads:
        loss_of(module(*inputs), 0).backward()
    return grads.dense()


def a_case(function: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Tensor]]:
    case = Case("", lambda: Calls(lambda m, h: function(h.sin(), m.w), w=param(D)), lambda: [torch.randn(B, T, D)])
    module, args, kwargs = case.build()
    return module, args, oracle(case, module, args, kwargs, B)


@pytest.mark.parametrize("function", [shifted, scaled], ids=["a torch function", "an operator of a library"])
def test_a_rule_of_ones_own_is_taken(function: Any) -> None:
    module, args, expected = a_case(function)
    assert_rows_close(recorded(module, *args), expected)  # by the generic rule
    calls = []

    @persample.register_rule(shifted)
    def of_shifted(grad: Tensor, input: Tensor, weight: Tensor, steps: int = 1) -> dict[str, Dense]:
        calls.append(input.shape)
        return {"weight": Dense((grad * input.roll(steps, 2)).sum((1, 2)))}

    @persample.register_rule("persample_tests::scaled")
    def of_scaled(grad: Tensor, input: Tensor, weight: Tensor) -> dict[str, Dense]:
        calls.append(input.shape)
        return {"weight": Dense((grad * input).sum((1, 2)))}

    assert_rows_close(recorded(module, *args), expected)
    assert calls == [(B, 1, T, D)]  # a sample is a batch of one


def test_the_last_rule_is_asked_first_and_may_decline() -> None:
    module, args, expected = a_case(shifted)

    @persample.register_rule(shifted)
    def right(grad: Tensor, input: Tensor, weight: Tensor, steps: int = 1) -> dict[str, Dense]:
        return {"weight": Dense((grad * input.roll(steps, 2)).sum((1, 2)))}

    @persample.register_rule(shifted, when=lambda input, weight, steps=1: steps == 2)
    def for_two_steps(grad: Tensor, input: Tensor, weight: Tensor, steps: int = 1) -> dict[str, Dense]:
        raise AssertionError

    assert_rows_close(recorded(module, *args), expected)


def test_a_rule_that_forgets_a_weight_is_an_error() -> None:
    module, args, _ = a_case(shifted)
    persample.register_rule(shifted)(lambda grad, input, weight, steps=1: {})
    with pytest.raises(persample.PerSampleError, match=r"rule of shifted gives no term for \['weight'\]"):
        recorded(module, *args)


def test_samples_where_a_rule_expects_none_go_to_the_generic_rule() -> None:
    """A weight of each sample's own is no weight to the rule."""
    case = Case("", lambda: Calls(lambda m, h: shifted(m.w.expand(len(h), T, D), h[:, 0, :1].unsqueeze(1)), w=param(D)), lambda: [torch.randn(B, T, D)])  # fmt: skip # noqa: E501
    module, args, kwargs = case.build()
    expected = oracle(case, module, args, kwargs, B)
    persample.register_rule(shifted)(lambda grad, input, weight, steps=1: {"weight": Dense(weight)})
    assert_rows_close(recorded(module, *args), expected)


def test_the_example_of_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "rules.md").read_text()
    blocks = [part.split("```")[0] for part in text.split("```python\n")[1:]]
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(block, scope)
    scope["test_snake"]()
