"""Rules of norm layers, computed for some samples at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from persample import record
from persample.rules import norm
from persample.testing.oracle import assert_rows_close, compute_test_loss
from tests.support.case import loop_gradients

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("block_size", [1, 100, 10**9])
def test_group_norm_in_blocks_of_samples(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "_BLOCK_SIZE", block_size)
    model, x = nn.GroupNorm(2, 4).double(), torch.randn(5, 4, 3, 3).double()
    with torch.no_grad():
        model.weight.normal_()
        model.bias.normal_()
    expected = loop_gradients(model, x)
    with record(model, loss_reduction="sum") as grads:
        compute_test_loss(model(x), 0).backward()
    assert_rows_close(grads.dense(), expected)
