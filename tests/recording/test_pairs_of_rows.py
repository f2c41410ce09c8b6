"""Tensors of all pairs of rows of which the loss takes those of one sample: the diagonal of a similarity matrix."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import SamplesMixed, record
from persample.testing.oracle import assert_rows_close, loop_gradients, perturb
from tests.support.modules import make_mlp

B, D, Q = 3, 4, 5


def make_model() -> nn.Module:
    model = make_mlp(D, 6, 4)
    perturb(model)
    return model


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """The generalised overlap of all pairs of boxes, given by two corners."""
    low, high = torch.max(a[:, None, :2], b[:, :2]), torch.min(a[:, None, 2:], b[:, 2:])
    sides = (high - low).clamp(min=0)
    shared = sides[:, :, 0] * sides[..., 1]
    area = [(boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) for boxes in (a, b)]
    union = area[0][:, None] + area[1] - shared
    hull = torch.max(a[:, None, 2:], b[:, 2:]) - torch.min(a[:, None, :2], b[:, :2])
    hull_area = hull.prod(2) if hull.dim() < 3 else hull[:, :, 0] * hull[:, :, 1]
    return shared / union - (hull_area - union) / hull_area


def as_boxes(outputs: Tensor) -> Tensor:
    low = outputs[..., :2]
    return torch.cat([low, low + outputs[..., 2:].exp()], -1)


def match_boxes(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return (1 - torch.diag(overlap(as_boxes(model(x)), as_boxes(y)))).sum() / len(x)


def pick(function: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    """The loss of the pairs that `function` takes from a matrix of similarities."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        a, b = F.normalize(model(batch[0]), dim=-1), F.normalize(batch[1], dim=-1)
        return function((a @ b.T) / 0.5).exp().mean()

    return loss


def number(matrix: Tensor) -> Tensor:
    return torch.arange(len(matrix))


RIGHT: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "overlap of boxes": match_boxes,
    "diag": pick(torch.diag),
    "diagonal": pick(lambda s: s.tanh().diagonal()),
    "transposed": pick(lambda s: (s.T + s).diag()),
    "indexed": pick(lambda s: s[number(s), number(s)]),
    "gathered": pick(lambda s: s.gather(1, number(s)[:, None])),
    "masked by a constant": pick(lambda s: s.masked_fill(torch.ones_like(s).triu(1).bool(), 0.0).diagonal()),
    "written in place": pick(lambda s: s.clone().mul_(2).diagonal()),
    "einsum": lambda m, b: torch.einsum("nd,md->nm", m(b[0]), b[1]).diagonal().square().mean(),
    "two calls": lambda m, b: (m(b[0])[:, None] - m(b[1])).diagonal().square().sum(0).mean(),
    "distances": lambda m, b: torch.cdist(m(b[0]), b[1]).diag().mean(),
}

MIXED: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "all pairs": pick(lambda s: s),
    "neighbours": pick(lambda s: s.diagonal(1)),
    "flipped": pick(lambda s: s.flip(0).diagonal()),
    "softmax": pick(lambda s: s.softmax(-1).diagonal()),
    "contrastive": lambda m, b: F.cross_entropy(m(b[0]) @ b[1].T, number(b[0])),
    "another order": pick(lambda s: (s + s.roll(1, 0)).diagonal()),
    "three arguments": lambda m, b: (m(b[0])[:, None, :, None] * b[1][:, :, None, None] * b[1][0]).sum(),
}


@pytest.mark.parametrize("batch", [B, D, 5])
@pytest.mark.parametrize("name", RIGHT)
def test_pairs_of_one_sample(name: str, batch: int) -> None:
    model, data = make_model(), (torch.randn(batch, D).double(), torch.randn(batch, 4).double())
    for _ in range(2):
        with record(model) as grads:
            RIGHT[name](model, data).backward()
        assert_rows_close(grads.dense(), loop_gradients(model, data, RIGHT[name]))


@pytest.mark.parametrize("name", MIXED)
def test_pairs_of_different_samples(name: str) -> None:
    model, data = make_model(), (torch.randn(5, D).double(), torch.randn(5, 4).double())
    with pytest.raises(SamplesMixed), record(model):
        MIXED[name](model, data).backward()


def test_a_backward_pass_from_all_pairs() -> None:
    model, x, y = make_model(), torch.randn(5, D).double(), torch.randn(5, 4).double()
    with record(model) as grads:
        (model(x) @ y.T).backward(torch.eye(5).double())
    expected = loop_gradients(model, (x, y), lambda m, b: (m(b[0]) * b[1]).sum())
    assert_rows_close(grads.dense(), expected)
    with pytest.raises(SamplesMixed, match="combines each sample with every other"), record(model):
        (model(x) @ y.T).backward(torch.ones(5, 5).double())


def test_several_rows_of_each_sample() -> None:
    """Boxes that were matched to some of the queries of each image."""
    model, x, y = make_model(), torch.randn(B, Q, D).double(), torch.randn(B, Q, 4).double()
    counts = [2, 1, 3]

    def loss(model: nn.Module, batch: Any, counts: list[int] = counts) -> Tensor:
        outputs, images = model(batch[0]), [n for n, count in enumerate(counts) for _ in range(count)]
        queries = [q for count in counts for q in range(count)]
        found, wanted = as_boxes(outputs[images, queries]), as_boxes(batch[1][images, queries])
        return (1 - overlap(found, wanted).diag()).sum()

    with record(model) as grads:
        loss(model, (x, y)).backward()
    rows = [
        loop_gradients(model, (x[n : n + 1], y[n : n + 1]), partial(loss, counts=[count]))
        for n, count in enumerate(counts)
    ]
    assert_rows_close(grads.dense(), {name: torch.cat([row[name] for row in rows]) for name in rows[0]})


def test_parts_of_a_batch() -> None:
    model, x, y = make_model(), torch.randn(4, D).double(), torch.randn(4, 4).double()
    with record(model) as grads:
        first = model(x[:2]) @ y[:2].T
        second = model(x[2:]) @ y[2:].T
        (first.diagonal().square().sum() + second.diagonal().square().sum()).backward()
    assert_rows_close(grads.dense(), loop_gradients(model, (x, y), lambda m, b: (m(b[0]) * b[1]).sum(1).square().sum()))
