"""Constants that happen to have the batch's size: steps in which they had another size decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import PerSampleError, record, watch
from persample.testing.oracle import assert_rows_close, perturb, stack_gradients
from tests.support.modules import make_mlp

D, T = 3, 4

# The loss of some samples, given the model, the samples and the constants of a step.
Loss = Callable[[nn.Module, Tensor, Any], Tensor]


def weigh_positions(model: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
    return (model(x).square().sum(-1) * weights).sum(1).mean()


def compare_with_queue(model: nn.Module, x: Tensor, queue: Tensor) -> Tensor:
    return (F.normalize(model(x).mean(1), dim=-1) @ queue.T).logsumexp(-1).mean()


def weigh_new_positions(model: nn.Module, x: Tensor, weights: list[float]) -> Tensor:
    """The weights are another tensor in each step."""
    return weigh_positions(model, x, torch.stack([torch.tensor(w) for w in weights]).double())


def weigh_labels(model: nn.Module, x: Tensor, data: Any) -> Tensor:
    """Picks the weights before the model is called, as long as the batch size is not known."""
    labels, weights = data
    own = weights[labels]
    return (model(x).square().sum((1, 2)) * own).mean()


WEIGHTS = torch.rand(T).double()
LABELS = torch.tensor([0, 2, 3, 1])
QUEUES = {n: torch.randn(n, 2).double() for n in (3, 4, 5)}

# The loss, and the constants in a batch of that size.
CASES: dict[str, tuple[Loss, Callable[[int], Any]]] = {
    "weights of positions": (weigh_positions, lambda batch: WEIGHTS),
    "new weights of positions": (weigh_positions, lambda batch: WEIGHTS.clone()),
    "class weights": (weigh_labels, lambda batch: (LABELS[:batch], WEIGHTS)),
    "new class weights": (weigh_labels, lambda batch: (LABELS[:batch], WEIGHTS.clone())),
    "a queue": (compare_with_queue, lambda batch: QUEUES[4]),
    "a queue that grows": (compare_with_queue, lambda batch: QUEUES[5 if batch == 3 else batch]),
}


def make_model() -> nn.Module:
    model = make_mlp(D, 2, is_last_tanh=True, seed=None)
    perturb(model)
    return model


def take(constants: Any, n: int) -> Any:
    return (constants[0][n : n + 1], constants[1]) if isinstance(constants, tuple) else constants


def run_step(model: nn.Module, loss: Loss, batch: int, constants: Any) -> None:
    x = torch.randn(batch, T, D).double()
    with record(model) as grads:
        loss(model, x, constants).backward()
    expected = stack_gradients(
        (loss(model, x[n : n + 1], take(constants, n)) for n in range(batch)), dict(model.named_parameters())
    )
    assert_rows_close(grads.dense(), expected)


@pytest.mark.parametrize("name", CASES)
def test_an_earlier_step_of_another_size_decides(name: str) -> None:
    loss, make_constants = CASES[name]
    model = make_model()
    for batch in (3, 4, 3, 4):
        run_step(model, loss, batch, make_constants(batch))


# Vectors that the loss writes out have one entry for each of T classes, also where there are T samples.
WRITTEN_OUT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a prior": lambda out, y: F.cross_entropy(out + torch.tensor([0.5, 0.2, 0.1, 0.2]).log(), y),
    "weights by label": lambda out, y: (
        F.cross_entropy(out, y, reduction="none") * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=out.dtype)[y]
    ).mean(),
    "weights by label, gathered": lambda out, y: (
        F.cross_entropy(out, y, reduction="none") * torch.tensor([1.0, 2.0, 3.0, 4.0]).gather(0, y)
    ).mean(),
    "margins": lambda out, y: F.cross_entropy(
        out - torch.tensor([[0.1, 0.2, 0.3, 0.5]], dtype=out.dtype).matmul(F.one_hot(y, T).to(out).T).view(-1, 1), y
    ),
    "the value of each class": lambda out, y: (
        (out.softmax(1) @ torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=out.dtype) - y).square().mean()
    ),
    "after numbers were read": lambda out, y: F.cross_entropy(
        out, torch.tensor(y.tolist()), torch.tensor([1.0, 2.0, 3.0, 0.5], dtype=out.dtype), reduction="sum"
    ),
}


@pytest.mark.parametrize("sizes", [(T, 3, T), (3, T, 5)])
@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_vectors_that_are_written_out(name: str, sizes: tuple[int, ...]) -> None:
    model = make_mlp(D, T, is_last_tanh=True, seed=None)
    perturb(model)
    for batch in sizes:
        x, y = torch.randn(batch, D).double(), torch.arange(batch) % T
        with record(model) as grads:
            WRITTEN_OUT[name](model(x), y).backward()
        losses = (WRITTEN_OUT[name](model(x[n : n + 1]), y[n : n + 1]) for n in range(batch))
        assert_rows_close(grads.dense(), stack_gradients(losses, dict(model.named_parameters())))


def test_samples_that_are_written_out() -> None:
    model = make_mlp(2, 1, seed=None)
    perturb(model)

    def compute_losses() -> Tensor:
        x = torch.tensor([[1.0, 2.0], [3.0, -4.0], [5.0, 6.0]], dtype=torch.float64)
        return (model(x / 2).squeeze(1) - torch.tensor([1.0, 2.0, 4.0])).square()

    for _ in range(2):
        with record(model) as grads:
            compute_losses().mean().backward()
        assert_rows_close(
            grads.dense(), stack_gradients((compute_losses()[n] for n in range(3)), dict(model.named_parameters()))
        )


@pytest.mark.parametrize("name", CASES)
def test_where_nothing_is_known_both_readings_are_named(name: str) -> None:
    loss, make_constants = CASES[name]
    model = make_model()
    for _ in range(2):
        with pytest.raises(PerSampleError, match=r"taken as one row per sample.*constants="):
            run_step(model, loss, 4, make_constants(4))


def test_a_watched_model_learns_too() -> None:
    model, received = make_model(), []  # type: ignore[var-annotated]
    watched = watch(model, received.append)
    for batch in (3, 4, 5, 4):
        weigh_positions(model, torch.randn(batch, T, D).double(), WEIGHTS).backward()
    watched.stop()
    assert [len(grads) for grads in received] == [3, 4, 5, 4]


def test_models_do_not_learn_from_each_other() -> None:
    loss, make_constants = CASES["weights of positions"]
    run_step(make_model(), loss, 3, make_constants(3))
    with pytest.raises(PerSampleError, match="one row per sample"):
        run_step(make_model(), loss, 4, make_constants(4))


def test_one_image_with_as_many_boxes_as_images() -> None:
    """The other images of the batch tell that the boxes have no row for each image."""
    model, x = make_model(), torch.randn(4, T, D).double()

    def compute_loss(x: Tensor, boxes: list[Tensor]) -> Tensor:
        outputs = model(x)
        return sum(
            F.l1_loss(out[:1].expand(len(own), 2), own, reduction="sum")
            for out, own in zip(outputs, boxes, strict=True)
        )  # type: ignore[return-value, misc]

    for counts in ((1, 2, 4, 3), (4, 4, 1, 2), (3, 4, 4, 4)):
        boxes = [torch.randn(n, 2).double() for n in counts]
        with record(model) as grads:
            compute_loss(x, boxes).backward()
        losses = (compute_loss(x[n : n + 1], boxes[n : n + 1]) for n in range(4))
        assert_rows_close(grads.dense(), stack_gradients(losses, dict(model.named_parameters())))


def test_targets_stay_samples() -> None:
    """Mixing in targets is noticed, also after a batch in which a constant had the size of this one."""
    model = make_model()

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x).mean((1, 2)), y - y.mean()) + model(x).square().sum(-1).mul(WEIGHTS).sum(1).mean()

    for batch in (3, 4, 5, 4):
        x, y = torch.randn(batch, T, D).double(), torch.randn(batch).double()
        with pytest.raises(PerSampleError, match="mixed"), record(model):
            compute_loss(x, y).backward()


class Equation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Linear(D, D)

    def forward(self, state: Tensor, times: Tensor) -> Tensor:
        for step in times.diff():
            state = state + step * self.field(state).tanh()
        return state


def test_as_many_times_as_samples() -> None:
    model, times = Equation().double(), torch.linspace(0, 1, 5).double()
    perturb(model)
    for batch in (4, 5, 6, 5):
        x = torch.randn(batch, D).double()
        with record(model) as grads:
            model(x, times).square().sum().backward()
        losses = (model(x[n : n + 1], times).square().sum() for n in range(batch))
        assert_rows_close(grads.dense(), stack_gradients(losses, dict(model.named_parameters())))


def test_a_batch_in_parts_teaches_nothing_wrong() -> None:
    """The targets of the whole batch are larger than the first part, and belong to samples nevertheless."""
    model, x, y = nn.Linear(D, 1).double(), torch.randn(4, D).double(), torch.randn(4, 1).double()
    for _ in range(2):
        with pytest.raises(PerSampleError, match="mixed"), record(model):
            first = (model(x[:2]) - y[:2]).square().sum()
            ((model(x[2:]) - (y - y.mean())[2:]).square().sum() + first).backward()
