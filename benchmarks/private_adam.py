"""DP-AdamBC against Adam at a fixed epsilon: `python -m benchmarks.private_adam [--write]`.

Two tasks on the digits of scikit-learn, five seeds each, with the best of a few learning rates for each optimizer.
Choosing a learning rate by test accuracy is not private; it is done for both in the same way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from persample.private import AdamBC, PrivacyEngine

RESULTS = Path(__file__).parent / "results" / "private_adam.json"
EPOCHS, BATCH, DELTA = 8, 100, 1e-4
RATES = (0.001, 0.003, 0.01, 0.03)
FLOORS = (1e-7, 1e-5, 1e-4)


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def make_cnn() -> nn.Module:
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))


def load_data(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found: Any = load_digits()
    x = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return x[order[:1400]], y[order[:1400]], x[order[1400:]], y[order[1400:]]


def train(make_model: Any, make_optimizer: Any, epsilon: float, seed: int) -> float:
    """Test accuracy after a private training."""
    torch.manual_seed(seed)
    x, y, x_test, y_test = load_data(seed)
    model = make_model()
    model, optimizer, loader = PrivacyEngine(accountant="rdp").make_private_with_epsilon(
        module=model, optimizer=make_optimizer(model.parameters()), max_grad_norm=1.0, target_epsilon=epsilon,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=BATCH), target_delta=DELTA, epochs=EPOCHS,
    )  # fmt: skip
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    optimizer.release()
    with torch.no_grad():
        return float((model(x_test).argmax(1) == y_test).float().mean())


def list_optimizers() -> dict[str, list[Any]]:
    adam = [lambda p, r=rate: torch.optim.Adam(p, lr=r) for rate in RATES]
    corrected = [lambda p, r=rate, f=floor: AdamBC(p, lr=r, floor=f) for rate in RATES for floor in FLOORS]
    return {"Adam": adam, "AdamBC": corrected}


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    table: list[dict[str, Any]] = []
    for task, make_model in {"digits, MLP": make_mlp, "digits, CNN": make_cnn}.items():
        for epsilon in (1.0, 4.0):
            for name, makers in list_optimizers().items():
                # One seed that is not used below chooses the settings.
                best = max(makers, key=lambda make: train(make_model, make, epsilon, seed=100))
                found = [train(make_model, best, epsilon, seed) for seed in range(5)]
                row = {"task": task, "epsilon": epsilon, "optimizer": name, "accuracy": statistics.mean(found)}
                table.append({**row, "deviation": statistics.stdev(found)})
                print(table[-1], flush=True)
    if given.write:
        RESULTS.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
