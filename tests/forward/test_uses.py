"""Uses of weights: calls with a weight on one side and samples on the other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import SamplesMixed, call_for_per_sample_grads
from persample.testing.oracle import assert_rows_close, compute_test_loss
from tests.support.case import Case
from tests.support.cases import B, Calls, D, T, param, x


class Halve(torch.autograd.Function):
    """A function of weights whose backward reads values, which vmap does not allow."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w / 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 2 if bool(grad.isfinite().all()) else grad * 0


def choose_by_value(m: Any, h: Tensor) -> Tensor:
    return h if bool(h.sum() > 1e9) else m.a(h)


UNUSUAL_USES: list[Case] = [
    Case("a weight as the input of linear", lambda: Calls(lambda m, h: F.linear(m.w, h).t() * 1.5, w=param(5, D)), x(B, D)),
    Case("samples in weight and input of linear", lambda: Calls(lambda m, h: (m.w @ h.transpose(1, 2)).softmax(-1), w=param(5, D)), x(B, T, D)),
    Case("backward of weights that vmap refuses", lambda: Calls(lambda m, h: F.linear(h, Halve.apply(m.w)), w=param(5, D)), x(B, D)),
    Case("a branch on values", lambda: Calls(choose_by_value, a=nn.Linear(D, D)), x(B, D)),
    Case("index_put", lambda: Calls(lambda m, h: torch.zeros_like(h).index_put_((torch.arange(len(h))[:, None], torch.tensor([[0, 2]])), m.a(h)[:, :2]), a=nn.Linear(D, D)), x(B, D)),
    Case("zip over samples", lambda: Calls(lambda m, h: torch.stack([m.a(a) * b for a, b in zip(h, h.sin(), strict=True)]), a=nn.Linear(D, D)), x(B, D)),
]  # fmt: skip


@pytest.mark.parametrize("case", UNUSUAL_USES, ids=str)
def test_unusual_uses_of_a_weight(case: Case) -> None:
    module, args, kwargs = case.build()
    expected = case.loop_gradients(module, args, kwargs, B)
    compute_test_loss(call_for_per_sample_grads(module)(*args), 0).backward()
    assert_rows_close({name: p.grad_sample for name, p in module.named_parameters()}, expected)


def test_a_number_of_one_sample_may_not_scale_all_samples() -> None:
    module = Calls(lambda m, h: m.a(h * h[0, 0]), a=nn.Linear(D, D))
    with pytest.raises(SamplesMixed, match="mixes the samples"):
        call_for_per_sample_grads(module)(torch.randn(B, D))


@pytest.mark.parametrize("pair", list(itertools.permutations(["sum", "mean"], 2)), ids=str)
def test_sums_over_the_samples_may_be_scaled_and_added(pair: tuple[str, str]) -> None:
    first, second = pair

    def forward(m: Any, h: Tensor) -> Tensor:
        y = m.a(h)
        return 0.5 * getattr(y.sin(), first)() - getattr(y.cos(), second)() / 3

    module = Calls(forward, a=nn.Linear(D, D))
    h = torch.randn(B, D)
    call_for_per_sample_grads(module)(h).backward()
    (plain,) = torch.autograd.grad(module(h), module.a.weight)
    torch.testing.assert_close(module.a.weight.grad_sample.sum(0), plain)


def test_an_output_of_weights_expanded_to_the_batch_has_a_row_for_each_sample() -> None:
    def forward(m: Any, h: Tensor) -> Any:
        volume = torch.linalg.slogdet(m.w @ m.w.mT + 2 * torch.eye(D, dtype=h.dtype))[1]
        return h @ m.w, volume.expand(len(h)), m.v.expand(len(h), -1)

    case = Case("", lambda: Calls(forward, w=param(D, D), v=param(D)), lambda: [torch.randn(B, D)])
    module, args, kwargs = case.build()
    expected = case.loop_gradients(module, args, kwargs, B)
    compute_test_loss(call_for_per_sample_grads(module)(*args), 0).backward()
    assert_rows_close({name: p.grad_sample for name, p in module.named_parameters()}, expected)
