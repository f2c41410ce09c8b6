"""Per-sample gradients in lower precision and under autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from persample import call_for_per_sample_grads
from persample.testing.oracle import assert_rows_close, compute_test_loss
from tests.support.case import Case, loop_gradients
from tests.support.cases import B, D, T
from tests.support.modules import get_grad_samples


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (lambda: nn.Linear(D, 5), (B, T, D)),
        (lambda: nn.Conv1d(D, 6, 3, padding=1, groups=2), (B, D, 8)),
        (lambda: nn.Conv2d(D, 6, 3, stride=2, dilation=2), (B, D, 8, 7)),
        (lambda: nn.Conv3d(2, 3, 2), (B, 2, 4, 3, 3)),
        (lambda: nn.LayerNorm(D), (B, T, D)),
        (lambda: nn.GroupNorm(2, D), (B, D, T)),
        (lambda: nn.InstanceNorm1d(D, affine=True), (B, D, T)),
        (lambda: nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 2)), (B, D)),
    ],
)
def test_lower_precision(module: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    case = Case("", module, lambda: [torch.randn(shape)], double=False)
    built, (x,), _ = case.build()
    built, x = built.to(dtype), x.to(dtype)
    compute_test_loss(call_for_per_sample_grads(built)(x), 0).backward()
    actual = {name: rows.double() for name, rows in get_grad_samples(built).items()}
    assert all(rows.dtype == dtype for rows in get_grad_samples(built).values())
    exact = module().double()
    exact.load_state_dict({key: value.double() for key, value in built.state_dict().items()})
    expected = loop_gradients(exact, x.double())
    assert_rows_close(actual, expected, {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype])


def test_embedding_in_lower_precision() -> None:
    module, ids = nn.Embedding(5, D).bfloat16(), torch.randint(0, 5, (B, T))
    call_for_per_sample_grads(module)(ids).sum().backward()
    counts = F.one_hot(ids, 5).sum(1).unsqueeze(-1).expand(B, 5, D)
    assert torch.equal(module.weight.grad_sample, counts.bfloat16())


def test_autocast() -> None:
    module = nn.Sequential(nn.Linear(D, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    x = torch.randn(B, T, D)
    with torch.autocast("cpu", torch.bfloat16):
        plain = module(x)
        output = call_for_per_sample_grads(module)(x)
    assert torch.equal(output, plain)
    compute_test_loss(output.float(), 0).backward()
    assert_rows_close(get_grad_samples(module), loop_gradients(module, x), 0.1)
