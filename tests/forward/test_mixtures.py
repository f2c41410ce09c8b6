"""Mixtures of experts equal the loop in every batch: idle experts, one expert for all tokens, one or two per token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import PerSampleError, SamplesMixed, record
from persample.testing.oracle import assert_rows_close, compute_test_loss, perturb, stack_gradients

D = 4


class Mixture(nn.Module):
    """Experts, a gate that chooses `k` of them for each token, and a way to send tokens to them."""

    def __init__(self, send: Callable[[Any, Tensor, Tensor, Tensor], Tensor], experts: int, k: int) -> None:
        super().__init__()
        self.gate = nn.Linear(D, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.GELU()) for _ in range(experts))
        self.k, self.send = k, send

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, D)
        weights, chosen = self.gate(tokens).softmax(-1).topk(self.k, -1)
        return self.send(self, tokens, weights, chosen).view_as(x)


def add_by_mask(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(tokens)
    for e, expert in enumerate(m.experts):
        for k in range(m.k):
            mask = chosen[:, k] == e
            out[mask] += weights[mask, k, None] * expert(tokens[mask])
    return out


def add_by_where(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros(tokens.shape, dtype=tokens.dtype)
    is_chosen = F.one_hot(chosen, len(m.experts)).permute(2, 1, 0)
    for e, expert in enumerate(m.experts):
        k, rows = torch.where(is_chosen[e])
        out.index_add_(0, rows, expert(tokens[None, rows].reshape(-1, D)) * weights[rows, k, None])
    return out


def add_by_nonzero(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(tokens)
    for e, expert in enumerate(m.experts):
        rows, k = (chosen == e).nonzero().unbind(1)
        out = out.index_add(0, rows, expert(tokens.index_select(0, rows)) * weights[rows, k].unsqueeze(1))
    return out


def scatter_by_where(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(tokens)
    for e in chosen.unique():
        rows, k = torch.where(chosen == e)
        y = m.experts[int(e)](tokens[rows]) * weights[rows, k, None]
        out = out.scatter_add(0, rows[:, None].expand(-1, D), y)
    return out


def put_by_where(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(tokens)
    for e, expert in enumerate(m.experts):
        rows, k = torch.where(chosen == e)
        if len(rows):
            out.index_put_((rows,), expert(tokens[rows]) * weights[rows, k, None], accumulate=True)
    return out


def sort_and_split(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=len(m.experts))
    parts = tokens.repeat_interleave(m.k, 0)[order].split(counts.tolist())
    y = torch.cat([expert(part) for expert, part in zip(m.experts, parts, strict=True) if len(part)])
    return (y[order.argsort()].view(-1, m.k, D) * weights[..., None]).sum(1)


def run_groups(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor, ranges: Callable[[Tensor], Any]) -> Tensor:
    order = chosen.flatten().argsort(stable=True)
    rows = order // m.k
    given, results = tokens[rows], []
    for expert, (start, stop) in zip(
        m.experts, ranges(chosen.flatten().bincount(minlength=len(m.experts))), strict=True
    ):
        results.append(expert(given[start:stop]))
    y = torch.cat(results) * weights.flatten()[order][:, None]
    return torch.zeros_like(tokens).index_add(0, rows, y)


def list_by_numpy(counts: Tensor) -> list[tuple[int, int]]:
    ranges, start = [], 0
    for count in counts.numpy():
        ranges.append((start, start + count))
        start += count
    return ranges


def list_by_item(counts: Tensor) -> list[tuple[int, int]]:
    ranges, start = [], 0
    for e in range(len(counts)):
        ranges.append((start, start + int(counts[e])))
        start = ranges[-1][1]
    return ranges


def list_by_ends(counts: Tensor) -> list[tuple[int, int]]:
    ends = counts.cumsum(0).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def sum_all(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    gates = (F.one_hot(chosen, len(m.experts)) * weights[..., None]).sum(1)
    return sum((gates[:, e, None] * expert(tokens) for e, expert in enumerate(m.experts)), torch.zeros_like(tokens))


SENDERS: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "mask": add_by_mask,
    "where, index_add": add_by_where,
    "nonzero, index_add": add_by_nonzero,
    "unique, scatter_add": scatter_by_where,
    "where, index_put": put_by_where,
    "sort, split": sort_and_split,
    "sort, groups by numpy": lambda *args: run_groups(*args, list_by_numpy),
    "sort, groups by item": lambda *args: run_groups(*args, list_by_item),
    "sort, groups by ends": lambda *args: run_groups(*args, list_by_ends),
    "all experts": sum_all,
}

# Samples, tokens for each, experts, experts for each token; and the bias of the gate.
BATCHES: list[tuple[int, int, int, int, Callable[[Tensor], Any] | None]] = [
    (3, 5, 4, 2, None),
    (3, 3, 8, 1, None),
    (2, 1, 4, 1, lambda bias: bias[2:].sub_(100)),
    (4, 3, 4, 1, lambda bias: bias[0].sub_(100)),
    (3, 2, 3, 1, lambda bias: bias[1].add_(100)),
    (3, 3, 3, 2, lambda bias: bias[:2].add_(100)),
    (1, 2, 4, 1, lambda bias: bias[:3].sub_(100)),
]


@pytest.mark.parametrize("batch", range(len(BATCHES)))
@pytest.mark.parametrize("name", SENDERS)
def test_mixtures_equal_the_loop(name: str, batch: int) -> None:
    torch.manual_seed(batch)
    samples, length, experts, k, change = BATCHES[batch]
    model = Mixture(SENDERS[name], experts, k).double()
    perturb(model)
    if change is not None:
        with torch.no_grad():
            change(model.gate.bias)
    x = torch.randn(samples, length, D, dtype=torch.float64)
    losses = (compute_test_loss(model(x[n : n + 1])) for n in range(samples))
    expected = stack_gradients(losses, dict(model.named_parameters()))
    with record(model, loss_reduction="sum") as grads:
        compute_test_loss(model(x)).backward()
    found = {key: rows for key, rows in grads.dense().items() if key in expected or rows.any()}
    assert_rows_close(found, {key: rows for key, rows in expected.items() if key in found or rows.any()})


def test_groups_by_other_numbers_are_refused() -> None:
    def send(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return run_groups(m, tokens, weights, chosen, lambda counts: [(0, 4), (4, len(tokens) * m.k)])

    model = Mixture(send, 2, 1)
    torch.manual_seed(0)
    with pytest.raises(SamplesMixed, match="by position"), record(model, loss_reduction="sum"):
        model(torch.randn(3, 3, D)).square().sum().backward()


class Rows(nn.Module):
    """Writes each sample into a tensor of constants with a row more than the batch has samples."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.a, self.first = nn.Linear(D, D), first

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.zeros(1 + len(x), D)
        for n in range(len(x)):
            rows[1 + n] = x[n]
        return self.a(rows)[self.first :]


def test_constant_rows_belong_to_no_sample() -> None:
    x = torch.randn(3, D)
    model = Rows(first=0)
    with pytest.raises(PerSampleError, match="belong to no sample"), record(model, loss_reduction="sum"):
        model(x).square().sum().backward()


def test_padding_of_one_sample_belongs_to_it() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            results = []
            for n in range(len(x)):
                rows = torch.zeros(5, D, dtype=x.dtype)
                rows[:3] = x[n]
                results.append(self.a(rows).sin())
            return torch.stack(results)

    model, x = Padded().double(), torch.randn(3, 3, D, dtype=torch.float64)
    perturb(model)
    losses = (compute_test_loss(model(x[n : n + 1])) for n in range(3))
    expected = stack_gradients(losses, dict(model.named_parameters()))
    with record(model, loss_reduction="sum") as grads:
        compute_test_loss(model(x)).backward()
    assert_rows_close(grads.dense(), expected)
