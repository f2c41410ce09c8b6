"""What a number means by which a loss is scaled does not depend on a coincidence of sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import PerSampleError, record
from persample.testing.oracle import assert_rows_close, loop_gradients
from tests.support.shares import share_gradients

T, D, C = 6, 3, 5

Loss = Callable[[Any, Any], Tensor]


def make_batch(size: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, T, D, generator=generator).double()
    labels = torch.randint(0, C, (size, T), generator=generator)
    return x, labels, torch.randn(size, T, C, generator=generator).double()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, C), nn.Tanh()).double()


def entropy(m: Any, b: Any, **options: Any) -> Tensor:
    return F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten(), **options)


LOOP: dict[str, Loss] = {
    "distillation, 4 squared": lambda m, b: F.mse_loss(m(b[0]), b[2]) * 4**2,
    "half of a sum": lambda m, b: (m(b[0]) - b[2]).square().sum() / 2,
    "a sum over a number": lambda m, b: (m(b[0]) - b[2]).square().sum() / 12,
    "a sum over a number, by code that reads sizes": lambda m, b: (
        (m(b[0]) - b[2])[: len(b[0])].square().sum() / (2 * T)
    ),
    "a number times the batch size": lambda m, b: (m(b[0]) - b[2]).square().sum() / (len(b[0]) * 7),
    "distillation, 4 squared, by a model that reads sizes": lambda m, b: F.mse_loss(m(b[0]), b[2][: len(b[0])]) * 4**2,
    "mean times the batch size": lambda m, b: F.mse_loss(m(b[0]), b[2]) * len(b[0]),
    "tokens": lambda m, b: (m(b[0]) - b[2]).square().sum() / (len(b[0]) * T),
}


@pytest.mark.parametrize("sizes", [[16], [3, 2, 4, 12, 6]], ids=str)
@pytest.mark.parametrize("name", LOOP)
def test_rows_are_those_of_the_loop(name: str, sizes: list[int]) -> None:
    loss, model = LOOP[name], make_model()
    for size in sizes:
        batch = make_batch(size)
        with record(model) as grads:
            loss(model, batch).backward()
        assert_rows_close(grads.dense(), loop_gradients(model, batch, loss))


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, C)

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return F.cross_entropy(self.linear(x).flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_number_of_items_is_a_count_whatever_its_value(as_tensor: bool) -> None:
    model = WithLoss().double()
    for size, items in ((4, 37), (4, 36), (4, 4), (3, 12), (5, 24)):
        batch = make_batch(size)
        given = torch.tensor(items) if as_tensor else items
        with record(model) as grads:
            model(batch[0], batch[1], num_items_in_batch=given).backward()
        expected = loop_gradients(model, batch[:2], lambda m, b, items=items: m(*b, num_items_in_batch=items))
        assert_rows_close(grads.dense(), {key: size * rows for key, rows in expected.items()})
        assert grads.loss_reduction == ("mean" if items == size else f"mean over {items} items")
        with record(model, loss_reduction="sum") as grads:  # the items of several batches, whose gradients are added up
            model(batch[0], batch[1], num_items_in_batch=given).backward()
        assert_rows_close(grads.dense(), expected)


def squares(m: Any, b: Any) -> Tensor:
    return (m(b[0]) - b[2]).square().mean(-1)


def pick(size: int, *samples: int) -> Tensor:
    return torch.tensor([[n in samples] * T for n in range(size)])


SHARES: dict[str, Loss] = {
    "rows of one sample": lambda m, b: squares(m, b)[pick(len(b[0]), 1)].mean(),
    "rows of one sample by a loss": lambda m, b: F.mse_loss(m(b[0])[mask := pick(len(b[0]), 1)], b[2][mask]),
    "rows of one sample, divided": lambda m, b: squares(m, b)[mask := pick(len(b[0]), 2)].sum() / int(mask.sum()),
    "rows of one sample beside others": lambda m, b: (
        squares(m, b)[pick(len(b[0]), 1)].mean() + squares(m, b)[pick(len(b[0]), 0, 2)].mean()
    ),
    "means of classes": lambda m, b: torch.stack([squares(m, b)[b[1] == c].mean() for c in b[1].unique()]).mean(),
    "targets": lambda m, b: entropy(m, b, ignore_index=0),
    "class weights": lambda m, b: entropy(m, b, weight=torch.linspace(0.5, 2, C).double()),
    "counted before": lambda m, b: entropy(m, b, ignore_index=0, reduction="sum") / int(b[3]),
    "two parts": lambda m, b: entropy(m, b, ignore_index=0) + 0.1 * F.mse_loss(m(b[0]), b[2]),
    "weighted entries": lambda m, b: F.mse_loss(m(b[0]), b[2], weight=b[2].abs()),
}


@pytest.mark.parametrize("name", SHARES)
def test_shares_in_steps_of_several_sizes(name: str) -> None:
    loss, model = SHARES[name], make_model()
    for size in (4, 3, 6, 4):
        batch: Any = make_batch(size)
        batch = (*batch, int((batch[1] != 0).sum()))
        with record(model) as grads:
            loss(model, batch).backward()
        assert_rows_close(grads.dense(), share_gradients(model, batch, loss, size))
        assert grads.loss_reduction.startswith("mean")  # without a number if the samples have equal parts of it


def test_a_literal_that_equals_the_batch_size_is_noticed_later() -> None:
    model = make_model()

    def loss(m: Any, b: Any) -> Tensor:
        return (m(b[0]) - b[2]).square().sum() / 2

    batch = make_batch(2)
    with record(model) as grads:
        loss(model, batch).backward()
    assert grads.loss_reduction == "mean"
    batch = make_batch(3)
    with pytest.warns(UserWarning, match="taken for the batch size in an earlier step"), record(model) as grads:
        loss(model, batch).backward()
    assert_rows_close(grads.dense(), loop_gradients(model, batch, loss))


def test_own_means_of_different_parts_are_refused() -> None:
    model, batch = make_model(), make_batch(4)
    with (
        pytest.raises(PerSampleError, match="parts of the loss have different divisors"),
        record(model, divisor="own"),
    ):
        SHARES["two parts"](model, batch).backward()
