"""A motion that is the same for two batch sizes is used for all sizes, unless it may depend on the size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from persample import SamplesMixed, record
from persample.layouts import MEMO, find
from persample.testing.oracle import assert_rows_close

D, T = 4, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.positions = nn.Parameter(torch.randn(T, D))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x + self.positions)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(attended).softmax(-1).flatten(1)


def make_convolutions() -> nn.Module:
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
    """The names of the functions that are tried, starting with an empty cache."""
    MEMO.clear()
    tried: list[str] = []
    find_by_trial = find.find_motion_by_trial

    def find_and_note(call: Any, results: Any) -> Any:
        tried.append(call.func.__name__)
        return find_by_trial(call, results)

    monkeypatch.setattr(find, "find_motion_by_trial", find_and_note)
    return tried


@pytest.mark.parametrize("make", [Block, make_convolutions, LastStep])
def test_new_batch_sizes_need_no_trials(make: Callable[[], nn.Module], trials: list[str]) -> None:
    """Sizes 0 and 1 say nothing about others. The last sizes equal other dimensions of the model, so they are tried."""
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
    """A function that is not of torch, and depends on the batch size."""
    if has_torch_function_unary(x):
        return handle_torch_function(mixes_large_batches, (x,), x)
    return x - x.mean(0) if len(x) > 4 else x * 2


def test_functions_outside_torch_are_tried_for_each_size(trials: list[str]) -> None:
    layer = nn.Linear(D, D)
    for size in (2, 3, 4):
        with record(layer):
            mixes_large_batches(layer(torch.randn(size, D))).square().sum(1).mean().backward()
    assert trials.count("mixes_large_batches") == 3
    with pytest.raises(SamplesMixed), record(layer):
        mixes_large_batches(layer(torch.randn(5, D))).square().sum(1).mean().backward()


def test_arguments_that_may_be_the_batch_size_are_not_generalised(trials: list[str]) -> None:
    """`narrow(0, 0, 4)` keeps all samples of a batch of 4, but not of a batch of 5."""
    layer = nn.Linear(D, D)
    for size in (2, 3, 4, 5, 6):
        with record(layer, loss_reduction="sum") as grads:
            layer(torch.randn(size, D)).narrow(0, 0, min(size, 4)).square().sum().backward()
        assert (grads.norms() > 0).tolist() == [n < 4 for n in range(size)]
