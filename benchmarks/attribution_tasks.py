"""Small tasks for `benchmarks.attribution`: data that is made here, a model, and how it is trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHECKPOINTS = 4
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """Training data and test data of a classification, and a model with its training."""

    make_model: Callable[[], nn.Module]
    data: Pair
    test: Pair
    epochs: int

    def train(self, data: Pair, seed: int) -> tuple[nn.Module, list[dict[str, Tensor]]]:
        """Train with Adam; return the model and state dicts from the training, the last one at its end."""
        torch.manual_seed(seed)
        model, (inputs, labels) = self.make_model(), data
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        states = []
        for epoch in range(1, self.epochs + 1):
            for index in torch.randperm(len(inputs)).split(32):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[index]), labels[index]).backward()
                optimizer.step()
            if epoch % (self.epochs // CHECKPOINTS) == 0:
                states.append({name: value.clone() for name, value in model.state_dict().items()})
        return model, states


def make_digits_task() -> Task:
    """The digits of scikit-learn with a multilayer perceptron."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(5))
    inputs = torch.tensor(digits.images, dtype=torch.float32).flatten(1)[order] / 16
    labels = torch.tensor(digits.target)[order]

    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 10))

    return Task(make_model, (inputs[:800], labels[:800]), (inputs[800:1000], labels[800:1000]), epochs=8)


def make_shapes_task() -> Task:
    """Noisy images of discs, squares, diamonds, crosses and rings with a convolutional net."""
    generator = torch.Generator().manual_seed(6)
    count, size = 900, 12
    labels = torch.randint(5, (count,), generator=generator)
    centres = torch.rand(count, 2, generator=generator) * 5 + 3
    radii = 1.8 + 2 * torch.rand(count, 1, 1, generator=generator)
    grid = torch.arange(size)
    rows = (grid[None, :, None] - centres[:, 0, None, None]).abs()
    columns = (grid[None, None, :] - centres[:, 1, None, None]).abs()
    distance, largest = (rows**2 + columns**2).sqrt(), torch.maximum(rows, columns)
    kinds = torch.stack(
        [
            distance <= radii,
            largest <= radii,
            rows + columns <= 1.3 * radii,
            (torch.minimum(rows, columns) <= 0.35 * radii) & (largest <= radii),
            (distance <= radii) & (distance >= 0.55 * radii),
        ]
    )
    images = kinds[labels, torch.arange(count)].float()
    images = (images + 0.2 * torch.randn(images.shape, generator=generator)).unsqueeze(1)

    def make_model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.ReLU(), nn.AdaptiveAvgPool2d(3),
            nn.Flatten(), nn.Linear(144, 5),
        )  # fmt: skip

    return Task(make_model, (images[:700], labels[:700]), (images[700:], labels[700:]), epochs=12)


WORDS, LENGTH, TOPICS = 150, 16, 3


class Classifier(nn.Module):
    """A transformer with one layer. Its attention is written out, so that every peer can differentiate it."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, width), nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.keys, self.values, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down, self.head = nn.Linear(width, 48), nn.Linear(48, width), nn.Linear(width, TOPICS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens) + self.positions
        inputs = self.before(hidden)
        weights = (self.queries(inputs) @ self.keys(inputs).transpose(-1, -2) / math.sqrt(inputs.shape[-1])).softmax(-1)
        hidden = hidden + self.out(weights @ self.values(inputs))
        hidden = hidden + self.down(F.gelu(self.up(self.after(hidden))))
        return self.head(hidden.mean(-2))


def make_sentences_task() -> Task:
    """Sentences of 16 words about one of three topics, mixed with words of other topics, with a transformer."""
    generator = torch.Generator().manual_seed(7)
    count = 1000
    labels = torch.randint(TOPICS, (count,), generator=generator)
    # The words of a topic are frequent or rare, and two thirds of all words belong to no topic.
    places = (30 * torch.rand(count, LENGTH, generator=generator) ** 2).long()
    topics = labels[:, None].expand(count, LENGTH).clone()
    is_other = torch.rand(count, LENGTH, generator=generator) < 0.35
    topics[is_other] = torch.randint(TOPICS, (int(is_other.sum()),), generator=generator)
    common = 30 * TOPICS + torch.randint(WORDS - 30 * TOPICS, (count, LENGTH), generator=generator)
    tokens = torch.where(torch.rand(count, LENGTH, generator=generator) < 0.65, common, 30 * topics + places)
    return Task(Classifier, (tokens[:800], labels[:800]), (tokens[800:], labels[800:]), epochs=8)


TASKS: dict[str, Callable[[], Task]] = {
    "digits, MLP": make_digits_task,
    "shapes, CNN": make_shapes_task,
    "sentences, transformer": make_sentences_task,
}


def measure_accuracy(model: nn.Module, data: Pair) -> float:
    """The share of samples whose label is the most probable class."""
    with torch.no_grad():
        return float((model(data[0]).argmax(1) == data[1]).float().mean())


def describe(task: Task, models: list[nn.Module]) -> dict[str, Any]:
    """Sizes and accuracies, for the file of the results."""
    return {
        "examples": len(task.data[0]),
        "parameters": sum(p.numel() for p in models[0].parameters()),
        "train_accuracy": [measure_accuracy(model, task.data) for model in models],
        "test_accuracy": [measure_accuracy(model, task.test) for model in models],
    }
