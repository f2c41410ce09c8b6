"""Metagradients of whole trainings beside finite differences in float64, and trainings beside those of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample.scanning import ScanError, measure_smoothness, replay
from persample.scanning.metagradients import _Training

N, STEPS, SIZE = 12, 7, 4
LOSS = nn.CrossEntropyLoss()


class Texts(nn.Module):
    """Embeddings, of which some have no gradient, attention, norms, dropout, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
        self.mixed = nn.Linear(4, 4)
        self.out, self.unused = nn.Linear(4, 3), nn.Linear(2, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.mixed(torch.tanh(self.mixed(self.layer(self.words(tokens)).mean(1)))))


def make_images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)), (3,)),
    "images": (make_images, (1, 3, 3)),
    "texts": (Texts, (4,)),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, eps=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.9), eps=1e-4),
}


def make(name: str = "linear", optimizer: str = "adamw") -> dict[str, Any]:
    make_model, shape = MODELS[name]
    torch.manual_seed(0)
    model = make_model().double()
    inputs = torch.randint(6, (N + 2, *shape)) if name == "texts" else torch.randn(N + 2, *shape).double()
    labels = torch.randint(3, (N + 2,))
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(N, (SIZE,), generator=generator).tolist() for _ in range(STEPS)]  # some ids occur twice
    return {
        "model": model,
        "loss_fn": LOSS,
        "data": (inputs[:N], labels[:N]),
        "queries": (inputs[N:], labels[N:]),
        "optimizer": OPTIMIZERS[optimizer](model.parameters()),
        "batches": batches,
    }


def train(task: dict[str, Any], weights: Tensor, rates: Any = None) -> Tensor:
    """`(queries,)`: minus the losses after a training by torch's optimizer. Changes the model."""
    model, optimizer, (inputs, labels) = task["model"], task["optimizer"], task["data"]
    for step, ids in enumerate(task["batches"]):
        torch.manual_seed(step)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] if rates is None else rates[step]
        optimizer.zero_grad()
        losses = F.cross_entropy(model(inputs[ids]), labels[ids], reduction="none")
        (losses * weights[ids]).mean().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return -F.cross_entropy(model(task["queries"][0]), task["queries"][1], reduction="none")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_finite_differences(name: str, optimizer: str) -> None:
    found = replay(**make(name, optimizer))
    step, used = 1e-5, {i for ids in make(name)["batches"] for i in ids}
    for i in range(0, N, 2):
        ends = []
        for sign in (1, -1):
            weights = torch.ones(N).double()
            weights[i] += sign * step
            ends.append(train(make(name, optimizer), weights))
        torch.testing.assert_close(found.scores[:, i], (ends[0] - ends[1]) / (2 * step), rtol=1e-4, atol=1e-7)
        assert bool(found.scores[:, i].any()) == (i in used)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_training_is_that_of_torch(optimizer: str) -> None:
    task = make("texts", optimizer)
    before = {name: p.clone() for name, p in task["model"].state_dict().items()}
    found = replay(**task)
    assert all(torch.equal(p, before[name]) for name, p in task["model"].state_dict().items())
    assert task["model"].training and found.losses.shape == (STEPS,)
    train(task, torch.ones(N).double())
    for name, p in task["model"].named_parameters():
        torch.testing.assert_close(found.state[name], p.detach(), rtol=1e-9, atol=1e-12)


def test_rates_change() -> None:
    task, rates = make(), [0.01 * (step + 1) for step in range(STEPS)]
    found = replay(**task, rates=rates)
    train(task, torch.ones(N).double(), rates)
    torch.testing.assert_close(found.state["0.weight"], task["model"][0].weight.detach(), rtol=1e-9, atol=1e-12)
    with pytest.raises(ScanError, match="2 learning rates for 7 batches"):
        replay(**make(), rates=[0.1, 0.1])


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_any_number_of_steps(steps: int) -> None:
    """The states between the kept ones are computed again, however many there are."""
    task = make()
    task["batches"] = task["batches"][:steps]
    found = replay(**task)
    training = _Training(task["model"], LOSS, task["data"], task["optimizer"], task["batches"], None, 0)
    states, _ = training.run(training.start(), 0, steps, 1, torch.ones(N))
    cotangents, scores = training.differentiate_queries(states[steps], task["queries"])
    for step in reversed(range(steps)):
        cotangents = training.reverse(states[step], step, cotangents, scores)
    assert torch.equal(found.scores, scores)


def test_some_parameters_are_trained() -> None:
    task = make()
    task["optimizer"] = torch.optim.SGD(task["model"][2].parameters(), lr=0.1)
    found = replay(**task)
    assert set(found.state) == {"2.weight", "2.bias"}
    train(task, torch.ones(N).double())
    torch.testing.assert_close(found.state["2.weight"], task["model"][2].weight.detach())


class Noisy(nn.Module):
    """A model that differs from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.calls = nn.Linear(3, 3).double(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.out(x) * self.calls


class Sometimes(nn.Module):
    """A layer that is used in every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(3, 3).double(), nn.Linear(3, 3).double(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.first(x) + (self.second(x) if self.calls % 2 else 0)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).double(), "BatchNorm"),
        (Noisy(), "not deterministic"),
        (Sometimes(), "has a gradient in some steps only"),
    ],
)
def test_models_that_cannot_be_replayed(model: nn.Module, message: str) -> None:
    task = {**make(), "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with pytest.raises(ScanError, match=message):
        replay(**task)


def test_optimizers_that_cannot_be_replayed() -> None:
    task = make()
    for optimizer, message in (
        (torch.optim.RMSprop(task["model"].parameters()), "got RMSprop"),
        (torch.optim.Adam(task["model"].parameters(), amsgrad=True), "amsgrad"),
        (torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), "no parameter"),
    ):
        with pytest.raises(ScanError, match=message):
            replay(**{**task, "optimizer": optimizer})
    with pytest.raises(ScanError, match="one loss per sample"):
        replay(**{**task, "loss_fn": lambda model, batch: model(batch[0]).mean()})


def test_statistics_of_batch_norm_in_eval_mode_are_constants() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).double()
    model[0].eval()
    task = {**make(), "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    assert bool(replay(**task).scores.any())


def test_smoothness_tells_smooth_from_chaotic_trainings() -> None:
    task = make()
    task["optimizer"] = torch.optim.SGD(task["model"].parameters(), lr=0.01)
    smooth = measure_smoothness(**task)
    assert smooth.value > 0.9 and smooth.of_parameters > 0.9 and smooth.advice.startswith("smooth")
    task["optimizer"] = torch.optim.SGD(task["model"].parameters(), lr=3.0, momentum=0.9)
    task["batches"] = task["batches"] * 6
    chaotic = measure_smoothness(**task, directions=6)
    assert chaotic.value < 0.3 and "not smooth" in chaotic.advice
