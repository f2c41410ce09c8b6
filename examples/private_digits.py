"""Train a small CNN on the handwritten digits of scikit-learn, without and with differential privacy.

    python examples/private_digits.py

Each line shows the accuracy on test digits, the privacy budget spent, and the time.
"""

from __future__ import annotations

import sys
import time
import warnings

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from persample.private import PrivacyEngine

EPSILON, DELTA, EPOCHS, BATCH = 4.0, 1e-4, 30, 128


def load_data() -> tuple[TensorDataset, Tensor, Tensor]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return TensorDataset(images[train], labels[train]), images[test], labels[test]


def make_cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def train(name: str, private: bool) -> float:
    """Train a model from scratch; return its test accuracy."""
    data, images, labels = load_data()
    model = make_cnn()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(1))
    engine = PrivacyEngine(accountant="rdp")
    if private:
        model, optimizer, loader = engine.make_private_with_epsilon(
            module=model, optimizer=optimizer, data_loader=loader,
            target_epsilon=EPSILON, target_delta=DELTA, epochs=EPOCHS, max_grad_norm=1.0,
        )  # fmt: skip
    start = time.perf_counter()
    for epoch in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        show_progress(name, epoch + 1)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        accuracy = float((model(images).argmax(1) == labels).float().mean())
    spent = f"epsilon {engine.get_epsilon(DELTA):.2f} at delta {DELTA:g}" if private else "no privacy"
    print(f"\r{name:12} accuracy {accuracy:6.1%}   {spent:30} {seconds:5.1f} s")
    return accuracy


def show_progress(name: str, epoch: int) -> None:
    if sys.stdout.isatty():
        done = 30 * epoch // EPOCHS
        print(f"\r{name:12} [{'#' * done}{'.' * (30 - done)}] epoch {epoch}/{EPOCHS}", end="", flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="Secure RNG turned off")  # fine for an example, not for production
    train("as usual", private=False)
    train("private", private=True)
