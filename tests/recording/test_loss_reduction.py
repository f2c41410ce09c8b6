"""Whether the back-propagated loss is a sum or a mean over the samples is found, and what is given must agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import persample
from persample import _torch, record, watch
from persample.errors import PerSampleError, SamplesMixed
from persample.forward import FollowMode
from persample.testing.oracle import assert_rows_close, loop_gradients, perturb
from tests.support.modules import make_mlp

B, D, C = 4, 3, 5

torch.manual_seed(0)
X, Y, LABELS = torch.randn(B, D).double(), torch.randn(B, C).double(), torch.tensor([0, 4, 1, 1])
SOFT = torch.rand(B, C).double().softmax(1)

Loss = Callable[[nn.Module, Any], Tensor]

pytestmark = [
    pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss"),
    pytest.mark.filterwarnings("ignore:size_average and reduce args"),
]


def make_model() -> nn.Module:
    model = make_mlp(D, C, is_last_tanh=True, seed=None)
    perturb(model)
    return model


def squares(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square()


def own_losses(model: nn.Module, batch: Any) -> list[Tensor]:
    return [row.sum() for row in squares(model, batch)]


# name: how the loss combines the samples, and the loss
FOUND: dict[str, tuple[str, Loss]] = {
    "mean of a loss": ("mean", lambda m, b: F.mse_loss(m(b[0]), b[1])),
    "sum of a loss": ("sum", lambda m, b: F.mse_loss(m(b[0]), b[1], reduction="sum")),
    "legacy mean": ("mean", lambda m, b: F.mse_loss(m(b[0]), b[1], size_average=True)),
    "legacy sum": ("sum", lambda m, b: F.mse_loss(m(b[0]), b[1], size_average=False)),
    "mean of a module": ("mean", lambda m, b: nn.HuberLoss()(m(b[0]), b[1])),
    "classes": ("mean", lambda m, b: F.cross_entropy(m(b[0]), b[2])),
    "sum over classes": ("sum", lambda m, b: F.cross_entropy(m(b[0]), b[2], reduction="sum")),
    "mean by hand": ("mean", lambda m, b: squares(m, b).mean()),
    "sum by hand": ("sum", lambda m, b: squares(m, b).sum()),
    "square of a norm": ("mean", lambda m, b: m(b[0]).norm(2).pow(2) / len(b[0])),
    "squares of norms by other names": (
        "sum",
        lambda m, b: (
            0.1 * (m(b[0]).norm() ** 2 + torch.linalg.vector_norm(m(b[0])).square() + torch.norm(m(b[0])) ** 2)
        ),
    ),
    "squares of Frobenius norms": (
        "mean",
        lambda m, b: (torch.linalg.matrix_norm(m(b[0])) ** 2 + torch.linalg.norm(m(b[0])).pow(2.0)) / len(b[0]),
    ),
    "squares of the norms of columns": ("sum", lambda m, b: (m(b[0]).norm(dim=0) ** 2).sum()),
    "mean over entries, sum over samples": ("sum", lambda m, b: squares(m, b).mean(1).sum()),
    "sum over entries, mean over samples": ("mean", lambda m, b: squares(m, b).sum(1).mean()),
    "sum over samples, mean over entries": ("sum", lambda m, b: squares(m, b).sum(0).mean()),
    "mean over samples, sum over entries": ("mean", lambda m, b: squares(m, b).mean(0).sum()),
    "divided by the batch size": ("mean", lambda m, b: squares(m, b).sum() / len(b[0])),
    "divided by a tensor": ("mean", lambda m, b: squares(m, b).sum() / torch.tensor(float(len(b[0])))),
    "divided by the number of entries": ("mean", lambda m, b: squares(m, b).sum() / b[1].numel()),
    "sum of a loss, divided by the number of entries": (
        "mean",
        lambda m, b: F.mse_loss(m(b[0]), b[1], reduction="sum") / b[1].numel(),
    ),
    "sum over classes, divided by the number of targets": (
        "mean",
        lambda m, b: (
            F.cross_entropy(m(b[0])[:, :, None].expand(-1, -1, 3), b[2][:, None].expand(-1, 3), reduction="sum")
            / (3 * len(b[0]))
        ),
    ),
    "two sums, divided by the number of entries": (
        "mean",
        lambda m, b: (squares(m, b).sum() + m(b[0]).sum()) / b[1].numel(),
    ),
    "divided by a multiple of the batch size": ("mean", lambda m, b: squares(m, b).sum() / (5 * len(b[0]))),
    "times the inverse of the batch size": ("mean", lambda m, b: squares(m, b).sum() * (1 / b[0].shape[0])),
    "times the inverse of the number of entries": ("mean", lambda m, b: squares(m, b).sum() * (1 / b[1].numel())),
    "mean times the batch size": ("sum", lambda m, b: squares(m, b).mean() * len(b[0])),
    "mean times the number of entries": ("sum", lambda m, b: F.mse_loss(m(b[0]), b[1]) * b[1].numel()),
    "mean of targets times the batch size": ("sum", lambda m, b: F.cross_entropy(m(b[0]), b[2]) * len(b[0])),
    "mean and a sum times the inverse of the batch size, read before": (
        "mean",
        lambda m, b: (1 / len(b[0])) * squares(m, b).sum() + F.mse_loss(m(b[0]), b[1]),
    ),
    "divided by another number": ("sum", lambda m, b: squares(m, b).sum() / 7),
    "divided in place": ("mean", lambda m, b: squares(m, b).sum().div_(len(b[0]))),
    "mean, scaled": ("mean", lambda m, b: 3 * squares(m, b).mean() / 2),
    "mean over 2 steps": ("mean", lambda m, b: squares(m, b).mean() / 4),
    "sum, scaled": ("sum", lambda m, b: 3 * squares(m, b).sum() / 2),
    "two means": ("mean", lambda m, b: F.mse_loss(m(b[0]), b[1]) + 0.1 * F.cross_entropy(m(b[0]), b[2])),
    "two sums": ("sum", lambda m, b: squares(m, b).sum() - 0.1 * m(b[0]).sum()),
    "a mean times a float": ("mean", lambda m, b: 4.0 * squares(m, b).mean() + 12.0 * m(b[0]).mean()),
    "a mean times a multiple of the batch size": ("mean", lambda m, b: 16 * squares(m, b).mean()),
    "a sum times a float": ("sum", lambda m, b: squares(m, b).sum() + 0.125 * m(b[0]).sum()),
    "stacked means": ("mean", lambda m, b: torch.stack([squares(m, b).mean(), m(b[0]).mean()]).sum()),
    "losses one by one": ("sum", lambda m, b: sum(own_losses(m, b), torch.zeros(()))),
    "losses one by one, divided": ("mean", lambda m, b: sum(own_losses(m, b), torch.zeros(())) / len(b[0])),
    "stacked losses": ("mean", lambda m, b: torch.stack(own_losses(m, b)).mean()),
    "inner product": ("sum", lambda m, b: torch.einsum("bi,bi->", m(b[0]), b[1])),
    "inner product, divided": ("mean", lambda m, b: torch.einsum("bi,bi->", m(b[0]), b[1]) / len(b[0])),
    "batchmean": ("mean", lambda m, b: F.kl_div(m(b[0]).log_softmax(1), b[3], reduction="batchmean")),
    "mean of kl_div": ("mean", lambda m, b: F.kl_div(m(b[0]).log_softmax(1), b[3])),
    "batchmean, samples last": (
        "sum",
        lambda m, b: F.kl_div(m(b[0]).log_softmax(1).T, b[3].T, reduction="batchmean"),
    ),
}

ANSWERS: dict[str, dict[str, Any]] = {
    "everything": {},
    "norms": {"keep": "norms"},
    "clip": {"keep": "clip", "max_norm": 0.1},
    "clip each parameter": {"keep": "clip", "max_norm": {"0.weight": 0.1, "0.bias": 0.1}},
    "clip in two passes": {"keep": "clip", "max_norm": 0.1, "passes": 2},
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("name", FOUND)
def test_found_reductions(name: str, answer: str) -> None:
    kind, loss = FOUND[name]
    model, batch = make_model(), (X, Y, LABELS, SOFT)
    expected = loop_gradients(model, batch, loss)
    with record(model, **ANSWERS[answer]) as grads:
        loss(model, batch).backward()
    assert grads.loss_reduction == kind and f"loss_reduction='{kind}' as found" in repr(grads)
    norms = {key: rows.flatten(1).norm(dim=1) for key, rows in expected.items()}
    torch.testing.assert_close(grads.norms(), torch.stack([*norms.values()]).norm(dim=0), rtol=1e-6, atol=1e-9)
    if answer == "everything":
        assert_rows_close(grads.dense(), expected)
    elif answer.startswith("clip"):
        total = torch.stack([*norms.values()]).norm(dim=0)
        for key, rows in expected.items():
            factors = (0.1 / (norms[key] if answer == "clip each parameter" else total)).clamp(max=1)
            torch.testing.assert_close(grads.clip()[key], torch.einsum("b,b...->...", factors, rows))


@pytest.mark.parametrize("name", FOUND)
def test_given_reductions_must_agree(name: str) -> None:
    kind, loss = FOUND[name]
    other = "sum" if kind == "mean" else "mean"
    model, batch = make_model(), (X, Y, LABELS, SOFT)
    with record(model, loss_reduction=kind) as grads:
        loss(model, batch).backward()
    assert_rows_close(grads.dense(), loop_gradients(model, batch, loss))
    message = f"loss_reduction='{other}' was given, but the back-propagated loss is a {kind} over the samples"
    with pytest.raises(PerSampleError, match=message), record(model, loss_reduction=other):
        loss(model, batch).backward()
    one = tuple(tensor[:1] for tensor in batch)
    with record(model, loss_reduction=other) as grads:  # of one sample, the sum is the mean
        loss(model, one).backward()
    assert_rows_close(grads.dense(), loop_gradients(model, one, loss))


ROOTS: dict[str, Loss] = {
    "a norm": lambda m, b: m(b[0]).norm(),
    "beside a sum": lambda m, b: m(b[0]).norm() + squares(m, b).sum(),
    "the square of a sum of norms": lambda m, b: (m(b[0]).norm() + squares(m, b).norm()) ** 2,
    "the product of two norms": lambda m, b: m(b[0]).norm() ** 2 + m(b[0]).norm() * squares(m, b).norm(),
    "another power": lambda m, b: m(b[0]).norm() ** 3,
    "as an exponent": lambda m, b: 2 ** m(b[0]).norm(),
    "as a divisor": lambda m, b: (m(b[0]) / m(b[0]).norm()).sum(),
    "the square of a spectral norm": lambda m, b: torch.linalg.norm(m(b[0]), ord=2) ** 2,
    "the square of another norm": lambda m, b: m(b[0]).norm(3) ** 2,
}


@pytest.mark.parametrize("given", [None, "sum", "mean"])
@pytest.mark.parametrize("name", ROOTS)
def test_norms_of_the_batch_that_are_not_squared(name: str, given: Any) -> None:
    model, batch = make_model(), (X, Y, LABELS)
    with pytest.raises(SamplesMixed, match=r"root|combines samples"), record(model, loss_reduction=given):
        ROOTS[name](model, batch).backward()


UNCLEAR: dict[str, tuple[str, Loss]] = {
    "sum and mean": (
        "l1_loss adds up.*mse_loss averages",
        lambda m, b: F.mse_loss(m(b[0]), b[1]) + F.l1_loss(m(b[0]), b[1], reduction="sum"),
    ),
    "sum times the inverse of a number that was counted": (
        "may stand for a number of all samples",
        lambda m, b: squares(m, b).sum() * (1 / (torch.cat([b[1].sum(1) * 0 + 1, b[2] * 0 + 1.5]).sum().item())),
    ),
    "sum times its inverse": ("may stand for the batch size 4", lambda m, b: (1 / len(b[0])) * squares(m, b).sum()),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_unclear_reductions_must_be_given(name: str) -> None:
    message, loss = UNCLEAR[name]
    model, batch = make_model(), (X, Y, LABELS)
    with pytest.raises(PerSampleError, match=f"{message}.*Pass loss_reduction="), record(model):
        loss(model, batch).backward()
    check_that_what_is_given_decides(loss)


def test_what_is_given_decides_on_a_multiple_of_the_batch_size() -> None:
    check_that_what_is_given_decides(lambda m, b: squares(m, b).sum() / (3 * B))


def check_that_what_is_given_decides(loss: Loss) -> None:
    model, batch = make_model(), (X, Y, LABELS)
    total = torch.autograd.grad(loss(model, batch), model[0].weight)[0]
    for given, scale in (("sum", 1), ("mean", B)):
        with record(model, loss_reduction=given) as grads:
            loss(model, batch).backward()
        torch.testing.assert_close(grads.sum()["0.weight"], scale * total)


# ---- where and how backward is called ----


def run_in_block(model: nn.Module, roots: Callable[[], list[Tensor]], options: Any) -> Any:
    with record(model, **options) as grads:
        torch.autograd.backward(roots())
    return grads


def run_one_by_one(model: nn.Module, roots: Callable[[], list[Tensor]], options: Any) -> Any:
    with record(model, **options) as grads:
        losses = roots()
    for loss in losses:
        loss.backward(retain_graph=True)
    return grads


def run_one_by_one_in_block(model: nn.Module, roots: Callable[[], list[Tensor]], options: Any) -> Any:
    with record(model, **options) as grads:
        for loss in roots():
            loss.backward(retain_graph=True)
    return grads


WAYS = [run_in_block, run_one_by_one, run_one_by_one_in_block]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("divided", [False, True])
def test_several_losses_must_agree(way: Callable[..., Any], divided: bool) -> None:
    model, batch = make_model(), (X, Y, LABELS)

    def mean(model: nn.Module, batch: Any) -> Tensor:
        return squares(model, batch).sum() / len(batch[0]) if divided else squares(model, batch).mean()

    grads = way(model, lambda: [mean(model, batch), F.cross_entropy(model(X), LABELS)], {})
    expected = loop_gradients(model, batch, lambda m, b: mean(m, b) + F.cross_entropy(m(b[0]), b[2]))
    assert_rows_close(grads.dense(), expected)

    def roots() -> list[Tensor]:
        return [mean(model, batch), model(X).sum()]

    with pytest.raises(PerSampleError, match="the rows of both cannot be added up"):
        way(model, roots, {})


def test_a_part_of_a_loss_may_be_a_root_of_its_own() -> None:
    model = make_model()
    with record(model) as grads:
        total = squares(model, (X, Y)).sum()
        mean = total / B
    mean.backward(retain_graph=True)
    with pytest.raises(PerSampleError, match="the rows of both cannot be added up"):
        total.backward()
    assert grads.loss_reduction == "mean"


@pytest.mark.parametrize("given", [None, "sum", "mean"])
def test_roots_that_are_not_reduced_are_contributions(given: str | None) -> None:
    model = make_model()
    with record(model, loss_reduction=given) as grads:
        losses = squares(model, (X, Y)).sum(1)
    losses.backward(torch.ones(B).double())
    scale = B if given == "mean" else 1
    expected = loop_gradients(model, (X, Y), lambda m, b: squares(m, b).sum() * scale)
    assert_rows_close(grads.dense(), expected)


@pytest.mark.parametrize("first", ["losses", "mean"])
def test_a_mean_and_a_root_that_is_not_reduced_are_refused(first: str) -> None:
    model = make_model()

    def run(kind: str) -> None:
        losses = squares(model, (X, Y)).sum(1)
        losses.backward(torch.ones(B).double()) if kind == "losses" else losses.mean().backward()

    with record(model):
        run(first)
        with pytest.raises(PerSampleError, match="the rows of both cannot be added up"):
            run("mean" if first == "losses" else "losses")


def test_gradients_of_inputs_do_not_count() -> None:
    model, x = make_model(), X.clone().requires_grad_()
    with record(model) as grads:
        outputs = model(x)
        torch.autograd.grad(outputs.sum(), x, retain_graph=True)
        F.mse_loss(outputs, Y).backward()
    assert grads.loss_reduction == "mean"
    assert_rows_close(grads.dense(), loop_gradients(model, (X, Y), lambda m, b: F.mse_loss(m(b[0]), b[1])))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints(use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(D, D) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=use_reentrant)
            return x

    model, x = Checkpointed().double(), X.clone().requires_grad_()
    with record(model) as grads:
        model(x).square().mean().backward()
    assert grads.loss_reduction == "mean"
    assert_rows_close(grads.dense(), loop_gradients(model, (x,), lambda m, b: m(b[0]).square().mean()))


def test_a_model_that_returns_its_loss() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, C)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.linear(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    model = WithLoss().double()
    with record(model) as grads:
        (model(X, LABELS)["loss"] / 3).backward()
    assert_rows_close(grads.dense(), loop_gradients(model, (X, LABELS), lambda m, b: m(*b)["loss"] / 3))


# ---- front ends ----


def test_watched_steps() -> None:
    model, found = make_model(), []
    with watch(model, found.append, {}):
        squares(model, (X, Y)).mean().backward()
        squares(model, (X, Y)).sum().backward()
    assert [grads.loss_reduction for grads in found] == ["mean", "sum"]
    with (
        watch(model, found.append, {"loss_reduction": "mean"}),
        pytest.raises(PerSampleError, match="is a sum over the samples"),
    ):
        squares(model, (X, Y)).sum().backward()


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_compiled_steps(kind: str) -> None:
    model = make_model()

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        losses = squares(model, (x, y)).sum(1)
        return losses.sum() / len(x) if kind == "mean" else losses.sum()

    step = persample.compile(model, loss_fn, lambda grads: grads.norms(), backend="eager")
    with record(model) as grads:
        loss_fn(model, X, Y).backward()
    torch.testing.assert_close(step(X, Y)[1], grads.norms())
    other = "sum" if kind == "mean" else "mean"
    wrong = persample.compile(model, loss_fn, lambda grads: grads.norms(), backend="eager", loss_reduction=other)
    with pytest.raises(PerSampleError, match=f"is a {kind} over the samples"):
        wrong(X, Y)


def test_compiled_steps_refuse_mixed_targets() -> None:
    model = make_model()
    step = persample.compile(
        model, lambda m, x, y: F.mse_loss(m(x), y - y.mean(0)), lambda grads: grads.norms(), backend="eager"
    )
    with pytest.raises(SamplesMixed):
        step(X, Y)


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_private_training_refuses_another_reduction(kind: str) -> None:
    private = pytest.importorskip("persample.private")
    model = make_model()
    for given in ("mean", "sum"):
        optimizer = private.PrivateOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0),
            module=model,
            noise_multiplier=0.0,
            max_grad_norm=1.0,
            expected_batch_size=1,
            loss_reduction=given,
        )
        try:
            if given == kind:
                getattr(squares(model, (X, Y)), kind)().backward()
                total = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
                assert total.norm() <= B
            else:
                with pytest.raises(PerSampleError, match=f"is a {kind} over the samples"):
                    getattr(squares(model, (X, Y)), kind)().backward()
        finally:
            optimizer.release()
            optimizer.zero_grad()


def test_the_graph_does_not_keep_the_tracker() -> None:
    model = make_model()
    with record(model) as grads:
        loss = squares(model, (X, Y)).sum() / B
        (tracker,) = [mode._tracker for mode in _torch.get_function_modes() if isinstance(mode, FollowMode)]
    assert tracker() is None
    loss.backward()
    assert grads.loss_reduction == "mean"
