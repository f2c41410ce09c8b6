"""Rules of norm layers, computed for some samples at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from persample import record
from persample.rules import norm
from persample.testing.oracle import assert_rows_close, compute_test_loss
from tests.support.case import loop_gradients


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


class Normed(nn.Module):
    """A group norm behind a weight, so that torch's graph has its statistics; `images` of them for each sample."""

    def __init__(self, images: int) -> None:
        super().__init__()
        self.images = images
        self.shift, self.norm = nn.Parameter(torch.randn(4, 1, 1)), nn.GroupNorm(2, 4)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm((x + self.shift).flatten(0, 1)).unflatten(0, (-1, self.images))


def record_rows(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    with record(model, loss_reduction="sum", nonfinite="keep") as grads:
        compute_test_loss(model(x), 0).backward()
    return {name: rows for name, rows in grads.dense().items() if name.startswith("norm.")}


@pytest.fixture
def library_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch size of each call of the library. Small uses are not retained, so that they have a node."""
    monkeypatch.setattr("persample.forward.use.MAX_ENTRIES", 0)
    compute, calls = norm._compute_by_library, []

    def compute_and_note(grad: Tensor, *args: Any) -> Any:
        calls.append(len(grad))
        return compute(grad, *args)

    monkeypatch.setattr(norm, "_compute_by_library", compute_and_note)
    return calls


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("mean", [0.0, 3.0, 3000.0])
def test_group_norm_by_the_library(images: int, mean: float, library_calls: list[int]) -> None:
    model, x = Normed(images), torch.randn(5, images, 4, 8, 8)
    x[1] += mean
    for _ in range(2):  # the second pass repeats the plan of the first
        rows = record_rows(model, x)
    assert library_calls == [5, 5]
    expected = record_rows(copy.deepcopy(model).double(), x.double())
    assert library_calls == [5, 5]  # float64 has the other algorithm
    for name, found in rows.items():
        tolerance = torch.full((5,), 5e-6)
        tolerance[1] = 1e-3 if mean > 100 else 5e-6  # the input itself is rounded
        assert ((found - expected[name]).norm(dim=1) <= tolerance * expected[name].norm(dim=1)).all(), name


def test_samples_with_a_large_mean_are_normalised_first(library_calls: list[int]) -> None:
    """The library would subtract the mean after the sum."""
    model, x = Normed(1), torch.randn(5, 1, 4, 8, 8)
    alone = record_rows(model, x)
    x[2] += 1e4
    mixed, rows = record_rows(model, x), slice(0, 2)
    grad, input = torch.randn(5, 1, 4, 8, 8), x
    statistics = torch.native_group_norm(input[:, 0], None, None, 5, 4, 64, 2, 1e-5)[1:]
    found = norm.group_norm(grad, input, 2, statistics=statistics)["weight"].dense()
    expected = norm.group_norm(grad, input, 2)["weight"].dense()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for name in alone:  # the others keep their bits
        assert torch.equal(mixed[name][rows], alone[name][rows])
    assert library_calls == [5, 5, 5]


def test_a_sample_that_is_not_finite_leaves_the_others_as_they_are(library_calls: list[int]) -> None:
    model, x = Normed(1), torch.randn(5, 1, 4, 8, 8)
    before = record_rows(model, x)
    x[2, 0, 0, 0, 0] = torch.inf
    after = record_rows(model, x)
    for name in before:
        assert torch.equal(before[name][[0, 1, 3, 4]], after[name][[0, 1, 3, 4]])
        assert not after[name][2].isfinite().all() or name == "norm.bias"
    assert library_calls == [5, 5]
