"""Private training with several augmentations of each example (De et al., 2022), on the digits of scikit-learn.

    python examples/private_augmentations.py

The gradients of the augmentations of an example are averaged before they are clipped, so that they share the privacy
budget of one example. Each line shows the accuracy on test digits at the same epsilon.
"""

from __future__ import annotations

import time
import warnings

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from persample.private import PrivacyEngine

EPSILON, DELTA, EPOCHS, BATCH = 4.0, 1e-4, 16, 128


class MovedDigits(Dataset[tuple[Tensor, Tensor]]):
    """Handwritten digits; an item is `(augmentations, 1, 8, 8)`: the image, and copies that are turned and moved."""

    def __init__(self, images: Tensor, labels: Tensor, augmentations: int) -> None:
        self.images, self.labels, self.augmentations = images, labels, augmentations

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        angles, moves = 0.08 * torch.randn(self.augmentations), 0.04 * torch.randn(self.augmentations, 2, 1)
        angles[0], moves[0] = 0, 0
        turns = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], 1).view(-1, 2, 2)
        copies = self.images[index].expand(self.augmentations, 1, 8, 8)
        grid = F.affine_grid(torch.cat([turns, moves], 2), list(copies.shape), align_corners=False)
        return F.grid_sample(copies, grid, align_corners=False), self.labels[index]


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return images[train], labels[train], images[test], labels[test]


def make_cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def train(augmentations: int) -> float:
    """Train a model from scratch; return its test accuracy."""
    images, labels, test_images, test_labels = load_data()
    model = make_cnn()
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        data_loader=DataLoader(MovedDigits(images, labels, augmentations), batch_size=BATCH),
        target_epsilon=EPSILON, target_delta=DELTA, epochs=EPOCHS, max_grad_norm=1.0,
        units=augmentations,  # consecutive samples of the model's batch that are one row, and clipped as one
    )  # fmt: skip
    start = time.perf_counter()
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            outputs = model(x.flatten(0, 1))
            F.cross_entropy(outputs, y.repeat_interleave(augmentations)).backward()
            optimizer.step()
    seconds = time.perf_counter() - start
    with torch.no_grad():
        accuracy = float((model(test_images).argmax(1) == test_labels).float().mean())
    spent = f"epsilon {engine.get_epsilon(DELTA):.2f} at delta {DELTA:g}"
    print(f"{augmentations} augmentations   accuracy {accuracy:6.1%}   {spent} {seconds:6.1f} s")
    return accuracy


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="Secure RNG turned off")  # fine for an example, not for production
    for count in (1, 4):
        train(count)
