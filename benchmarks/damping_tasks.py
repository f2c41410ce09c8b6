"""Small tasks for `benchmarks.damping`: those that the choice of the damping was made on, and others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from sklearn import datasets as sk
from torch import Tensor, nn

from benchmarks import attribution_tasks, rankings
from benchmarks.stacked_training import Task

TESTS = 150
CHOSEN: dict[str, Callable[[], Task]] = {}  # the rule and its numbers were chosen by their LDS
HELD_OUT: dict[str, Callable[[], Task]] = {}  # measured after all choices had been made
MakeTask = Callable[[], Task]


def _add(tasks: dict[str, MakeTask], name: str) -> Callable[[MakeTask], MakeTask]:
    def add(make: MakeTask) -> MakeTask:
        tasks[name] = make
        return make

    return add


def split(
    inputs: Any, targets: Any, count: int, make_model: Callable[[], nn.Module], epochs: int, **options: Any
) -> Task:
    """A task with `count` random examples for training, and up to `TESTS` others for the test."""
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(21))
    train, test = order[:count], order[count : count + TESTS]
    return Task(make_model, (inputs[train], targets[train]), (inputs[test], targets[test]), epochs, **options)


def mlp(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    """A network of linear layers."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def standardise(values: Any) -> Tensor:
    """Columns with mean 0 and variance 1, in float32."""
    return torch.tensor((values - values.mean(0)) / values.std(0), dtype=torch.float32)


def load_digits() -> tuple[Tensor, Tensor]:
    """The digits of scikit-learn, as vectors."""
    digits = sk.load_digits()
    return torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)


def _make_table(tables: dict[str, Any], make_table: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    inputs, targets = make_table(**tables)
    return standardise(inputs), torch.tensor(targets)


# ---- tasks that the rule was chosen on ----


def _add_earlier_tasks() -> None:
    """The tasks of `benchmarks.attribution` and `benchmarks.rankings`, trained briefly or long."""
    for name, count, epochs in (
        ("digits, MLP", 300, 4), ("digits, MLP", 400, 16), ("shapes, CNN", 300, 6), ("shapes, CNN", 400, 20),
        ("shapes, CNN", 700, 8), ("sentences, transformer", 300, 6),
    ):  # fmt: skip
        CHOSEN[f"{name}, {count} examples, {epochs} epochs"] = lambda n=name, c=count, e=epochs: _take(  # type: ignore[misc]
            attribution_tasks.TASKS[n](), c, e
        )
    for name, widths in (("tumours", (30, 32, 32, 2)), ("clusters", (20, 48, 48, 5)), ("moons", (2, 48, 48, 2))):
        CHOSEN[f"{name}, MLP"] = lambda n=name, w=widths: _take_ranking(f"{n}, MLP", w)  # type: ignore[misc]


def _take(task: attribution_tasks.Task, count: int, epochs: int) -> Task:
    (inputs, labels), (test, test_labels) = task.data, task.test
    data = inputs[:count], labels[:count]
    return Task(task.make_model, data, (test[:TESTS], test_labels[:TESTS]), epochs)


def _take_ranking(name: str, widths: tuple[int, ...]) -> Task:
    dataset = rankings.DATASETS[name]
    inputs, labels = dataset.make(0)
    data, test = (inputs[:400], labels[:400]), (inputs[400:550], labels[400:550])
    return Task(lambda: mlp(*widths), data, test, dataset.epochs[0])


_add_earlier_tasks()


@_add(CHOSEN, "wine, MLP")
def make_wine_task() -> Task:
    """Three kinds of wine by 13 measurements."""
    wine = sk.load_wine()
    return split(standardise(wine.data), torch.tensor(wine.target), 120, lambda: mlp(13, 32, 32, 3), 12)


@_add(CHOSEN, "odd digits, MLP")
def make_parity_task() -> Task:
    """Whether a digit is odd: two classes of several kinds each."""
    inputs, labels = load_digits()
    return split(inputs, labels % 2, 400, lambda: mlp(64, 48, 48, 2), 12)


@_add(CHOSEN, "turned digits, CNN")
def make_turns_task() -> Task:
    """By how many quarters a digit was turned."""
    inputs, _ = load_digits()
    images, turns = inputs.view(-1, 8, 8), torch.randint(4, (len(inputs),), generator=torch.Generator().manual_seed(13))
    turned = torch.stack([image.rot90(int(turn)) for image, turn in zip(images, turns, strict=True)])

    def make_model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)
        )

    return split(turned[:, None], turns, 400, make_model, 10)


@_add(CHOSEN, "random labels, MLP")
def make_noisy_task() -> Task:
    """Two classes in ten dimensions; a fifth of the labels are drawn at random."""
    table = _make_table(
        {"n_samples": 600, "n_features": 10, "n_informative": 6, "flip_y": 0.2, "random_state": 12},
        sk.make_classification,
    )
    return split(*table, 400, lambda: mlp(10, 32, 32, 2), 16)


@_add(CHOSEN, "1,500 digits, MLP")
def make_many_digits_task() -> Task:
    """Most of the digits."""
    return split(*load_digits(), 1500, lambda: mlp(64, 40, 24, 10, activation=nn.Tanh), 8)


@_add(CHOSEN, "1,500 digits, MLP, long")
def make_long_digits_task() -> Task:
    """The same, three times as long."""
    return replace(make_many_digits_task(), epochs=24)


@_add(CHOSEN, "1,500 in clusters, MLP")
def make_many_clusters_task() -> Task:
    """Five classes in 20 dimensions."""
    options = {"n_samples": 1700, "n_features": 20, "n_informative": 10, "n_redundant": 4, "n_classes": 5}
    table = _make_table({**options, "class_sep": 1.2, "random_state": 17}, sk.make_classification)
    return split(*table, 1500, lambda: mlp(20, 32, 32, 5), 10)


@_add(CHOSEN, "1,500 in blobs, MLP")
def make_many_blobs_task() -> Task:
    """Six round clusters that overlap."""
    options = {"n_samples": 1700, "n_features": 3, "centers": 6, "cluster_std": 2.5, "random_state": 18}
    return split(*_make_table(options, sk.make_blobs), 1500, lambda: mlp(3, 32, 6), 10)


@_add(CHOSEN, "sine, regression")
def make_sine_task() -> Task:
    """A function of one number, with noise."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.rand(500, 1, generator=generator) * 6 - 3
    targets = torch.sin(2 * inputs) + 0.2 * torch.randn(500, 1, generator=generator)
    model = lambda: mlp(1, 32, 32, 1, activation=nn.Tanh)  # noqa: E731
    return split(inputs, targets, 300, model, 30, loss="squared error")


@_add(CHOSEN, "Friedman 1, regression")
def make_friedman_task() -> Task:
    """A function of ten numbers."""
    inputs, targets = sk.make_friedman1(1700, 10, noise=1.0, random_state=3)
    inputs, targets = standardise(inputs), standardise(targets[:, None])
    return split(inputs, targets, 350, lambda: mlp(10, 32, 32, 1), 20, loss="squared error")


@_add(CHOSEN, "Friedman 1, 1,500 examples, regression")
def make_many_friedman_task() -> Task:
    """The same with more examples."""
    inputs, targets = sk.make_friedman1(1700, 8, noise=1.0, random_state=19)
    inputs, targets = standardise(inputs), standardise(targets[:, None])
    return split(inputs, targets, 1500, lambda: mlp(8, 32, 32, 1), 12, loss="squared error")


# ---- tasks that no choice was made on ----


@_add(HELD_OUT, "diabetes, regression")
def make_diabetes_task() -> Task:
    """The progress of a disease by ten measurements."""
    table = sk.load_diabetes()
    options: dict[str, Any] = {"loss": "squared error", "optimizer": "adamw", "decay": 0.01}
    return split(
        standardise(table.data), standardise(table.target[:, None]), 300, lambda: mlp(10, 32, 16, 1), 15, **options
    )


@_add(HELD_OUT, "Friedman 3, regression")
def make_friedman3_task() -> Task:
    """The angle of an impedance."""
    inputs, targets = sk.make_friedman3(550, noise=0.1, random_state=4)
    options: dict[str, Any] = {"loss": "squared error", "optimizer": "adamw", "decay": 0.05}
    model = lambda: mlp(4, 48, 32, 1, activation=nn.GELU)  # noqa: E731
    return split(standardise(inputs), standardise(targets[:, None]), 400, model, 25, **options)


@_add(HELD_OUT, "waves, 1,500 examples, regression")
def make_waves_task() -> Task:
    """A function of two numbers, with noise."""
    generator = torch.Generator().manual_seed(51)
    inputs = torch.rand(1700, 2, generator=generator) * 4 - 2
    clean = torch.sin(2 * inputs[:, :1]) * torch.cos(1.5 * inputs[:, 1:])
    targets = clean + 0.3 * torch.randn(1700, 1, generator=generator)
    options: dict[str, Any] = {"loss": "squared error", "optimizer": "adamw", "decay": 0.01}
    return split(inputs, targets, 1500, lambda: mlp(2, 40, 40, 1, activation=nn.SiLU), 12, **options)


@_add(HELD_OUT, "digits, autoencoder")
def make_autoencoder_task() -> Task:
    """Digits by eight numbers each."""
    inputs, _ = load_digits()
    model = lambda: mlp(64, 24, 8, 24, 64, activation=nn.Tanh)  # noqa: E731
    return split(inputs, inputs, 300, model, 20, loss="squared error", rate=5e-3)


@_add(HELD_OUT, "stripes, 6 % wrong labels, CNN")
def make_stripes_task() -> Task:
    """The direction of noisy stripes."""
    generator, count = torch.Generator().manual_seed(31), 550
    labels, places = torch.randint(4, (count,), generator=generator), torch.arange(10.0)
    angles = labels * math.pi / 4 + 0.25 * torch.randn(count, generator=generator)
    phases = torch.rand(count, generator=generator) * 2 * math.pi
    down, across = angles.cos()[:, None, None] * places[:, None], angles.sin()[:, None, None] * places
    images = torch.sin(1.3 * (down + across) + phases[:, None, None])
    images = images + 0.7 * torch.randn(count, 10, 10, generator=generator)
    is_wrong = torch.rand(count, generator=generator) < 0.06
    labels = torch.where(is_wrong, torch.randint(4, (count,), generator=generator), labels)

    def make_model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 12, 3, stride=2), nn.GroupNorm(3, 12),
            nn.ReLU(), nn.Flatten(), nn.Linear(108, 4),
        )  # fmt: skip

    return split(images[:, None], labels, 400, make_model, 12, optimizer="adamw", decay=0.01)


class Transformer(nn.Module):
    """A causal transformer that predicts the next token, or with `classes` a classifier of sequences."""

    def __init__(self, tokens: int, width: int, length: int, layers: int, classes: int = 0) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Parameter(0.1 * torch.randn(length, width))
        self.before, self.after = (nn.ModuleList(nn.LayerNorm(width) for _ in range(layers)) for _ in range(2))
        self.attention = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.norm, self.head, self.classes = nn.LayerNorm(width), nn.Linear(width, classes or tokens), classes

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next tokens `(batch, tokens, positions)`, or of the classes."""
        hidden, length = self.tokens(tokens) + self.places[: tokens.shape[-1]], tokens.shape[-1]
        mask = torch.zeros(length, length) if self.classes else torch.full((length, length), -1e9).triu(1)
        blocks = zip(self.before, self.attention, self.out, self.after, self.up, self.down, strict=True)
        for before, attention, out, after, up, down in blocks:
            query, key, value = attention(before(hidden)).chunk(3, -1)
            weights = (query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + mask).softmax(-1)
            hidden = hidden + out(weights @ value)
            hidden = hidden + down(F.gelu(up(after(hidden))))
        hidden = self.norm(hidden)
        return self.head(hidden.mean(-2)) if self.classes else self.head(hidden).transpose(-1, -2)


@_add(HELD_OUT, "grammar, language model")
def make_grammar_task() -> Task:
    """Sequences of four Markov chains, with a transformer of two layers."""
    generator, count, tokens, length = torch.Generator().manual_seed(41), 450, 20, 12
    chains = torch.softmax(2.5 * torch.randn(4, tokens, tokens, generator=generator), -1)
    kinds = torch.randint(4, (count,), generator=generator)
    text = torch.zeros(count, length + 1, dtype=torch.long)
    text[:, 0] = torch.randint(tokens, (count,), generator=generator)
    for i in range(length):
        text[:, i + 1] = torch.multinomial(chains[kinds, text[:, i]], 1, generator=generator)[:, 0]
    model = lambda: Transformer(tokens, 24, length, 2)  # noqa: E731
    return split(text[:, :-1], text[:, 1:], 300, model, 10, optimizer="adamw", decay=0.01)


@_add(HELD_OUT, "counts, transformer")
def make_counts_task() -> Task:
    """Which of two tokens is more frequent."""
    tokens = torch.randint(8, (550, 10), generator=torch.Generator().manual_seed(42))
    labels = ((tokens == 1).sum(1) - (tokens == 2).sum(1)).clamp(-1, 1) + 1
    return split(tokens, labels, 400, lambda: Transformer(8, 16, 10, 1, classes=3), 10)


class Bag(nn.Module):
    """A classifier of the mean embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden, self.out = nn.Embedding(120, 24), nn.Linear(24, 32), nn.Linear(32, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the classes."""
        return self.out(torch.tanh(self.hidden(self.words(tokens).mean(-2))))


@_add(HELD_OUT, "topics, bag of words")
def make_bag_task() -> Task:
    """Texts about four topics."""
    tokens, labels = rankings.make_topics(7)
    return split(tokens % 120, labels, 400, Bag, 15, rate=1e-2)


@_add(HELD_OUT, "digits, MLP, SGD")
def make_sgd_task() -> Task:
    """The digits, trained by stochastic gradient descent."""
    return split(*load_digits(), 400, lambda: mlp(64, 40, 10), 12, optimizer="sgd", rate=0.05, decay=1e-3)


@_add(HELD_OUT, "digits, CNN, SGD")
def make_digits_cnn_task() -> Task:
    """The digits with a convolutional net."""
    inputs, labels = load_digits()

    def make_model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 10, 3, padding=1), nn.GELU(), nn.MaxPool2d(2), nn.Conv2d(10, 16, 3), nn.GELU(), nn.Flatten(),
            nn.Linear(64, 10),
        )  # fmt: skip

    return split(inputs.view(-1, 1, 8, 8), labels, 400, make_model, 10, optimizer="sgd", rate=0.03)


@_add(HELD_OUT, "lower halves of digits, MLP")
def make_halves_task() -> Task:
    """Digits modulo 5 by the lower half of the image."""
    inputs, labels = load_digits()
    return split(inputs[:, 32:], labels % 5, 1200, lambda: mlp(32, 48, 5), 10, optimizer="adamw", decay=0.05)


@_add(HELD_OUT, "digits, 15 % wrong labels, linear")
def make_linear_task() -> Task:
    """Logistic regression."""
    (inputs, labels), generator = load_digits(), torch.Generator().manual_seed(5)
    is_wrong = torch.rand(len(labels), generator=generator) < 0.15
    labels = torch.where(is_wrong, torch.randint(10, labels.shape, generator=generator), labels)
    return split(inputs, labels, 300, lambda: nn.Linear(64, 10), 15, rate=1e-2)


@_add(HELD_OUT, "spirals, MLP")
def make_spirals_task() -> Task:
    """Three arms of a spiral."""
    generator, count = torch.Generator().manual_seed(43), 550
    labels, radii = torch.randint(3, (count,), generator=generator), torch.rand(count, generator=generator)
    angles = 4 * radii + 2 * math.pi / 3 * labels + 0.25 * torch.randn(count, generator=generator)
    inputs = 2 * torch.stack([radii * angles.cos(), radii * angles.sin()], 1)
    return split(inputs, labels, 400, lambda: mlp(2, 48, 32, 3), 30)


@_add(HELD_OUT, "circles, MLP")
def make_circles_task() -> Task:
    """Two circles that overlap."""
    options = {"n_samples": 550, "noise": 0.2, "factor": 0.5, "random_state": 9}
    return split(*_make_table(options, sk.make_circles), 350, lambda: mlp(2, 32, 32, 2, activation=nn.Tanh), 20)


@_add(HELD_OUT, "quantiles, 1,500 examples, MLP")
def make_quantiles_task() -> Task:
    """Four shells of a sphere in six dimensions."""
    options = {"n_samples": 1700, "n_features": 6, "n_classes": 4, "random_state": 20}
    table = _make_table(options, sk.make_gaussian_quantiles)
    return split(*table, 1500, lambda: mlp(6, 40, 32, 4), 12, optimizer="sgd", rate=0.05)


@_add(HELD_OUT, "rare class, MLP")
def make_rare_task() -> Task:
    """One class has an eighth of the examples."""
    options = {"n_samples": 550, "n_features": 12, "n_informative": 6, "weights": [0.88], "flip_y": 0.04}
    table = _make_table({**options, "class_sep": 0.8, "random_state": 8}, sk.make_classification)
    return split(*table, 400, lambda: mlp(12, 32, 32, 2), 12, optimizer="adamw", decay=0.02)


@_add(HELD_OUT, "iris, MLP")
def make_iris_task() -> Task:
    """Three kinds of flowers, 100 examples."""
    iris = sk.load_iris()
    return split(standardise(iris.data), torch.tensor(iris.target), 100, lambda: mlp(4, 24, 3), 25)
