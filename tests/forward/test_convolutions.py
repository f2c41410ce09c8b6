"""Convolutions whose outputs see only padding, and all ways to call a convolution, equal the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import record
from persample.testing.oracle import assert_rows_close, compute_test_loss, perturb, stack_gradients
from tests.support.cases import Calls, param

B = 3
SIZES = {1: (5,), 2: (5, 6), 3: (4, 5, 3)}

# With the last two, every output sees only padding.
LAYERS: dict[str, dict[str, Any]] = {
    "some windows of padding": {"kernel_size": 1, "padding": 2},
    "same": {"kernel_size": 2, "padding": "same", "dilation": 3},
    "valid, groups": {"kernel_size": 2, "padding": "valid", "groups": 2},
    "circular": {"kernel_size": 3, "padding": 2, "padding_mode": "circular"},
    "reflect": {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    "stride over the input": {"kernel_size": 1, "padding": 3, "stride": 20},
    "dilated around the input": {"kernel_size": 2, "padding": 6, "dilation": 11, "stride": 40},
}
TRANSPOSED: dict[str, dict[str, Any]] = {
    "gaps": {"kernel_size": 1, "stride": 3, "output_padding": 2},
    "cut": {"kernel_size": 3, "padding": 2},
    "groups": {"kernel_size": 2, "groups": 2, "dilation": 2},
}


def check(model: nn.Module, dims: int) -> None:
    model, x = model.double(), torch.randn(B, 4, *SIZES[dims], dtype=torch.float64)
    perturb(model)
    losses = (compute_test_loss(model(x[n : n + 1])) for n in range(B))
    expected = stack_gradients(losses, dict(model.named_parameters()))
    with record(model, loss_reduction="sum") as grads:
        compute_test_loss(model(x)).backward()
    assert_rows_close(grads.dense(), expected)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("dims", SIZES)
@pytest.mark.parametrize("name", LAYERS)
def test_convolution_layers(name: str, dims: int, is_first: bool) -> None:
    torch.manual_seed(0)
    layer = getattr(nn, f"Conv{dims}d")
    before = nn.Identity() if is_first else layer(4, 4, 1)
    check(nn.Sequential(before, layer(4, 4, **LAYERS[name])), dims)


@pytest.mark.parametrize("dims", SIZES)
@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolution_layers(name: str, dims: int) -> None:
    torch.manual_seed(0)
    check(getattr(nn, f"ConvTranspose{dims}d")(4, 4, **TRANSPOSED[name]), dims)


def convolve(m: Any, x: Tensor, owner: Any = F, **options: Any) -> Tensor:
    return getattr(owner, f"conv{m.dims}d")(x, m.w, m.b, **options)


# `far`: no window sees the input.
FAR = {"padding": 7, "stride": 30}
CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "F": lambda m, x: convolve(m, x, **FAR),
    "torch": lambda m, x: convolve(m, x, torch, **FAR),
    "by names": lambda m, x: getattr(F, f"conv{m.dims}d")(bias=m.b, weight=m.w, input=x, **FAR),
    "a word for padding": lambda m, x: getattr(F, f"conv{m.dims}d")(x, m.w, m.b, 1, "same"),
    "unbatched": lambda m, x: torch.stack([convolve(m, row, padding=1) for row in x]),
    "unbatched, far": lambda m, x: torch.stack([convolve(m, row, **FAR) for row in x]),
    "convolution": lambda m, x: torch.convolution(
        x, m.w, m.b, [30] * m.dims, [7] * m.dims, [1] * m.dims, False, [0] * m.dims, 1
    ),
    "transposed by names": lambda m, x: getattr(F, f"conv_transpose{m.dims}d")(weight=m.w, input=x, bias=m.b, stride=3),
    "steps as a batch": lambda m, x: convolve(m, x.repeat_interleave(2, 0), **FAR).unflatten(0, (-1, 2)),
}


@pytest.mark.parametrize("dims", SIZES)
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_convolutions(name: str, dims: int) -> None:
    torch.manual_seed(0)
    model = Calls(CALLS[name], w=param(4, 4, *[2] * dims), b=param(4))
    model.dims = dims
    check(model, dims)


def test_convolution_with_time_first() -> None:
    torch.manual_seed(0)
    model = Calls(
        lambda m, x: torch.conv_tbc(x.permute(2, 0, 1).contiguous(), m.w, m.b, 2).transpose(0, 1),
        w=param(2, 4, 4), b=param(4),
    )  # fmt: skip
    check(model, 1)
