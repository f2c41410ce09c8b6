"""Small tasks that no choice about influence was made on, for `benchmarks.damping`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from sklearn import datasets as sk
from torch import Tensor, nn

from benchmarks.attribution_tasks import Task


def make_wine_task() -> Task:
    """Three kinds of wine by 13 measurements."""
    wine = sk.load_wine()
    inputs = torch.tensor((wine.data - wine.data.mean(0)) / wine.data.std(0), dtype=torch.float32)
    return _split(inputs, torch.tensor(wine.target), 120, lambda: _make_mlp(13, 32, 3), epochs=12)


def make_parity_task() -> Task:
    """Whether a digit is odd: two classes of several kinds each."""
    images, labels = _load_digits()
    return _split(images.flatten(1), labels % 2, 600, lambda: _make_mlp(64, 48, 2), epochs=12)


def make_blobs_task() -> Task:
    """Four round clusters in the plane that overlap."""
    inputs, labels = sk.make_blobs(600, 2, centers=4, cluster_std=2.5, random_state=11)
    return _split(torch.tensor(inputs, dtype=torch.float32) / 5, torch.tensor(labels), 400, lambda: _make_mlp(2, 32, 4))


def make_noisy_task() -> Task:
    """Two classes in ten dimensions; a fifth of the labels are drawn at random."""
    inputs, labels = sk.make_classification(700, 10, n_informative=6, flip_y=0.2, random_state=12)
    return _split(torch.tensor(inputs, dtype=torch.float32), torch.tensor(labels), 500, lambda: _make_mlp(10, 32, 2))


def make_turns_task() -> Task:
    """By how many quarters a digit was turned, with a convolutional net."""
    images, _ = _load_digits()
    turns = torch.randint(4, (len(images),), generator=torch.Generator().manual_seed(13))
    turned = torch.stack([image.rot90(int(turn)) for image, turn in zip(images, turns, strict=True)])

    def make_model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)
        )

    return _split(turned[:, None], turns, 600, make_model, epochs=12)


HELD_OUT_TASKS: dict[str, Callable[[], Task]] = {
    "wine, MLP": make_wine_task,
    "odd digits, MLP": make_parity_task,
    "blobs, MLP": make_blobs_task,
    "random labels, MLP": make_noisy_task,
    "turned digits, CNN": make_turns_task,
}


def _load_digits() -> tuple[Tensor, Tensor]:
    digits = sk.load_digits()
    return torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)


def _make_mlp(inputs: int, width: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
    )


def _split(inputs: Tensor, labels: Tensor, count: int, make_model: Callable[[], nn.Module], epochs: int = 16) -> Task:
    """A task with `count` random examples for training, and up to 200 others for the test."""
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(14))
    train, test = order[:count], order[count : count + 200]
    return Task(make_model, (inputs[train], labels[train]), (inputs[test], labels[test]), epochs)
