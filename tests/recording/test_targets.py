"""Targets, masks and weights that the model never sees: they have one row per sample, or are constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import SamplesMixed, record, watch
from persample.errors import PerSampleError
from persample.testing.oracle import assert_rows_close, loop_gradients, perturb
from tests.support.modules import make_mlp
from tests.support.shares import share_gradients

B, T, D, C = 6, 7, 3, 5

Loss = Callable[[nn.Module, Any], Tensor]


def make_data() -> dict[str, Tensor]:
    torch.manual_seed(0)
    mask = torch.rand(B, T) > 0.4
    mask[:, 0] = True
    labels = torch.randint(0, C, (B, T))
    ignored = labels.clone()
    ignored[:, :2] = -100
    return {
        "x": torch.randn(B, D).double(),
        "y": torch.randn(B).double(),
        "y1": torch.randn(B, 1).double(),
        "c": torch.tensor([0, 1, 1, 2, 4, 4]),
        "w": torch.rand(B).double() + 0.1,
        "keep": torch.tensor([True, False, True, True, False, True]),
        "soft": torch.rand(B, C).double().softmax(1),
        "many": (torch.rand(B, C) > 0.5).double(),
        "seq": torch.randn(B, T, D).double(),
        "labels": labels,
        "ignored": ignored,
        "mask": mask,
        "soft_seq": torch.rand(B, T, C).double().softmax(-1),
    }


DATA = make_data()
CLASS_WEIGHTS = torch.rand(B).double() + 0.5  # for a model with as many classes as samples


def make_model(outputs: int, inputs: int = D) -> nn.Module:
    model = make_mlp(inputs, outputs, is_last_tanh=True, seed=None)
    perturb(model)
    return model


def take(names: str) -> tuple[Tensor, ...]:
    return tuple(DATA[name] for name in names.split())


def record_rows(model: nn.Module, loss: Loss, batch: Any, **options: Any) -> dict[str, Tensor]:
    with record(model, **options) as grads:
        loss(model, batch).backward()
    return grads.dense()


def per_token(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(x).transpose(1, 2), labels, reduction="none")


def standardise(values: Tensor) -> Tensor:
    return (values - values.mean(0)) / values.std(0, correction=0).clamp(min=0.1)


def mix_up(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    order = torch.randperm(len(x))
    return F.mse_loss(model(0.3 * x + 0.7 * x[order]), 0.3 * y + 0.7 * y[order])


def cut_mix(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch[0].clone(), batch[1]
    x[:, :1] = x[torch.randperm(len(x)), :1]
    return F.mse_loss(model(x), y)


def change_through_a_view(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch[0].clone(), batch[1]
    column = x[:, 0]
    column.sub_(column.mean())
    return F.mse_loss(model(x), y)


def subtract_in_place(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch[0].clone(), batch[1]
    x -= x.mean(0)
    return F.mse_loss(model(x), y)


def weigh_by_counts(model: nn.Module, batch: Any) -> Tensor:
    x, c = batch
    losses = F.cross_entropy(model(x), c, reduction="none")
    return ((1 / torch.bincount(c, minlength=C).clamp(min=1))[c] * losses).mean()


def standardise_after_constants(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    scale = CONSTANTS / CONSTANTS.sum()  # of another size than the batch, and used before it
    return F.mse_loss(model(x - x.mean(0)), y) * scale[0]


CONSTANTS = torch.rand(C).double()


# name: number of outputs, names of the data, loss
def count_by_item(labels: Tensor) -> list[float]:
    return [np.float64(1 + (labels == k).sum().item()) for k in range(C)]


def weigh(model: nn.Module, batch: Any, weights: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weights, reduction="sum")


MIXED: dict[str, tuple[int, str, Loss]] = {
    "15: broadcast against the targets": (1, "x y", lambda m, b: F.mse_loss(m(b[0]), b[1])),
    "15: broadcast by hand": (1, "x y", lambda m, b: (m(b[0]) - b[1]).square().sum()),
    "16: centred targets": (1, "x y1", lambda m, b: F.mse_loss(m(b[0]), b[1] - b[1].mean())),
    "17: class counts": (C, "x c", weigh_by_counts),
    "17: class counts as class weights": (
        C,
        "x c",
        lambda m, b: F.cross_entropy(
            m(b[0]), b[1], weight=1 / (torch.bincount(b[1], minlength=C) + 1).double(), reduction="sum"
        ),
    ),
    "18: masked mean, divided by a number": (
        C,
        "seq labels mask",
        lambda m, b: (per_token(m, b[0], b[1]) * b[2]).sum() / b[2].sum().item(),
    ),
    "18: masked mean, multiplied by a number": (
        C,
        "seq labels mask",
        lambda m, b: (1 / float(b[2].sum())) * (per_token(m, b[0], b[1]) * b[2]).sum(),
    ),
    "18: picked tokens, divided by their number": (
        C,
        "seq labels mask",
        lambda m, b: per_token(m, b[0], b[1])[b[2] > 0].sum() / len(b[1][b[2] > 0]),
    ),
    "18: picked outputs, divided by their number": (
        C,
        "seq labels mask",
        lambda m, b: (m(b[0])[b[2] > 0].square().sum() + m(b[0])[b[2] > 0].sum()) / int((b[2] > 0).sum()),
    ),
    "18: masked mean over all tokens": (
        C,
        "seq labels mask",
        lambda m, b: (per_token(m, b[0], b[1]) * b[2]).sum() / b[2].sum(),
    ),
    "18: mean over picked tokens": (C, "seq labels mask", lambda m, b: per_token(m, b[0], b[1])[b[2]].mean()),
    "18: divided by a number of listed tokens": (
        C,
        "seq labels mask",
        lambda m, b: (per_token(m, b[0], b[1]) * b[2]).sum() / len(b[2].nonzero()),
    ),
    "18: divided by a number of picked tokens": (
        C,
        "seq labels mask",
        lambda m, b: (per_token(m, b[0], b[1]) * b[2]).sum() / b[1][b[2]].numel(),
    ),
    "18: divided by all tokens less those that are left out": (
        C,
        "seq labels mask",
        lambda m, b: (per_token(m, b[0], b[1]) * b[2]).sum() / (b[2].numel() - (~b[2]).long().sum()),
    ),
    "18: divided by a number that numpy counted": (
        C,
        "seq labels mask",
        lambda m, b: (per_token(m, b[0], b[1]) * b[2]).sum() / int(np.asarray(b[2]).sum()),
    ),
    "18: divided by a number that Python counted": (
        C,
        "seq labels mask",
        lambda m, b: (per_token(m, b[0], b[1]) * b[2]).sum() / sum(map(sum, b[2].tolist())),
    ),
    "divided by its own value": (1, "x y1", lambda m, b: (loss := F.mse_loss(m(b[0]), b[1])) / loss.item()),
    "multiplied by its own value": (1, "x y1", lambda m, b: (loss := F.mse_loss(m(b[0]), b[1])) * float(loss.detach())),
    "17: weights counted by item": (C, "x c", lambda m, b: weigh(m, b, torch.tensor(count_by_item(b[1])))),
    "17: weights counted by item after the model": (
        C,
        "x c",
        lambda m, b: F.cross_entropy(m(b[0]), b[1], torch.tensor(count_by_item(b[1])), reduction="sum"),
    ),
    "17: weights counted by Python": (
        C,
        "x c",
        lambda m, b: weigh(m, b, torch.tensor([1.0 + b[1].tolist().count(k) for k in range(C)]).double()),
    ),
    "17: weights counted by numpy": (
        C,
        "x c",
        lambda m, b: weigh(m, b, torch.as_tensor(1.0 + np.bincount(b[1].numpy(), minlength=C))),
    ),
    "17: as many weights as samples, counted by numpy": (
        B,
        "x c",
        lambda m, b: weigh(m, b, torch.tensor(1.0 + np.bincount(b[1].numpy(), minlength=B))),
    ),
    "19: normalised advantages": (1, "x y1", lambda m, b: -(m(b[0]) * standardise(b[1])).mean()),
    "standardised inputs": (1, "x y1", lambda m, b: F.mse_loss(m(standardise(b[0])), b[1])),
    "inputs over their maximum": (1, "x y1", lambda m, b: F.mse_loss(m(b[0] / b[0].abs().max()), b[1])),
    "inputs centred in place": (1, "x y1", subtract_in_place),
    "inputs centred through a view": (1, "x y1", change_through_a_view),
    "inputs centred after other tensors": (1, "x y1", standardise_after_constants),
    "mixup": (1, "x y1", mix_up),
    "cutmix": (1, "x y1", cut_mix),
    "neighbours": (1, "x y1", lambda m, b: F.mse_loss(m(b[0]), b[1] - b[1].roll(1, 0))),
    "two orders of the batch": (1, "x", lambda m, b: (m(b[0].roll(1, 0)) - m(b[0])).square().mean()),
    "above the median": (1, "x y1", lambda m, b: F.mse_loss(m(b[0]), (b[1] > b[1].median()).double())),
    "ranks": (1, "x y1", lambda m, b: F.mse_loss(m(b[0]), b[1].argsort(0).argsort(0).double())),
    "running sum": (1, "x y1", lambda m, b: F.mse_loss(m(b[0]), b[1].cumsum(0))),
    "weights that add up to one": (
        1,
        "x y w",
        lambda m, b: (b[2] / b[2].sum() * (m(b[0]).squeeze(1) - b[1]).square()).sum(),
    ),
    "targets made in the block": (
        1,
        "x y1",
        lambda m, b: F.mse_loss(m(b[0]), (t := torch.tensor(b[1].tolist()).double()) - t.mean()),
    ),
    "pairs of labels": (C, "x c", lambda m, b: (m(b[0]).sum(1) * (b[1][:, None] == b[1]).double()).mean()),
    "contrastive": (C, "x", lambda m, b: F.cross_entropy(m(b[0]) @ m(b[0]).T, torch.arange(len(b[0])))),
    "26: batchmean over unequal rows": (
        C,
        "seq soft_seq mask",
        lambda m, b: F.kl_div(m(b[0]).log_softmax(-1)[b[2]], b[1][b[2]], reduction="batchmean"),
    ),
    "mean over the samples and other rows": (
        1,
        "x",
        lambda m, b: torch.cat([m(b[0]), torch.zeros(2, 1).double()]).mean(),
    ),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", MIXED)
def test_mixed_samples_are_refused(name: str) -> None:
    outputs, names, loss = MIXED[name]
    for _ in range(2):  # what is kept of the first call does not decide
        with pytest.raises(SamplesMixed):
            record_rows(make_model(outputs), loss, take(names), divisor="refuse" if is_counted(name) else "batch")


def is_counted(name: str) -> bool:
    """Whether the only thing that combines the samples is a divisor that counts."""
    return name.startswith("18: ") or name in ("26: batchmean over unequal rows", "weights that add up to one")


@pytest.mark.parametrize("name", [*filter(is_counted, MIXED)])
def test_divisors_that_count_are_held_constant(name: str) -> None:
    outputs, names, loss = MIXED[name]
    model, batch = make_model(outputs), take(names)
    with record(model) as grads:
        loss(model, batch).backward()
    number = f"{DATA['w'].sum():.6g}" if "weights" in name else int(DATA["mask"].sum())
    assert grads.loss_reduction.startswith(f"mean over {number} ") and f"mean over {number} " in repr(grads)
    assert_rows_close(grads.dense(), share_gradients(model, batch, loss, B))
    assert_rows_close(
        grads.mean(),
        dict(zip(grads.names, torch.autograd.grad(loss(model, batch), [*model.parameters()]), strict=True)),
    )


REFUSED: dict[str, Loss] = {
    "targets": lambda m, b: F.cross_entropy(m(b[0]), b[1], ignore_index=2),
    "class weights": lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=torch.linspace(0.5, 2, C).double()),
    "class weights by position": lambda m, b: F.cross_entropy(m(b[0]), b[1], torch.linspace(0.5, 2, C).double()),
    "weights": lambda m, b: F.mse_loss(m(b[0]), b[2], weight=b[2].abs()),
    "constant weights": lambda m, b: F.mse_loss(
        m(b[0]), b[2], weight=(torch.arange(len(b[0])).double() + 1)[:, None].expand(-1, C)
    ),
    "rows of a mask": lambda m, b: (m(b[0]) - b[2])[b[1] > 1].square().mean(),
    "entries of a mask": lambda m, b: (m(b[0]) - b[2])[b[2] > 0].square().mean(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_recording_holds_constant_stays_refused_elsewhere(name: str) -> None:
    loss, model = REFUSED[name], make_model(C)
    batch = torch.randn(B, 3).double(), torch.arange(B) % C, torch.randn(B, C).double()
    for _ in range(2):
        with record(model) as grads:
            loss(model, batch).backward()
        assert grads.loss_reduction.startswith("mean over ")
        assert_rows_close(grads.dense(), share_gradients(model, batch, loss, B))
        for _ in range(2):
            with pytest.raises(SamplesMixed, match=r"is a mean over|sum of weights"), record(model, divisor="refuse"):
                loss(model, batch).backward()


@pytest.mark.parametrize("name", [*filter(is_counted, MIXED)])
def test_own_divisors(name: str) -> None:
    outputs, names, loss = MIXED[name]
    model, batch = make_model(outputs), take(names)
    for keep in ({}, {"keep": "norms"}, {"units": [0, 0, 1, 1, 2, 2]}):
        with record(model, divisor="own", **keep) as grads:
            loss(model, batch).backward()
        rows = loop_gradients(model, batch, loss)
        if "units" in keep:
            rows = {key: row.unflatten(0, (3, 2)).sum(1) for key, row in rows.items()}
        norms = torch.cat([row.flatten(1) for row in rows.values()], 1).norm(dim=1)
        torch.testing.assert_close(grads.norms(), norms)
        if "keep" not in keep:
            assert_rows_close(grads.dense(), rows)
            assert "mean of the samples' own means" in repr(grads)


def test_the_refusal_names_both_readings() -> None:
    x, y = take("x y1")
    reading = (
        r"the tensor of shape \(6, 1\) has the batch's size in dimension 0 and was taken as one row per sample; if it "
        "is the same for all samples, pass it in constants="
    )
    with pytest.raises(SamplesMixed, match=reading):
        record_rows(make_model(1), lambda m, b: F.mse_loss(m(b[0]), b[1] - b[1].mean()), (x, y))
    with pytest.raises(SamplesMixed, match=reading.replace("6, 1", "6, 3")):
        record_rows(make_model(1), lambda m, b: F.mse_loss(m(standardise(b[0])), b[1]), (x, y))


def distil(model: nn.Module, batch: Any, first: bool) -> Tensor:
    """A teacher with as many channels as there are samples."""
    (x,) = batch
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(D, B), nn.BatchNorm1d(B), nn.Linear(B, C)).double().eval().requires_grad_(False)
    outputs = None if first else model(x)
    with torch.no_grad():
        targets = teacher(x).softmax(1)
    return F.kl_div((model(x) if outputs is None else outputs).log_softmax(1), targets, reduction="batchmean")


def clip_values(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch[0].clone(), batch[1]
    x[:, 0] -= x[:, 1]
    return F.mse_loss(model(x.clamp_(-1, 1)), y)


RIGHT: dict[str, tuple[int, str, Loss]] = {
    "targets": (1, "x y1", lambda m, b: F.mse_loss(m(b[0]), b[1])),
    "rewards computed by Python": (
        1,
        "x y1",
        lambda m, b: (m(b[0]) * torch.tensor([[sum(row)] for row in b[1].tolist()]).double()).sum(),
    ),
    "a number read for a log": (
        1,
        "x y1",
        lambda m, b: 0.5 * F.mse_loss(m(b[0]), b[1]) * torch.tensor(0.1 + 0.0 * len(str(m(b[0]).sum().item()))),
    ),
    "flattened outputs": (1, "x y", lambda m, b: F.mse_loss(m(b[0]).view(-1), b[1])),
    "classes": (C, "x c", lambda m, b: F.cross_entropy(m(b[0]), b[1])),
    "label smoothing": (C, "x c", lambda m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=0.1)),
    "flattened sequences": (C, "seq labels", lambda m, b: F.cross_entropy(m(b[0]).view(-1, C), b[1].view(-1))),
    "sequences": (C, "seq labels", lambda m, b: F.cross_entropy(m(b[0]).transpose(1, 2), b[1])),
    "shifted sequences": (
        C,
        "seq labels",
        lambda m, b: F.cross_entropy(m(b[0])[:, :-1].reshape(-1, C), b[1][:, 1:].reshape(-1)),
    ),
    "ignored targets, mean": (
        C,
        "seq ignored",
        lambda m, b: F.cross_entropy(m(b[0]).view(-1, C), b[1].view(-1), ignore_index=-100),
    ),
    "ignored targets, sum": (
        C,
        "seq labels mask",
        lambda m, b: F.cross_entropy(m(b[0]).transpose(1, 2), b[1].masked_fill(~b[2], -100), reduction="sum"),
    ),
    "mean of each sample's tokens": (
        C,
        "seq labels mask",
        lambda m, b: ((per_token(m, b[0], b[1]) * b[2]).sum(1) / b[2].sum(1)).mean(),
    ),
    "soft labels": (C, "x soft", lambda m, b: F.cross_entropy(m(b[0]), b[1])),
    "one-hot": (C, "x c", lambda m, b: -(m(b[0]).log_softmax(1) * F.one_hot(b[1], C)).sum(1).mean()),
    "one-hot as wide as the batch needs": (1, "x c", lambda m, b: (m(b[0]) * F.one_hot(b[1])).sum()),
    "gather": (C, "x c", lambda m, b: -m(b[0]).log_softmax(1).gather(1, b[1][:, None]).mean()),
    "index": (C, "x c", lambda m, b: -m(b[0]).log_softmax(1)[torch.arange(len(b[1])), b[1]].mean()),
    "weights": (1, "x y w", lambda m, b: (b[2] * (m(b[0]).squeeze(1) - b[1]).square()).mean()),
    "weights of binary_cross_entropy": (
        C,
        "x many w",
        lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]), b[1], weight=b[2][:, None]),
    ),
    "class weights": (
        B,
        "x c",
        lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=CLASS_WEIGHTS, reduction="none").mean(),
    ),
    "class weights of a module": (
        B,
        "x c",
        lambda m, b: nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, reduction="sum")(m(b[0]), b[1]),
    ),
    "positive weights": (
        B,
        "x w",
        lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]), b[1][:, None].expand(-1, B), pos_weight=CLASS_WEIGHTS),
    ),
    "class weights of a loss in Python": (
        B,
        "x c",
        lambda m, b: F.multilabel_soft_margin_loss(m(b[0]), F.one_hot(b[1], B).double(), weight=CLASS_WEIGHTS),
    ),
    "table that was made in the block": (
        B,
        "x c",
        lambda m, b: (m(b[0]).log_softmax(1) * torch.eye(B).double()[b[1]]).sum(1).mean(),
    ),
    "numbers that were made in the block": (
        B,
        "x",
        lambda m, b: (m(b[0]).softmax(1) * torch.arange(B).double()).sum(1).mean(),
    ),
    "mask": (1, "x y keep", lambda m, b: torch.where(b[2], (m(b[0]).squeeze(1) - b[1]).square(), 0.0).mean()),
    "mask over the batch size": (
        1,
        "x y keep",
        lambda m, b: ((m(b[0]).squeeze(1) - b[1]).square() * b[2]).sum() / len(b[0]),
    ),
    "picked rows": (
        1,
        "x y keep",
        lambda m, b: F.mse_loss(m(b[0]).squeeze(1)[b[2]], b[1][b[2]], reduction="sum"),
    ),
    "teacher before": (C, "x", lambda m, b: distil(m, b, first=True)),
    "teacher after": (C, "x", lambda m, b: distil(m, b, first=False)),
    "several targets in a dict": (
        1,
        "x y1",
        lambda m, b: sum((F.mse_loss(m(b[0]), t) for t in {"a": b[1], "b": 2 * b[1]}.values()), torch.zeros(())),
    ),
    "losses one by one": (
        1,
        "x y1",
        lambda m, b: torch.stack([(o - t).square().sum() for o, t in zip(m(b[0]), b[1], strict=True)]).mean(),
    ),
    "normal distribution": (1, "x y1", lambda m, b: -torch.distributions.Normal(m(b[0]), 1.0).log_prob(b[1]).mean()),
    "categorical": (C, "x c", lambda m, b: -torch.distributions.Categorical(logits=m(b[0])).log_prob(b[1]).mean()),
    "triplets": (C, "x", lambda m, b: F.triplet_margin_loss(m(b[0]), m(b[0] + 1), m(b[0] - 1))),
    "ranking": (
        1,
        "x y",
        lambda m, b: F.margin_ranking_loss(m(b[0]).squeeze(1), m(b[0] + 1).squeeze(1), b[1].sign()),
    ),
    "variances": (1, "x y w", lambda m, b: F.gaussian_nll_loss(m(b[0]).squeeze(1), b[1], b[2])),
    "scaled inputs": (1, "x y1", lambda m, b: F.mse_loss(m(b[0].float().double() / 255), b[1])),
    "one-hot inputs": (1, "c y1", lambda m, b: F.mse_loss(m(F.one_hot(b[0], D + 2)[:, :D].double()), b[1])),
    "inputs changed in place": (1, "x y1", clip_values),
    "statistics of each sample": (1, "x y1", lambda m, b: F.mse_loss(m(b[0] - b[0].mean(1, keepdim=True)), b[1])),
    "a statistic that the gradient does not reach": (1, "x y1", lambda m, b: F.mse_loss(m(b[0]), b[1]) + b[1].mean()),
}


@pytest.mark.parametrize("name", RIGHT)
def test_rows_equal_the_loop(name: str) -> None:
    outputs, names, loss = RIGHT[name]
    model, batch = make_model(outputs), take(names)
    assert_rows_close(record_rows(model, loss, batch), loop_gradients(model, batch, loss))


def draw_order(model: nn.Module, batch: Any) -> Tensor:
    order = torch.randperm(len(batch[0]), generator=torch.Generator().manual_seed(0))
    return F.mse_loss(model(batch[0][order]), batch[1][order])


def roll(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0].roll(1, 0)), batch[1].roll(1, 0))


def sort_by_weight(model: nn.Module, batch: Any) -> Tensor:
    _, order = batch[2].sort(descending=True)
    return F.mse_loss(model(batch[0][order]), batch[1][order])


ORDERS: dict[str, tuple[Loss, Callable[[], Tensor]]] = {
    "random": (draw_order, lambda: torch.randperm(B, generator=torch.Generator().manual_seed(0))),
    "rolled": (roll, lambda: torch.arange(B).roll(1, 0)),
    "sorted": (sort_by_weight, lambda: DATA["w"].argsort(descending=True)),
}


@pytest.mark.parametrize("name", ORDERS)
def test_rows_have_the_order_in_which_the_model_sees_the_samples(name: str) -> None:
    loss, find_order = ORDERS[name]
    model, (x, y, w), order = make_model(1), take("x y1 w"), find_order()
    rows = record_rows(model, loss, (x, y, w))
    expected = loop_gradients(model, (x[order], y[order]), lambda m, b: F.mse_loss(m(b[0]), b[1]))
    assert_rows_close(rows, expected)


@pytest.mark.parametrize("targets", ["as they are", "in another order"])
def test_inputs_in_another_order_than_the_targets_are_refused(targets: str) -> None:
    x, y = take("x y1")
    with pytest.raises(SamplesMixed, match="order"):
        record_rows(
            make_model(1),
            lambda m, b: F.mse_loss(m(b[0].roll(1, 0)), b[1] if targets == "as they are" else b[1].flip(0)),
            (x, y),
        )


def test_a_batch_that_is_taken_from_more_data_inside_the_block() -> None:
    torch.manual_seed(0)
    model, x, y, index = make_model(1), torch.randn(50, D).double(), torch.randn(50, 1).double(), torch.arange(3, 9)
    rows = record_rows(model, lambda m, b: F.mse_loss(m(b[0][index]), b[1][index]), (x, y))
    expected = loop_gradients(model, (x[index], y[index]), lambda m, b: F.mse_loss(m(b[0]), b[1]))
    assert_rows_close(rows, expected)
    with pytest.raises(SamplesMixed):
        record_rows(model, lambda m, b: F.mse_loss(m(b[0][index]), (t := b[1][index]) - t.mean()), (x, y))


# ---- constants ----


def weigh_classes(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]).log_softmax(1) * CLASS_WEIGHTS * F.one_hot(batch[1], B)).sum(1).mean()


def test_an_ambiguous_tensor_is_refused_unless_it_is_declared() -> None:
    model, batch = make_model(B), take("x c")
    with pytest.raises(SamplesMixed, match=r"shape \(6,\).*pass it in constants="):
        record_rows(model, weigh_classes, batch)
    expected = loop_gradients(model, batch, weigh_classes)
    for constants in (CLASS_WEIGHTS, [CLASS_WEIGHTS], (CLASS_WEIGHTS, torch.ones(2))):
        assert_rows_close(record_rows(model, weigh_classes, batch, constants=constants), expected)


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(B, 2)
        self.register_buffer("table", torch.rand(B, B))
        self.scale = torch.rand(B)

    def forward(self, x: Tensor, projection: Tensor) -> Tensor:
        return self.linear(x @ projection)


@pytest.mark.parametrize("constants", ["projection", ["projection", "table"], "tensor"])
def test_constant_arguments_of_the_model(constants: Any) -> None:
    torch.manual_seed(0)
    model, x, projection = Projected().double(), torch.randn(B, B).double(), torch.rand(B, B).double()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0], projection) @ projection[:2]).square().mean()

    given = projection if constants == "tensor" else constants
    assert_rows_close(record_rows(model, loss, (x,), constants=given), loop_gradients(model, (x,), loss))


def test_buffers_and_attributes_of_the_model_are_constants() -> None:
    torch.manual_seed(0)
    model, x, projection = Projected().double(), torch.randn(B, B).double(), torch.rand(B, B).double()
    model.scale = model.scale.double()

    def loss(model: Any, batch: Any) -> Tensor:
        return (model(batch[0], projection) @ model.table[:2] * model.scale).square().mean()

    rows = record_rows(model, loss, (x,), constants="projection")
    assert_rows_close(rows, loop_gradients(model, (x,), loss))


@pytest.mark.parametrize(
    ("constants", "message"), [("weights", "constants names 'weights'"), ([3], "tensors and of names.*got int")]
)
def test_wrong_constants(constants: Any, message: str) -> None:
    model, (x,) = Projected(), (torch.randn(B, B),)
    with pytest.raises(PerSampleError, match=message), record(model, constants=constants):
        model(x, x)


# ---- batch dimensions, watched models ----


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(D, 4), nn.Linear(4, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


TIME_FIRST: dict[str, tuple[bool | None, Loss]] = {  # None: rows are shares
    "sequences": (True, lambda m, b: F.cross_entropy(m(b[0]).reshape(-1, C), b[1].reshape(-1))),
    "one target": (True, lambda m, b: F.cross_entropy(m(b[0])[-1], b[2])),
    "centred targets": (False, lambda m, b: (m(b[0])[-1, :, 0] * (b[2] - b[2].double().mean())).mean()),
    "masked mean": (
        None,
        lambda m, b: (m(b[0])[:, :, 0] * (b[1] > 2)).sum() / (b[1] > 2).sum(),
    ),
}


@pytest.mark.parametrize("name", TIME_FIRST)
def test_time_first_targets(name: str) -> None:
    is_right, loss = TIME_FIRST[name]
    torch.manual_seed(0)
    model = TimeFirst().double()
    x, labels, c = DATA["seq"].transpose(0, 1).contiguous(), DATA["labels"].T.contiguous(), DATA["c"]
    if is_right:
        expected = loop_gradients(model, (x, labels, c), loss, batch_dim=(1, 1, 0))
        assert_rows_close(record_rows(model, loss, (x, labels, c), batch_dim=1), expected)
    elif is_right is None:
        expected = share_gradients(model, (x, labels, c), loss, B, dim=1)
        assert_rows_close(record_rows(model, loss, (x, labels, c), batch_dim=1), expected)
    else:
        with pytest.raises(SamplesMixed):
            record_rows(model, loss, (x, labels, c), batch_dim=1)


def test_a_watched_model() -> None:
    model, (x, y), found = make_model(1), take("x y1"), []
    with watch(model, found.append, {}) as watched:
        F.mse_loss(model(x), y).backward()
        with pytest.raises(SamplesMixed):
            F.mse_loss(model(x), y - y.mean()).backward()
        watched.rest()
        F.mse_loss(model(x), y).backward()
    expected = loop_gradients(model, (x, y), lambda m, b: F.mse_loss(m(b[0]), b[1]))
    assert len(found) == 2
    for grads in found:
        assert_rows_close(grads.dense(), expected)


def test_samples_of_a_watched_model_can_be_declared() -> None:
    """A target with the samples in dimension 1 of a model with the samples in dimension 0."""
    model, x = make_model(1), DATA["x"]
    y = torch.randn(2, B, generator=torch.Generator().manual_seed(0)).double()

    def compute_loss() -> Tensor:
        return (model(x).squeeze(1) * (y - y.mean())).sum(0).mean()

    with watch(model, lambda grads: None, {}) as watched:
        compute_loss().backward()  # not noticed: nothing says that y has samples
        watched.add_samples({"targets": [y], "scale": torch.ones(3)}, batch_dim=1)
        with pytest.raises(SamplesMixed):
            compute_loss().backward()
        watched.rest()
        with pytest.raises(SamplesMixed):  # a declaration holds as long as the tensor exists
            compute_loss().backward()


def test_a_batch_of_one_is_never_refused() -> None:
    model, batch = make_model(1), tuple(tensor[:1] for tensor in take("x y1"))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0] - 0.5 * batch[0].mean(0)), batch[1] - 0.5 * batch[1].mean())

    assert_rows_close(record_rows(model, loss, batch), loop_gradients(model, batch, loss))


def test_steps_with_other_values_and_sizes() -> None:
    """What was found in one step does not hide a mixture in another."""
    model = make_model(1)
    for size in (4, 6, 4):
        x, y = DATA["x"][:size], DATA["y1"][:size]
        rows = record_rows(model, lambda m, b: F.mse_loss(m(b[0]), b[1]), (x, y))
        assert_rows_close(rows, loop_gradients(model, (x, y), lambda m, b: F.mse_loss(m(b[0]), b[1])))
        with pytest.raises(SamplesMixed):
            record_rows(model, lambda m, b: (m(b[0]) - b[1].squeeze(1)).square().mean(), (x, y))
