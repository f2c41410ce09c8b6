"""The size of the batches of a scan, where the user has not chosen it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import persample
from persample.scanning import ScanError
from persample.scanning.batch_size import choose_batch_size
from persample.scanning.measure import Measurement
from persample.scanning.source import Source

X, Y = torch.randn(4096, 8), torch.arange(4096) % 3
LOSS = nn.CrossEntropyLoss()


class Wide(nn.Module):
    """Saves `width` numbers of each example for the backward pass, and few others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.head = width, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x)
        return logits + logits.sum(1, keepdim=True).expand(-1, self.width).exp().mean(1, keepdim=True)


def choose(model: nn.Module, data: Any = (X, Y), shard_size: int = 1024, loss: Any = LOSS, **options: Any) -> int:
    return choose_batch_size(Measurement(model, loss), Source(data, **options), shard_size)


@pytest.mark.parametrize("width, expected", [(10, 256), (40_000, 128), (70_000, 64), (10**6, 64)])
def test_batches_are_larger_if_the_model_saves_little(width: int, expected: int) -> None:
    assert choose(Wide(width)) == expected


def test_batches_stay_as_they_are() -> None:
    model = Wide(10)
    assert choose(model, (X[:300], Y[:300])) == 64, "the first batch is measured twice"
    assert choose(model, (X[:2048], Y[:2048])) == 128
    assert choose(model, collate=lambda examples: default_collate(examples)) == 64, "examples may differ in length"
    assert choose(model, shard_size=100) == 64, "a shard has whole batches"
    assert choose(model, shard_size=128) == 128

    def fail(model: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("The scan explains this.")

    assert choose(model, loss=fail) == 64


def test_chosen_batch_sizes_are_used(tmp_path: Path) -> None:
    model = Wide(10)
    scans = [
        persample.scan(model, LOSS, data, out=tmp_path / str(i), project=16, progress=False, batch_size=size)
        for i, (data, size) in enumerate([((X, Y), None), ((X, Y), 64), (DataLoader(TensorDataset(X, Y), 200), None)])
    ]
    assert [found.settings["batch_size"] for found in scans] == [256, 64, 200]
    for found in scans[1:]:
        for name in found.columns:
            np.testing.assert_allclose(found.column(name), scans[0].column(name), rtol=1e-4, atol=1e-4)


def test_a_scan_is_continued_with_its_batches(tmp_path: Path) -> None:
    model, options = Wide(10), {"project": 16, "progress": False, "shard_size": 1024, "out": tmp_path}
    persample.scan(model, LOSS, (X, Y), batch_size=32, **options)
    (tmp_path / "summary.json").unlink()
    (tmp_path / "0" / "00003.npz").unlink()
    assert persample.scan(model, LOSS, (X, Y), **options).settings["batch_size"] == 32
    with pytest.raises(ScanError, match="batch size changed"):
        persample.scan(model, LOSS, (X, Y), batch_size=64, **options)


def test_choosing_changes_neither_model_nor_random_numbers() -> None:
    model = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3), nn.Dropout())
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    choose(model)
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
