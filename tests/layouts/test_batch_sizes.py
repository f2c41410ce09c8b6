"""What is known of an op from two sizes of the batch holds for the others, and nothing is assumed that may not hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from persample import SamplesMixed, record
from persample.layouts import CACHE, find
from persample.testing.oracle import assert_rows_close

D, T = 4, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.places = nn.Parameter(torch.randn(T, D))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x + self.places)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(attended).softmax(-1).flatten(1)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, T)), nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * T * D, 3),
    )  # fmt: skip


class LastStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0][:, -1]


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that are tried, in a process that knows nothing."""
    CACHE.clear()
    tried: list[str] = []
    trial = find.find_motion_by_trial

    def noted(op: Any, results: Any) -> Any:
        tried.append(op.func.__name__)
        return trial(op, results)

    monkeypatch.setattr(find, "find_motion_by_trial", noted)
    return tried


@pytest.mark.parametrize("make", [Block, convolutions, LastStep])
def test_any_size(make: Callable[[], nn.Module], trials: list[str]) -> None:
    """Of one sample and of none nothing is learnt. The last sizes may be those of other things too: they are tried."""
    torch.manual_seed(0)
    model = make().double()
    for i, size in enumerate((1, 7, 11, 9, 0, 1, 13, T, D, 3, 2)):
        x = torch.randn(size, T, D).double()
        before = len(trials)
        with record(model, loss_reduction="sum") as grads:
            model(x).square().sum().backward()
        assert i < 3 or size <= T or not trials[before:], (size, trials[before:])
        if size:
            rows = []
            for n in range(size):
                parts = torch.autograd.grad(model(x[n : n + 1]).square().sum(), list(model.parameters()))
                rows.append(parts)
            stacked = map(torch.stack, zip(*rows, strict=True))
            assert_rows_close(grads.dense(), dict(zip(grads.names, stacked, strict=True)))


def mixes_large_batches(x: Tensor) -> Tensor:
    """A function of somebody's own, which looks at the size of the batch."""
    if has_torch_function_unary(x):
        return handle_torch_function(mixes_large_batches, (x,), x)
    return x - x.mean(0) if len(x) > 4 else x * 2


def test_functions_of_others_are_tried_for_each_size(trials: list[str]) -> None:
    layer = nn.Linear(D, D)
    for size in (2, 3, 4):
        with record(layer):
            mixes_large_batches(layer(torch.randn(size, D))).square().sum(1).mean().backward()
    assert trials.count("mixes_large_batches") == 3
    with pytest.raises(SamplesMixed), record(layer):
        mixes_large_batches(layer(torch.randn(5, D))).square().sum(1).mean().backward()


def test_numbers_that_may_be_the_size_are_not_taken_for_others(trials: list[str]) -> None:
    """`narrow(0, 0, 4)` keeps all samples of a batch of 4, and not those of one of 5."""
    layer = nn.Linear(D, D)
    for size in (2, 3, 4, 5, 6):
        with record(layer, loss_reduction="sum") as grads:
            layer(torch.randn(size, D)).narrow(0, 0, min(size, 4)).square().sum().backward()
        assert (grads.norms() > 0).tolist() == [n < 4 for n in range(size)]
