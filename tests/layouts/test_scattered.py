"""Batches that are split into several dimensions: followed through moves, entrywise functions, layers and sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import SamplesMixed, record
from persample.testing.oracle import assert_rows_close, compute_test_loss, perturb, stack_gradients
from tests.support.cases import Calls

pytestmark = pytest.mark.quick

D = 4


def split(h: Tensor, groups: int = 2) -> Tensor:
    """`(B, ...)` as `(groups, B / groups, ...)`; one sample is one group."""
    return h.view(groups if len(h) > 1 else 1, -1, *h.shape[1:])


def change_through_view(h: Tensor) -> Tensor:
    h = h.clone()
    split(h).mul_(2)
    return h.sin()


def write_through_view(h: Tensor) -> Tensor:
    base = torch.zeros_like(h)
    view = split(base)
    view.copy_(split(h) * 3)
    return base.sin() + view.flatten(0, 1)


FOLLOWED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "split and merged": lambda m, h: split(h).flatten(0, 1),
    "scaled in between": lambda m, h: (split(h) * 2 + 1).sin().flatten(0, 1),
    "combined with another": lambda m, h: (split(h) * split(h.cos()) + split(h)).flatten(0, 1),
    "swapped": lambda m, h: split(h).transpose(0, 1).transpose(0, 1).reshape(len(h), D),
    "a layer": lambda m, h: m.a(split(h)).flatten(0, 1),
    "a layer with names": lambda m, h: F.linear(split(h), weight=m.a.weight, bias=m.a.bias).flatten(0, 1),
    "layers and norms": lambda m, h: m.a(F.gelu(m.norm(m.a(split(h))))).flatten(0, 1),
    "tokens": lambda m, h: m.table(split((h > 0).long())).sum(-2).flatten(0, 1),
    "softmax and sums": lambda m, h: (split(h).softmax(-1) * split(h).amax(2, keepdim=True)).sum(2).flatten(0, 1),
    "changed through a view": lambda m, h: change_through_view(h),
    "written through a view": lambda m, h: write_through_view(h),
    "parts": lambda m, h: torch.cat([m.a(part) for part in split(h).unbind(0)]),
    "summed up inside": lambda m, h: m.a(split(h)).square().sum(),
    "stacked": lambda m, h: torch.stack([*split(h).unbind(1)], 1).flatten(0, 1),
    "a mask": lambda m, h: torch.where(split(h) > 0, split(h), torch.zeros((), dtype=h.dtype)).flatten(0, 1),
}


def make_model(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    model = Calls(
        lambda m, x: forward(m, m.first(x)),
        first=nn.Linear(D, D), a=nn.Linear(D, D), norm=nn.LayerNorm(D), table=nn.Embedding(2, D), rnn=nn.RNN(D, D),
    ).double()  # fmt: skip
    perturb(model)
    return model


@pytest.mark.parametrize("batch", [4, 6])
@pytest.mark.parametrize("name", FOLLOWED)
def test_split_batches_equal_the_loop(name: str, batch: int) -> None:
    torch.manual_seed(0)
    model, x = make_model(FOLLOWED[name]), torch.randn(batch, D, dtype=torch.float64)
    losses = (compute_test_loss(model(x[n : n + 1])) for n in range(batch))
    expected = stack_gradients(losses, dict(model.named_parameters()))
    if name == "summed up inside":  # a sum over the samples has no quadratic term of each
        expected = stack_gradients((model(x[n : n + 1]) for n in range(batch)), dict(model.named_parameters()))
    for _ in range(2):  # the second time, motions are cached
        with record(model, loss_reduction="sum") as grads:
            outputs = model(x)
            (compute_test_loss(outputs) if outputs.dim() else outputs).backward()
        assert_rows_close({key: rows for key, rows in grads.dense().items() if key in expected}, expected)


def test_a_split_output_is_a_sum_over_samples() -> None:
    model, x = make_model(lambda m, h: split(h)), torch.randn(4, D, dtype=torch.float64)
    expected = stack_gradients((model(x[n : n + 1]).square().mean() for n in range(4)), dict(model.named_parameters()))
    with record(model, loss_reduction="mean") as grads:
        model(x).square().mean().backward()
    assert_rows_close({key: rows for key, rows in grads.dense().items() if key in expected}, expected)


MIXED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "statistics of groups": lambda m, h: (split(h) - split(h).mean(1, keepdim=True)).flatten(0, 1),
    "softmax over groups": lambda m, h: split(h).softmax(0).flatten(0, 1),
    "a neighbour": lambda m, h: (split(h) + split(h).flip(1)).flatten(0, 1),
    "attention in groups": lambda m, h: F.scaled_dot_product_attention(*[split(h)] * 3).flatten(0, 1),
    "a layer over groups": lambda m, h: m.a(split(h).transpose(1, 2).flatten(0, 1)),
    "a norm over groups": lambda m, h: F.layer_norm(split(h), (2, D)).flatten(0, 1),
    "a recurrent layer over groups": lambda m, h: m.rnn(split(h))[0].flatten(0, 1),
    "a cumulative sum": lambda m, h: split(h).cumsum(1).flatten(0, 1),
    "packed": lambda m, h: nn.utils.rnn.pack_padded_sequence(split(h), [2, 2]).data,
    "group norm": lambda m, h: F.group_norm(split(h), 1).flatten(0, 1),
    "a mean of some": lambda m, h: split(h)[:, 1:].mean() + h.flip(0).mean(0).mean(),
}


@pytest.mark.parametrize("name", MIXED)
def test_groups_that_meet_are_refused(name: str) -> None:
    model, x = make_model(MIXED[name]), torch.randn(4, D, dtype=torch.float64)
    if name == "a layer over groups":
        model.a = nn.Linear(2, D).double()
    with pytest.raises(SamplesMixed), record(model, loss_reduction="sum"):
        output = model(x)
        (output.square().sum() * output.mean()).backward() if name == "a mean of some" else compute_test_loss(
            output
        ).backward()
