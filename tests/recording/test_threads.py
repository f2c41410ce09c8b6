"""Recordings in several threads, each with its own model."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from persample import record
from persample.layouts import MEMO
from persample.testing import loop_gradients


class Mixed(nn.Module):
    """A rule, the generic rule, dropout and a branch on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.logaddexp(self.linear(x), self.scale)
        return nn.functional.dropout(h, 0.0, True).cumsum(-1)


MODELS = [
    nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
    Mixed(),
    nn.Sequential(nn.Conv1d(5, 3, 3, padding=1), nn.ReLU(), nn.Flatten(1)),
    nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
]


def check_steps(model: nn.Module, seed: int, barrier: threading.Barrier) -> int:
    """Record batches of changing sizes, and compare each with the loop."""
    generator = torch.Generator().manual_seed(seed)
    barrier.wait()
    for step in range(8):
        x = torch.randn(2 + (seed + step) % 3, 5, 4, generator=generator, dtype=torch.float64)
        with record(model, loss_reduction="sum") as grads:
            model(x).square().sum().backward()
        expected = loop_gradients(model, x, lambda model, x: model(x).square().sum())
        for name, rows in grads.dense().items():
            torch.testing.assert_close(rows, expected[name])
    return step + 1


def test_threads_do_not_disturb_each_other() -> None:
    MEMO.clear()  # so that all threads look for the same layouts at the same time
    models = [copy.deepcopy(model).double() for model in MODELS * 2]
    barrier = threading.Barrier(len(models))
    with ThreadPoolExecutor(len(models)) as pool:
        runs = [pool.submit(check_steps, model, seed, barrier) for seed, model in enumerate(models)]
        assert [run.result() for run in runs] == [8] * len(models)
