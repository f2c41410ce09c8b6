"""What a number means by which a loss is scaled does not depend on a coincidence of sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import PerSampleError, record
from persample.testing.oracle import assert_rows_close, loop_gradients
from tests.support.modules import make_mlp
from tests.support.shares import share_gradients

T, D, C = 6, 3, 5

Loss = Callable[[Any, Any], Tensor]


def make_batch(size: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, T, D, generator=generator).double()
    labels = torch.randint(0, C, (size, T), generator=generator)
    return x, labels, torch.randn(size, T, C, generator=generator).double()


def make_model() -> nn.Module:
    return make_mlp(D, C, is_last_tanh=True)


def entropy(m: Any, b: Any, **options: Any) -> Tensor:
    return F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten(), **options)


LOOP: dict[str, Loss] = {
    "distillation, 4 squared": lambda m, b: F.mse_loss(m(b[0]), b[2]) * 4**2,
    "half of a sum": lambda m, b: (m(b[0]) - b[2]).square().sum() / 2,
    "a sum over a number": lambda m, b: (m(b[0]) - b[2]).square().sum() / 12,
    "a sum over the positions of a sample": lambda m, b: (m(b[0]) - b[2]).square().sum() / b[0].size(1),
    "half of a sum, by a method": lambda m, b: (m(b[0]) - b[2]).square().sum().div(2),
    "a number times the batch size": lambda m, b: (m(b[0]) - b[2]).square().sum() / (len(b[0]) * 7),
    "distillation, 4 squared, by a model that reads sizes": lambda m, b: F.mse_loss(m(b[0]), b[2][: len(b[0])]) * 4**2,
    "the number of entries, of NumPy": lambda m, b: (m(b[0]) - b[2]).square().sum() / np.prod(b[2].shape),
    "tokens, of NumPy": lambda m, b: (m(b[0]) - b[2]).square().sum() / np.int64(b[1].numel()),
    "the batch size, in float32": lambda m, b: (m(b[0]) - b[2]).square().sum().div(np.float32(len(b[0]))),
    "mean times the batch size, of NumPy": lambda m, b: F.mse_loss(m(b[0]), b[2]) * np.prod(b[0].shape[:1]),
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


NUMBERS = {
    "the batch size": lambda size: size,
    "its multiples": lambda size: 3 * size,
    "others": lambda size: 7 * size + 1,
    "one": lambda size: 1,
    "tokens": lambda size: (12, 5, 6, 4)[size % 4],  # also a size of each sample, or the batch's
    "a float": lambda size: 7.25 * size,
    "one number": lambda size: 12,
}


@pytest.mark.parametrize("sizes", [(4, 3, 12, 6), (12, 6, 2), (3, 5, 4)], ids=str)
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_sum_is_divided_by_a_count_whatever_its_value(name: str, as_tensor: bool, sizes: tuple[int, ...]) -> None:
    """The number was computed before the block, so that nothing is known of it."""
    model = make_model()
    for size in sizes:
        batch, number = make_batch(size), NUMBERS[name](size)
        count: Any = torch.tensor(float(number)) if as_tensor else number
        for given, scale in ((None, size), ("sum", 1), ("mean", size)):
            if as_tensor and given == "sum" and number % size == 0:
                continue  # a tensor may hold the batch size
            with record(model, loss_reduction=given) as grads:
                loss = squares(model, batch).sum() / count
                loss.backward()
            expected = loop_gradients(model, batch, lambda m, b, n=number: squares(m, b).sum() / n)
            assert_rows_close(grads.dense(), {key: scale * rows for key, rows in expected.items()})
            assert grads.loss_reduction.startswith(given or "mean")


@pytest.mark.parametrize("sizes", [(2, 3, 4), (12, 2, 4), (4, 6, 12)], ids=str)
def test_a_number_of_the_source_code_is_a_factor_whatever_the_batch_size(sizes: tuple[int, ...]) -> None:
    losses: list[Loss] = [
        lambda m, b: squares(m, b).sum() / 2,
        lambda m, b: squares(m, b).sum() / (2 * 6),
        lambda m, b: squares(m, b).sum().div_(4.0),
        lambda m, b: torch.div(squares(m, b).sum(), 12),
        lambda m, b: squares(m, b).sum() / 2 + 0.5 * m(b[0])[: len(b[0])].sum(),
        lambda m, b: squares(m, b)[: len(b[0])].sum(dim=(0, 1)) * 0.25 + 0.5 * m(b[0]).sum(),
    ]
    for loss in losses:
        model = make_model()
        for size in sizes:
            batch = make_batch(size)
            with record(model) as grads:
                loss(model, batch).backward()
            assert grads.loss_reduction == "sum"
            assert_rows_close(grads.dense(), loop_gradients(model, batch, loss))


OTHER_PARTS: dict[str, tuple[str, Callable[[Any, Any, Any, float], Tensor]]] = {
    "a sum over a number beside a sum": ("sum", lambda m, b, s, n: s.sum() / n + m(b[0]).sum()),
    "a sum beside a sum over a number": ("sum", lambda m, b, s, n: m(b[0]).sum() + s.sum() / n),
    "a sum over a number beside a sum with a factor": ("sum", lambda m, b, s, n: s.sum() / n + n * m(b[0]).sum()),
    "two sums over numbers": ("mean", lambda m, b, s, n: s.sum() / n + m(b[0]).sum() / (2 * n)),
    "a mean beside a sum times a number": (
        "mean",
        lambda m, b, s, n: m(b[0]).mean() + 6 * (1 / (0 * n + len(b[0]))) * s.sum(),
    ),
    "TRADES": (
        "mean",
        lambda m, b, s, n: (
            entropy(m, b) + 6.0 * ((1.0 / (0 * n + len(b[0]))) * F.l1_loss(m(b[0]), b[2], reduction="sum"))
        ),
    ),
    "three parts": ("sum", lambda m, b, s, n: s.sum() / n + n * m(b[0]).sum() + s.square().sum()),
}


@pytest.mark.parametrize("name", OTHER_PARTS)
def test_other_parts_of_the_loss_decide_what_a_number_is(name: str) -> None:
    model, (kind, loss) = make_model(), OTHER_PARTS[name]
    for size in (4, 3, 6):
        batch, number = make_batch(size), 7.5 * size
        with record(model) as grads:
            loss(model, batch, squares(model, batch), number).backward()
        expected = loop_gradients(model, batch, lambda m, b, n=number: loss(m, b, squares(m, b), n))
        scale = size if name == "two sums over numbers" else 1
        assert_rows_close(grads.dense(), {key: scale * rows for key, rows in expected.items()})
        assert grads.loss_reduction.split()[0] == kind


def test_a_plain_sum_beside_a_mean_is_refused() -> None:
    model, batch = make_model(), make_batch(4)
    for part in (lambda s: s.sum() / 7, lambda s: 0.1 * s.sum(), lambda s: s.sum()):
        with pytest.raises(PerSampleError, match="combines a sum over the samples"), record(model):
            (part(squares(model, batch)) + squares(model, batch).mean()).backward()


def test_a_size_of_each_sample_that_equals_the_batch_size_is_noticed_later() -> None:
    model = make_model()

    def loss(m: Any, b: Any) -> Tensor:
        return (m(b[0]) - b[2]).square().sum() / T

    with record(model) as grads:
        loss(model, make_batch(T)).backward()
    assert grads.loss_reduction == "mean"
    batch = make_batch(3)
    message = "taken for the batch size, so that rows differ by a factor of 6"
    with pytest.warns(UserWarning, match=message), record(model) as grads:
        loss(model, batch).backward()
    assert_rows_close(grads.dense(), loop_gradients(model, batch, loss))


def test_own_means_of_different_parts_are_refused() -> None:
    model, batch = make_model(), make_batch(4)
    with (
        pytest.raises(PerSampleError, match="parts of the loss have different divisors"),
        record(model, divisor="own"),
    ):
        SHARES["two parts"](model, batch).backward()
