"""Weights beside a sum over the samples: learned variances multiply each sample's part, and penalties stay apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import PerSampleError, SamplesMixed, monitor, record
from persample.testing.oracle import assert_rows_close, loop_gradients

B, T, D, C = 4, 3, 3, 5
torch.manual_seed(0)
X, TARGET = torch.randn(B, T, D).double(), torch.randn(B, T, C).double()
LABELS = torch.randint(0, C, (B, T))
BATCH = (X, TARGET, LABELS)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, C)
        self.s = nn.Parameter(torch.tensor(0.3))
        self.v = nn.Parameter(torch.tensor([0.2, -0.4]))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


Loss = Callable[[Any, Any], Tensor]


def mse(m: Any, b: Any, **options: Any) -> Tensor:
    return F.mse_loss(m(b[0]), b[1], **options)


def classes(m: Any, b: Any) -> Tensor:
    return F.cross_entropy(m(b[0]).flatten(0, 1), b[2].flatten())


def masked(m: Any, b: Any) -> Tensor:
    mask = torch.ones(len(b[0]), T).double()
    mask[:, 0] = 0
    return ((m(b[0]) - b[1]).abs().sum(-1) * mask).sum() / mask.sum()


def penalty(m: Model) -> Tensor:
    return sum((p.square().sum() for p in m.parameters()), torch.zeros(()).double())


def add_in_place(loss: Tensor, more: Tensor) -> Tensor:
    loss += more
    return loss


# name: the loss, and the same without what belongs to no sample
LOSSES: dict[str, tuple[Loss, Loss]] = {
    "a learned variance": (
        lambda m, b: torch.exp(-m.s) * mse(m, b) + m.s, lambda m, b: torch.exp(-m.s) * mse(m, b)
    ),
    "of a sum": (
        lambda m, b: mse(m, b, reduction="sum") * torch.exp(-m.s) + m.s,
        lambda m, b: mse(m, b, reduction="sum") * torch.exp(-m.s),
    ),
    "two tasks": (
        lambda m, b: (-m.v[0]).exp() * mse(m, b) + m.v[0] + (-m.v[1]).exp() * classes(m, b) + m.v[1],
        lambda m, b: (-m.v[0]).exp() * mse(m, b) + (-m.v[1]).exp() * classes(m, b),
    ),
    "a vector of tasks": (
        lambda m, b: ((-m.v).exp() * torch.stack([mse(m, b), classes(m, b)]) + m.v).sum(),
        lambda m, b: ((-m.v).exp() * torch.stack([mse(m, b), classes(m, b)])).sum(),
    ),
    "a quotient": (
        lambda m, b: (m(b[0]) - b[1]).square().sum(-1).mean() / (2 * m.s.square()) + m.s.log(),
        lambda m, b: (m(b[0]) - b[1]).square().sum(-1).mean() / (2 * m.s.square()),
    ),
    "a parameter itself": (lambda m, b: m.s * mse(m, b), lambda m, b: m.s * mse(m, b)),
    "nested": (
        lambda m, b: m.s.sigmoid() * (m.v[0] * mse(m, b) + m.v[1] * classes(m, b)),
        lambda m, b: m.s.sigmoid() * (m.v[0] * mse(m, b) + m.v[1] * classes(m, b)),
    ),
    "a sum in two steps": (
        lambda m, b: m.s.exp() * (m(b[0]) - b[1]).square().mean(0).sum(),
        lambda m, b: m.s.exp() * (m(b[0]) - b[1]).square().mean(0).sum(),
    ),
    "batchmean": (
        lambda m, b: m.s.exp() * F.kl_div(m(b[0]).log_softmax(-1), b[1].softmax(-1), reduction="batchmean"),
        lambda m, b: m.s.exp() * F.kl_div(m(b[0]).log_softmax(-1), b[1].softmax(-1), reduction="batchmean"),
    ),
    "a product": (lambda m, b: m.s * torch.einsum("btc,btc->", m(b[0]), b[1]),) * 2,
    "losses one by one": (lambda m, b: m.s * sum(row.square().mean() for row in m(b[0])),) * 2,
    "a part over a mask's sum": (lambda m, b: m.s.exp() * masked(m, b) + m.v[0] * classes(m, b),) * 2,
    "a number beside the loss": (lambda m, b: m.s * (mse(m, b) + 3.0), lambda m, b: m.s * mse(m, b)),
    "L2": (lambda m, b: mse(m, b) + 0.01 * penalty(m), mse),
    "a penalty first": (lambda m, b: 0.01 * m.linear.weight.norm() + mse(m, b), mse),
    "a penalty in place": (lambda m, b: add_in_place(mse(m, b), 0.1 * m.linear.weight.norm()), mse),
    "a penalty subtracted": (lambda m, b: mse(m, b) - 0.1 * m.s, mse),
    "a penalty, then a factor": (lambda m, b: (mse(m, b) + penalty(m)) / 4, lambda m, b: mse(m, b) / 4),
}  # fmt: skip


CLIP: dict[str, Any] = {"keep": "clip", "max_norm": 0.1}


@pytest.mark.parametrize("options", [{}, {"keep_grad": True}, CLIP, {**CLIP, "passes": 2}], ids=str)
@pytest.mark.parametrize("size", [B, 1])
@pytest.mark.parametrize("name", LOSSES)
def test_rows_and_what_belongs_to_no_sample(name: str, size: int, options: dict[str, Any]) -> None:
    loss, of_samples = LOSSES[name]
    model, batch = Model().double(), tuple(tensor[:size] for tensor in BATCH)
    plain = loss(model, batch)
    total = torch.autograd.grad(plain, [*model.parameters()], allow_unused=True)
    found = loop_gradients(model, batch, of_samples)
    expected = {key: found.get(key, torch.zeros(size, *p.shape).double()) for key, p in model.named_parameters()}
    for _ in range(2):  # the first step is audited
        model.zero_grad()
        with record(model, **options) as grads:
            value = loss(model, batch)
            value.backward()
    assert torch.equal(value, plain)
    norms = torch.cat([rows.reshape(size, -1) for rows in expected.values()], 1).norm(dim=1)
    torch.testing.assert_close(grads.norms(), norms)
    if "keep" not in options:
        assert_rows_close(grads.dense(), expected)
    shared = grads.shared()
    mean = "mean" in grads.loss_reduction
    for (key, p), whole in zip(model.named_parameters(), total, strict=True):
        whole = torch.zeros_like(p) if whole is None else whole
        own = expected[key].mean(0) if mean else expected[key].sum(0)
        torch.testing.assert_close(shared[key], whole - own, rtol=1e-7, atol=1e-9)
        if options.get("keep_grad") and whole.any():
            torch.testing.assert_close(p.grad, whole)
    assert ("belongs to no sample" in repr(grads)) == any(bool(part.any()) for part in shared.values())


def after_the_loss(loss: Tensor, apart: Tensor) -> None:
    loss.backward()
    apart.backward()


def before_the_loss(loss: Tensor, apart: Tensor) -> None:
    apart.backward(torch.tensor(1.0).double())
    loss.backward()


def as_two_roots(loss: Tensor, apart: Tensor) -> None:
    torch.autograd.backward([loss, apart], [torch.tensor(1.0).double(), None])


def added(loss: Tensor, apart: Tensor) -> None:
    (loss + apart).backward()


OPTIONS: list[dict[str, Any]] = [{}, {"keep_grad": True}, {"keep": "norms"}, CLIP, {**CLIP, "passes": 2}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("backward", [before_the_loss, after_the_loss, as_two_roots, added])
def test_a_penalty_with_a_backward_of_its_own(backward: Any, is_early: bool, options: dict[str, Any]) -> None:
    """Also with a leaf that is no parameter of the model: it gets its gradient as in plain training."""
    model, strength = Model().double(), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def compute(model: Model) -> tuple[Tensor, Tensor]:
        apart = strength.exp() * penalty(model) if is_early else None
        loss = mse(model, BATCH)
        return loss, strength.exp() * penalty(model) if apart is None else apart

    backward(*compute(model))
    wanted = {name: p.grad for name, p in model.named_parameters()}
    for _ in range(2):
        own, strength.grad = strength.grad, None
        model.zero_grad()
        with record(model, **options) as grads:
            backward(*compute(model))
        torch.testing.assert_close(strength.grad, own)
    with record(model) as alone:
        mse(model, BATCH).backward()
    torch.testing.assert_close(grads.norms(), alone.norms())
    shared, mean = grads.shared(), alone.mean()
    torch.testing.assert_close({name: shared[name] + mean[name] for name in wanted}, wanted)
    if options.get("keep_grad"):
        torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, wanted)


@pytest.mark.parametrize("backward", [before_the_loss, after_the_loss, as_two_roots])
def test_a_monitor_beside_a_penalty(backward: Any) -> None:
    model = Model().double()
    backward(mse(model, BATCH), penalty(model))
    wanted = {name: p.grad for name, p in model.named_parameters()}
    with monitor(model, every=1) as watching:
        for _ in range(2):
            model.zero_grad()
            backward(mse(model, BATCH), penalty(model))
            torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, wanted)
    assert len(watching.history) == 2


START = {name: torch.randn(p.shape).double() for name, p in Model().named_parameters()}


def test_a_constant_of_a_weight_s_shape_is_no_batch() -> None:
    """The batch has as many samples as a bias has entries, in the first step."""
    model = Model().double()
    x, y = torch.randn(C, T, D).double(), torch.randn(C, T, C).double()
    with record(model) as grads:
        apart = sum((START[name] * (p - START[name]) ** 2).sum() for name, p in model.named_parameters())
        (mse(model, (x, y)) + apart).backward()
    assert_rows_close(grads.dense(), loop_gradients(model, (x, y), mse) | {
        name: torch.zeros(C, *p.shape).double() for name, p in model.named_parameters() if name in "sv"
    })  # fmt: skip
    torch.testing.assert_close(grads.shared()["v"], 2 * START["v"] * (model.v - START["v"]).detach())


REFUSED: dict[str, Loss] = {
    "a function of a sum": lambda m, b: m.s * mse(m, b).sqrt(),
    "a sum as a divisor": lambda m, b: m.s / mse(m, b),
    "ctc": lambda m, b: m.s * F.ctc_loss(
        m(b[0]).log_softmax(-1).transpose(0, 1), torch.ones(B, 1).long(), torch.full((B,), T), torch.ones(B).long()
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_functions_are_refused(name: str) -> None:
    model = Model().double()
    with pytest.raises(SamplesMixed), record(model):
        REFUSED[name](model, BATCH).backward()


@pytest.mark.parametrize("name", ["a learned variance", "L2"])
def test_without_divisors_they_are_refused(name: str) -> None:
    """As in private training."""
    model = Model().double()
    with pytest.raises(SamplesMixed, match="belongs to no single sample"), record(model, divisor="refuse"):
        LOSSES[name][0](model, BATCH)
    with pytest.raises(PerSampleError, match="not recorded"), record(model, divisor="refuse"):
        after_the_loss(mse(model, BATCH), penalty(model))
